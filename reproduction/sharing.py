"""Runs that differ in nothing but the clock train the same, so the rounds of one tell those of the others.

Where everybody is waited for and nobody chooses by time, only the seconds of a round depend on the clock.
"""

import contextlib
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from broker_server.store import Store, TaskPhase
from broker_server.strategies.registry import KNOWN
from fleet_protocol.sizing import SizingConstants
from models.tier import Tier
from simulation.board_times import training_load
from simulation.clock import load_clock
from simulation.dynamics import Conditions
from simulation.results.history import RoundRow, read_devices, read_history
from simulation.settings import NO_DEADLINE, SimulationConfig


def rounds_with(config: SimulationConfig, folder: Path, trained: SimulationConfig) -> tuple[RoundRow, ...]:
    """The rounds of a complete run in a folder, as those of a configuration that differs in its clock or not at all.

    Returns:
        None where its own do not last as long as their slowest devices, or time decides who trains what.
    """
    rows = read_history(folder)
    if trained.clock == config.clock:
        return rows
    rule, leave = config.round, any(kind.dropout for kind in config.devices.kinds)
    if not _all_merged(folder):  # it waited for them, and the devices' parts do not tell of them
        return ()
    by_time = rule.over_selection or rule.buffer is not None or rule.deadline_seconds < NO_DEADLINE or leave
    if by_time or devices_choose(config) or _seconds(trained, folder) != [row.simulated_seconds for row in rows]:
        return ()
    seconds = _seconds(config, folder)
    timed = zip(rows, seconds, accumulate(seconds), strict=True)
    return tuple(replace(row, simulated_seconds=own, simulated_total=total) for row, own, total in timed)


def devices_choose(config: SimulationConfig) -> bool:
    """Whether every device chooses its own width before every round."""
    return KNOWN[config.strategy.name].settings is SizingConstants


def widths_in(config: SimulationConfig, folder: Path) -> dict[int, tuple[float | None, ...]]:
    """The width that every device trained in every round of a run in a folder; None for those that did not."""
    places, found = {name: place for place, name in enumerate(config.devices.ids)}, dict[int, list[float | None]]()
    for part in read_devices(folder):
        row = found.setdefault(part.round, [None] * len(places))
        row[places[part.device]] = Tier.parse(part.tier).width
    return {number: tuple(row) for number, row in found.items()}


def _all_merged(folder: Path) -> bool:
    """Whether every update that was asked for counted."""
    if not (folder / "store").exists():
        return False
    with contextlib.closing(Store(folder / "store", read_only=True)) as store:
        run = store.runs()[0].id
        tasks = (task for item in store.rounds(run) for task in store.tasks(run, item.number, "train"))
        return all(task.phase is TaskPhase.MERGED for task in tasks)


def _seconds(config: SimulationConfig, folder: Path) -> list[float]:
    """How long each round of a run takes with the clock of a configuration."""
    clock, ids = load_clock(config.clock), config.devices.ids
    devices = [clock.device(kind.type, kind.link) for kind in config.devices.kinds]
    conditions, slowest = Conditions(clock, devices, config.seed), dict[int, float]()
    for part in read_devices(folder):
        load = training_load(Tier.parse(part.tier).width, part.examples, config.train, part.payload_bytes)
        seconds = clock.device_seconds(conditions.of(ids.index(part.device), part.round), load)
        slowest[part.round] = max(slowest.get(part.round, 0.0), seconds)
    return list(slowest.values())
