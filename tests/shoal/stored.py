"""A store whose newest version has the initial weights of an export, without any training."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from broker_server.settings.fleet import FleetConfig
from broker_server.store import RunRecord, Store, VersionRecord
from fleet_protocol.blob_store import BlobStore


def store_of(artifacts: Path, arch: str, store: Path, **tables: Mapping[str, Any]) -> Path:
    """Make a store with version 0 of an exported architecture, and return its folder.

    Args:
        artifacts: folder of the exported sets.
        arch: name of the architecture.
        store: folder of the store.
        tables: further tables of the run's configuration.
    """
    config = FleetConfig.model_validate(
        {
            "fleet": "f",
            "store": store,
            "broker": {"url": "mqtt://127.0.0.1:1"},
            "model": {"artifacts": artifacts, "arch": arch},
            **tables,
        }
    )
    with closing(Store(store)) as opened:
        digest = BlobStore(store / "blobs").put(
            (artifacts / arch / "init.safetensors").read_bytes()
        )
        version = VersionRecord("r1", 0, 0, digest, None, None, 0.0, None)
        run = RunRecord("r1", "f", arch, config.model_dump_json(), "running", None, 0.0, None, 0, 0)
        opened.add_run(run, version)
    return store
