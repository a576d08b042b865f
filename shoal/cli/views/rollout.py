"""Shows the progress of the newest rollout, and its outcome on each board."""

from pathlib import Path

from broker_server.service.rollout import RolloutView, read_rollout, view_rollout
from fleet_protocol.errors import ConfigError
from shoal.cli.console import print_rows, print_text
from shoal.cli.views.view import View
from shoal.sources import LocalStore, Source


def rollout_view(folder: Path) -> View[RolloutView]:
    """Return the view of the newest rollout, which a local store has in its folder."""

    def read(source: Source, _run: str) -> RolloutView:
        # A rollout is a file of the fleet's folder; the store has only the boards' states.
        if isinstance(source, LocalStore):
            return view_rollout(read_rollout(folder), source.store)
        rollouts = source.rollouts()
        if not rollouts:
            raise ConfigError("the fleet has no rollout; start one with `shoal rollout start`")
        return rollouts[0]

    return View(read, _draw, _as_records)


def _draw(view: RolloutView) -> None:
    rows = []
    for device, outcome in view.boards.items():
        version = view.versions.get(device, "-")
        rows.append({"device": device, "version": version, "release": outcome})
    print_rows(f"release {view.rollout.release.number}", rows, empty="no board accepts releases")
    asked = f"{len(view.rollout.asked)} of {len(view.boards)} boards asked"
    # A stopped rollout shows its reason instead of its progress.
    print_text(f"{view.state}: {view.rollout.stopped or asked}")


def _as_records(view: RolloutView) -> list[dict[str, object]]:
    records = []
    for device, outcome in view.boards.items():
        record: dict[str, object] = {
            "device": device,
            "outcome": outcome,
            "version": view.versions.get(device),
            "release": view.rollout.release.number,
            "state": view.state,
            "stopped": view.rollout.stopped,
        }
        records.append(record)
    return records
