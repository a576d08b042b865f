"""Compares runs of one store, of several stores, and of simulations."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from broker_server.store.queries import RunView
from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.spelling import did_you_mean
from shoal.cli.console import bytes_text, flat, number_text, print_rows
from shoal.cli.views.compared_settings import compared_settings, is_of_recipe
from shoal.sources import LocalStore, Source, open_source
from shoal.store_folder import is_store

_MOST_RUNS = 12
"""Largest number of runs in a comparison; each one is a column."""


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison.

    Attributes:
        label: its name; without one its id, or its folder if runs of several stores are compared.
        view: its state.
        settings: its settings by dotted key.
        scores: the score of each version by its number: accuracy, or loss without an accuracy.
        rounds: the round that made each version, by the version's number.
        score_names: what the scores are: ``accuracy``, ``loss``, or both.
        metrics: the values of each metric that the recipe asks for, by version, by its name.
    """

    label: str
    view: RunView
    settings: Mapping[str, Any]
    scores: Mapping[int, float | None]
    rounds: Mapping[int, int]
    score_names: frozenset[str]
    metrics: Mapping[str, Mapping[int, float]]


@contextmanager
def compared_runs(names: Sequence[str], store: Path, url: str) -> Iterator[list[ComparedRun]]:
    """Read runs by the names that `shoal compare` accepts.

    Args:
        names: each the folder of a store or simulation (for its newest run), or such a folder, a
            colon and a run's id, or a run of `store`.
        store: the store of runs without a folder in their name.
        url: address of the page to read such runs from instead, if any.

    Raises:
        ConfigError: there is no such run, or too many runs are named.
        StorageError: a store cannot be read.
    """
    if not 2 <= len(names) <= _MOST_RUNS:
        raise ConfigError(f"shoal compare: name 2 to {_MOST_RUNS} runs or stores, not {len(names)}")
    with ExitStack() as stack:
        # Several names may belong to one store, which is opened once.
        sources: dict[Path | None, Source] = {}
        runs = []
        for name in names:
            folder, run = _store_and_run(name)
            try:
                if folder not in sources:
                    opened = open_source(store, url) if folder is None else open_source(folder, "")
                    sources[folder] = stack.enter_context(opened)
                # Labels are what the user typed, which is shorter than a path and a run's id.
                runs.append(_read(sources[folder], run, name if folder is not None else ""))
            except (ConfigError, StorageError) as error:
                # A damaged store is not the fault of a name.
                damaged = isinstance(error, StorageError) and is_store(store)
                if damaged or folder is not None:
                    raise
                raise _neither_folder_nor_run(name, error) from error
        yield _with_distinct_labels(runs)


def _store_and_run(name: str) -> tuple[Path | None, str]:
    """Return the store and the run of a name; without a store for a run of the default store."""
    # A path may contain a colon, so the whole name is tried first.
    for text, run in ((name, ""), tuple(name.rpartition(":")[::2])):
        folder = Path(text)
        # A simulation has its store in a folder of that name.
        for store in (folder, folder / "store"):
            if text and is_store(store):
                return store, run
    # A folder that exists was meant as one, so its name is not tried as the id of a run.
    if Path(name).is_dir():
        raise ConfigError(
            f"shoal compare: {name} is neither a store nor the folder of a simulation"
        )
    return None, "" if name == "newest" else name


def _neither_folder_nor_run(name: str, error: ConfigError | StorageError) -> ConfigError:
    """Return the error for a name that is not the folder of a store, with similar folders."""
    # A colon and a run's id may follow the folder.
    folder = Path(name.partition(":")[0])
    siblings = []
    if folder.parent.is_dir():
        siblings = [str(path) for path in sorted(folder.parent.iterdir()) if path.is_dir()]
    hint = did_you_mean(str(folder), siblings)
    return ConfigError(
        f"shoal compare: there is no folder {folder}{hint}; and as the name of a run: {error}"
    )


def _read(source: Source, run: str, label: str) -> ComparedRun:
    """Read one run."""
    views = source.runs(run)
    if not views:
        raise ConfigError(f"shoal compare: {label or 'the store'} contains no runs yet")
    view = views[0]
    scores: dict[int, float | None] = {}
    rounds: dict[int, int] = {}
    score_names = set()
    metrics: dict[str, dict[int, float]] = {}
    for version_view in source.versions(view.run.id):
        version = version_view.version
        rounds[version.number] = version.round
        # Versions without an evaluation do not appear in the table of scores.
        if version.evaluation is not None:
            scores[version.number] = version.evaluation.shown
            score_names.add("loss" if version.evaluation.accuracy is None else "accuracy")
            for metric in version.evaluation.metrics:
                if metric.value is not None:
                    metrics.setdefault(metric.name, {})[version.number] = metric.value
    # Files of another machine are not reachable.
    folder = source.store.folder if isinstance(source, LocalStore) else None
    settings = compared_settings(view.run, folder)
    return ComparedRun(
        view.run.name or label or view.run.id,
        view,
        settings,
        scores,
        rounds,
        frozenset(score_names),
        metrics,
    )


def _with_distinct_labels(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Number labels that occur twice, so that each keeps its own column."""
    counts: dict[str, int] = {}
    distinct = []
    for run in runs:
        counts[run.label] = counts.get(run.label, 0) + 1
        count = counts[run.label]
        label = run.label if count == 1 else f"{run.label} ({count})"
        distinct.append(replace(run, label=label))
    return distinct


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return the values of the differing settings between runs, by dotted key.

    Recipes are compared if that of every run is known.
    """
    names: set[str] = set()
    recipes_known = True
    for run in runs:
        names |= run.settings.keys()
        recipes_known &= any(map(is_of_recipe, run.settings))
    if not recipes_known:
        names = {name for name in names if not is_of_recipe(name)}
    values_by_name = {}
    for name in sorted(names):
        values = [run.settings.get(name) for run in runs]
        # A run that lacks the setting counts as None.
        if any(value != values[0] for value in values):
            values_by_name[name] = values
    return values_by_name


def scores_by_version(runs: Sequence[ComparedRun]) -> dict[int, list[float | None]]:
    """Return what each version was judged in every run, by its number."""
    return _side_by_side([run.scores for run in runs])


def metrics_by_version(runs: Sequence[ComparedRun]) -> dict[str, dict[int, list[float | None]]]:
    """Return the values of each metric in every run, by its name and the version's number."""
    names: set[str] = set()
    for run in runs:
        names |= run.metrics.keys()
    values_by_name = {}
    for name in sorted(names):
        values_of_runs = [run.metrics.get(name, {}) for run in runs]
        values_by_name[name] = _side_by_side(values_of_runs)
    return values_by_name


def _side_by_side(
    values_of_runs: Sequence[Mapping[int, float | None]],
) -> dict[int, list[float | None]]:
    """Return the values of all runs for each number that one of them has."""
    numbers: set[int] = set()
    for values in values_of_runs:
        numbers |= values.keys()
    return {number: [values.get(number) for values in values_of_runs] for number in sorted(numbers)}


def name_of_scores(runs: Sequence[ComparedRun]) -> str:
    """Return the kinds of scores of runs: accuracies, losses, or both."""
    names: set[str] = set()
    for run in runs:
        names |= run.score_names
    if len(names) == 1:
        return names.pop()
    return "accuracy, or loss without an accuracy"


def draw(runs: Sequence[ComparedRun]) -> None:
    """Print a comparison of runs: their states, differing settings, and scores by version."""
    print_rows("runs", [_summary(run) for run in runs], empty="no run")
    print_rows(
        "settings that differ",
        _rows("setting", runs, differing_settings(runs)),
        empty="no settings differ",
    )
    _draw_by_version(runs, name_of_scores(runs), scores_by_version(runs))
    for name, values in metrics_by_version(runs).items():
        _draw_by_version(runs, name, values)


def _draw_by_version(
    runs: Sequence[ComparedRun], name: str, values: Mapping[int, Sequence[float | None]]
) -> None:
    texts = {}
    for version, values_of_runs in values.items():
        texts[version] = [number_text(value) for value in values_of_runs]
    print_rows(name, _rows("version", runs, texts), empty="no version was evaluated")


def _summary(run: ComparedRun) -> dict[str, str]:
    """Return the cells of a run as a whole."""
    newest = None
    # The newest version may not have been evaluated yet.
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
    """Return a record for each differing setting and version, of the first and another run.

    With three runs there are two records of each: the first beside the second and beside the third.
    """
    records: list[dict[str, Any]] = []
    first = runs[0]
    for further in runs[1:]:
        pair = (first, further)
        records += _records("setting", pair, differing_settings(pair))
        records += _records(name_of_scores(pair), pair, scores_by_version(pair))
        for name, values in metrics_by_version(pair).items():
            records += _records(name, pair, values)
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
    """Return a value that `flat` keeps under one name.

    A list of records would get nested names, and then every setting would have those names.
    """
    if flat({"": value}).keys() == {""}:
        return value
    return str(value)
