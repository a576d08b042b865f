"""Writes a run to a folder of TensorBoard."""

import json
from pathlib import Path

from broker_server.store import RunRecord, queries
from broker_server.store.rows import config_json
from fleet_protocol.errors import StorageError
from shoal.tracking.writer import RoundWriter, values_of

_SUFFIX = ".shoal"


class TensorBoard(RoundWriter):
    """A folder for each run, written from its first round: event files cannot be appended to."""

    def __init__(self, folder: str) -> None:
        from tensorboardX import SummaryWriter  # noqa: PLC0415  (an extra)

        self._open_folder = SummaryWriter
        self._folder = Path(folder)

    def begin(self, run: RunRecord) -> int:
        """Replace the files of the run by new ones."""
        folder = self._folder / run.id
        try:
            # Only files of this command: others may share the folder.
            for earlier in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
                earlier.unlink()
            self._writer = self._open_folder(str(folder), filename_suffix=_SUFFIX)
        except OSError as error:
            raise StorageError(f"cannot write {folder}: {error}") from error
        settings = json.dumps(config_json(run), indent=1)
        self._writer.add_text("settings", f"```json\n{settings}\n```")
        return 1

    def write(self, view: queries.RoundView) -> None:
        """Write the values of a round as scalars."""
        for name, value in values_of(view):
            self._writer.add_scalar(name, value, view.round.number, walltime=view.round.ended_at)
        # TensorBoard reads the file while the run is in progress.
        self._writer.flush()

    def end(self, status: str) -> None:
        """Write the status of the run and close its files."""
        self._writer.add_text("status", status)
        self._writer.close()
