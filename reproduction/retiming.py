"""Computes the times of a complete run's rounds with another clock.

Runs that differ only in the clock train identically if the server waits for all devices and none
chooses by time; so one of them is enough.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from broker_server.settings.combinations import keeps
from broker_server.store import Store, TaskPhase
from broker_server.strategies.registry import STRATEGIES
from broker_server.strategies.traits import Trait
from models.tier import Tier
from simulation.board_times import training_load
from simulation.clock import load_clock
from simulation.dynamics import Conditions
from simulation.results.history import read_devices, read_history
from simulation.results.rounds import RoundRow
from simulation.settings import NO_DEADLINE, SimulationConfig

Rounds = tuple[RoundRow, ...]
Widths = tuple[float | None, ...]
"""Values of all devices in a round; None for a device that did not train."""


def rounds_with(
    config: SimulationConfig,
    folder: Path,
    trained: SimulationConfig,
) -> Rounds:
    """Return the rounds of a complete run with the times of another clock.

    Args:
        config: configuration that differs from the run's at most in its clock.
        folder: the folder of the run.
        trained: the run's own configuration.

    Returns:
        Empty if rounds of the run do not last as long as their slowest device, or if times affect
        the training.
    """
    rows = read_history(folder)
    if trained.clock == config.clock:
        return rows
    # A round also waited for updates that were not merged, which are not in the devices' file.
    if not _all_merged(folder) or _depends_on_time(config):
        return ()
    recorded = [row.simulated_seconds for row in rows]
    # If rounds did not last as long as their slowest devices, something else determined their
    # length.
    # Compared exactly, because the same computation has written the recorded seconds.
    if _seconds(trained, folder) != recorded:
        return ()
    return _retimed(rows, _seconds(config, folder))


def devices_choose(config: SimulationConfig) -> bool:
    """Return whether every device chooses its own width before every round."""
    return STRATEGIES[config.strategy.name].choice_remedy is not None


def widths_in(config: SimulationConfig, folder: Path) -> dict[int, Widths]:
    """Return the widths of all devices by round; None for a device that did not train."""
    by_round: dict[int, dict[str, float]] = {}
    for row in read_devices(folder):
        trained = by_round.setdefault(row.round, {})
        tier = Tier.parse(row.tier)
        trained[row.device] = tier.width
    widths: dict[int, Widths] = {}
    for number, trained in by_round.items():
        widths[number] = tuple(map(trained.get, config.devices.ids))
    return widths


def _retimed(rows: Sequence[RoundRow], seconds: Sequence[float]) -> Rounds:
    """Return rounds that last as long as these seconds, one after the other."""
    timed: list[RoundRow] = []
    total = 0.0
    for row, duration in zip(rows, seconds, strict=True):
        total += duration
        timed.append(replace(row, simulated_seconds=duration, simulated_total=total))
    return tuple(timed)


def _depends_on_time(config: SimulationConfig) -> bool:
    """Return whether times affect which device trains which tier."""
    rule = config.round
    # Both leave out the devices that are late.
    if rule.over_selection or rule.deadline_seconds < NO_DEADLINE:
        return True
    # Updates then merge in the order of their arrival.
    if not keeps(config, Trait.ONE_VERSION):
        return True
    if devices_choose(config):
        return True
    # A round with a device that leaves does not last as long as its slowest update.
    return any(kind.dropout for kind in config.devices.kinds)


def _all_merged(folder: Path) -> bool:
    """Return whether every requested update was merged."""
    path = folder / "store"
    # A reused run has no store, and neither has one whose store was removed to save space.
    if not path.exists():
        return False
    with contextlib.closing(Store(path, read_only=True)) as store:
        run = store.runs()[0].id
        for record in store.rounds(run):
            tasks = store.tasks(run, record.number, "train")
            phases = {task.phase for task in tasks}
            if phases - {TaskPhase.MERGED}:
                return False
    return True


def _seconds(config: SimulationConfig, folder: Path) -> list[float]:
    """Return how long each round of a run takes with the clock of a configuration."""
    clock = load_clock(config.clock)
    ids = config.devices.ids
    devices = [clock.device(kind.type, kind.link) for kind in config.devices.kinds]
    conditions = Conditions(clock, devices, config.seed)
    slowest: dict[int, float] = {}
    for row in read_devices(folder):
        tier = Tier.parse(row.tier)
        load = training_load(tier.width, row.examples, config.train, row.payload_bytes)
        # Conditions are drawn by the position of a device in the fleet.
        index = ids.index(row.device)
        device = conditions.clock_of(index, row.round)
        seconds = clock.device_seconds(device, load)
        # A round takes as long as its slowest device.
        slowest_so_far = slowest.get(row.round, 0.0)
        slowest[row.round] = max(slowest_so_far, seconds)
    return list(slowest.values())
