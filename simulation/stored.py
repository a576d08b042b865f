"""Reads configurations that earlier versions stored beside their results, so that a folder can be gone on with."""

from collections.abc import Mapping
from typing import Any

from simulation.clock import SHIPPED
from simulation.settings import SimulationConfig


def as_of_today(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Bring a stored configuration into the form that it has now.

    Keys that came later have their defaults when it is parsed. One table had another name, and so had the clock's own
    table of boards; nothing else was ever renamed.
    """
    found = dict(stored)
    for name in stored.keys() - SimulationConfig.model_fields.keys():
        table = found.pop(name)
        if table is not None:
            found["own_models"] = table
    clock = found.get("clock")
    if isinstance(clock, Mapping) and not str(clock.get("table", "")).endswith(".toml"):
        found["clock"] = {**clock, "table": SHIPPED}
    return found
