"""The file ``result.json`` in the folder of a complete simulation."""

import contextlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from broker_server.strategies.registry import STRATEGIES
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import DataError
from fleet_protocol.frozen import STORED, FrozenModel
from reproduction.experiment import Scale
from reproduction.sizes import Sizes
from simulation.settings import HOW_COMPUTED, SimulationConfig

RESULT = "result.json"
"""Name of the file."""
_PACKAGES = (
    "shoal",
    "numpy",
    # Two builds of the runtime, of which an installation has one.
    "onnxruntime-training-cpu",
    "onnxruntime",
    "torch",
    "onnx",
)


class RunRecord(FrozenModel):
    """The record of a complete run.

    Attributes:
        trained: table and arm for which it was trained, if it was reused.
        stated: digest of the table's statement at its end; empty if not recorded.
        sizes: sizes of the sub-models that it trained; None if not recorded.
    """

    table: str
    scale: Scale
    arm: str
    config: SimulationConfig
    versions: Mapping[str, str]
    machine: str
    # Records from before these fields existed have none of them.
    trained: str = ""
    stated: str = ""
    sizes: Sizes | None = None

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
    """Return the parts of a configuration that determine results, without ignored tables.

    Tables of other methods do not matter.
    """
    # Results do not depend on the number of workers or the folders, so a run may move or resume
    # with others.
    document = config.model_dump(mode="json", exclude={*HOW_COMPUTED, *ignored})
    strategy = document["strategy"]
    # A new default of another method would otherwise make every stored run look changed.
    for name in STRATEGIES.keys() - {config.strategy.name}:
        strategy.pop(name, None)
    return document


def is_shorter(recorded: SimulationConfig, wanted: SimulationConfig) -> bool:
    """Return whether configurations differ only in rounds, and the first has fewer."""
    # A round does not depend on the number of rounds after it, so a shorter run can be continued.
    rule = recorded.round.model_copy(update={"rounds": wanted.round.rounds})
    longer = recorded.model_copy(update={"round": rule})
    # A longer run than wanted does not match either: its last evaluations are of later rounds.
    return recorded.round.rounds < wanted.round.rounds and identity(longer) == identity(wanted)


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results may depend on."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        # No installation has all of them, for example only one build of the runtime.
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
