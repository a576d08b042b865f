"""Shows the devices that were ever seen."""

from collections.abc import Sequence

from broker_server.store.queries import DeviceView
from shoal.cli.console import (
    bytes_text,
    number_text,
    print_rows,
    release_text,
    say,
    seconds_text,
    time_text,
)
from shoal.cli.views.view import View
from shoal.sources import Source

_OPTIONAL = ("trains on", "version", "board", "memory", "training", "own accuracy", "samples")


def _read(source: Source, run: str) -> list[DeviceView]:
    return source.devices(run)


def _draw(views: Sequence[DeviceView]) -> None:
    rows = [_row(view) for view in views]
    print_rows("devices", rows, empty="no device was ever seen", optional=_OPTIONAL)
    for view in views:
        profile = view.device.profile
        if profile is None:
            continue
        release = release_text(profile.runtime_version, profile.release, profile.sets)
        # The column of versions gives way on a narrow terminal, and this must not.
        if "failed " in release:
            say(f"a release failed on {view.device.id}: it runs {release}")
        for finding in profile.findings or ():
            say(f"the data of {view.device.id} looks wrong: {finding}")


def _row(view: DeviceView) -> dict[str, str]:
    """Return the cells of one device."""
    profile = view.device.profile
    board = "-"
    release = "-"
    provider = ""
    lowered = None
    if profile is not None:
        board = f"{profile.arch}, {profile.cores} cores"
        release = release_text(profile.runtime_version, profile.release, profile.sets)
        provider = profile.provider
        lowered = profile.lowered
    accuracy = None
    if view.evaluation is not None:
        accuracy = view.evaluation.accuracy
    return {
        "device": view.device.id,
        "online": "yes" if view.device.online else "no",
        "board": board,
        "version": release,
        "tier": view.tier or "-",
        "samples": "-" if view.examples is None else str(view.examples),
        "merged": str(view.merged),
        "missed": str(view.missed),
        "refused": str(view.refused),
        "own accuracy": number_text(accuracy),
        "training": seconds_text(view.train_seconds),
        "memory": "-" if view.resident_bytes is None else bytes_text(view.resident_bytes),
        "trains on": provider or "-",
        "last seen": time_text(view.device.last_seen_at),
        "why not, or less": view.reason or lowered or "-",
    }


DEVICES = View(_read, _draw)
