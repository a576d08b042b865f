"""The time that the runs of a table took, and are expected to take."""

import os
from pathlib import Path
from statistics import fmean

from fleet_protocol.configuration import read_toml
from reproduction.experiment import Experiment, Scale
from reproduction.stored import EARLIER, read_rows

_COSTS = Path(__file__).with_name("costs.toml")
_STORED_CORES = 2

Seconds = dict[str, float]
"""By the name of an arm."""


def seconds_of_runs(
    out: Path,
    experiment: Experiment,
    scale: Scale,
) -> Seconds:
    """Return the mean real time of a run of each arm.

    Arms count that have stored results anywhere below the table's folder.
    """
    # A run that is stored several times counts once, with its last values.
    seconds_by_run: dict[tuple[str, int], float] = {}
    folder = out / experiment.table
    for path in sorted(folder.glob(f"**/{experiment.table}.csv")):
        # Runs of an earlier statement may have had other rounds or models.
        if path.parent.name.startswith(EARLIER):
            continue
        for row in read_rows(path):
            if row.scale == scale:
                seconds_by_run[row.arm, row.seed] = row.seconds
    seconds_by_arm: dict[str, list[float]] = {}
    for (arm, _), seconds in seconds_by_run.items():
        seconds_by_arm.setdefault(arm, []).append(seconds)
    means: Seconds = {}
    for arm, seconds_of_arm in seconds_by_arm.items():
        means[arm] = fmean(seconds_of_arm)
    return means


def estimated_seconds(experiment: Experiment, scale: Scale) -> Seconds:
    """Return the real time that a run of each arm would take on all cores of this machine.

    Arms without an entry in ``costs.toml`` are dropped.
    """
    return _seconds_on(os.cpu_count() or 1, experiment, scale)


def seconds_on_two_cores(experiment: Experiment, scale: Scale) -> Seconds:
    """Return the real time that a run of each arm would take on two cores.

    Stored runs have this number, so verdicts do not depend on the machine that computes them. Arms
    without an entry in ``costs.toml`` are dropped.
    """
    return _seconds_on(_STORED_CORES, experiment, scale)


def _seconds_on(cores: int, experiment: Experiment, scale: Scale) -> Seconds:
    # Costs were measured at this scale only.
    if scale != "small":
        return {}
    costs = read_toml(_COSTS).get(experiment.table, {})
    seconds: Seconds = {}
    for name, cost in costs.items():
        settings = experiment.arm(name).settings(scale)
        rounds = settings["round"]["rounds"]
        # An estimate: the devices of a round fill all cores for most of its time.
        seconds[name] = cost * rounds / cores
    return seconds
