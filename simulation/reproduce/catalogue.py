"""All experiments by the name of their table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fleet_protocol.errors import ConfigError
from simulation.reproduce import fedrolex, fml, heterofl, inclusivefl, whalefl
from simulation.reproduce.experiment import SCALES, Experiment, Scale, suggestion

__all__ = ["TABLES", "find_experiment", "parse_scale"]

TABLES: Mapping[str, Experiment] = MappingProxyType(
    {
        experiment.table: experiment
        for module in (heterofl, fedrolex, inclusivefl, whalefl, fml)
        for experiment in module.EXPERIMENTS
    }
)


def find_experiment(table: str) -> Experiment:
    """An experiment.

    Args:
        table: name of its table.

    Raises:
        ConfigError: there is none; the message names the closest one.
    """
    if table not in TABLES:
        raise ConfigError(f"no table {table!r} to reproduce{suggestion(table, TABLES)}")
    return TABLES[table]


def parse_scale(text: str) -> Scale:
    """A scale by its name.

    Raises:
        ConfigError: there is none; the message names the closest one.
    """
    for scale in SCALES:
        if scale == text:
            return scale
    raise ConfigError(f"no scale {text!r}{suggestion(text, SCALES)}")
