"""Devices that are not selected for a while, because they repeatedly delayed or harmed rounds.

The rule uses only the store: a device whose updates were refused in a number of rounds, with none
accepted in between, is not selected for the next rounds, unless there are too few devices without
it. The same holds for a device for which that many consecutive rounds waited until their deadline,
because it was connected and did not answer: it would delay every round to its deadline. Afterwards
it may try again, and is back in quarantine with the next refusal, or the next round that waits
without an answer. An operator can release it (`shoal devices release`); earlier refusals then no
longer count.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from broker_server.settings.fleet import FleetConfig
from broker_server.settings.robust import RobustConfig
from broker_server.store import Store, TaskPhase
from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean

RELEASED = "released"
"""Kind of the log line that releases a device."""

_GOOD = frozenset({TaskPhase.MERGED, TaskPhase.LEFT_OUT})


def quarantined(store: Store, run: str, config: FleetConfig) -> dict[str, int]:
    """Return the devices in quarantine, with the last round in which each is not selected."""
    if not config.robust.quarantine_after:
        return {}
    deadline_seconds = config.round.deadline_seconds
    # Reading every task of a long run takes time, and most runs have neither.
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
    """Return the last round in which each device in quarantine is not selected, by the rule only.

    Args:
        outcomes: device, round and phase of training tasks, in the order of the rounds; missed
            tasks only if a round waited for them until its deadline.
        releases: the newest round when it was last released, by device.
        config: number of refusals or misses, and of rounds.
    """
    refusals: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    ends: dict[str, int] = {}
    for device, number, phase in outcomes:
        # Only outcomes since the device was last merged or released count.
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
        ConfigError: it is unknown, or has not harmed any round of the run.
    """
    record = store.run(run)
    outcomes = []
    if record is not None:
        config = FleetConfig.stored(record.config)
        outcomes = store.costly_devices(run, config.round.deadline_seconds)
    if device not in {name for name, _, _ in outcomes}:
        known = [found.id for found in store.devices()]
        if device not in known:
            raise ConfigError(
                f"no device {device!r} has connected to this server{did_you_mean(device, known)};"
                " `shoal devices` lists the devices"
            )
        raise ConfigError(
            f"no update of device {device!r} was refused in run {run}, and no round waited for it"
            " without an answer, so it is not in quarantine"
        )
    last = store.last_round(run)
    store.log(
        RELEASED,
        f"{device} can be selected again",
        run=run,
        number=last.number if last else 0,
        device=device,
    )
