"""Shows the runs of a store."""

from collections.abc import Sequence

from broker_server.store.queries import RunView
from shoal.cli.console import bytes_text, number_text, print_rows, seconds_text, time_text
from shoal.cli.views.view import View
from shoal.sources import Source


def _read(source: Source, run: str) -> list[RunView]:
    return source.runs(run)


def _draw(views: Sequence[RunView]) -> None:
    rows = [_row(view) for view in views]
    print_rows("runs", rows, empty="no run yet")


def _row(view: RunView) -> dict[str, str]:
    """Return the cells of one run."""
    accuracy = view.evaluation.shown if view.evaluation else None
    versions = [f"{name} {number}" for name, number in view.versions.items()]
    return {
        "run": view.run.id,
        "status": view.run.status,
        "model": view.run.arch,
        "strategy": view.strategy,
        "rounds": f"{view.closed} of {view.rounds}",
        "versions": ", ".join(versions),
        "accuracy": number_text(accuracy),
        "on the wire": bytes_text(view.run.wire_bytes),
        "begun": time_text(view.run.created_at),
        "time": seconds_text(view.seconds),
        "note": view.run.detail or "",
    }


RUNS = View(_read, _draw)
