"""Ensures that a folder has only one simulation, and that it resumes with the same files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from broker_server.settings.combinations import keeps
from broker_server.store.queries.views import SIMULATION_SETTINGS
from broker_server.strategies.traits import Trait
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import STORED, problems
from simulation.settings import HOW_COMPUTED, SimulationConfig

_FILES = "files.json"
"""Name of the file with the digests of the files in the configuration."""
_DIGESTS = TypeAdapter(dict[str, str])


def claim_folder(config: SimulationConfig, *, begun: bool, has_failed: bool = False) -> str | None:
    """Write the configuration of a simulation to its folder.

    Args:
        config: the simulation.
        begun: whether the folder has rounds of a simulation.
        has_failed: whether that simulation failed; the file of its strategy may then be corrected.

    Returns:
        The file of the strategy, if it was corrected after a failure.

    Raises:
        ConfigError: the folder has another simulation, or files in the configuration have changed.
    """
    # The same paths may have new contents, which the configuration does not show.
    digests = _digests(config)
    path = config.out / SIMULATION_SETTINGS
    corrected = None
    if path.is_file():
        changed = _changed(config, path, digests)
        strategy_file = str(config.strategy.file)
        if has_failed and strategy_file in changed:
            changed.remove(strategy_file)
            corrected = strategy_file
        if changed and begun:
            raise ConfigError(
                f"{config.out} contains a simulation with a different {changed[0]}; use another"
                " `out`, or remove the folder"
            )
    if not begun:
        # Left behind by a failed start, possibly of another simulation.
        for leftover in (*config.out.glob("parts*.npz"), config.out / "init.safetensors"):
            leftover.unlink(missing_ok=True)
    write_atomically(config.out / _FILES, json.dumps(digests).encode())
    write_atomically(path, config.model_dump_json(indent=1, exclude=set(HOW_COMPUTED)).encode())
    return corrected


def _digests(config: SimulationConfig) -> dict[str, str]:
    """Return the digests of the files that a configuration names."""
    paths: list[Any] = [
        config.model.models,
        config.model.weights,
        config.clock.table,
        config.strategy.file,
    ]
    for change in config.data.changes:
        # An augmentation is a name, or a file, a colon and a function.
        file, colon, _ = change.rpartition(":")
        if colon:
            paths.append(Path(file))
    digests = {}
    for path in paths:
        if path and Path(path).is_file():
            digests[str(path)] = blob_digest(Path(path).read_bytes())
    return digests


def _changed(config: SimulationConfig, path: Path, digests: Mapping[str, str]) -> list[str]:
    """Return the differences from the simulation in a folder: tables, and files by name."""
    excluded: dict[str, Any] = dict.fromkeys(HOW_COMPUTED, True)
    excluded["round"] = _may_grow(config)
    settings = config.model_dump(mode="json", exclude=excluded)
    # Read as a configuration, so that newer keys get their defaults.
    try:
        stored = SimulationConfig.model_validate_json(path.read_bytes(), context=STORED)
    except ValidationError as error:
        raise _unreadable(path, error) from error
    stored_settings = stored.model_dump(mode="json", exclude=excluded)
    changed = []
    for key, value in settings.items():
        if value != stored_settings.get(key):
            changed.append(f"[{key}]")
    stored_digests = _stored_digests(config.out / _FILES)
    for name, digest in digests.items():
        # A file that the earlier start did not record counts as unchanged.
        if digest != stored_digests.get(name, digest):
            changed.append(name)
    return changed


def _stored_digests(path: Path) -> Mapping[str, str]:
    """Read the digests that an earlier start of the simulation wrote; empty if it wrote none.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not path.is_file():
        return {}
    try:
        return _DIGESTS.validate_json(path.read_bytes())
    except ValidationError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: ValidationError) -> ConfigError:
    """Return the error of a file of a simulation that is damaged."""
    reason = problems(error, "the file")
    return ConfigError(f"{path} cannot be read ({reason}); use another `out`, or remove the folder")


def _may_grow(config: SimulationConfig) -> set[str]:
    """Return the keys of `[round]` that a resumed simulation may change.

    More rounds are possible if they do not affect the earlier ones: not if the learning rate decays
    towards the last round, and not if updates count in later rounds.
    """
    rate = config.train.rate
    if rate is not None and rate.kind in {"cosine", "linear"}:
        return set()
    # Updates of one round that count in later ones make the last rounds depend on their number.
    if not keeps(config, Trait.ONE_VERSION):
        return set()
    return {"rounds"}
