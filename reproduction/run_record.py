"""The file ``result.json`` in the folder of a simulation, which says that it is complete."""

import contextlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import DataError
from fleet_protocol.frozen import STORED, FrozenModel
from reproduction.experiment import Scale
from simulation.settings import HOW_COMPUTED, SimulationConfig

RESULT = "result.json"
"""Name of the file."""
_PACKAGES = (
    "shoal",
    "numpy",
    "onnxruntime-training-cpu",
    "onnxruntime",
    "torch",
    "onnx",
)


class RunRecord(FrozenModel):
    """What a complete run was.

    Attributes:
        trained: table and arm that it was trained for, if not for its own.
        stated: digest of what the table stated when it ended; empty where that was not kept.
    """

    table: str
    scale: Scale
    arm: str
    config: SimulationConfig
    versions: Mapping[str, str]
    machine: str
    trained: str = ""
    stated: str = ""

    def write(self, folder: Path) -> None:
        """Write the file into the folder of the run.

        Raises:
            StorageError: the disk is full.
        """
        write_atomically(folder / RESULT, self.model_dump_json(indent=1).encode())


def read_record(folder: Path) -> RunRecord | None:
    """Return the record of the run in a folder; None if there is no complete one.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        return RunRecord.model_validate_json(path.read_bytes(), context=STORED)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: {error}; remove the folder and run the arm again"
        ) from error


def identity(config: SimulationConfig, *ignored: str) -> dict[str, Any]:
    """Return what decides the results of a configuration, without the tables to be ignored."""
    return config.model_dump(mode="json", exclude={*HOW_COMPUTED, *ignored})


def is_shorter(recorded: SimulationConfig, wanted: SimulationConfig) -> bool:
    """Return whether configurations differ only in the rounds, of which the first has fewer."""
    rule = recorded.round.model_copy(update={"rounds": wanted.round.rounds})
    longer = recorded.model_copy(update={"round": rule})
    return recorded.round.rounds < wanted.round.rounds and identity(longer) == identity(wanted)


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results may depend on."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
