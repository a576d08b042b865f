"""Shows the runs of a store."""

from collections.abc import Sequence

from broker_server.store.queries import RunView
from shoal.cli.console import bytes_text, number_text, print_rows, seconds_text, time_text
from shoal.cli.views.view import View
from shoal.sources import Source


def _read(source: Source, run: str) -> list[RunView]:
    return source.runs(run)


def _draw(views: Sequence[RunView]) -> None:
    named = any(view.run.name for view in views)
    rows = [_row(view, named=named) for view in views]
    print_rows("runs", rows, empty="no run yet")


def _row(view: RunView, *, named: bool) -> dict[str, str]:
    """Return the cells of one run, with its name if any run has one."""
    name = {"name": view.run.name or "-"} if named else {}
    score = number_text(view.evaluation.shown if view.evaluation else None)
    if view.evaluation is not None and view.evaluation.accuracy is None:
        score = f"loss {score}"
    versions = [f"{name} {number}" for name, number in view.versions.items()]
    return {
        **name,
        "run": view.run.id,
        "status": view.run.status,
        "model": view.run.arch,
        "strategy": view.strategy,
        "rounds": f"{view.closed} of {view.rounds}",
        "versions": ", ".join(versions),
        "score": score,
        "on the wire": bytes_text(view.run.wire_bytes),
        "begun": time_text(view.run.created_at),
        "time": seconds_text(view.seconds),
        "note": view.run.detail or "",
    }


RUNS = View(_read, _draw)
