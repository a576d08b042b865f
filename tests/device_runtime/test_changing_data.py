"""Files of data that are written again while a board trains on them: the update is that of the new
ones, or none.
"""

import contextlib
import io
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter

from device_runtime.training.compute import compute
from device_runtime.training.hooks import Hooks
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.data import DataConfig, load_data
from fleet_protocol.errors import RefusalReason
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Done, Offer, Refuse
from tests.brokers import any_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.scripted_server import ScriptedServer, scripted_server
from tests.device_runtime.tiny_set import CLASSES, TinySet, initial_weights, samples, write_tiny_set

HOLDOUT = 0.1
LONG = {"epochs": 1_500}  # long enough for files to change in the middle
IN_FILE = """
import runpy
import sys
from fleet_protocol.data import file_rows
file_rows.MEMORY_BYTES, file_rows.MEMORY_SHARE = 0, 0
sys.argv = sys.argv[3:]
runpy.run_module("device_runtime", run_name="__main__", alter_sys=True)
"""
"""A device that reads nothing into memory: it is given its own command, as a prefix."""

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinySet:
    return write_tiny_set(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with any_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npy_files(x: np.ndarray, y: np.ndarray) -> Files:
    return {"x.npy": saved(x), "y.npy": saved(y)}


def npz_files(x: np.ndarray, y: np.ndarray) -> Files:
    file = io.BytesIO()
    np.savez(file, x=x, y=y)
    return {"d.npz": file.getvalue()}


def csv_files(x: np.ndarray, y: np.ndarray) -> Files:
    lines = [",".join([*(f"c{i}" for i in range(x[0].size)), "label"])]
    lines += [",".join(map(str, [*row.ravel(), label])) for row, label in zip(x, y, strict=True)]
    return {"d.csv": ("\n".join(lines) + "\n").encode()}


def image_files(x: np.ndarray, y: np.ndarray) -> Files:
    files = {}
    for index, (row, label) in enumerate(zip(x, y, strict=True)):
        file = io.BytesIO()
        Image.fromarray(row).save(file, "png")
        files[f"images/{label}/{index:03}.png"] = file.getvalue()
    return files


TABLES: dict[str, dict[str, Any]] = {
    "npy": {"kind": "npz", "path": "x.npy", "y_path": "y.npy"},
    "npy-in-file": {"kind": "npz", "path": "x.npy", "y_path": "y.npy"},
    "npz": {"kind": "npz", "path": "d.npz"},
    "csv": {"kind": "csv", "path": "d.csv", "shape": [3, 4]},
    "images": {
        "kind": "images",
        "path": "images",
        "labels": [str(i) for i in range(CLASSES)],
        "channels": 1,
        "shape": [3, 4],
    },
}
WRITERS = {
    "npy": npy_files,
    "npy-in-file": npy_files,
    "npz": npz_files,
    "csv": csv_files,
    "images": image_files,
}


def content(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = samples(count, seed)
    return np.clip(x * 20 + 128, 0, 255).astype(np.uint8), y


def relabelled(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = content(count, seed)
    return x, (y + 1) % CLASSES


def write(folder: Path, files: Files) -> None:
    """Write files in place: the inode stays, as with `np.save` and `cp`."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def rename(folder: Path, files: Files) -> None:
    """Write files beside those that are there, and give them their names."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_bytes(data)
        path.with_suffix(".new").replace(path)


def replace_all(folder: Path, old: Files, new: Files, how: str) -> None:
    """Go from some files to others."""
    for name in old.keys() - new.keys():
        (folder / name).unlink()
    changed = {name: data for name, data in new.items() if old.get(name) != data}
    (rename if how == "renamed" else write)(folder, changed)


@dataclass(frozen=True)
class Board:
    """A device at work, with its server, and its folder of data."""

    server: ScriptedServer
    device: DeviceProcess
    folder: Path
    kind: str


@contextlib.contextmanager
def board(tmp_path: Path, url: str, tiny: TinySet, kind: str) -> Iterator[Board]:
    write(tmp_path, WRITERS[kind](*content(50, 0)))
    name = f"d-{zlib.crc32(str(tmp_path).encode()):08x}"
    device = DeviceProcess(
        tmp_path, url, TABLES[kind] | {"scale": 0.05}, device=name, holdout=HOLDOUT
    )
    prefix = ()
    if kind == "npy-in-file":
        (tmp_path / "in_file.py").write_text(IN_FILE)
        prefix = (sys.executable, str(tmp_path / "in_file.py"))
    with scripted_server(url, tiny.blobs) as server:
        device.start(prefix)
        try:
            server.wait_state("idle", name)
            yield Board(server, device, tmp_path, kind)
        finally:
            device.kill()


def update_on(folder: Path, kind: str, tiny: TinySet, offer: Offer) -> dict[str, np.ndarray]:
    """What a task leaves of samples that nobody touches."""
    config = (
        TypeAdapter(DataConfig).validate_python(TABLES[kind] | {"scale": 0.05}).resolved(folder)
    )
    device_setup = DeviceSetup(load_data(config), tiny.blobs, "onnx", threads=1, holdout=HOLDOUT)
    task = Task(
        run=offer.run,
        round=offer.round,
        id=offer.task,
        version=offer.version,
        tier=offer.choices[0].tier,
        instructions=offer,
        manifest=tiny.manifest,
        weights=offer.choices[0].weights,
    )
    return tensors_in(device_setup.blobs.read(compute(task, device_setup, Hooks()).update.digest))


CHANGES = {
    "rewritten": content(50, 7),
    "fewer": content(20, 7),
    "more": content(90, 7),
    "labels": relabelled(50, 0),
    "renamed": content(50, 7),
}


QUICK = {
    ("npy", "rewritten"),
    ("npy", "fewer"),
    ("npy-in-file", "fewer"),
    ("images", "labels"),
}
PAIRS = [
    pytest.param(kind, change, marks=() if (kind, change) in QUICK else pytest.mark.slow)
    for kind in TABLES
    for change in CHANGES
]


@pytest.mark.parametrize(("kind", "change"), PAIRS)
@pytest.mark.slow
def test_an_update_is_that_of_the_files_as_they_are_now(tmp_path, broker, tiny, kind, change):
    """Written in place, fewer or more samples, other labels alone, replaced: the update is that of
    the new samples.

    It has the bits of a board that never had others, and the board says which files they were.
    """
    new = WRITERS[kind](*CHANGES[change])
    with board(tmp_path, broker.url, tiny, kind) as at_work:
        offer = at_work.server.offer(at_work.device.id, tiny.choice(initial_weights()), train=LONG)
        at_work.device.wait_log("epoch 1/")
        replace_all(tmp_path, WRITERS[kind](*content(50, 0)), new, change)
        update = tensors_in(at_work.server.wait_update("t1"))
        assert at_work.device.terminate() == 0
        log = at_work.device.log()
    assert f"changed: read again, {len(CHANGES[change][1])} samples" in log
    write(tmp_path / "untouched", new)
    expected = update_on(tmp_path / "untouched", kind, tiny, offer)
    assert {name: value.tobytes() for name, value in update.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


SOME = ["npy", *(pytest.param(kind, marks=pytest.mark.slow) for kind in TABLES if kind != "npy")]


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.slow
def test_files_that_are_gone_are_refused_by_name_until_they_are_back(tmp_path, broker, tiny, kind):
    """The board stays, says which file it is, and trains as soon as that is there again."""
    old = WRITERS[kind](*content(50, 0))
    with board(tmp_path, broker.url, tiny, kind) as at_work:
        server = at_work.server
        device = at_work.device
        server.offer(device.id, tiny.choice(initial_weights()), train=LONG)
        device.wait_log("epoch 1/")
        for name in old:
            (tmp_path / name).rename(tmp_path / f"away-{zlib.crc32(name.encode())}")
        for task in ("t1", "t2"):
            refusal = server.wait_message(Refuse, task)
            assert refusal.reason is RefusalReason.DATA_CHANGED
            assert str(tmp_path / TABLES[kind]["path"]) in refusal.detail
            if task == "t1":
                server.offer(device.id, tiny.choice(initial_weights()), task="t2")
        for name in old:
            (tmp_path / f"away-{zlib.crc32(name.encode())}").rename(tmp_path / name)
        server.offer(device.id, tiny.choice(initial_weights()), task="t3")
        server.wait_update("t3")
        assert device.terminate() == 0


@pytest.mark.parametrize("kind", SOME)
def test_files_that_changed_between_tasks_are_read_before_the_next(tmp_path, broker, tiny, kind):
    """Nothing is computed twice for that, and the board tells its server how many samples it has
    now.
    """
    new = WRITERS[kind](*content(20, 7))
    with board(tmp_path, broker.url, tiny, kind) as at_work:
        replace_all(tmp_path, WRITERS[kind](*content(50, 0)), new, "rewritten")
        offer = at_work.server.offer(at_work.device.id, tiny.choice(initial_weights()))
        update = tensors_in(at_work.server.wait_update("t1"))
        assert at_work.server.wait_message(Done).metrics.examples == 18
        at_work.server.wait(
            lambda: at_work.server.profiles[-1].examples == 18, what="the new number of samples"
        )
        assert at_work.device.terminate() == 0
        assert at_work.device.log().count("epoch 1/2") == 1
    expected = update_on(tmp_path, kind, tiny, offer)
    assert all(np.array_equal(update[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "kind",
    ["npy", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("npz", "csv", "images"))],
)
def test_files_that_were_only_touched_cost_no_task(tmp_path, broker, tiny, kind):
    """With the same content under another time the update counts: a copy of the same data is no
    other data.
    """
    old = WRITERS[kind](*content(50, 0))
    with board(tmp_path, broker.url, tiny, kind) as at_work:
        at_work.server.offer(at_work.device.id, tiny.choice(initial_weights()), train=LONG)
        at_work.device.wait_log("epoch 1/")
        rename(tmp_path, old)
        at_work.server.wait_update("t1")
        assert at_work.device.terminate() == 0
        log = at_work.device.log()
    assert "changed: read again, 50 samples" in log
    assert log.count("epoch 1/") == 1


def test_half_of_a_file_is_refused_and_the_whole_is_trained_on(tmp_path, broker, tiny):
    """A copy that has stalled is no data; the board lives, and takes the file when it is whole."""
    whole = npy_files(*content(60, 7))
    with board(tmp_path, broker.url, tiny, "npy") as at_work:
        server = at_work.server
        device = at_work.device
        write(tmp_path, {"x.npy": whole["x.npy"][:300], "y.npy": whole["y.npy"]})
        server.offer(device.id, tiny.choice(initial_weights()))
        refusal = server.wait_message(Refuse, "t1")
        assert refusal.reason is RefusalReason.DATA_CHANGED
        assert "partly copied, or is still being written" in refusal.detail
        with (tmp_path / "x.npy").open("ab") as file:
            file.write(whole["x.npy"][300:])
        server.offer(device.id, tiny.choice(initial_weights()), task="t2")
        server.wait_update("t2")
        assert server.wait_message(Done).metrics.examples == 54
        assert device.terminate() == 0


@pytest.mark.slow
def test_a_time_that_is_set_back_hides_nothing(tmp_path, broker, tiny):
    """As ``rsync --times --inplace`` does: the same size and the same time, and other samples."""
    with board(tmp_path, broker.url, tiny, "npz") as at_work:
        before = (tmp_path / "d.npz").stat()
        offer = at_work.server.offer(at_work.device.id, tiny.choice(initial_weights()), train=LONG)
        at_work.device.wait_log("epoch 1/")
        write(tmp_path, npz_files(*content(50, 7)))
        os.utime(tmp_path / "d.npz", ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (tmp_path / "d.npz").stat().st_size == before.st_size
        update = tensors_in(at_work.server.wait_update("t1"))
        assert at_work.device.terminate() == 0
    expected = update_on(tmp_path, "npz", tiny, offer)
    assert all(np.array_equal(update[name], expected[name]) for name in expected)
