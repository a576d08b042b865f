"""Files of data that change during a task, and the contract of the fleet: what is read again has to
fit it, too.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from device_runtime.training.compute import compute
from device_runtime.training.hooks import Hooks
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.data import DataConfig, load_data, make_dataset
from fleet_protocol.data.contract import reconcile
from fleet_protocol.data.summary import summarise
from fleet_protocol.data.terms import DataContract
from fleet_protocol.errors import RefusalReason
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Done, Offer, Refuse
from tests.brokers import any_broker
from tests.device_runtime import tiny_set
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.scripted_server import ScriptedServer, scripted_server
from tests.device_runtime.test_changing_data import content, image_files, rename, write
from tests.device_runtime.tiny_set import FEATURES, TinySet, initial_weights, write_tiny_set

HOLDOUT = 0.1
LONG = {"epochs": 1_500}  # long enough for files to change in the middle
LABELS = ("ant", "bee", "cat", "dog")
COLUMNS = tuple(f"c{place}" for place in range(FEATURES))
LABELLED = DataContract(labels=LABELS)
TABULAR = DataContract(columns=COLUMNS)
IMAGES: dict[str, Any] = {"kind": "images", "path": "images", "channels": 1, "shape": [3, 4]}
TABLE: dict[str, Any] = {"kind": "csv", "path": "d.csv"}
LOOKS_WRONG = "possible fault in the data: "

Bits = dict[str, bytes]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinySet:
    """For images ``[3, 4]``."""
    return write_tiny_set(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def flat(tmp_path_factory) -> TinySet:
    """For lines of a table: the same, of flat samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_set, "SHAPE", (FEATURES,))
        return write_tiny_set(tmp_path_factory.mktemp("flat"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with any_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@dataclass(frozen=True)
class Board:
    """A device that waits for an offer, and its server."""

    server: ScriptedServer
    device: DeviceProcess
    tiny: TinySet

    def offer(self, contract: DataContract, task: str, **changes: Any) -> Offer:
        choice = self.tiny.choice(initial_weights())
        return self.server.offer(self.device.id, choice, task=task, contract=contract, **changes)

    def bits(self, task: str) -> Bits:
        return bits_of(self.server.wait_update(task))


@contextlib.contextmanager
def board(folder: Path, url: str, tiny: TinySet, data: dict[str, Any]) -> Iterator[Board]:
    device = DeviceProcess(folder, url, data, device=f"d-{time.monotonic_ns():x}", holdout=HOLDOUT)
    with scripted_server(url, tiny.blobs) as server:
        device.start()
        try:
            server.wait_state("idle", device.id)
            yield Board(server, device, tiny)
        finally:
            device.kill()


def bits_of(update: bytes) -> Bits:
    return {name: value.tobytes() for name, value in tensors_in(update).items()}


def expected_bits(folder: Path, data: dict[str, Any], tiny: TinySet, offer: Offer) -> Bits:
    """What a task leaves of files that nobody touches, under the contract of its offer."""
    config = TypeAdapter(DataConfig).validate_python(data).resolved(folder)
    samples = reconcile(load_data(config), offer.contract)
    device_setup = DeviceSetup(samples, tiny.blobs, "onnx", threads=1, holdout=HOLDOUT)
    choice = offer.choices[0]
    task = Task(
        run=offer.run,
        round=offer.round,
        id=offer.task,
        version=offer.version,
        tier=choice.tier,
        instructions=offer,
        manifest=tiny.manifest,
        weights=choice.weights,
    )
    return bits_of(device_setup.blobs.read(compute(task, device_setup, Hooks()).update.digest))


def named_images(seed: int = 0) -> dict[str, bytes]:
    """A folder for each label of `LABELS`."""
    numbered = image_files(*content(50, seed))
    return {_named(path): data for path, data in numbered.items()}


def _named(path: str) -> str:
    folder, number, name = path.split("/")
    return f"{folder}/{LABELS[int(number)]}/{name}"


def table(names: tuple[str, ...], seed: int, factor: int = 1) -> dict[str, bytes]:
    """A CSV file whose columns stand in the order of the names; a column has its values by its
    name.

    Args:
        names: of `COLUMNS`, and of others, which have noise.
        seed: of the values.
        factor: of the values.
    """
    x, y = content(50, seed)
    noise = np.random.default_rng(seed).integers(0, 255, len(y))
    by_name = dict(zip(COLUMNS, x.reshape(len(y), -1).astype(int).T * factor, strict=True))
    columns = [by_name.get(name, noise) for name in names]
    lines = [",".join([*names, "label"])]
    lines += [",".join(map(str, line)) for line in zip(*columns, y, strict=True)]
    return {"d.csv": ("\n".join(lines) + "\n").encode()}


@pytest.mark.slow
def test_a_class_that_is_moved_away_leaves_the_numbers_of_the_others(tmp_path, broker, tiny):
    """The update has the bits of a board that never had the class; the next task has the same
    labels.
    """
    write(tmp_path, named_images())
    with board(tmp_path, broker.url, tiny, IMAGES) as at_work:
        offer = at_work.offer(LABELLED, "t1", train=LONG)
        at_work.device.wait_log("epoch 1/")
        (tmp_path / "images" / "ant").rename(tmp_path / "ant")
        update = at_work.bits("t1")
        later = at_work.offer(LABELLED, "t2")
        later_update = at_work.bits("t2")
        assert "changed: read again" in at_work.device.log()
    assert update == expected_bits(tmp_path, IMAGES, tiny, offer)
    assert later_update == expected_bits(tmp_path, IMAGES, tiny, later)


def test_a_class_that_the_fleet_does_not_name_is_refused_by_name(tmp_path, broker, tiny):
    """As a mismatch, not as files that changed; without the class the next task is that of the
    samples of before.
    """
    write(tmp_path, named_images())
    write(tmp_path / "beside", {"eel/000.png": named_images(7)["images/ant/000.png"]})
    with board(tmp_path, broker.url, tiny, IMAGES) as at_work:
        at_work.offer(LABELLED, "t1", train=LONG)
        at_work.device.wait_log("epoch 1/")
        (tmp_path / "beside" / "eel").rename(tmp_path / "images" / "eel")
        refusal = at_work.server.wait_message(Refuse, "t1")
        assert refusal.reason is RefusalReason.DATA_MISMATCH
        assert "has the label 'eel', which is not a label of the fleet" in refusal.detail
        at_work.offer(LABELLED, "t2")
        assert at_work.server.wait_message(Refuse, "t2").reason is RefusalReason.DATA_MISMATCH
        (tmp_path / "images" / "eel").rename(tmp_path / "beside" / "eel")
        offer = at_work.offer(LABELLED, "t3")
        update = at_work.bits("t3")
        assert "t1" not in at_work.server.updates
    assert update == expected_bits(tmp_path, IMAGES, tiny, offer)


@pytest.mark.slow
def test_samples_that_did_not_fit_at_the_start_are_read_again_when_they_were_mended(
    tmp_path, broker, tiny
):
    """The board needs no new start: an offer that its samples do not fit makes it look at the
    files.
    """
    write(tmp_path, named_images())
    (tmp_path / "images" / "ant").rename(tmp_path / "images" / "eel")
    with board(tmp_path, broker.url, tiny, IMAGES) as at_work:
        at_work.offer(LABELLED, "t1")
        assert at_work.server.wait_message(Refuse, "t1").reason is RefusalReason.DATA_MISMATCH
        (tmp_path / "images" / "eel").rename(tmp_path / "images" / "ant")
        offer = at_work.offer(LABELLED, "t2")
        assert at_work.bits("t2") == expected_bits(tmp_path, IMAGES, tiny, offer)


@pytest.mark.slow
def test_columns_in_another_order_are_put_into_that_of_the_fleet(tmp_path, broker, flat):
    """A table that is replaced during a task is read by its names, as at the offer."""
    write(tmp_path, table(COLUMNS, 0))
    with board(tmp_path, broker.url, flat, TABLE) as at_work:
        offer = at_work.offer(TABULAR, "t1", train=LONG)
        at_work.device.wait_log("epoch 1/")
        rename(tmp_path, table(COLUMNS[::-1], 7))
        update = at_work.bits("t1")
        assert "d.csv changed: read again, 50 samples" in at_work.device.log()
    assert update == expected_bits(tmp_path, TABLE, flat, offer)


@pytest.mark.slow
def test_scales_that_go_by_place_count_when_columns_change_places(tmp_path, broker, flat):
    """The values are the same by name, but `mean` of [data] now goes with others: the task is done
    again.
    """
    data = TABLE | {"mean": [float(10 * place) for place in range(FEATURES)]}
    write(tmp_path, table(COLUMNS, 0))
    with board(tmp_path, broker.url, flat, data) as at_work:
        offer = at_work.offer(TABULAR, "t1", train=LONG)
        at_work.device.wait_log("epoch 1/")
        rename(tmp_path, table(COLUMNS[::-1], 0))
        update = at_work.bits("t1")
    assert update == expected_bits(tmp_path, data, flat, offer)


@pytest.mark.slow
def test_a_table_without_a_column_is_refused_by_name(tmp_path, broker, flat):
    """A column that is gone after a change is a mismatch, as at the offer."""
    write(tmp_path, table(COLUMNS, 0))
    with board(tmp_path, broker.url, flat, TABLE) as at_work:
        at_work.offer(TABULAR, "t1", train=LONG)
        at_work.device.wait_log("epoch 1/")
        rename(tmp_path, table(("x0", *COLUMNS[1:]), 7))
        refusal = at_work.server.wait_message(Refuse, "t1")
    assert refusal.reason is RefusalReason.DATA_MISMATCH
    assert "has no column 'c0'" in refusal.detail


@pytest.mark.parametrize("change", ["replaced", "aged"])
@pytest.mark.slow
def test_further_columns_stay_for_another_contract(tmp_path, broker, flat, change):
    """A task that reads the table again, or looks at its age, keeps the columns that its own
    contract leaves out.
    """
    wider = ("depth", *COLUMNS)
    write(tmp_path, table(wider, 0))
    hour_ahead = time.time() + 3600
    os.utime(
        tmp_path / "d.csv", (hour_ahead, hour_ahead)
    )  # so that the file is young whenever it is read
    other = DataContract(columns=("depth", *COLUMNS[1:]))
    with board(tmp_path, broker.url, flat, TABLE) as at_work:
        if change == "replaced":
            rename(tmp_path, table(wider, 7))
        first = at_work.offer(TABULAR, "t1")
        first_update = at_work.bits("t1")
        second = at_work.offer(other, "t2", run="run2")
        second_update = at_work.bits("t2")
        assert ("changed: read again" in at_work.device.log()) == (change == "replaced")
    assert first_update == expected_bits(tmp_path, TABLE, flat, first)
    assert second_update == expected_bits(tmp_path, TABLE, flat, second)


@pytest.mark.slow
def test_what_looks_wrong_in_new_samples_is_heard_before_their_update(tmp_path, broker, flat):
    """The findings are those of the samples that the update comes from, while it is still on its
    way.
    """
    x, y = content(50, 0)
    summary = summarise(make_dataset("test.npz", x.reshape(len(y), -1), y))
    contract = TABULAR.model_copy(update={"summary": summary})
    write(tmp_path, table(COLUMNS, 0))
    with board(tmp_path, broker.url, flat, TABLE) as at_work:
        server = at_work.server
        server.script.acknowledge = False
        at_work.offer(contract, "t1", train=LONG)
        at_work.device.wait_log("epoch 1/")
        assert server.profiles[-1].findings is None
        rename(tmp_path, table(COLUMNS[::-1], 7, factor=100))
        server.wait_message(Done, "t1")
        assert server.profiles[-1].findings is not None
        assert server.profiles[-1].findings[0].startswith("values range from ")
        assert at_work.device.log().count(LOOKS_WRONG) == len(server.profiles[-1].findings)
