"""Devices that are not asked for a while, because they cost rounds something again and again.

It follows from what is stored: a device whose updates were refused in so many rounds, with none
between that was taken, is not asked for the next ones, unless there are too few devices without it.
The same holds for a device for which so many rounds in a row waited until their deadline, because
it was connected and did not answer: it would cost every round its whole time. Then it may try
again, and is back in quarantine with the next refusal, or the next round that waits in vain. An
operator can release it (`shoal devices release`); what was before then counts no more.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from broker_server.settings.fleet import FleetConfig
from broker_server.settings.robust import RobustConfig
from broker_server.store import Store, TaskPhase
from fleet_protocol.errors import ConfigError

RELEASED = "released"
"""Kind of the line in the log that releases a device."""

_GOOD = frozenset({TaskPhase.MERGED, TaskPhase.LEFT_OUT})


def quarantined(store: Store, run: str, config: FleetConfig) -> dict[str, int]:
    """Return the devices in quarantine, with the last round that each is not asked for."""
    if not config.robust.quarantine_after:
        return {}
    deadline_seconds = config.round.deadline_seconds
    # To read every task of a long run takes its time, and most runs have neither.
    was_refused = any(refusal.by == "server" for refusal in store.refusals(run))
    if not was_refused and not store.has_whole_round(run, deadline_seconds):
        return {}
    outcomes = store.costly_devices(run, deadline_seconds)
    return quarantine_ends(outcomes, store.marked_rounds(run, RELEASED), config.robust)


def quarantine_ends(
    outcomes: Iterable[tuple[str, int, TaskPhase]],
    releases: Mapping[str | None, int],
    config: RobustConfig,
) -> dict[str, int]:
    """Return the last round that each device in quarantine is not asked for; the rule alone.

    Args:
        outcomes: device, round and phase of training tasks, in the order of the rounds; of missed
            ones those for which a round waited until its deadline.
        releases: by device, the newest round when it was released last.
        config: how many refusals or misses, and for how many rounds.
    """
    refusals: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    ends: dict[str, int] = {}
    for device, number, phase in outcomes:
        # What counts is only what came since the device was last merged or released.
        if phase in _GOOD or number <= releases.get(device, 0):
            refusals[device] = 0
            misses[device] = 0
            ends.pop(device, None)
            continue
        if phase is TaskPhase.REFUSED:
            refusals[device] += 1
        elif phase is TaskPhase.MISSED:
            misses[device] += 1
        else:
            continue
        if max(refusals[device], misses[device]) >= config.quarantine_after:
            ends[device] = number + config.quarantine_rounds
    return ends


def release(
    store: Store,
    run: str,
    device: str,
) -> None:
    """Let a device take part again.

    Raises:
        ConfigError: it has cost no round of the run anything.
    """
    record = store.run(run)
    outcomes = []
    if record is not None:
        config = FleetConfig.stored(record.config)
        outcomes = store.costly_devices(run, config.round.deadline_seconds)
    if device not in {name for name, _, _ in outcomes}:
        raise ConfigError(
            f"nothing of device {device!r} was refused in run {run}, and no round waited for it in"
            " vain, so it is in no quarantine; the devices are listed by `shoal devices`"
        )
    last = store.last_round(run)
    store.log(
        RELEASED,
        f"{device} is asked again",
        run=run,
        number=last.number if last else 0,
        device=device,
    )
