"""Shows all devices that the server has seen."""

from collections.abc import Sequence

from broker_server.store.queries import DeviceView
from broker_server.store.remedies import SIMULATED
from shoal.cli.console import (
    bytes_text,
    number_text,
    print_rows,
    print_text,
    release_text,
    seconds_text,
    time_text,
)
from shoal.cli.views.view import View
from shoal.sources import Source

# The least important columns come first: a narrow terminal omits them in this order.
_OPTIONAL = (
    "trains on", "version", "board", "memory", "training", "without private", "own accuracy",
    "samples",
)  # fmt: skip

_UNKNOWN = "unknown"
"""In the column `online`: the device was, and no server works now."""


def _read(source: Source, run: str) -> list[DeviceView]:
    return source.devices(run)


def _draw(views: Sequence[DeviceView]) -> None:
    rows = [_row(view) for view in views]
    # Only runs that compare have the figure.
    if not any(view.shared_evaluation for view in views):
        for row in rows:
            del row["without private"]
    print_rows("devices", rows, empty="the server has seen no device", optional=_OPTIONAL)
    unknown = [view for view in views if _online_text(view) == _UNKNOWN]
    if unknown:
        print_text(
            f"no server is using this store: {len(unknown)} of {len(views)} devices were online"
            " when the last server ended; `shoal up` or `shoal run` starts one"
        )
    # Below the table, because they are sentences.
    for view in views:
        profile = view.device.profile
        if profile is None:
            continue
        release = release_text(profile.runtime_version, profile.release, profile.sets)
        # A narrow terminal omits the column of versions, but this must always show.
        if "failed " in release:
            print_text(f"a release failed on {view.device.id}: it runs {release}")
        for finding in profile.findings or ():
            print_text(f"the data of {view.device.id} looks wrong: {finding}")


def _online_text(view: DeviceView) -> str:
    """Return whether a device is connected, which only a running server knows."""
    if not view.device.online:
        return "no"
    # A virtual device has no connection.
    if view.device.state == SIMULATED:
        return SIMULATED
    return "yes" if view.is_online else _UNKNOWN


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
    shared_accuracy = None
    if view.shared_evaluation is not None:
        shared_accuracy = view.shared_evaluation.accuracy
    return {
        "device": view.device.id,
        "online": _online_text(view),
        "board": board,
        "version": release,
        "tier": view.tier or "-",
        "samples": "-" if view.examples is None else str(view.examples),
        "merged": str(view.merged),
        "missed": str(view.missed),
        "refused": str(view.refused),
        "own accuracy": number_text(accuracy),
        "without private": number_text(shared_accuracy),
        "training": seconds_text(view.train_seconds),
        "memory": "-" if view.resident_bytes is None else bytes_text(view.resident_bytes),
        "trains on": provider or "-",
        "last seen": time_text(view.device.last_seen_at),
        "reason": view.reason or lowered or "-",
    }


DEVICES = View(_read, _draw)
