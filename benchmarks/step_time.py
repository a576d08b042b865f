"""Time of a training step on two threads: the portable graph against PyTorch eager, in turns in one process.

Many short turns are taken one after the other, so that what else the machine does weighs on all alike, and each side's
time is the fastest tenth of its steps: on a busy machine that is what it can do when it gets both cores. Both reuse
their buffers: PyTorch its parameters, the session its bound inputs and outputs, as the device runtime does. The time
of onnxruntime-training's own gradient graph stands beside it without a budget.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

from benchmarks.row import Row
from fleet_protocol.manifest import parameter_input, state_input
from models import Registry, build
from models.zoo import set_mode
from trainer_export.batches import SizedBatches, vocabulary_of
from trainer_export.check import open_session
from trainer_export.formats import ort_training
from trainer_export.formats.onnx import write_train_graph
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe

THREADS = 2
BATCH = 32
TURNS = 8
TURN_SECONDS = 0.15
SETTLE = 2  # steps at the start of a turn that are not counted: the other side's threads still spin
BUDGETS = {"mlp": 1.0, "lenet5": 1.0, "text_encoder": 1.0, "conv": 1.3}
CASES: tuple[tuple[str, float, int | None], ...] = (
    ("mlp", 1.0, None),
    ("mlp", 0.25, None),
    ("lenet5", 1.0, None),
    ("lenet5", 0.25, None),
    ("text_encoder", 1.0, 4),
    ("text_encoder", 0.5, 4),
    ("text_encoder", 0.25, 2),
    ("conv", 1.0, None),
    ("conv", 0.5, None),
    ("conv", 0.25, None),
    ("conv", 0.125, None),
    ("conv", 0.0625, None),
)


def rows() -> list[Row]:
    """One row per model and width against the budget, and one for onnxruntime-training without."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        return [row for case in CASES for row in measure(*case)]
    finally:
        torch.set_num_threads(threads)


def measure(name: str, width: float, depth: int | None) -> list[Row]:
    """Times of one model."""
    arch = Registry.zoo().get(name)
    settings = arch.settings()
    torch.manual_seed(0)
    module = build(arch, width, depth)
    signature = Signature(tuple(settings["input_shape"]), arch.input_dtype, settings["classes"])
    graphs = {"portable": write_train_graph(module, signature, Recipe()).data}
    if ort_training.is_installed():
        graphs["ort-training"] = ort_training.write_artifacts(module, signature, Recipe())[-1].data
    steps = [torch_step(module, signature)]
    steps += [session_step(open_session(graph, THREADS), module, signature) for graph in graphs.values()]
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(TURNS):
        for step, kept in zip(steps, times, strict=True):
            kept.extend(turn(step))
    label = f"{name} width {width:g}" + ("" if depth is None else f" depth {depth}")
    eager, *others = (statistics.quantiles(kept, n=10)[0] * 1e3 for kept in times)
    found = []
    for other, runtime in zip(others, graphs, strict=True):
        what = f"step time {runtime}/PyTorch {label} ({other:.2f} / {eager:.2f} ms)"
        found.append(Row(what, other / eager, "ratio", BUDGETS[name] if runtime == "portable" else None))
    return found


def turn(step: Callable[[], None]) -> list[float]:
    """Seconds of each step over a short while."""
    for _ in range(SETTLE):
        step()
    times: list[float] = []
    end = time.perf_counter() + TURN_SECONDS
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def torch_step(module: nn.Module, signature: Signature) -> Callable[[], None]:
    """A step of PyTorch eager with the default recipe."""
    set_mode(module, "train")
    recipe = Recipe()
    optimizer = recipe.optimizer.pytorch(list(module.parameters()), 0.01)
    x, y = next(SizedBatches(signature, vocabulary_of(module), (BATCH,)).take(1))
    mask = torch.ones(signature.classes)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x) * mask, y).backward()
        nn.utils.clip_grad_norm_(module.parameters(), recipe.clip_norm or 1.0)
        optimizer.step()

    return step


def session_step(session: onnxruntime.InferenceSession, module: nn.Module, signature: Signature) -> Callable[[], None]:
    """A step of a graph with bound inputs and outputs."""
    x, y = next(SizedBatches(signature, vocabulary_of(module), (BATCH,)).take(1))
    feed: dict[str, Any] = {"x": x.numpy(), "y": y.numpy(), "mask": np.ones(signature.classes, np.float32)}
    feed["lr"] = np.array(0.01, np.float32)
    for name, parameter in module.named_parameters():
        feed[parameter_input(name)] = parameter.detach().numpy().copy()
        feed[state_input(name)] = np.zeros(tuple(parameter.shape), np.float32)
    binding = session.io_binding()
    kept = [feed]
    for item in session.get_inputs():
        binding.bind_cpu_input(item.name, np.ascontiguousarray(feed[item.name]))
    for item in session.get_outputs():
        array = np.empty(item.shape, np.float32)
        kept.append({item.name: array})
        binding.bind_output(item.name, "cpu", 0, np.float32, array.shape, array.ctypes.data)

    def step() -> None:
        session.run_with_iobinding(binding)
        assert kept  # the bound arrays live as long as the step does

    return step
