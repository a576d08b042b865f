"""Shows two runs side by side."""

from collections.abc import Mapping
from typing import Any

from broker_server.store.queries import Comparison
from shoal.cli.console import flat, number_text, print_rows
from shoal.cli.views.view import View
from shoal.sources import Source


def comparison_with(other: str) -> View[Comparison]:
    """Return the view of a run beside another one, named by its id or the beginning of it."""

    def read(source: Source, run: str) -> Comparison:
        return source.compare(run, other)

    return View(read, _draw, _as_records)


def _draw(view: Comparison) -> None:
    print_rows(
        "settings that differ",
        _rows("setting", view.runs, view.settings),
        empty="the settings are the same",
    )
    scores = {}
    for version, (score, other_score) in view.accuracies.items():
        scores[version] = (number_text(score), number_text(other_score))
    print_rows(
        "accuracy, or loss where there is none",
        _rows("version", view.runs, scores),
        empty="no version was judged",
    )


def _rows(
    first_column: str, runs: tuple[str, str], values: Mapping[Any, tuple[Any, Any]]
) -> list[dict[str, str]]:
    """Return a row for each name, with the values of both runs."""
    run, other_run = runs
    rows = []
    for name, (value, other_value) in values.items():
        rows.append({first_column: str(name), run: str(value), other_run: str(other_value)})
    return rows


def _as_records(view: Comparison) -> list[dict[str, Any]]:
    """Return a record for each setting that differs and for each version."""
    records = _records("setting", view.runs, view.settings)
    return records + _records("accuracy", view.runs, view.accuracies)


def _records(
    what: str, runs: tuple[str, str], values: Mapping[Any, tuple[Any, Any]]
) -> list[dict[str, Any]]:
    run, other_run = runs
    records = []
    for name, (value, other_value) in values.items():
        record = {
            "run": run,
            "other_run": other_run,
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
