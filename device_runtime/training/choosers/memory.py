"""What a rule for the choice of a tier remembers between rounds, on disk."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, ValidationError

from device_runtime.training.choosers import TierChooser
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import StorageError
from fleet_protocol.frozen import FrozenModel


class _StoredMemory(FrozenModel):
    """The file; it belongs to a run, and another one starts afresh."""

    version: Literal[1] = 1
    rule: str
    run: str
    memory: Mapping[str, JsonValue]


class ChooserMemory:
    """The memory of one board, in the agent's state folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "chooser.json"

    def load(self, run: str, chooser: TierChooser) -> FrozenModel | None:
        """Return what a rule remembers of a run; None if there is nothing that can be read."""
        with contextlib.suppress(OSError, ValidationError):
            stored = _StoredMemory.model_validate_json(self.path.read_bytes())
            # What one run has taught says nothing of another model.
            if (stored.run, stored.rule) == (run, chooser.rule.name):
                memory: FrozenModel = chooser.rule.memory.model_validate(stored.memory)
                return memory
        return None

    def save(
        self,
        run: str,
        chooser: TierChooser,
        memory: FrozenModel,
    ) -> None:
        """Replace the memory atomically.

        Where the disk is full, the next round goes without this one.
        """
        stored = _StoredMemory(
            rule=chooser.rule.name,
            run=run,
            memory=memory.model_dump(mode="json"),
        )
        with contextlib.suppress(StorageError):
            write_atomically(self.path, stored.model_dump_json(indent=1).encode())
