"""Time of a training step on a board, beside PyTorch eager and onnxruntime-training if installed.

The device's own path: a `TrainSession` with the runtime's settings on a board, one thread, no
spinning, buffers that swap. Beside it is the same session with all its inputs and outputs bound
once, which shows the time of the runtime by itself. The others are plain PyTorch, PyTorch with its
fused optimizer, and PyTorch with a compiled loss if there is a compiler. All of them take short
turns in one process. A turn's figure is the median processor time of its steps, so that other work
of the machine affects all alike. A row is the median of the ratios of neighbouring turns, with
their quartiles. The time to open a set is measured as in `shoal device bench`.

One more turn is a square matrix product by the same runtime, whose speed a step cannot exceed. The
share of it that a step reaches, in multiplications and additions, shows what is left to gain.
"""

import contextlib
import copy
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gemm import PRODUCT_FLOPS, product_step
from benchmarks.nets import NETS
from benchmarks.nets.by_sample import BY_SAMPLE
from benchmarks.row import Row
from device_runtime.bench import costs
from device_runtime.training.backends import LowerGraph, TrainSession, step_graph_key
from device_runtime.training.backends.runtime import open_session
from device_runtime.training.kept_outputs import KeptOutputs
from fleet_protocol.errors import ConfigError, ExportError
from fleet_protocol.graph_parts import ABOVE, BELOW
from fleet_protocol.manifest import noise_input, parameter_input, state_input
from models import Architecture, Registry
from models.registry import infer_layout
from models.tier import WHOLE_SHARE
from models.zoo.layers import set_mode
from models.zoo.noise_inputs import feed_noise
from models.zoo.randomized_model import vocabulary_of
from trainer_export.batches import SizedBatches
from trainer_export.check import calm_torch
from trainer_export.exported import Export
from trainer_export.footprint import Footprint, count_flops, peak_memory
from trainer_export.formats import ort_training
from trainer_export.formats.files import SetFile
from trainer_export.formats.onnx import write_step_graphs
from trainer_export.in_place import overwritten
from trainer_export.loss import Answer
from trainer_export.manifests import SubModelFacts, manifest_of
from trainer_export.model_inputs import model_noise
from trainer_export.recipe import Recipe
from trainer_export.reference import Reference

TURNS = 12
TURN_SECONDS = 0.08
OTHERS = (("fused", None), ("compiled", None), ("ort-training", 0.9), ("static", 1.05))
"""The comparisons besides eager PyTorch, with their budgets."""

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
    label: str = ""  # if the settings differ from the architecture's
    settings: Mapping[str, Any] = field(default_factory=dict)
    trained: float = WHOLE_SHARE  # share of the blocks
    recipe: Recipe = field(default_factory=Recipe)

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.label or self.arch} width {self.width:g} batch {self.batch}"

    @property
    def architecture(self) -> Architecture:
        """The architecture that builds it."""
        return NETS.get(self.arch) or Registry.zoo().get(self.arch)


_LARGE: Any = {"input_shape": (3, 224, 224)}
_DEMO: Any = {"channels": [32, 64], "input_shape": (1, 8, 8)}
CASES = (
    *(Case("conv", width, 10, 0.22, "demo", _DEMO) for width in (1.0, 0.5, 0.125)),
    *(Case("conv", width, 10, 0.22) for width in (0.125, 0.0625)),
    Case("conv"),
    Case("mlp", budget=0.5),
    Case("mlp", 0.25, budget=0.3),
    Case("lenet5"),
    Case("cnn1"),
    Case("cnn2", budget=0.97),
    Case("har_cnn"),
    Case("preresnet18", batch=8, budget=0.94),
    Case("text_encoder", budget=0.8),
    Case("text_encoder", 0.25),
    Case("next_word", batch=8, budget=0.86),
    Case("transformer_mlm", batch=4, budget=0.8),
    Case("token_classifier", batch=4, budget=0.8),
    Case("mobilenet_v2", batch=16, budget=0.6),
    Case("mobilenet_v3_small", batch=16, budget=0.5),
    Case("mobilenet_v3_small", 0.25, 16, 0.45),
    Case("mobilenet_v3_small", 1.0, 4, 0.6, "mobilenet_v3_small at 224", _LARGE),
    Case("mobilenet_v2", 1.0, 4, 0.6, "mobilenet_v2 at 224", _LARGE),
    Case("efficientnet_lite0", batch=16, budget=0.6),
    Case("efficientnet_lite0", 1.0, 4, 0.6, "efficientnet_lite0 at 224", _LARGE),
    Case("convnext_atto", batch=16, budget=0.6),
    Case("convnext_atto", 1.0, 4, 0.6, "convnext_atto at 224", _LARGE),
    Case("ds_cnn", batch=32, budget=0.6),
    Case("vit_tiny", batch=8, budget=0.75),
    Case("vit_tiny", 1.0, 4, 0.75, "vit_tiny at 224", _LARGE),
    Case("unet", batch=4, budget=1.0),
)


REQUIREMENTS = {"compiled": "a C++ compiler", "ort-training": "onnxruntime-training"}
"""Requirements of a comparison that may be missing."""


def rows() -> list[Row]:
    """For every model, the device's step over the others', and the costs of opening its graph."""
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
        subjects = Subjects(case, Path(folder))
        steps = subjects.steps()
        turns = turns_of({**steps, "product": product_step()})
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
            _share_of_product(case, turns, subjects.flops),
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
            turns[name].append(_time_step(step))
    return turns


def _time_step(step: Step) -> float:
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
    return Row.from_values(
        f"step device/{way}, {name}", ratios, "ratio, processor", budget, note=note
    )


def _share_of_product(
    case: Case,
    turns: Mapping[str, list[float]],
    flops: int,
) -> Row:
    """Return the row of a step's speed over that of a matrix product.

    Args:
        case: the model.
        turns: seconds of the processor, turn by turn.
        flops: floating point operations of a step, without element-wise work and optimizer.
    """
    shares = []
    for step, product in zip(turns["device"], turns["product"], strict=True):
        shares.append((flops / step) / (PRODUCT_FLOPS / product))
    rate = PRODUCT_FLOPS / statistics.median(turns["product"]) / 1e9
    note = f"product {rate:.0f} GFLOP/s, step {flops / 1e9:.3f} GFLOP"
    return Row.from_values(
        f"step share of product, {case.name}", shares, "ratio, processor", note=note
    )


class Subjects:
    """The comparisons that train one model.

    Attributes:
        flops: floating point operations of a step, without element-wise work and optimizer.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
    ) -> None:
        self._folder = folder
        self._recipe = case.recipe
        arch = case.architecture
        layout = infer_layout(arch, dict(case.settings) or None)
        export = Export(arch, layout, case.recipe)
        tier = layout.tier(case.width, None, case.trained)
        self._module = export.module(tier)
        self._signature = export.signature_of(tier, self._module)
        graph, *parts = write_step_graphs(self._module, self._signature, export.recipe)
        files: list[SetFile] = [graph]
        # Parts of a step whose values depend on the batch are for no board.
        if case.arch.endswith(BY_SAMPLE):
            files += parts
        if ort_training.is_installed():
            files += ort_training.write_artifacts(self._module, self._signature, export.recipe)
        for file in files:
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / file.path).write_bytes(file.data)
        noise = model_noise(self._module, self._signature)
        peak = peak_memory(graph.model, in_place=overwritten(files))
        footprint = Footprint(layout.parameter_count(tier), 0, 0, peak)
        facts = SubModelFacts(self._signature, noise, (), footprint)
        self.manifest = manifest_of(export, tier, files, facts)
        (folder / "manifest.json").write_bytes(self.manifest.to_bytes())
        _, flops_of_sample = count_flops(self._module, self._signature)
        self.flops = flops_of_sample * case.batch
        batches = SizedBatches(self._signature, vocabulary_of(self._module), (case.batch,))
        self._x, self._y = next(batches.draw(1))
        self._noise = batches.noise(noise, case.batch, 0)
        self._mask = torch.ones(self._signature.classes)

    def steps(self) -> dict[str, Step]:
        """Return a step of each way: device, static, eager, fused, and others if installed."""
        eager = partial(
            Reference(self._module, self._recipe, base=self._signature.base).step,
            self._x,
            Answer(self._y, self._mask),
            self._noise,
        )
        runs: dict[str, Step] = {
            "device": self.device("onnx"),
            "static": self._static(),
            "eager": eager,
        }
        runs["fused"] = self._fused(lambda work: work)
        if shutil.which("c++") is not None:
            runs["compiled"] = self._fused(torch.compile)
        if ort_training.is_installed():
            runs["ort-training"] = self.device("ort-training")
        return runs

    def _fused(
        self, made: Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
    ) -> Step:
        """PyTorch with its fused SGD, and the loss as it is `made`."""
        module = set_mode(copy.deepcopy(self._module), "train")
        answer = Answer(self._y, self._mask)
        numbers = [value for value in module.parameters() if value.requires_grad]
        optimizer = torch.optim.SGD(numbers, 0.01, momentum=0.9, weight_decay=5e-4, fused=True)
        loss = made(lambda: self._recipe.loss.pytorch(module(self._x), answer))

        def step() -> None:
            feed_noise(module, self._noise)
            loss().backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(numbers, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _graph(self, backend: str) -> Path:
        return self._folder / self.manifest.graphs[str(step_graph_key(backend, self.manifest))].path

    def device(self, backend: str = "onnx") -> Step:
        """Return the step of a board."""
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

    @contextlib.contextmanager
    def kept(self) -> Iterator[Step]:
        """Yield a step on samples for which the outputs of the frozen layers are kept."""
        graphs = self.manifest.graphs
        outputs = KeptOutputs(self._folder / "kept", 10**9)
        lower = LowerGraph(self._folder / graphs[BELOW].path, outputs, "")
        session = TrainSession(self.manifest, self._folder / graphs[ABOVE].path, lower=lower)
        session.load(self._parameters())
        count = len(self._y)
        with session.keeping(count, count, again=True, is_random=False):
            step = partial(
                session.step,
                self._x.numpy(),
                self._y.numpy(),
                self._mask.numpy(),
                0.01,
            )
            step()  # computes the rows
            yield step

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
