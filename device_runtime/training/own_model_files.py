"""Keeps the board's own model from round to round: one file per round.

A round starts from the file of the latest round before it. So a task that is computed twice after a
power cut gives the same result, and a restart loses nothing. Two rounds of a run are kept, and the
newest few runs: a run that has ended looks the same as one whose server is offline.

Each file has a digest of its tensors, because a board's card may return other bits than it was
given, and no other copy of these values exists.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from device_runtime.training.backends.swapping import TensorDescription
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.digests import blob_digest
from fleet_protocol.disk import storage_error
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.weights import encode_weights, weights_parts

Tensors = dict[str, NDArray[Any]]

KEPT_RUNS = 3
_SUFFIX = ".safetensors"
_DIGEST = "digest"
"""Key of the digest in the metadata; files of earlier versions of Shoal have none."""


def sub_model_of(tier: str) -> str:
    """Return the id of a tier without its trained share and the place of its window.

    Tiers of one width and depth hold the same parameters, whichever of these they train, so a
    board has one set of private values for all of them.

    Example:
        >>> sub_model_of("w1.00-d4-t0.50-p1")
        'w1.00-d4'
    """
    return "-".join(tier.split("-")[:2])


@dataclass(frozen=True)
class KeptRound:
    """The file of a round, and its content."""

    path: Path
    tensors: Mapping[str, NDArray[Any]]

    def under(self, prefix: str, expected: Mapping[str, TensorDescription]) -> Tensors:
        """Return the tensors under a prefix.

        Args:
            prefix: prefix of their names in the file.
            expected: their shapes and types, by name without the prefix.

        Raises:
            RefusedError: one is missing or differs; the file belongs to another pair.
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
        expected: TensorDescription,
    ) -> RefusedError:
        return RefusedError(
            RefusalReason.UNSUPPORTED,
            f"{self.path} belongs to another pair: {name} is {state} instead of "
            f"{expected.dtype} {list(expected.shape)}; put the set with which this run began "
            "back into [own_model], or delete the file to begin again",
        )


@dataclass(frozen=True)
class _RoundFile:
    """A file of the folder, described by its name."""

    run: str
    number: int  # of the round
    path: Path


@dataclass(frozen=True)
class OwnModelFiles:
    """The files of all runs.

    Attributes:
        folder: folder that contains them.
        runs: number of runs whose files are kept, including the current one.
        prefix: prefix of their names.
        writes: whether `save` writes anything.
    """

    folder: Path
    runs: int = KEPT_RUNS
    prefix: str = "own-model-"
    writes: bool = True

    def newest(self) -> KeptRound | None:
        """Load the newest file, of any run; None if nothing is kept.

        Raises the errors of `load`, and OSError.
        """
        ages = [(file.path.stat().st_mtime, file.number, file.run) for file in self._files()]
        if not ages:
            return None
        _age, number, run = max(ages)
        return self.load(run, number + 1)

    def stamps(self) -> list[tuple[str, int]]:
        """Return the names of all files with the times of their last change, in nanoseconds."""
        names: list[tuple[str, int]] = []
        for file in self._files():
            names.append((file.path.name, file.path.stat().st_mtime_ns))
        return sorted(names)

    def load(self, run: str, before: int) -> KeptRound | None:
        """Load the file of a run's latest round before a given one; None if there is none.

        Raises:
            StorageError: the file cannot be read.
            BlobError: it is damaged.
        """
        earlier = [file for file in self._files() if file.run == run and file.number < before]
        if not earlier:
            return None
        path = max(earlier, key=lambda file: file.number).path
        try:
            return KeptRound(path, _verified(path.read_bytes()))
        except OSError as error:
            raise storage_error("read", path, error) from error
        except BlobError as error:
            raise BlobError(
                f"{path} is damaged; delete it to continue from the previous round: {error}"
            ) from error

    def save(
        self,
        run: str,
        number: int,
        tensors: Mapping[str, NDArray[Any]],
    ) -> None:
        """Save a round's file, and remove files that are no longer needed.

        Raises:
            StorageError: the disk is full; the earlier files are intact.
        """
        if not self.writes:
            return
        path = self.folder / f"{self.prefix}{run}-{number}{_SUFFIX}"
        # Before others are removed: on a full disk the earlier files stay.
        metadata = {_DIGEST: blob_digest(*weights_parts(tensors))}
        write_atomically(path, encode_weights(tensors, metadata))
        for spare in self._spare(run, number):
            with contextlib.suppress(OSError):
                spare.unlink()

    def load_tiers(self, run: str, before: int) -> dict[str, Tensors]:
        """Load what `save_tiers` saved in the latest round before a given one, by tier.

        The arguments and errors are those of `load`.
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
        """Save tensors of several tiers.

        The arguments and errors are those of `save`, with the tensors by tier.
        """
        named: Tensors = {}
        for tier, tensors in tiers.items():
            for name, value in tensors.items():
                named[f"{tier}/{name}"] = value
        self.save(run, number, named)

    def _files(self) -> Iterator[_RoundFile]:
        for path in self.folder.glob(f"{self.prefix}*{_SUFFIX}"):
            middle = path.name.removeprefix(self.prefix).removesuffix(_SUFFIX)
            # From the right, because a run's id may contain dashes.
            run, _, number = middle.rpartition("-")
            if run and number.isdigit():
                yield _RoundFile(run, int(number), path)

    def _spare(self, run: str, number: int) -> list[Path]:
        """Return the files of old runs, and this run's earlier ones except the last before a round.

        This round started from that file, so it must stay until the round is over.
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


def _verified(data: bytes) -> Tensors:
    """Return the tensors of a file.

    Raises:
        BlobError: they are not those that were written.
    """
    metadata, tensors = blob_in(data)
    digest = metadata.get(_DIGEST)
    if digest is not None and digest != blob_digest(*weights_parts(tensors)):
        raise BlobError("its tensors do not have the digest with which they were written")
    return tensors
