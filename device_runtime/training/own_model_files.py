"""What a board keeps of its own model from round to round: one file per round.

A round starts from the file of the latest round before it, so a task that is computed twice after a
power cut gives the same result, and a restart loses nothing. Of a run two rounds are kept, and of
runs the newest few: a run that ended cannot be told from one whose server is away.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from device_runtime.training.backends.swapping import Sized
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.disk import storage_error
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.weights import encode_weights

Tensors = dict[str, NDArray[Any]]

KEPT_RUNS = 3
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class KeptRound:
    """What a round left: a file, and its content."""

    path: Path
    tensors: Mapping[str, NDArray[Any]]

    def under(self, prefix: str, expected: Mapping[str, Sized]) -> Tensors:
        """Return the tensors under a prefix.

        Args:
            prefix: in front of their names in the file.
            expected: their shapes and types, by name without it.

        Raises:
            RefusedError: one is missing or another one; the file is of another pair.
        """
        tensors: Tensors = {}
        for name, sized in expected.items():
            value = self.tensors.get(prefix + name)
            if value is None:
                raise self._of_another_pair(prefix + name, "missing", sized)
            if (value.shape, value.dtype.name) != (sized.shape, sized.dtype):
                shape = f"{value.dtype.name} {list(value.shape)}"
                raise self._of_another_pair(prefix + name, shape, sized)
            tensors[name] = value
        return tensors

    def _of_another_pair(
        self,
        name: str,
        state: str,
        expected: Sized,
    ) -> RefusedError:
        return RefusedError(
            RefusalReason.UNSUPPORTED,
            f"{self.path} is of another pair: {name} is {state} instead of {expected.dtype} "
            f"{list(expected.shape)}; put the set that this run began with back into [own_model], "
            "or delete the file to start anew",
        )


@dataclass(frozen=True)
class _RoundFile:
    """A file of the folder, by what its name says."""

    run: str
    number: int  # of the round
    path: Path


@dataclass(frozen=True)
class OwnModelFiles:
    """The files of all runs.

    Attributes:
        folder: where they lie.
        runs: of so many runs files are kept, the current one among them.
        prefix: of their names.
    """

    folder: Path
    runs: int = KEPT_RUNS
    prefix: str = "own-model-"

    def newest(self) -> KeptRound | None:
        """Load what was written last, of any run; None where nothing is kept.

        Raises what `load` does, and OSError.
        """
        ages = [(file.path.stat().st_mtime, file.number, file.run) for file in self._files()]
        if not ages:
            return None
        _age, number, run = max(ages)
        return self.load(run, number + 1)

    def load(self, run: str, before: int) -> KeptRound | None:
        """Load what the latest round of a run before a round left; None if there was none.

        Raises:
            StorageError: the file cannot be read.
            BlobError: it is damaged.
        """
        earlier = [file for file in self._files() if file.run == run and file.number < before]
        if not earlier:
            return None
        path = max(earlier, key=lambda file: file.number).path
        try:
            return KeptRound(path, tensors_in(path.read_bytes()))
        except OSError as error:
            raise storage_error("read", path, error) from error
        except BlobError as error:
            raise BlobError(
                f"{path} is damaged; delete it to go on from the round before: {error}"
            ) from error

    def save(
        self,
        run: str,
        number: int,
        tensors: Mapping[str, NDArray[Any]],
    ) -> None:
        """Keep what a round leaves, and remove what is not needed any more.

        Raises:
            StorageError: the disk is full; what was kept before is still there.
        """
        path = self.folder / f"{self.prefix}{run}-{number}{_SUFFIX}"
        # Before others go: on a full disk what was there is still there.
        write_atomically(path, encode_weights(tensors))
        for spare in self._spare(run, number):
            with contextlib.suppress(OSError):
                spare.unlink()

    def load_tiers(self, run: str, before: int) -> dict[str, Tensors]:
        """Load what `save_tiers` of the latest round before a round kept, by tier.

        Arguments and errors are those of `load`.
        """
        kept = self.load(run, before)
        tiers: dict[str, Tensors] = {}
        if kept is None:
            return tiers
        for key, value in kept.tensors.items():
            tier, _, name = key.partition("/")
            tiers.setdefault(tier, {})[name] = value
        return tiers

    def save_tiers(
        self,
        run: str,
        number: int,
        tiers: Mapping[str, Mapping[str, NDArray[Any]]],
    ) -> None:
        """Keep tensors of several tiers.

        Arguments and errors are those of `save`, with the tensors by tier.
        """
        named: Tensors = {}
        for tier, tensors in tiers.items():
            for name, value in tensors.items():
                named[f"{tier}/{name}"] = value
        self.save(run, number, named)

    def _files(self) -> Iterator[_RoundFile]:
        for path in self.folder.glob(f"{self.prefix}*{_SUFFIX}"):
            middle = path.name.removeprefix(self.prefix).removesuffix(_SUFFIX)
            # From the right, as a run may have dashes in its id.
            run, _, number = middle.rpartition("-")
            if run and number.isdigit():
                yield _RoundFile(run, int(number), path)

    def _spare(self, run: str, number: int) -> list[Path]:
        """Return the files of old runs, and earlier ones of this run but the last before a round.

        From that one this round started, so it must stay until the round is over.
        """
        by_run: dict[str, list[_RoundFile]] = {}
        written: dict[str, float] = {}  # when the newest file of a run was written
        for file in self._files():
            by_run.setdefault(file.run, []).append(file)
            with contextlib.suppress(OSError):
                age = file.path.stat().st_mtime
                written[file.run] = max(written.get(file.run, 0.0), age)
        finished_runs = [name for name in by_run if name != run]
        finished_runs.sort(key=lambda name: written.get(name, 0.0), reverse=True)
        spare: list[Path] = []
        for name in finished_runs[self.runs - 1 :]:
            spare += [file.path for file in by_run[name]]
        earlier = [file for file in by_run.get(run, []) if file.number < number]
        earlier.sort(key=lambda file: file.number)
        return spare + [file.path for file in earlier[:-1]]
