"""Time the rounds of a complete run with another clock.

Runs that differ only in the clock train the same, if all devices are waited for and none chooses
by time; so one of them is enough.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from broker_server.settings.combinations import keeps
from broker_server.store import Store, TaskPhase
from broker_server.strategies.registry import STRATEGIES
from broker_server.strategies.traits import Trait
from fleet_protocol.sizing import SizingConstants
from models.tier import Tier
from simulation.board_times import training_load
from simulation.clock import load_clock
from simulation.dynamics import Conditions
from simulation.results.history import RoundRow, read_devices, read_history
from simulation.settings import NO_DEADLINE, SimulationConfig


def rounds_with(
    config: SimulationConfig, folder: Path, trained: SimulationConfig
) -> tuple[RoundRow, ...]:
    """Return the rounds of a complete run as those of a configuration with another clock.

    Args:
        config: differs from the run's only in its clock, or not at all.
        folder: the folder of the run.
        trained: the run's own configuration.

    Returns:
        No rounds if the run's do not last as long as their slowest devices, or if time decides
        which device trains what.
    """
    rows = read_history(folder)
    if trained.clock == config.clock:
        return rows
    # A round also waited for updates that were not merged, which are not in the devices' file.
    if not _all_merged(folder) or _depends_on_time(config):
        return ()
    recorded = [row.simulated_seconds for row in rows]
    if _seconds(trained, folder) != recorded:
        return ()
    return _retimed(rows, _seconds(config, folder))


def devices_choose(config: SimulationConfig) -> bool:
    """Return whether every device chooses its own width before every round."""
    return STRATEGIES[config.strategy.name].settings is SizingConstants


def widths_in(config: SimulationConfig, folder: Path) -> dict[int, tuple[float | None, ...]]:
    """Return the widths of all devices by round; None for a device that did not train."""
    by_round: dict[int, dict[str, float]] = {}
    for row in read_devices(folder):
        trained = by_round.setdefault(row.round, {})
        trained[row.device] = Tier.parse(row.tier).width
    widths: dict[int, tuple[float | None, ...]] = {}
    for number, trained in by_round.items():
        widths[number] = tuple(map(trained.get, config.devices.ids))
    return widths


def _retimed(rows: Sequence[RoundRow], seconds: Sequence[float]) -> tuple[RoundRow, ...]:
    """Return rounds that last as long as these seconds, one after the other."""
    timed: list[RoundRow] = []
    total = 0.0
    for row, duration in zip(rows, seconds, strict=True):
        total += duration
        timed.append(replace(row, simulated_seconds=duration, simulated_total=total))
    return tuple(timed)


def _depends_on_time(config: SimulationConfig) -> bool:
    """Return whether time decides which device trains what."""
    rule = config.round
    if rule.over_selection or rule.deadline_seconds < NO_DEADLINE:
        return True
    if not keeps(config, Trait.ONE_VERSION) or devices_choose(config):
        return True
    return any(kind.dropout for kind in config.devices.kinds)


def _all_merged(folder: Path) -> bool:
    """Return whether every update that was asked for was merged."""
    if not (folder / "store").exists():
        return False
    with contextlib.closing(Store(folder / "store", read_only=True)) as store:
        run = store.runs()[0].id
        for record in store.rounds(run):
            tasks = store.tasks(run, record.number, "train")
            if any(task.phase is not TaskPhase.MERGED for task in tasks):
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
        width = Tier.parse(row.tier).width
        load = training_load(width, row.examples, config.train, row.payload_bytes)
        device = conditions.of(ids.index(row.device), row.round)
        seconds = clock.device_seconds(device, load)
        slowest[row.round] = max(slowest.get(row.round, 0.0), seconds)
    return list(slowest.values())
