"""The settings by which `shoal compare` tells runs apart."""

import json
from pathlib import Path
from typing import Any

from broker_server.settings.fleet import FleetConfig
from broker_server.store.queries import flat_settings
from broker_server.store.records import RunRecord
from broker_server.store.rows import config_json
from fleet_protocol.errors import BlobError, ConfigError
from fleet_protocol.manifest import parse_manifest

_SIMULATED_FLEET = "simulation"
_SIMULATION_CONFIG = "config.json"
_RECIPE = "model.recipe"
_OWN_PLACES = frozenset({"store", "model.artifacts"})
"""Keys that say where a run keeps its files; the runs of two folders always differ in them."""
_MADE_BY_SIMULATION = frozenset({"model.weights", "evaluation.data.path"})
"""Keys of files that a simulation makes in its folder, from settings of its own."""


def compared_settings(run: RunRecord, store: Path | None) -> dict[str, Any]:
    """Return the settings of a run by dotted key, with the recipe that its devices train.

    A simulation also has the settings that a fleet has not, such as its data and its partition.

    Args:
        run: the run.
        store: folder of the store; None where it is on another machine, whose files are not read.

    Raises:
        ConfigError: the settings in the folder of a simulation cannot be read.
    """
    settings = dict(flat_settings(config_json(run)))
    left_out = _OWN_PLACES
    further: dict[str, Any] = {}
    if store is not None:
        simulation = _simulation_settings(run, store)
        if simulation:
            left_out |= _MADE_BY_SIMULATION
        further = {**simulation, **_recipe_settings(run)}
    for name in left_out:
        settings.pop(name, None)
    for name, value in further.items():
        if settings.get(name) is None:
            settings[name] = value
    return settings


def _simulation_settings(run: RunRecord, store: Path) -> dict[str, Any]:
    """Return the settings in the folder around a simulation's store; none for another run."""
    path = store.parent / _SIMULATION_CONFIG
    if run.fleet != _SIMULATED_FLEET or not path.is_file():
        return {}
    try:
        return dict(flat_settings(json.loads(path.read_bytes())))
    except ValueError as error:
        raise ConfigError(
            f"the settings of the simulation in {path} cannot be read: {error}; restore the file,"
            " or remove it to compare the simulation without them"
        ) from error


def _recipe_settings(run: RunRecord) -> dict[str, Any]:
    """Return the recipe of a run's artifacts by dotted key; nothing where they are gone."""
    model = FleetConfig.stored(run.config).model
    # All tiers have the same recipe.
    for path in sorted((model.artifacts / model.arch).glob("*/manifest.json")):
        try:
            manifest = parse_manifest(path.read_bytes())
        except (OSError, BlobError):
            continue
        return dict(flat_settings(manifest.recipe.model_dump(mode="json"), _RECIPE))
    return {}
