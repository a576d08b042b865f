"""Makes sure that a folder holds one simulation, which is continued with the same files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker_server.settings.combinations import keeps
from broker_server.strategies.traits import Trait
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import STORED
from simulation.settings import HOW_COMPUTED, SimulationConfig

_CONFIG = "config.json"
_FILES = "files.json"
"""Digests of the files that the configuration names."""


def claim_folder(config: SimulationConfig, *, begun: bool, has_failed: bool = False) -> str | None:
    """Write the configuration of a simulation to its folder.

    Args:
        config: the simulation.
        begun: whether the folder has rounds of a simulation.
        has_failed: whether that simulation failed; the file of its strategy may then be corrected.

    Returns:
        The file of the strategy, if it was corrected after a failure.

    Raises:
        ConfigError: it holds another simulation, or files that it names have changed.
    """
    digests = _digests(config)
    path = config.out / _CONFIG
    corrected = None
    if path.is_file():
        changed = _changed(config, path, digests)
        strategy_file = str(config.strategy.file)
        if has_failed and strategy_file in changed:
            changed.remove(strategy_file)
            corrected = strategy_file
        if changed and begun:
            raise ConfigError(
                f"{config.out} holds a simulation with another {changed[0]}; take another `out`, "
                "or remove the folder"
            )
    if not begun:
        # Left by a start that failed, perhaps of another simulation.
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
        file, colon, _ = change.rpartition(":")
        if colon:
            paths.append(Path(file))
    digests = {}
    for path in paths:
        if path and Path(path).is_file():
            digests[str(path)] = blob_digest(Path(path).read_bytes())
    return digests


def _changed(config: SimulationConfig, path: Path, digests: Mapping[str, str]) -> list[str]:
    """Return what differs from the simulation that a folder holds: tables, and files by name."""
    excluded: dict[str, Any] = dict.fromkeys(HOW_COMPUTED, True)
    excluded["round"] = _may_grow(config)
    settings = config.model_dump(mode="json", exclude=excluded)
    # Read as a configuration, so that keys which came later have their defaults.
    try:
        stored = SimulationConfig.model_validate_json(path.read_bytes(), context=STORED)
    except ValueError as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); take another `out`, or remove the folder"
        ) from error
    stored_settings = stored.model_dump(mode="json", exclude=excluded)
    changed = []
    for key, value in settings.items():
        if value != stored_settings.get(key):
            changed.append(f"[{key}]")
    files = config.out / _FILES
    stored_digests = json.loads(files.read_bytes()) if files.is_file() else {}
    for name, digest in digests.items():
        if digest != stored_digests.get(name, digest):
            changed.append(name)
    return changed


def _may_grow(config: SimulationConfig) -> set[str]:
    """Return the keys of `[round]` that a simulation that goes on may change.

    More rounds are possible where the earlier ones stay as they are: not where the learning rate
    falls towards the last round, nor where updates count in later rounds.
    """
    rate = config.train.rate
    if rate is not None and rate.kind in {"cosine", "linear"}:
        return set()
    if not keeps(config, Trait.ONE_VERSION):
        return set()
    return {"rounds"}
