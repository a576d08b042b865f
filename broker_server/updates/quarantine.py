"""Devices that are not asked for a while, because their updates were refused again and again.

It follows from what is stored: a device whose updates were refused in so many rounds, with none
between that was taken, is not asked for the next ones, unless there are too few devices without it.
Then it may try again, and is back in quarantine with the next refusal. An operator can release it
(`shoal devices release`); what was refused before then counts no more.
"""

from collections.abc import Iterable, Mapping

from broker_server.settings.robust import RobustConfig
from broker_server.store import Store, TaskPhase
from fleet_protocol.errors import ConfigError

RELEASED = "released"
"""Kind of the line in the log that releases a device."""

_GOOD = frozenset({TaskPhase.MERGED, TaskPhase.LEFT_OUT})


def quarantined(
    store: Store,
    run: str,
    config: RobustConfig,
) -> dict[str, int]:
    """Return the devices in quarantine, with the last round that each is not asked for."""
    if not config.quarantine_after:
        return {}
    # To read every task of a long run takes its time, and most runs have no refusals.
    if not any(refusal.by == "server" for refusal in store.refusals(run)):
        return {}
    releases = store.marked_rounds(run, RELEASED)
    return quarantine_ends(store.refused_devices(run), releases, config)


def quarantine_ends(
    outcomes: Iterable[tuple[str, int, TaskPhase]],
    releases: Mapping[str | None, int],
    config: RobustConfig,
) -> dict[str, int]:
    """Return the last round that each device in quarantine is not asked for; the rule alone.

    Args:
        outcomes: device, round and phase of training tasks, in the order of the rounds.
        releases: by device, the newest round when it was released last.
        config: how many refusals, and for how many rounds.
    """
    refusals: dict[str, int] = {}
    ends: dict[str, int] = {}
    for device, number, phase in outcomes:
        # A refusal counts only among those since the device was last merged or released.
        if phase in _GOOD or number <= releases.get(device, 0):
            refusals[device] = 0
            ends.pop(device, None)
        elif phase is TaskPhase.REFUSED:
            refusals[device] = refusals.get(device, 0) + 1
            if refusals[device] >= config.quarantine_after:
                ends[device] = number + config.quarantine_rounds
    return ends


def release(
    store: Store,
    run: str,
    device: str,
) -> None:
    """Let a device take part again.

    Raises:
        ConfigError: nothing of it was refused in the run.
    """
    refused_devices = {name for name, _, _ in store.refused_devices(run)}
    if device not in refused_devices:
        raise ConfigError(
            f"nothing of device {device!r} was refused in run {run}, so it is in no quarantine; the"
            " devices are listed by `shoal devices`"
        )
    last = store.last_round(run)
    store.log(
        RELEASED,
        f"{device} is asked again",
        run=run,
        number=last.number if last else 0,
        device=device,
    )
