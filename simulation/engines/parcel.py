"""Copies the files of a worker's setup to a machine that does not share the folder."""

from collections.abc import Mapping
from pathlib import Path

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.disk import disk_errors
from fleet_protocol.errors import DataError
from simulation.orders import WorkerSetup

_SAMPLES = ("train_x.npy", "train_y.npy", "black.npy")
_TEST = "test.npz"  # for workers that evaluate devices on their part of the test set


def packing_list(setup: WorkerSetup) -> dict[str, Path]:
    """Return the files that a worker reads and that do not change during the simulation.

    They are listed by their paths in the worker's folder, with slashes.

    Raises:
        DataError: a file is missing.
    """
    files = {}
    for name in (*_SAMPLES, _TEST) if setup.own_test else _SAMPLES:
        files[f"data/{name}"] = setup.data / name
    files["parts.npz"] = setup.split
    if setup.models is not None:
        files["models.py"] = setup.models
    for change, place in _function_places(setup).items():
        files[place] = Path(change.rpartition(":")[0])
    trees = {"artifacts": setup.artifacts}
    for number, folder in enumerate(setup.pairs):
        trees[f"pairs/{number}"] = folder
    for place, folder in trees.items():
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                files[f"{place}/{name}"] = path
    for path in files.values():
        if not path.is_file():
            raise DataError(f"{path} is missing; start the simulation again")
    return files


def _function_places(setup: WorkerSetup) -> dict[str, str]:
    """Return the paths of the user's files, by their augmentation."""
    places = {}
    for number, change in enumerate(setup.augment):
        if ":" in change:
            places[change] = f"augment/{number}.py"
    return places


def relocated(setup: WorkerSetup, shared: Path, own: Path) -> WorkerSetup:
    """Return the setup of a worker with its own folder.

    Args:
        setup: the setup of the simulation.
        shared: folder with the files of the packing list; workers of one machine may share it.
        own: folder of this worker.
    """
    places = _function_places(setup)
    augment = []
    for change in setup.augment:
        if change in places:
            function = change.rpartition(":")[2]
            augment.append(f"{shared / places[change]}:{function}")
        else:
            augment.append(change)
    models = None if setup.models is None else shared / "models.py"
    pairs = []
    for number in range(len(setup.pairs)):
        pairs.append(shared / f"pairs/{number}")
    return setup.model_copy(
        update={
            "artifacts": shared / "artifacts",
            "data": shared / "data",
            "split": shared / "parts.npz",
            "models": models,
            "augment": tuple(augment),
            "pairs": tuple(pairs),
            "blobs": own / "blobs",
            "updates": own / "updates",
            "devices": own / "devices",
        }
    )


def read_state(folder: Path) -> dict[str, bytes]:
    """Return the files that a device keeps between rounds: their content by name.

    Raises:
        StorageError: a file cannot be read.
    """
    if not folder.is_dir():
        return {}
    files = {}
    for path in sorted(folder.iterdir()):
        # Unfinished files have a name that starts with a dot.
        is_complete = not path.name.startswith(".")
        with disk_errors("read", path):
            if is_complete and path.is_file():
                files[path.name] = path.read_bytes()
    return files


def write_state(folder: Path, files: Mapping[str, bytes]) -> None:
    """Create a device's folder with exactly these files.

    Raises:
        StorageError: the folder cannot be written.
    """
    for name, content in files.items():
        write_atomically(folder / name, content)
    # A file that the state no longer has would be read as current.
    for name in read_state(folder).keys() - files.keys():
        (folder / name).unlink(missing_ok=True)
