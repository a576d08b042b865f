"""Shows runs side by side: of one store, of several, and of simulations."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from broker_server.store.queries import RunView
from fleet_protocol.errors import ConfigError
from shoal.cli.console import bytes_text, flat, number_text, print_rows
from shoal.cli.views.compared_settings import compared_settings
from shoal.sources import LocalStore, Source, open_source

_DATABASE = "shoal.db"
_MOST_RUNS = 12
"""Bound on the runs of one comparison, each of which is a column."""


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison.

    Attributes:
        label: what it is called: its id, or its folder where runs of several stores are compared.
        view: how it stands.
        settings: its settings by dotted key.
        scores: what each version was judged by its number: accuracy, or loss where there is none.
        rounds: the round that made each version, by the version's number.
        score_names: what the scores are: ``accuracy``, ``loss``, or both.
    """

    label: str
    view: RunView
    settings: Mapping[str, Any]
    scores: Mapping[int, float | None]
    rounds: Mapping[int, int]
    score_names: frozenset[str]


@contextmanager
def compared_runs(names: Sequence[str], store: Path, url: str) -> Iterator[list[ComparedRun]]:
    """Read runs that are named as `shoal compare` takes them.

    Args:
        names: each the folder of a store or of a simulation, which stands for its newest run, or
            such a folder, a colon and a run's id; or a run of `store`.
        store: the store of runs that are named without a folder.
        url: address of the page that is asked for such runs instead, if any.

    Raises:
        ConfigError: there is no such run, or there are too many.
        StorageError: a store cannot be read.
    """
    if not 2 <= len(names) <= _MOST_RUNS:
        raise ConfigError(f"shoal compare: name 2 to {_MOST_RUNS} runs or stores, not {len(names)}")
    with ExitStack() as stack:
        sources: dict[Path | None, Source] = {}
        runs = []
        for name in names:
            folder, run = _store_and_run(name)
            if folder not in sources:
                opened = open_source(store, url) if folder is None else open_source(folder, "")
                sources[folder] = stack.enter_context(opened)
            runs.append(_read(sources[folder], run, name if folder is not None else ""))
        yield _with_distinct_labels(runs)


def _store_and_run(name: str) -> tuple[Path | None, str]:
    """Return the store and the run that a name means; no store for a run of the default one."""
    for text, run in ((name, ""), tuple(name.rpartition(":")[::2])):
        folder = Path(text)
        for store in (folder, folder / "store"):
            if text and (store / _DATABASE).is_file():
                return store, run
    if Path(name).is_dir():
        raise ConfigError(
            f"shoal compare: {name} is neither a store nor the folder of a simulation"
        )
    return None, "" if name == "newest" else name


def _read(source: Source, run: str, label: str) -> ComparedRun:
    """Read one run."""
    views = source.runs(run)
    if not views:
        raise ConfigError(f"shoal compare: {label or 'the store'} has no run yet")
    view = views[0]
    scores: dict[int, float | None] = {}
    rounds: dict[int, int] = {}
    score_names = set()
    for version_view in source.versions(view.run.id):
        version = version_view.version
        rounds[version.number] = version.round
        if version.evaluation is not None:
            scores[version.number] = version.evaluation.shown
            score_names.add("loss" if version.evaluation.accuracy is None else "accuracy")
    folder = source.store.folder if isinstance(source, LocalStore) else None
    settings = compared_settings(view.run, folder)
    return ComparedRun(label or view.run.id, view, settings, scores, rounds, frozenset(score_names))


def _with_distinct_labels(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Number the labels that occur twice, which would be one column."""
    counts: dict[str, int] = {}
    distinct = []
    for run in runs:
        counts[run.label] = counts.get(run.label, 0) + 1
        count = counts[run.label]
        label = run.label if count == 1 else f"{run.label} ({count})"
        distinct.append(replace(run, label=label))
    return distinct


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return the values of the settings that are not the same in all runs, by dotted key."""
    names: set[str] = set()
    for run in runs:
        names |= run.settings.keys()
    values_by_name = {}
    for name in sorted(names):
        values = [run.settings.get(name) for run in runs]
        if any(value != values[0] for value in values):
            values_by_name[name] = values
    return values_by_name


def scores_by_version(runs: Sequence[ComparedRun]) -> dict[int, list[float | None]]:
    """Return what each version was judged in every run, by its number."""
    numbers: set[int] = set()
    for run in runs:
        numbers |= run.scores.keys()
    return {number: [run.scores.get(number) for run in runs] for number in sorted(numbers)}


def name_of_scores(runs: Sequence[ComparedRun]) -> str:
    """Return what the scores of runs are: accuracies, losses, or some of each."""
    names: set[str] = set()
    for run in runs:
        names |= run.score_names
    if len(names) == 1:
        return names.pop()
    return "accuracy, or loss where there is none"


def draw(runs: Sequence[ComparedRun]) -> None:
    """Print runs side by side: how they stand, settings that differ, and scores by version."""
    print_rows("runs", [_summary(run) for run in runs], empty="no run")
    print_rows(
        "settings that differ",
        _rows("setting", runs, differing_settings(runs)),
        empty="the settings are the same",
    )
    texts = {}
    for version, scores in scores_by_version(runs).items():
        texts[version] = [number_text(score) for score in scores]
    print_rows(
        name_of_scores(runs),
        _rows("version", runs, texts),
        empty="no version was judged",
    )


def _summary(run: ComparedRun) -> dict[str, str]:
    """Return the cells of a run as a whole."""
    newest = None
    for score in run.scores.values():
        newest = newest if score is None else score
    return {
        "run": run.label,
        "strategy": run.view.strategy,
        "model": run.view.run.arch,
        "status": run.view.run.status,
        "rounds": f"{run.view.closed} of {run.view.rounds}",
        "newest": number_text(newest),
        "on the wire": bytes_text(run.view.run.wire_bytes),
    }


def _rows(
    first_column: str, runs: Sequence[ComparedRun], values: Mapping[Any, Sequence[Any]]
) -> list[dict[str, str]]:
    """Return a row for each name, with the values of all runs."""
    rows = []
    for name, values_of_runs in values.items():
        row = {first_column: str(name)}
        for run, value in zip(runs, values_of_runs, strict=True):
            row[run.label] = str(value)
        rows.append(row)
    return rows


def comparison_records(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return a record for each setting that differs and each version, of the first and another run.

    With three runs there are two records of each: the first beside the second and beside the third.
    """
    records: list[dict[str, Any]] = []
    first = runs[0]
    for other in runs[1:]:
        pair = (first, other)
        records += _records("setting", pair, differing_settings(pair))
        records += _records("accuracy", pair, scores_by_version(pair))
    return records


def _records(
    what: str,
    pair: tuple[ComparedRun, ComparedRun],
    values: Mapping[Any, Sequence[Any]],
) -> list[dict[str, Any]]:
    """Return a record for each name with the values of two runs."""
    records = []
    for name, (value, other_value) in values.items():
        record = {
            "run": pair[0].label,
            "other_run": pair[1].label,
            "what": what,
            "name": str(name),
            "value": _undivided(value),
            "other_value": _undivided(other_value),
        }
        records.append(record)
    return records


def _undivided(value: Any) -> Any:
    """Return a value that `flat` leaves under its own name.

    A list of records would be printed under names of its own, which all settings would then have.
    """
    if flat({"": value}).keys() == {""}:
        return value
    return str(value)
