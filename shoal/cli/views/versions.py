"""Shows the global versions of a run, and selects one."""

from collections.abc import Sequence

from broker_server.rounds.best import VersionView
from broker_server.store import RunRecord
from fleet_protocol.errors import ConfigError
from shoal.cli.console import print_rows, time_text
from shoal.cli.views.view import View
from shoal.sources import Source


def choose_version(source: Source, run: str, *, best: bool) -> tuple[RunRecord, int]:
    """Return a run, and the version that a download takes by default.

    Args:
        source: the store, or its page.
        run: name or id of the run, or a prefix of its id; "" for the newest.
        best: whether to take the version with the best evaluation. Otherwise it is the promoted
            version or, if there is none, the newest.

    Raises:
        ConfigError: there is no such run, or `best` is set and no version was evaluated.
    """
    runs = source.runs(run)
    if not runs:
        raise ConfigError("there are no runs yet; start one with `shoal run`")
    newest = runs[0]
    if not best:
        promoted = newest.versions.get("promoted")
        return newest.run, newest.versions["newest"] if promoted is None else promoted
    number = _best_version(source.versions(newest.run.id))
    if number is None:
        raise ConfigError(
            f"--best: no version of run {newest.run.id} was evaluated; give --version N"
        )
    return newest.run, number


def _best_version(views: Sequence[VersionView]) -> int | None:
    """Return the number of the version with the highest score; the newest among equals."""
    scores = [(view.score, view.version.number) for view in views if view.score is not None]
    if not scores:
        return None
    # Pairs compare by the score, then by the number.
    _, number = max(scores)
    return number


def _read(source: Source, run: str) -> list[VersionView]:
    return source.versions(run)


def _draw(views: Sequence[VersionView]) -> None:
    best = _best_version(views)
    rows = [_row(view, best) for view in views]
    print_rows("versions", rows, empty="no run yet")


def _row(view: VersionView, best: int | None) -> dict[str, str]:
    """Return the cells of one version."""
    evaluation = view.version.evaluation
    return {
        "version": str(view.version.number),
        "made": time_text(view.version.created_at),
        "judged": "-" if evaluation is None else evaluation.summary,
        "best": "best" if view.version.number == best else "",
        "weights": "kept" if view.kept else "gone",
    }


VERSIONS = View(_read, _draw)
