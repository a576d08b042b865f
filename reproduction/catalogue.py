"""All experiments by the name of their table, read from the files of `reproduction.tables`."""

from collections.abc import Mapping
from types import MappingProxyType

from fleet_protocol.errors import ConfigError
from reproduction.experiment import SCALES, Experiment, Scale, suggestion
from reproduction.table_file import read_table, table_names

TABLES: Mapping[str, Experiment] = MappingProxyType(
    {table.table: table for table in sorted(map(read_table, table_names()), key=lambda table: table.section)}
)
"""In the order of the specification."""


def find_experiment(table: str) -> Experiment:
    """An experiment by the name of its table.

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
