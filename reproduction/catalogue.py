"""All experiments by the name of their table, found in the modules of `reproduction.tables`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fleet_protocol.discovery import modules_of
from fleet_protocol.errors import ConfigError
from reproduction.experiment import SCALES, Experiment, Scale, suggestion

__all__ = ["TABLES", "find_experiment", "parse_scale"]


def _found() -> Mapping[str, Experiment]:
    papers = [module for module in modules_of("reproduction.tables") if hasattr(module, "EXPERIMENTS")]
    tables: dict[str, Experiment] = {}
    for paper in sorted(papers, key=lambda module: (module.SECTION, module.__name__)):
        for experiment in paper.EXPERIMENTS:
            if experiment.table in tables:
                raise ConfigError(f"{paper.__name__}: there is another table {experiment.table!r}; rename one")
            tables[experiment.table] = experiment
    return MappingProxyType(tables)


TABLES: Mapping[str, Experiment] = _found()
"""In the order of the specification."""


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
