"""Time of a training step on a board, beside PyTorch eager and onnxruntime-training if installed.

The device's own path: a `TrainSession` with the runtime's settings on a board, one thread, no
spinning, buffers that swap. Beside it the same session with all its inputs and outputs bound once,
which is what the runtime alone takes. All take short turns one after the other in one process, and
a turn's figure is the median of the processor time of its steps, so that what else the machine does
weighs on none; a row is the median of the ratios of neighbouring turns, with their quartiles. The
others are PyTorch as one writes it, with its fused optimizer, and with the loss compiled as well
where there is a compiler. What it takes to open a set is measured as `shoal device bench` does.
"""

import copy
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.nets import NETS
from benchmarks.row import Row
from device_runtime.bench import costs
from device_runtime.training.backends import TrainSession, step_graph_key
from device_runtime.training.backends.runtime import open_session
from fleet_protocol.errors import ConfigError, ExportError
from fleet_protocol.manifest import noise_input, parameter_input, state_input
from models import Architecture, Registry
from models.registry import infer_layout
from models.zoo.dropout import feed_noise
from models.zoo.layers import set_mode
from models.zoo.randomized_model import vocabulary_of
from trainer_export.batches import SizedBatches
from trainer_export.check import calm_torch
from trainer_export.exported import Export
from trainer_export.footprint import Footprint, peak_memory
from trainer_export.formats import ort_training
from trainer_export.formats.files import SetFile
from trainer_export.formats.onnx import write_train_graph
from trainer_export.loss import Answer
from trainer_export.manifests import Facts, manifest_of
from trainer_export.model_inputs import model_noise
from trainer_export.recipe import Recipe
from trainer_export.reference import Reference

TURNS = 12
TURN_SECONDS = 0.08
OTHERS = (("fused", None), ("compiled", None), ("ort-training", 0.9), ("static", 1.05))
"""What a device is measured against beside PyTorch eager, with budgets."""

FIRST_STEP_SECONDS = 1.0
Array = NDArray[Any]
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model to time, of the zoo or of `benchmarks.nets`."""

    arch: str
    width: float = 1.0
    batch: int = 32
    budget: float = 0.7  # the device's step over PyTorch's
    label: str = ""  # where the settings are others than the architecture's
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.label or self.arch} width {self.width:g} batch {self.batch}"

    @property
    def architecture(self) -> Architecture:
        """What builds it."""
        return NETS.get(self.arch) or Registry.zoo().get(self.arch)


_LARGE: Any = {"input_shape": (3, 224, 224)}
_DEMO: Any = {"channels": [32, 64], "input_shape": (1, 8, 8)}
CASES = (
    *(Case("conv", width, 10, 0.22, "demo", _DEMO) for width in (1.0, 0.5, 0.125)),
    *(Case("conv", width, 10, 0.22) for width in (0.125, 0.0625)),
    Case("conv"),
    Case("mlp", budget=0.55),
    Case("mlp", 0.25, budget=0.55),
    Case("lenet5"),
    Case("cnn1"),
    Case("cnn2"),
    Case("har_cnn"),
    Case("preresnet18", batch=8),
    Case("text_encoder", budget=0.8),
    Case("text_encoder", 0.25),
    Case("next_word", batch=8),
    Case("transformer_mlm", batch=4, budget=0.8),
    Case("token_classifier", batch=4, budget=0.8),
    Case("mobilenet_v2", batch=16, budget=0.6),
    Case("mobilenet_v3_small", batch=16, budget=0.6),
    Case("mobilenet_v3_small", 0.25, 16, 0.6),
    Case("mobilenet_v3_small", 1.0, 4, 0.6, "mobilenet_v3_small at 224", _LARGE),
    Case("efficientnet_lite0", batch=16, budget=0.6),
    Case("convnext_atto", batch=16, budget=0.6),
    Case("ds_cnn", batch=32, budget=0.6),
    Case("vit_tiny", batch=8, budget=0.75),
    Case("unet", batch=4, budget=1.0),
)


REQUIREMENTS = {"compiled": "a C++ compiler", "ort-training": "onnxruntime-training"}
"""What ways of a step need that may be missing."""


def rows() -> list[Row]:
    """Of every model the device's step over the others', and what it takes to open its graph."""
    with calm_torch():
        rows: list[Row] = []
        for case in CASES:
            rows += measured(case)
        return rows


def measured(case: Case) -> list[Row]:
    """The rows of one model, or one that says why it cannot be measured here."""
    try:
        return _measured(case)
    except (ModuleNotFoundError, ConfigError, ExportError) as error:
        return [Row(f"step, {case.name}", None, f"skipped: {error}")]


def _measured(case: Case) -> list[Row]:
    """The rows of one model."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Subjects(case, Path(folder)).steps()
        turns = turns_of(steps)
        (cost,) = costs(Path(folder), case.batch)
        compared = [_row(case.name, turns, "eager", case.budget)]
        for way, budget in OTHERS:
            if way in steps:
                compared.append(_row(case.name, turns, way, budget))
        for way, requirement in REQUIREMENTS.items():
            if way not in steps:
                reason = f"skipped: {requirement} is not installed"
                compared.append(Row(f"step device/{way}, {case.name}", None, reason))
        return [
            *compared,
            Row(f"opens its step graph, {case.name}", cost.opens_ms, "ms, processor"),
            Row(f"opens it again, {case.name}", cost.opens_again_ms, "ms, processor"),
            Row(
                f"first step of a process, {case.name}",
                cost.first_step_seconds,
                "s, clock",
                FIRST_STEP_SECONDS,
            ),
            Row(f"memory of a session, {case.name}", cost.peak_mb, "MB"),
        ]


def turns_of(steps: Mapping[str, Step]) -> dict[str, list[float]]:
    """Seconds of the processor that each takes for a step, turn by turn."""
    for step in steps.values():
        step()
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, step in steps.items():
            turns[name].append(_turn(step))
    return turns


def _turn(step: Step) -> float:
    step()  # what the other left in the caches
    times = list[float]()
    end = time.perf_counter() + TURN_SECONDS
    while time.perf_counter() < end or len(times) < 3:
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return statistics.median(times)


def _row(
    name: str,
    turns: Mapping[str, list[float]],
    way: str,
    budget: float | None,
) -> Row:
    """Return the row of the device's step over another way's."""
    ratios = []
    # Turn by turn, so that what else the machine does disturbs both alike.
    for device, compared in zip(turns["device"], turns[way], strict=True):
        ratios.append(device / compared)
    device_ms = statistics.median(turns["device"]) * 1e3
    compared_ms = statistics.median(turns[way]) * 1e3
    note = f"{device_ms:.2f} / {compared_ms:.2f} ms"
    return Row.of(f"step device/{way}, {name}", ratios, "ratio, processor", budget, note=note)


class Subjects:
    """What trains one model."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._folder = folder
        arch = case.architecture
        layout = infer_layout(arch, dict(case.settings) or None)
        export = Export(arch, layout, Recipe())
        tier = layout.tier(case.width)
        self._module = export.module(tier)
        self._signature = export.signature
        self._signature = self._signature.with_places_of(self._module)
        graph = write_train_graph(self._module, self._signature, export.recipe)
        files: list[SetFile] = [graph]
        if ort_training.is_installed():
            files += ort_training.write_artifacts(self._module, self._signature, export.recipe)
        for file in files:
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / file.path).write_bytes(file.data)
        noise = model_noise(self._module, self._signature)
        footprint = Footprint(layout.parameter_count(tier), 0, 0, peak_memory(graph.model))
        self.manifest = manifest_of(
            export, tier, files, Facts(self._signature, noise, (), footprint)
        )
        (folder / "manifest.json").write_bytes(self.manifest.to_bytes())
        batches = SizedBatches(self._signature, vocabulary_of(self._module), (case.batch,))
        self._x, self._y = next(batches.take(1))
        self._noise = batches.noise(noise, case.batch, 0)
        self._mask = torch.ones(self._signature.classes)

    def steps(self) -> dict[str, Step]:
        """Return a step of each way: device, static, eager, fused, and others if installed."""
        eager = partial(
            Reference(self._module, Recipe()).step,
            self._x,
            Answer(self._y, self._mask),
            self._noise,
        )
        runs: dict[str, Step] = {
            "device": self._device("onnx"),
            "static": self._static(),
            "eager": eager,
        }
        runs["fused"] = self._fused(lambda work: work)
        if shutil.which("c++") is not None:
            runs["compiled"] = self._fused(torch.compile)
        if ort_training.is_installed():
            runs["ort-training"] = self._device("ort-training")
        return runs

    def _fused(
        self, made: Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
    ) -> Step:
        """PyTorch with its fused SGD, and the loss as it is `made`."""
        module = set_mode(copy.deepcopy(self._module), "train")
        answer = Answer(self._y, self._mask)
        numbers = list(module.parameters())
        optimizer = torch.optim.SGD(numbers, 0.01, momentum=0.9, weight_decay=5e-4, fused=True)
        loss = made(lambda: Recipe().loss.pytorch(module(self._x), answer))

        def step() -> None:
            feed_noise(module, self._noise)
            loss().backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(numbers, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _graph(self, backend: str) -> Path:
        return self._folder / self.manifest.graphs[str(step_graph_key(backend, self.manifest))].path

    def _device(self, backend: str) -> Step:
        session = TrainSession(self.manifest, self._graph(backend))
        session.load(self._parameters())
        noise = {layer: value.numpy() for layer, value in self._noise.items()}
        return partial(
            session.step,
            self._x.numpy(),
            self._y.numpy(),
            self._mask.numpy(),
            0.01,
            noise,
        )

    def _parameters(self) -> dict[str, NDArray[np.float32]]:
        parameters = {}
        for name, value in self._module.named_parameters():
            parameters[name] = value.detach().numpy()
        return parameters

    def _static(self) -> Step:
        session = open_session(self._graph("onnx"), self.manifest.graphs.values())
        feed: dict[str, Any] = {
            "x": self._x.numpy(),
            "y": self._y.numpy(),
            "mask": self._mask.numpy(),
        }
        feed["lr"] = np.array(0.01, np.float32)
        for layer, value in self._noise.items():
            feed[noise_input(layer)] = value.numpy()
        for name, parameter in self._parameters().items():
            feed[parameter_input(name)] = parameter
        for spec in self.manifest.states:
            feed[state_input(spec.name)] = np.zeros(spec.shape, np.float32)
        binding = session.io_binding()
        # The binding has addresses only, so the arrays must live as long as it.
        kept = [feed]
        for port in session.get_inputs():
            binding.bind_cpu_input(port.name, np.ascontiguousarray(feed[port.name]))
        for port in session.get_outputs():
            array = np.empty(port.shape, np.float32)
            kept.append({port.name: array})
            binding.bind_output(port.name, "cpu", 0, np.float32, array.shape, array.ctypes.data)

        def step() -> None:
            session.run_with_iobinding(binding)
            assert kept  # the bound arrays live as long as the step does

        return step
