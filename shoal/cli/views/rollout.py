"""Shows how far the newest rollout is, and what became of each board."""

from pathlib import Path

from broker_server.service.rollout import RolloutView, read_rollout, view_rollout
from fleet_protocol.errors import ConfigError
from shoal.cli.console import print_rows, say
from shoal.cli.views.view import View
from shoal.sources import LocalStore, Source


def rollout_view(folder: Path) -> View[RolloutView]:
    """Return the view of the newest rollout of a fleet, which a local store has in its folder."""

    def read(source: Source, _run: str) -> RolloutView:
        if isinstance(source, LocalStore):
            return view_rollout(read_rollout(folder), source.store)
        rollouts = source.rollouts()
        if not rollouts:
            raise ConfigError("the fleet has no rollout; begin one with `shoal rollout start`")
        return rollouts[0]

    return View(read, _draw, _as_records)


def _draw(view: RolloutView) -> None:
    rows = []
    for device, outcome in view.boards.items():
        version = view.versions.get(device, "-")
        rows.append({"device": device, "version": version, "release": outcome})
    print_rows(f"release {view.rollout.release.number}", rows, empty="no board takes releases")
    asked = f"{len(view.rollout.asked)} of {len(view.boards)} asked"
    say(f"{view.state}: {view.rollout.stopped or asked}")


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
