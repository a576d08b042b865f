"""Wall time of a step with two threads, and with the number that ``threads = "auto"`` settles on.

python -m benchmarks.threads FOLDER [write]

Writes the sets of all nets below the folder, unless they are there, then measures those whose step
takes more than 20 ms with one thread. ``write`` only writes them: that needs PyTorch and minutes,
and may happen on a busy machine. The figures need one that does nothing else.

Steps with one and with two threads take short turns, and a row is the median of the ratios of
neighbouring turns, with their quartiles. ``auto`` is settled by the trial of a board's first task.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import history
from benchmarks.row import Row
from benchmarks.step_time import CASES, Case, Subjects
from device_runtime.processor_share import thread_counts
from device_runtime.training.accelerators import Accelerators
from device_runtime.training.backends.runtime import CPU
from device_runtime.training.backends.session import TrainSession
from device_runtime.training.epochs import made_up_steps
from device_runtime.training.hooks import Hooks
from fleet_protocol.errors import ConfigError, ExportError
from fleet_protocol.manifest import Manifest, parse_manifest
from trainer_export.check import calm_torch

TWO = f"{CPU}:2"
LEAST_SECONDS = 0.02
SPEED_BUDGET = 1.6
AUTO_BUDGET = 1.05
TURNS = 7
TURN_SECONDS = 0.2
_STEP = "onnx/train"


@dataclass(frozen=True)
class _Turns:
    """Seconds of a step, turn by turn, by provider; neighbouring turns follow each other."""

    seconds: Mapping[str, Sequence[float]]

    def ratios(self, above: str, below: str) -> list[float]:
        """Return the ratios of two providers' steps."""
        ratios = []
        for upper, lower in zip(self.seconds[above], self.seconds[below], strict=True):
            ratios.append(upper / lower)
        return ratios

    def text(self, first: str, second: str) -> str:
        """Return the median steps of two providers."""
        first_ms = 1e3 * statistics.median(self.seconds[first])
        second_ms = 1e3 * statistics.median(self.seconds[second])
        return f"{first_ms:.1f} / {second_ms:.1f} ms"


def rows() -> list[Row]:
    """Write the sets of all nets, and measure them."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        write_sets(Path(name))
        table: list[Row] = []
        for case in CASES:
            table += measured(case, Path(name))
        return table


def write_sets(folder: Path) -> None:
    """Write the set of each net that a folder lacks; a net that cannot be exported has none."""
    with calm_torch():
        for case in CASES:
            written = _folder_of(case, folder)
            if (written / "manifest.json").is_file():
                continue
            written.mkdir(parents=True, exist_ok=True)
            try:
                Subjects(case, written)
            except (ModuleNotFoundError, ConfigError, ExportError) as error:
                print(f"{case.name}: {error}", file=sys.stderr)


def _folder_of(case: Case, folder: Path) -> Path:
    return folder / case.name.replace(" ", "-")


def measured(case: Case, sets: Path) -> list[Row]:
    """Return the rows of a net, or one that says why it cannot be measured here.

    Args:
        case: the net.
        sets: folder of the sets.
    """
    if 2 not in thread_counts():
        return [Row(f"threads, {case.name}", None, "skipped: one processor is available")]
    folder = _folder_of(case, sets)
    if not (folder / "manifest.json").is_file():
        return [Row(f"threads, {case.name}", None, "skipped: it cannot be exported here")]
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    turns = _take_turns(manifest, folder, case.batch)
    one = statistics.median(turns.seconds[CPU])
    if one < LEAST_SECONDS:
        return [Row(f"step with one thread, {case.name}", 1e3 * one, "ms, clock")]
    return [
        Row.from_values(
            f"threads, speed of two/one, {case.name}",
            turns.ratios(CPU, TWO),
            "ratio, clock",
            SPEED_BUDGET,
            at_least=True,
            note=turns.text(CPU, TWO),
        ),
        _auto_row(case, manifest, folder, turns),
    ]


def _take_turns(manifest: Manifest, folder: Path, batch: int) -> _Turns:
    steps = {}
    for provider in (CPU, TWO):
        session = _open(manifest, folder, provider)
        steps[provider] = made_up_steps(session, manifest, batch)
        next(steps[provider])
    seconds: dict[str, list[float]] = {provider: [] for provider in steps}
    for _ in range(TURNS):
        for provider, losses in steps.items():
            next(losses)  # what the other left in the caches
            taken: list[float] = []
            end = time.perf_counter() + TURN_SECONDS
            while not taken or time.perf_counter() < end:
                began = time.perf_counter()
                next(losses)
                taken.append(time.perf_counter() - began)
            seconds[provider].append(statistics.median(taken))
    return _Turns(seconds)


def _auto_row(
    case: Case,
    manifest: Manifest,
    folder: Path,
    turns: _Turns,
) -> Row:
    """Return the row of the step by the number of threads that a board settles on.

    A board with more than two processors may settle on another number, which took no turns.
    """
    with tempfile.TemporaryDirectory() as state:
        accelerators = Accelerators(Path(state) / "providers.json", (), threads=thread_counts())
        settled = accelerators.settle(
            manifest.graphs[_STEP].digest,
            manifest,
            case.batch,
            lambda provider: _open(manifest, folder, provider),
            Hooks(),
        )
    name = f"threads, step of auto/one, {case.name}"
    if settled.provider not in turns.seconds:
        return Row(name, None, f"skipped: it settled on {settled.provider}, which took no turns")
    return Row.from_values(
        name,
        turns.ratios(settled.provider, CPU),
        "ratio, clock",
        AUTO_BUDGET,
        note=f"{settled.provider}; {settled.why}",
    )


def _open(manifest: Manifest, folder: Path, provider: str) -> TrainSession:
    return TrainSession(manifest, folder / manifest.graphs[_STEP].path, provider=provider)


def main(arguments: Sequence[str]) -> None:
    """Write the sets, and unless only that is wanted, measure them and add to the history."""
    folder = Path(arguments[0])
    write_sets(folder)
    if "write" in arguments[1:]:
        return
    for case in CASES:
        case_rows = measured(case, folder)
        history.keep(case_rows)
        for row in case_rows:
            print(row.name, row.value, row.unit, row.note, "" if row.ok else "MISSED", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
