"""A simulation that takes seconds, for the tests of this folder."""

from pathlib import Path
from typing import Any

from broker_server.store import Store
from simulation.config import SimulationConfig
from simulation.runner import SimulationResult

WIDTHS = (1.0, 0.5, 0.25)

BASE: dict[str, Any] = {
    "seed": 3,
    "model": {"arch": "conv", "settings": {"channels": (8, 16)}, "widths": WIDTHS},
    "data": {"name": "digits", "train_limit": 360, "test_limit": 120},
    "partition": {"kind": "dirichlet", "alpha": 1.0},
    "devices": {"count": 6},
    "round": {"rounds": 4, "fraction": 0.5},
    "train": {"epochs": 3, "batch_size": 8, "learning_rate": 0.1},
    "tiers": {"assign": "dynamic", "levels": "a1-b1-c1"},
    "engine": {"workers": 2},
}


def settings(out: Path, cache: Path, **tables: Any) -> SimulationConfig:
    """The small simulation; a table that is given is merged into its own."""
    merged = {**BASE, "out": out, "cache": cache}
    for key, value in tables.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return SimulationConfig.model_validate(merged)


def digests(result: SimulationResult) -> list[str]:
    """Digests of the weights of every global version."""
    return _digests(result.folder, result.run)


def _digests(folder: Path, run: str) -> list[str]:
    store = Store(folder / "store", read_only=True)
    try:
        return [version.digest for version in store.versions(run)]
    finally:
        store.close()


def tensors(folder: Path, run: str) -> list[dict[str, Any]]:
    """Weights of every global version; blobs differ in metadata where runs have different names."""
    from fleet_protocol.blob_store import BlobStore  # noqa: PLC0415
    from fleet_protocol.weights import decode_weights  # noqa: PLC0415

    blobs = BlobStore(folder / "store" / "blobs")
    return [decode_weights(blobs.path(digest).read_bytes()) for digest in _digests(folder, run)]
