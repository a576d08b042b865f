"""Cost of tiers that train a share of their blocks, beside the whole tier and beside PyTorch.

The last row compares a net that trains an exit behind every stage with one that has only the last.

PyTorch trains with the same parameters frozen. All steps take short turns in one process, as in
`benchmarks.step_time`; memory is that of a process for each set, less that of one for a tiny set,
so that the runtime itself does not count. Beside PyTorch, memory is that of the whole processes.

A row without a budget says what the matrix products of a share's graph would take of PyTorch's
step, at the speed of `benchmarks.gemm`.
"""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gemm import PRODUCT_FLOPS, product_step
from benchmarks.nets.by_sample import BY_SAMPLE
from benchmarks.products import product_flops
from benchmarks.row import Row
from benchmarks.step_time import Case, Step, Subjects, turns_of
from benchmarks.torch_peak import torch_peak
from device_runtime.bench import SMALL, costs
from models.tier import HEAD_SHARE
from trainer_export.check import calm_torch
from trainer_export.losses.all_exits_teach import AllExitsTeach
from trainer_export.recipe import Recipe

CASES = (Case("mobilenet_v3_small", batch=16), Case("resnet18", batch=16))
KEPT_BUDGET = 0.1
"""The step of a head on kept outputs over the step of the whole model."""


@dataclass(frozen=True)
class Budget:
    """Limits of a share's costs relative to the whole tier, and relative to PyTorch."""

    name: str
    step: float
    memory: float
    upload: float | None = None
    of_pytorch: float = 0.8
    memory_of_pytorch: float = 0.35


SHARES: Mapping[float, Budget] = {
    0.5: Budget(
        "half",
        step=0.65,
        memory=0.65,
    ),
    HEAD_SHARE: Budget(
        "head",
        step=0.35,
        memory=0.4,
        upload=0.05,
    ),
}
_FLOAT_BYTES = 4

EXITS_BUDGET = 1.25
"""The step of a net with an exit behind every stage over that of the same net with the last one."""

_STAGES = {"channels": (16, 32, 64, 128), "blocks": (1, 1, 1, 1), "norm": "instance"}


def rows() -> list[Row]:
    """Measure what each share of every net costs in steps, memory and upload."""
    (small,) = costs(SMALL, 1)
    table: list[Row] = []
    with calm_torch():
        for case in CASES:
            with tempfile.TemporaryDirectory() as folder:
                net = _Net(
                    case,
                    Path(folder),
                    small.peak_mb,
                )
                table += net.rows()
            # Batch norms would let what a frozen layer returns depend on the batch.
            table.append(_kept_row(replace(case, arch=case.arch + BY_SAMPLE)))
        table.append(exits_row())
    return table


def exits_row() -> Row:
    """Measure the step of a net that trains all its exits beside that of only its last exit."""
    every = Case("exit_resnet", batch=16, settings=_STAGES, recipe=Recipe(loss=AllExitsTeach()))
    last = Case("preresnet18", batch=16, settings=_STAGES)
    with tempfile.TemporaryDirectory() as folder:
        steps = {
            "every": Subjects(every, Path(folder) / "every").device(),
            "last": Subjects(last, Path(folder) / "last").device(),
        }
        turns = turns_of(steps)
    ratios: list[float] = []
    for every_seconds, last_seconds in zip(turns["every"], turns["last"], strict=True):
        ratios.append(every_seconds / last_seconds)
    every_ms = statistics.median(turns["every"]) * 1e3
    last_ms = statistics.median(turns["last"]) * 1e3
    return Row.from_values(
        f"share, step of every exit/last exit, {every.arch}",
        ratios,
        "ratio, processor",
        EXITS_BUDGET,
        note=f"{every_ms:.2f} / {last_ms:.2f} ms",
    )


def _kept_row(case: Case) -> Row:
    """Measure the second pass over samples whose outputs of the frozen layers are kept."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Subjects(case, Path(folder) / "whole").device()
        head = Subjects(replace(case, trained=HEAD_SHARE), Path(folder) / "head")
        with head.kept() as step:
            turns = turns_of({"whole": whole, "kept": step})
    ratios: list[float] = []
    for kept_seconds, whole_seconds in zip(turns["kept"], turns["whole"], strict=True):
        ratios.append(kept_seconds / whole_seconds)
    kept_ms = statistics.median(turns["kept"]) * 1e3
    whole_ms = statistics.median(turns["whole"]) * 1e3
    return Row.from_values(
        f"share, second pass/whole, head of {case.arch}",
        ratios,
        "ratio, processor",
        KEPT_BUDGET,
        note=f"{kept_ms:.2f} / {whole_ms:.2f} ms",
    )


@dataclass(frozen=True)
class _Net:
    """One net with the sets of all its shares.

    Attributes:
        folder: for the sets.
        runtime_mb: memory of a process that trains next to nothing.
    """

    case: Case
    folder: Path
    runtime_mb: float

    def rows(self) -> list[Row]:
        """Measure steps in turns, then memory and upload."""
        steps: dict[str, Step] = {}
        whole = Subjects(self.case, self.folder / "whole")
        steps["whole"] = whole.device()
        sent: dict[str, int] = {"whole": _sent_bytes(whole)}
        for share, budget in SHARES.items():
            name = budget.name
            case = replace(self.case, trained=share)
            subjects = Subjects(case, self.folder / name)
            ways = subjects.steps()
            steps[name] = ways["device"]
            steps[f"{name} eager"] = ways["eager"]
            sent[name] = _sent_bytes(subjects)
        turns = turns_of({**steps, "product": product_step()})
        table: list[Row] = []
        for budget in SHARES.values():
            table += self._step_rows(budget, turns)
            table.append(self._bound_row(budget, turns))
            table += self._memory_rows(budget)
            table.append(self._upload_row(budget, sent))
        return table

    def _step_rows(self, budget: Budget, turns: Mapping[str, list[float]]) -> list[Row]:
        title = self._title(budget)
        table: list[Row] = []
        bounds = {"whole": budget.step, f"{budget.name} eager": budget.of_pytorch}
        for way, bound in bounds.items():
            # Turn by turn, so that what else the machine does disturbs both alike.
            ratios: list[float] = []
            for device, compared in zip(turns[budget.name], turns[way], strict=True):
                ratios.append(device / compared)
            kind = way.rpartition(" ")[2]
            name = f"share, step/{kind}, {title}"
            device_ms = statistics.median(turns[budget.name]) * 1e3
            compared_ms = statistics.median(turns[way]) * 1e3
            note = f"{device_ms:.2f} / {compared_ms:.2f} ms"
            row = Row.from_values(
                name,
                ratios,
                "ratio, processor",
                bound,
                note=note,
            )
            table.append(row)
        return table

    def _bound_row(self, budget: Budget, turns: Mapping[str, list[float]]) -> Row:
        """Return the time of only the matrix products of a share's graph, over PyTorch's step."""
        graph = self.folder / budget.name / "train.onnx"
        flops = product_flops(graph, self.case.batch)
        ratios: list[float] = []
        for product, eager in zip(turns["product"], turns[f"{budget.name} eager"], strict=True):
            ratios.append(flops / PRODUCT_FLOPS * product / eager)
        rate = PRODUCT_FLOPS / statistics.median(turns["product"]) / 1e9
        return Row.from_values(
            f"share, products/eager, {self._title(budget)}",
            ratios,
            "ratio, processor",
            note=f"product {rate:.0f} GFLOP/s, graph {flops / 1e9:.2f} GFLOP",
        )

    def _memory_rows(self, budget: Budget) -> list[Row]:
        title = self._title(budget)
        process_mb = self._process_mb(budget.name)
        share_mb = process_mb - self.runtime_mb
        whole_mb = self._process_mb("whole") - self.runtime_mb
        torch_mb = torch_peak(self.folder / budget.name / "manifest.json", self.case.batch)
        return [
            Row(
                f"share, memory/whole, {title}",
                share_mb / whole_mb,
                "ratio, session",
                budget.memory,
                note=f"{share_mb:.1f} / {whole_mb:.1f} MB",
            ),
            Row(
                f"share, memory/eager, {title}",
                process_mb / torch_mb,
                "ratio, process",
                budget.memory_of_pytorch,
                note=f"{process_mb:.0f} / {torch_mb:.0f} MB",
            ),
        ]

    def _upload_row(self, budget: Budget, sent: Mapping[str, int]) -> Row:
        share_bytes = sent[budget.name]
        whole_bytes = sent["whole"]
        name = f"share, upload/whole, {self._title(budget)}"
        note = f"{share_bytes:,} / {whole_bytes:,} bytes"
        return Row(
            name,
            share_bytes / whole_bytes,
            "ratio, bytes",
            budget.upload,
            note=note,
        )

    def _process_mb(self, name: str) -> float:
        """Return the peak memory of a process that trains a set."""
        (cost,) = costs(self.folder / name, self.case.batch)
        return cost.peak_mb

    def _title(self, budget: Budget) -> str:
        return f"{budget.name} of {self.case.arch}"


def _sent_bytes(subjects: Subjects) -> int:
    """Return the bytes of an update in fp32, without its header."""
    return _FLOAT_BYTES * subjects.manifest.trained_count
