"""What a worker needs that does not share the simulation's folder: the files of its setup, in
places of its own.
"""

from collections.abc import Mapping
from pathlib import Path

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.disk import disk_errors
from fleet_protocol.errors import DataError
from simulation.orders import WorkerSetup

_SAMPLES = ("train_x.npy", "train_y.npy", "black.npy")
_TEST = "test.npz"  # for workers that judge devices on their own part of it


def packing_list(setup: WorkerSetup) -> dict[str, Path]:
    """The files a worker reads that stay the same for the whole simulation, by their places,
    relative and with slashes.

    Raises:
        DataError: one of them is missing.
    """
    samples = (*_SAMPLES, _TEST) if setup.own_test else _SAMPLES
    found = {f"data/{name}": setup.data / name for name in samples} | {"parts.npz": setup.parts}
    if setup.models is not None:
        found["models.py"] = setup.models
    found |= {
        place: Path(item.rpartition(":")[0]) for item, place in _places(setup).items() if place
    }
    trees = {"artifacts": setup.artifacts}
    trees |= {f"pairs/{number}": folder for number, folder in enumerate(setup.pairs)}
    for place, folder in trees.items():
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                found[f"{place}/{path.relative_to(folder).as_posix()}"] = path
    missing = [path for path in found.values() if not path.is_file()]
    if missing:
        raise DataError(f"{missing[0]} is missing; start the simulation again")
    return found


def _places(setup: WorkerSetup) -> dict[str, str | None]:
    """The changes of samples, with the places of the files of those that are the user's functions."""
    return {
        item: f"augment/{number}.py" if ":" in item else None
        for number, item in enumerate(setup.augment)
    }


def relocated(setup: WorkerSetup, shared: Path, own: Path) -> WorkerSetup:
    """The setup of a worker with a folder of its own.

    Those of one machine may share the packing list's files.
    """
    return setup.model_copy(
        update={
            "artifacts": shared / "artifacts",
            "data": shared / "data",
            "parts": shared / "parts.npz",
            "models": None if setup.models is None else shared / "models.py",
            "augment": tuple(
                item if place is None else f"{shared / place}:{item.rpartition(':')[2]}"
                for item, place in _places(setup).items()
            ),
            "pairs": tuple(shared / "pairs" / str(number) for number in range(len(setup.pairs))),
            "blobs": own / "blobs",
            "updates": own / "updates",
            "devices": own / "devices",
        }
    )


def read_state(folder: Path) -> dict[str, bytes]:
    """What a device keeps between rounds: the content of its files by name.

    A StorageError where one cannot be read.
    """
    if not folder.is_dir():
        return {}
    found = {}
    for path in sorted(folder.iterdir()):
        with disk_errors("read", path):
            if path.is_file() and not path.name.startswith(
                "."
            ):  # what begins with a dot is being written
                found[path.name] = path.read_bytes()
    return found


def write_state(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make a device's folder, and let it hold these files and no others.

    Raises:
        StorageError: the folder cannot be written.
    """
    for name, content in files.items():
        write_atomically(folder / name, content)
    for name in read_state(folder).keys() - files.keys():
        (folder / name).unlink(missing_ok=True)
