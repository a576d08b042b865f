"""The settings by which `shoal compare` distinguishes runs."""

import json
from pathlib import Path
from typing import Any

from broker_server.store.configurations import read_saved_config
from broker_server.store.queries import flat_settings, simulation_settings
from broker_server.store.records import RunRecord
from broker_server.store.rows import config_json
from fleet_protocol.errors import BlobError, ConfigError, StorageError
from fleet_protocol.foreign_files import read_regular
from fleet_protocol.manifest import parse_manifest

_RECIPE = "model.recipe"
# Every run has its own value of these.
_OWN_PLACES = frozenset({"store", "model.artifacts"})
"""Keys of a run's folders and files; runs of two folders always differ in them."""
_MADE_BY_SIMULATION = frozenset({"model.weights", "evaluation.data.path"})
"""Keys of files that a simulation creates in its folder from its own settings."""


def compared_settings(run: RunRecord, store: Path | None) -> dict[str, Any]:
    """Return the settings of a run by dotted key, with the recipe that its devices train.

    A simulation also has its own settings, such as its data and its partition. If the recipe is
    unknown, there is no setting of it.

    Args:
        run: the run.
        store: folder of the store; None if it is on another machine, whose files are not read.

    Raises:
        ConfigError: the settings in the folder of a simulation cannot be read.
    """
    settings = dict(flat_settings(config_json(run)))
    left_out = _OWN_PLACES
    further: dict[str, Any] = {}
    recipe: dict[str, Any] = {}
    if store is not None:
        simulation = _simulation_settings(run, store)
        # Read first, because they also say whether the run belongs to a simulation.
        if simulation:
            left_out |= _MADE_BY_SIMULATION
        recipe = _recipe_settings(run, store)
        further = {**simulation, **recipe}
    for name in left_out:
        settings.pop(name, None)
    for name, value in further.items():
        # A run's stored value has priority; None stands for the default, which the recipe replaces.
        if settings.get(name) is None:
            settings[name] = value
    if recipe:
        return settings
    return {name: value for name, value in settings.items() if not is_of_recipe(name)}


def is_of_recipe(name: str) -> bool:
    """Return whether a setting belongs to the recipe, which is not known of every run."""
    return name == _RECIPE or name.startswith(f"{_RECIPE}.")


def _simulation_settings(run: RunRecord, store: Path) -> dict[str, Any]:
    """Return the settings in the folder of a simulation's store; empty for other runs."""
    path = simulation_settings(run, store)
    if path is None:
        return {}
    try:
        return dict(flat_settings(json.loads(read_regular(path))))
    except (ValueError, RecursionError, BlobError) as error:
        raise ConfigError(
            f"the settings of the simulation in {path} cannot be read: {error}; restore the"
            " file, or remove it to compare the simulation without its settings"
        ) from error


def _recipe_settings(run: RunRecord, store: Path) -> dict[str, Any]:
    """Return the recipe of a run's artifacts by dotted key; empty if it is unknown.

    The artifacts are those of the configuration that this user's server or simulation saved: a
    database from somebody else may name any path.
    """
    try:
        config = read_saved_config(store, run.id)
    except (ConfigError, StorageError):
        return {}
    if isinstance(config, str):
        return {}
    # All tiers have the same recipe.
    for path in sorted((config.model.artifacts / config.model.arch).glob("*/manifest.json")):
        try:
            manifest = parse_manifest(read_regular(path))
        except BlobError:
            # A damaged manifest of one tier says nothing about the others.
            continue
        return dict(flat_settings(manifest.recipe.model_dump(mode="json"), _RECIPE))
    return {}
