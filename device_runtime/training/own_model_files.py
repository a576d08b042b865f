"""What a board keeps of its own model from round to round: one file per round in its state folder.

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
from fleet_protocol.blobs import storage_error
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.weights import encode_weights

KEPT_RUNS = 3
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Kept:
    """What a round left: a file, and its content."""

    path: Path
    tensors: Mapping[str, NDArray[Any]]

    def under(self, prefix: str, expected: Mapping[str, Sized]) -> dict[str, NDArray[Any]]:
        """The tensors under a prefix, of which shape and type are expected by name without it.

        One that is not there or another one is a RefusedError: the file is of another pair.
        """
        found: dict[str, NDArray[Any]] = {}
        for name, sized in expected.items():
            value = self.tensors.get(prefix + name)
            if value is None or (value.shape, value.dtype.name) != (
                sized.shape,
                sized.dtype,
            ):
                what = "missing" if value is None else f"{value.dtype.name} {list(value.shape)}"
                raise RefusedError(
                    RefusalReason.UNSUPPORTED,
                    f"{self.path} is of another pair: {prefix + name} is {what} instead of {sized.dtype}"
                    f" {list(sized.shape)}; put the set that this run began with back into [own_model], or delete the"
                    " file to start anew",
                )
            found[name] = value
        return found


@dataclass(frozen=True)
class OwnModelFiles:
    """The files of all runs, of which so many are kept, the current one among them."""

    folder: Path
    runs: int = KEPT_RUNS
    prefix: str = "own-model-"

    def _found(self) -> Iterator[tuple[str, int, Path]]:
        """Run, round and path of each file."""
        for path in self.folder.glob(f"{self.prefix}*{_SUFFIX}"):
            run, _, number = (
                path.name.removeprefix(self.prefix).removesuffix(_SUFFIX).rpartition("-")
            )
            if run and number.isdigit():
                yield run, int(number), path

    def newest(self) -> Kept | None:
        """What was written last, of any run; None where nothing is kept.

        It raises what `load` does, and OSError.
        """
        files = [(path.stat().st_mtime, number, run) for run, number, path in self._found()]
        return self.load(max(files)[2], max(files)[1] + 1) if files else None

    def load(self, run: str, before: int) -> Kept | None:
        """What the latest round of a run before a round left; None if there was none.

        Raises:
            StorageError: the file cannot be read.
            BlobError: it is damaged.
        """
        rounds = {
            number: path for name, number, path in self._found() if name == run and number < before
        }
        if not rounds:
            return None
        path = rounds[max(rounds)]
        try:
            return Kept(path, tensors_in(path.read_bytes()))
        except OSError as error:
            raise storage_error("read", path, error) from error
        except BlobError as error:
            raise BlobError(
                f"{path} is damaged; delete it to go on from the round before: {error}"
            ) from error

    def save(self, run: str, number: int, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Keep what a round leaves, and remove what is not needed any more.

        Where the disk is full, a StorageError, what was kept before is still there.
        """
        write_atomically(
            self.folder / f"{self.prefix}{run}-{number}{_SUFFIX}",
            encode_weights(tensors),
        )
        for path in self._spare(run, number):
            with contextlib.suppress(OSError):
                path.unlink()

    def load_tiers(self, run: str, before: int) -> dict[str, dict[str, NDArray[Any]]]:
        """What `save_tiers` of the latest round before a round kept, by tier.

        The arguments are those of `load`.
        """
        found = self.load(run, before)
        tiers: dict[str, dict[str, NDArray[Any]]] = {}
        for key, value in (found.tensors if found is not None else {}).items():
            tier, _, name = key.partition("/")
            tiers.setdefault(tier, {})[name] = value
        return tiers

    def save_tiers(
        self, run: str, number: int, tiers: Mapping[str, Mapping[str, NDArray[Any]]]
    ) -> None:
        """Keep tensors of several tiers.

        The arguments are those of `save`, with the tensors by tier.
        """
        named = {
            f"{tier}/{name}": value
            for tier, found in tiers.items()
            for name, value in found.items()
        }
        self.save(run, number, named)

    def _spare(self, run: str, number: int) -> list[Path]:
        """Files of old runs, and of this one those before the round that the newest started from."""
        newest: dict[str, float] = {}
        files: dict[str, list[tuple[int, Path]]] = {}
        for name, found, path in self._found():
            files.setdefault(name, []).append((found, path))
            with contextlib.suppress(OSError):
                newest[name] = max(newest.get(name, 0.0), path.stat().st_mtime)
        others = sorted(
            (name for name in files if name != run),
            key=lambda name: newest.get(name, 0.0),
            reverse=True,
        )
        spare = [path for name in others[self.runs - 1 :] for _, path in files[name]]
        earlier = sorted(item for item in files.get(run, []) if item[0] < number)
        return spare + [path for _, path in earlier[:-1]]
