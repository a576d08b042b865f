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

_TAKEN = frozenset({TaskPhase.MERGED, TaskPhase.LEFT_OUT})


def quarantined(store: Store, run: str, config: RobustConfig) -> dict[str, int]:
    """Devices in quarantine, with the last round that each is not asked for."""
    if not config.quarantine_after or not any(
        refusal.by == "server" for refusal in store.refusals(run)
    ):
        return {}  # to look at every task of a long run takes its time
    return judged(store.refused_devices(run), store.marked_rounds(run, RELEASED), config)


def judged(
    outcomes: Iterable[tuple[str, int, TaskPhase]],
    releases: Mapping[str | None, int],
    config: RobustConfig,
) -> dict[str, int]:
    """The rule alone: the last round that each device is not asked for, of training tasks in the
    order of the rounds.

    Each device's last release is told by the newest round at its time.
    """
    counts: dict[str, int] = {}
    until: dict[str, int] = {}
    for device, number, phase in outcomes:
        if phase in _TAKEN or number <= releases.get(device, 0):
            counts[device] = 0
            until.pop(device, None)
        elif phase is TaskPhase.REFUSED:
            counts[device] = counts.get(device, 0) + 1
            if counts[device] >= config.quarantine_after:
                until[device] = number + config.quarantine_rounds
    return until


def release(store: Store, run: str, device: str) -> None:
    """Let a device take part again; a ConfigError where nothing of it was refused in the run."""
    if not any(name == device for name, _, _ in store.refused_devices(run)):
        raise ConfigError(
            f"nothing of device {device!r} was refused in run {run}, so it is in no quarantine; the devices are listed"
            " by `shoal devices`"
        )
    last = store.last_round(run)
    store.log(
        RELEASED,
        f"{device} is asked again",
        run=run,
        number=last.number if last else 0,
        device=device,
    )
