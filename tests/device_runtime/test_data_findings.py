"""What looks wrong in a board's data: in its log and profile before it accepts an offer, and in
`doctor`.
"""

import contextlib
import json

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from device_runtime.doctor import examine
from fleet_protocol.data import CsvData, load_data, make_dataset
from fleet_protocol.data.contract import complete_contract
from fleet_protocol.data.facts import SourceFacts
from fleet_protocol.data.summary import summarise
from fleet_protocol.data.terms import CONTRACT_FILE, DataContract
from fleet_protocol.messages import Accept, Refuse
from tests.brokers import any_broker, free_port
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.scripted_server import scripted_server
from tests.device_runtime.tiny_set import initial_weights, samples, write_tiny_set

LOGGED = "possible fault in the data: values range from"
NAMES = [f"f{number}" for number in range(30)]


@contextlib.contextmanager
def running(tmp_path, tiny, x, y, **options):
    """A board with these samples, and a server that offers what a test says."""
    np.savez(tmp_path / "data.npz", x=x, y=y)
    with any_broker(tmp_path) as broker, scripted_server(broker.url, tiny.blobs) as server:
        device = DeviceProcess(tmp_path, broker.url, {"kind": "npz", "path": "data.npz"}, **options)
        device.start()
        try:
            yield server, device
        finally:
            device.kill()


@pytest.fixture
def tiny(tmp_path):
    return write_tiny_set(tmp_path / "tiny")


def test_findings_are_told_before_the_offer_is_accepted(tmp_path, tiny):
    """Once for each change: with the contract of an offer, from the kept one after a start, no
    longer without one.
    """
    x, y = samples(50)
    contract = DataContract(summary=summarise(make_dataset("test.npz", x, y)))
    choice = tiny.choice(initial_weights())
    with running(tmp_path, tiny, x * 255, y) as (server, device):
        server.wait_state("idle")
        assert [profile.findings for profile in server.profiles] == [None]
        server.offer("pi-1", choice, contract=contract)
        server.wait_message(Accept, "t1")
        (finding,) = server.profiles[-1].findings
        assert finding.startswith("values range from -")
        assert "(their deviation is 255 times larger)" in finding
        server.wait_update("t1")
        server.offer("pi-1", choice, task="t2", contract=contract)
        server.wait_update("t2")
        assert device.log().count(LOGGED) == 1
        assert {profile.findings for profile in server.profiles} == {None, (finding,)}
        device.terminate()

        told = len(server.profiles)
        device.start()
        server.wait(lambda: len(server.profiles) > told, what="profile")
        assert server.profiles[told].findings == (finding,)
        server.offer("pi-1", choice, task="t3")
        server.wait_message(Accept, "t3")
        assert server.profiles[-1].findings is None


def test_a_board_may_keep_its_findings(tmp_path, tiny):
    """With report_data = false they stand in its own log alone."""
    x, y = samples(50)
    contract = DataContract(summary=summarise(make_dataset("test.npz", x, y)))
    choice = tiny.choice(initial_weights())
    with running(tmp_path, tiny, x * 255, y, report_data=False) as (server, device):
        server.wait_state("idle")
        server.offer("pi-1", choice, contract=contract)
        server.wait_message(Accept, "t1")
        device.wait_log(LOGGED)
        assert {profile.findings for profile in server.profiles} == {None}


# The doctor.


def rows_of(table):
    return [",".join(map(str, row)) for row in table]


@pytest.fixture
def board(tmp_path):
    """What the doctor says of a table; the fleet's contract is that of a test set, unless there is
    none.
    """
    bunch = load_breast_cancer()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    x = bunch.data[order]
    y = bunch.target[order]
    test = tmp_path / "test.csv"
    test.write_text(
        "\n".join(
            [
                ",".join([*NAMES, "label"]),
                *rows_of([[*a, b] for a, b in zip(x[:113], y[:113], strict=True)]),
            ]
        )
    )
    train = order[113:]
    train = train[
        np.argsort(bunch.target[train], kind="stable")
    ]  # as df.sort_values("label") leaves it

    def look(head, row_of, settings="", *, contract=True):
        (tmp_path / "state").mkdir(exist_ok=True)
        if contract:
            kept = complete_contract(load_data(CsvData(path=test)))
            (tmp_path / "state" / CONTRACT_FILE).write_bytes(kept.to_bytes())
        lines = rows_of(row_of(place, [*bunch.data[place]], bunch.target[place]) for place in train)
        (tmp_path / "attic.csv").write_text(
            "\n".join([*([",".join(head)] if head else []), *lines]) + "\n"
        )
        keys = {
            "fleet": "tab",
            "device": "attic",
            "broker": f"mqtt://127.0.0.1:{free_port()}",
            "state_dir": "state",
        }
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        config = tmp_path / "device.toml"
        config.write_text(f'{text}[data]\nkind = "csv"\npath = "attic.csv"\n{settings}')
        return next(found for found in examine(config) if found.check == "data")

    return look


@pytest.mark.parametrize("contract", [True, False])
def test_a_plain_table(board, contract):
    """With and without a contract nothing looks wrong."""
    found = board([*NAMES, "label"], lambda _, row, label: [*row, label], contract=contract)
    assert (found.level, found.detail[:29]) == ("ok", "456 samples of shape (30,) in")


def test_columns_in_another_order_by_name(board):
    """Are put into the fleet's, and nothing looks wrong."""
    found = board([*NAMES[::-1], "label"], lambda _, row, label: [*row[::-1], label])
    assert found.level == "ok", found


def test_columns_in_another_order_without_names(board):
    """Are seen by their figures, where those differ."""
    found = board(
        None, lambda _, row, label: [*row[::-1], label], "header = false\nlabel_column = 30\n"
    )
    assert found.level == "warning", found
    assert "Columns are in a different order from the fleet's: column " in found.detail
    plain = board(None, lambda _, row, label: [*row, label], "header = false\nlabel_column = 30\n")
    assert plain.level == "ok", plain


def test_the_label_twice(board):
    """As after a merge: under the same name it is refused, under another it determines the label.

    Where the fleet says the columns by name, no model reads it.
    """

    def row_of(_, row, label):
        return [label, *row, label]

    twice = board(["label", *NAMES, "label"], row_of, contract=False)
    assert twice.level == "failed", twice
    again = board(["label_x", *NAMES, "label"], row_of, contract=False)
    assert again.level == "warning", again
    assert "Column 'label_x' determines the label in all 456 examined samples" in again.detail
    assert board(["label_x", *NAMES, "label"], row_of).level == "ok"


@pytest.mark.parametrize("name", ["", "id"])
def test_an_index_column(board, name):
    """Shuffled as it is, it numbers the samples; without a name it is refused before that."""
    head = [name, *NAMES, "label"]
    found = board(head, lambda place, row, label: [place, *row, label], contract=False)
    assert found.level == "warning", found
    expected = (
        "column 0 of"
        if name == ""
        else "Column 'id' numbers the samples (456 different whole numbers"
    )
    assert expected in found.detail


def test_a_sensor_that_is_stuck(board):
    """Is named with its value; so is a column in another unit."""
    found = board([*NAMES, "label"], lambda _, row, label: [*row[:4], 17.5, *row[5:], label])
    assert found.level == "warning", found
    assert "Column 'f4' is 17.5 in all 456 examined samples" in found.detail
    found = board(
        [*NAMES, "label"], lambda _, row, label: [*row[:3], row[3] * 1000, *row[4:], label]
    )
    assert "Column 'f3' ranges from " in found.detail


def test_a_board_tells_its_own_labels_and_refuses_a_model_with_more(tmp_path, tiny):
    """Names of two labels cannot be those of a model of more; the server gets their digest to
    compare.
    """
    x, y = samples(50)
    rows = [
        ",".join(map(str, [*pixels.ravel(), label % 2])) for pixels, label in zip(x, y, strict=True)
    ]
    (tmp_path / "data.csv").write_text("\n".join(rows))
    table = {
        "kind": "csv",
        "path": "data.csv",
        "header": False,
        "label_column": -1,
        "shape": [*x.shape[1:]],
    }
    labels = ("odd", "even")
    with any_broker(tmp_path) as broker, scripted_server(broker.url, tiny.blobs) as server:
        device = DeviceProcess(tmp_path, broker.url, {**table, "labels": [*labels]})
        device.start()
        try:
            server.wait_state("idle")
            digest = SourceFacts(labels=labels, labels_said=True).labels_digest
            assert [profile.labels_digest for profile in server.profiles] == [digest]
            server.offer("pi-1", tiny.choice(initial_weights()))
            refusal = server.wait_message(Refuse, "t1")
        finally:
            device.kill()
    assert refusal.reason.value == "data-mismatch"
    assert "names 2 labels for " in refusal.detail
