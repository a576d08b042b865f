"""The board's own model: trained beside the one of an offer, it never leaves this board.

The operator copies a pair to the board: the step of both models, and the initial weights of the
board's own. `OwnModelFiles` holds what the board keeps of it from round to round.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from device_runtime.training.measuring import EVAL, STATS
from device_runtime.training.own_model_files import KEPT_RUNS, KeptRound, OwnModelFiles
from fleet_protocol.digests import matches
from fleet_protocol.errors import BlobError, ConfigError
from fleet_protocol.foreign_files import DOCUMENT_LIMIT, path_within, read_within
from fleet_protocol.manifest import FileSpec
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.pair_manifest import PairManifest, parse_pair_manifest

MODEL = "model/"
"""Prefix of the names of the model's parameters in the files between rounds."""


@dataclass(frozen=True)
class OwnModel:
    """Where the board's own model is stored.

    Attributes:
        folder: folder of the pair.
        state_dir: folder for the model between rounds.
        kept_runs: number of runs for which it is kept.
    """

    folder: Path
    state_dir: Path
    kept_runs: int = KEPT_RUNS

    @property
    def files(self) -> OwnModelFiles:
        """The files that are kept between rounds."""
        return OwnModelFiles(self.state_dir, self.kept_runs)

    def manifest(self) -> PairManifest:
        """Read the pair's manifest.

        Raises:
            ConfigError: it cannot be read.
            BlobError: it is not the manifest of a pair.
        """
        return parse_pair_manifest(self._read("manifest.json"))

    def parameters(self, kept: KeptRound | None) -> dict[str, NDArray[Any]]:
        """Return the model as a round left it, or else the initial one of the set.

        Raises:
            RefusedError: the round's file belongs to another pair.
            ConfigError: the set is not whole.
        """
        pair = self.manifest()
        if kept is None:
            return tensors_in(self.read(pair.own_init))
        return kept.under(MODEL, {spec.name: spec for spec in pair.own.parameters})

    def check(self) -> None:
        """Check that every file of the pair that this board uses is present and as exported.

        Raises:
            ConfigError: a file is not; the message names it.
            BlobError: the manifest is not that of a pair.
        """
        pair = self.manifest()
        # A set without these is whole, too: its model is then not evaluated.
        graphs = (pair.own.graphs.get(key) for key in (EVAL, STATS))
        for file in (pair.graph, pair.own_init, pair.adaptor, *graphs):
            if file is not None:
                self.read(file)

    def read(self, file: FileSpec) -> bytes:
        """Return the content of a file of the pair.

        Raises:
            ConfigError: it cannot be read, or differs from the export.
        """
        data = self._read(file.path, max(file.size, DOCUMENT_LIMIT))  # a longer one is damaged
        if not matches(data, file.digest):
            raise ConfigError(
                f"[own_model] set: {self.folder / file.path} is damaged, or from a different"
                " export from the manifest beside it; copy the whole set to this board again"
            )
        return data

    def path(self, file: FileSpec) -> Path:
        """Return the path of a graph of the pair.

        Raises:
            ConfigError: it is missing.
        """
        try:
            return path_within(self.folder, file.path)
        except BlobError as error:
            raise ConfigError(
                f"[own_model] set: {error}; copy the whole set to this board again"
            ) from error

    def _read(self, name: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        try:
            return read_within(self.folder, name, limit)
        except BlobError as error:
            raise ConfigError(
                f"[own_model] set: {error}; name the folder that the export of the pair printed, "
                "and copy all of it"
            ) from error
