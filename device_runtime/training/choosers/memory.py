"""Saves what a rule for choosing a tier remembers between rounds."""

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
    """The file's content; it belongs to one run, and another run begins with none."""

    version: Literal[1] = 1
    rule: str
    run: str
    memory: Mapping[str, JsonValue]


class ChooserMemory:
    """The memory of one board, in the agent's state folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "chooser.json"

    def load(self, run: str, chooser: TierChooser) -> FrozenModel | None:
        """Return what a rule remembers of a run; None if nothing can be read."""
        with contextlib.suppress(OSError, ValidationError):
            stored = _StoredMemory.model_validate_json(self.path.read_bytes())
            # The memory of one run does not apply to another model.
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

        If the disk is full, the next round does without this one.
        """
        stored = _StoredMemory(
            rule=chooser.rule.name,
            run=run,
            memory=memory.model_dump(mode="json"),
        )
        with contextlib.suppress(StorageError):
            write_atomically(self.path, stored.model_dump_json(indent=1).encode())
