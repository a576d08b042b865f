"""The contract of a run: what `[contract]` and the test sets say, and what happens where they
disagree.
"""

import json
import logging

import numpy as np
import pytest
from PIL import Image

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.evaluators import open_evaluators, open_test_sets
from broker_server.rounds.run_context import prepare_run
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import ConfigError, MismatchError
from models.registry import Registry, infer_layout
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

NAMES = ["ant", "bee", "cat"]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A small network over six columns with three classes."""
    folder = tmp_path_factory.mktemp("contracts")
    architecture = Registry.zoo().get("mlp")
    settings = architecture.settings({"input_shape": (6,), "hidden": (4,), "classes": 3})
    tiers = (infer_layout(architecture, settings).tier(1.0),)
    export_architecture(
        ExportRequest(architecture, settings, tiers, Recipe()),
        folder,
        ExportOptions(formats=("onnx",)),
    )
    return folder


@pytest.fixture
def opened(artifacts, tmp_path):
    """The evaluators of a run with these tables."""

    def build(data, contract=None):
        config = fleet(tmp_path, artifacts, data, contract)
        loaded = load_artifacts(artifacts, "mlp", chunk_bytes=1024)
        return open_evaluators(prepare_run("run", config, loaded))

    return build


def fleet(folder, artifacts, data, contract=None):
    return FleetConfig.model_validate(
        {
            "fleet": "lab",
            "store": folder / "store",
            "model": {"artifacts": artifacts, "arch": "mlp"},
            "evaluation": {"data": data},
            "contract": contract,
        }
    )


def table(folder, labels, names="abcdef", **keys):
    lines = [",".join([*names, "label"])]
    lines += [",".join([*map(str, range(6)), label]) for label in labels]
    path = folder / f"{len([*folder.iterdir()])}.csv"
    path.write_text("\n".join(lines))
    return {"kind": "csv", "path": path, **keys}


def only(evaluators):
    (contract,) = evaluators.contracts.values()
    return contract


def test_the_test_set_says_names_and_how_values_look(opened, tmp_path):
    """Labels sorted by name, columns as they stand."""
    contract = only(opened(table(tmp_path, ["cat", "ant", "bee"])))
    assert (contract.labels, contract.columns) == (tuple(NAMES), tuple("abcdef"))
    assert contract.summary.highest == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)


def test_images_without_names_of_columns(opened, tmp_path):
    """Folders that a system has put there are no labels."""
    for name in (*NAMES, ".hidden", "@eaDir"):
        (tmp_path / "img" / name).mkdir(parents=True)
        Image.new("L", (6, 1), 9).save(tmp_path / "img" / name / "1.png")
    data = {"kind": "images", "path": tmp_path / "img", "channels": 1, "shape": [6]}
    contract = only(opened(data))
    assert (contract.labels, contract.columns) == (tuple(NAMES), ())


def test_the_table_wins_and_the_test_set_follows_by_name(opened, tmp_path):
    """Another order of both, and a further column of the file."""
    said = {"labels": ["cat", "bee", "ant"], "columns": [*"fedcba"]}
    evaluators = opened(table(tmp_path, ["ant", "cat"]), said)
    judged = evaluators.judged.data
    assert judged.y.tolist() == [2, 0]
    assert judged.x[0].tolist() == [5, 4, 3, 2, 1, 0]
    assert only(evaluators).labels == ("cat", "bee", "ant")
    lines = ["x,a,b,c,d,e,f,label", "9,0,1,2,3,4,5,ant"]
    (tmp_path / "more.csv").write_text("\n".join(lines))
    more = opened({"kind": "csv", "path": tmp_path / "more.csv"}, said)
    assert more.judged.data.x[0].tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (
            {"labels": ["ant", "bee"]},
            r"\.csv and \[contract\] of fleet\.toml.* disagree: .*\.csv has the label 'cat'",
        ),
        ({"columns": ["a", "z"]}, r"\[contract\] of fleet\.toml.*no column 'z'"),
        ({"range": [0, 1]}, r"\[contract\] of fleet\.toml.*range from 0 to 5 .* from 0 to 1"),
        (
            {"missing": 1},
            r"\[contract\] missing = 1 of fleet\.toml and missing = 0 of the test set .* disagree",
        ),
        ({"labels": [*NAMES, "dog"]}, r"has 4 names for labels .* has 3 classes"),
    ],
)
def test_a_disagreement_names_both(opened, tmp_path, contract, message):
    """A run that begins with one of two meanings would be wrong in silence."""
    with pytest.raises(ConfigError, match=message):
        opened(table(tmp_path, ["cat", "ant"], missing=0), contract)


def test_names_that_the_test_set_lacks_are_warned_of(opened, tmp_path, caplog):
    """Boards with the class would be refused: say all of them."""
    with caplog.at_level(logging.WARNING):
        opened(table(tmp_path, ["cat", "ant"]))
    assert "names 2 labels, and mlp has 3 classes" in caplog.text


def test_a_column_without_a_name_is_refused(opened, tmp_path):
    """As for a board."""
    with pytest.raises(MismatchError, match=r"column 0 of .* has no name"):
        opened(table(tmp_path, NAMES, ["", *"bcdef"]))


def test_arrays_have_no_names(opened, tmp_path):
    """Labels and columns may be said for them; else the contract has a summary alone."""
    np.savez(tmp_path / "d.npz", x=np.zeros((3, 6), np.float32), y=[0, 1, 2])
    data = {"kind": "npz", "path": tmp_path / "d.npz"}
    contract = only(opened(data))
    assert (
        contract.to_bytes()
        == json.dumps(
            {"labels": [], "columns": [], "summary": json.loads(contract.summary.to_bytes())},
            separators=(",", ":"),
        ).encode()
    )
    assert only(opened(data, {"labels": NAMES})).labels == tuple(NAMES)
    with pytest.raises(ConfigError, match="numbers as labels"):
        opened(data, {"labels": ["1", "2", "0"]})


def test_a_table_of_the_server_with_numbers_says_their_names(opened, tmp_path):
    """As a board does, in the server's own table."""
    numbers = table(tmp_path, ["2", "0"])
    with pytest.raises(
        ConfigError,
        match=r"numbers as labels.* in \[evaluation\.data\] of fleet\.toml, labels = \[",
    ):
        opened(numbers, {"labels": NAMES})
    judged = opened({**numbers, "labels": ["cat", "bee", "ant"]}, {"labels": NAMES}).judged
    assert judged.data.y.tolist() == [0, 2]


def test_without_a_test_set_the_table_alone_is_told(artifacts, opened):
    """And nothing where there is none."""
    assert opened(None).contracts == {}
    assert only(opened(None, {"labels": NAMES})).labels == tuple(NAMES)


def test_a_run_keeps_the_names_that_it_began_with(artifacts, opened, tmp_path):
    """A class that the test set has got since would move the others."""
    begun = opened(table(tmp_path, ["bee", "cat"]))
    stored = fleet(tmp_path, artifacts, None, begun.terms.model_dump())
    now = fleet(tmp_path, artifacts, None)
    assert now.differing_settings(stored.model_dump_json()) == []
    with pytest.raises(
        ConfigError, match=r"the names with which the run began, disagree: .* has the label 'ant'"
    ):
        opened(table(tmp_path, NAMES), begun.terms.model_dump())
    moved = opened(table(tmp_path, ["cat", "bee"], "fedcba"), begun.terms.model_dump())
    assert moved.judged.data.y.tolist() == [1, 0]
    assert moved.judged.data.column_names == tuple("abcdef")


def test_boards_labels_are_open_unless_a_contract_names_them(artifacts, tmp_path):
    """A summary alone says nothing of names."""
    np.savez(tmp_path / "d.npz", x=np.zeros((3, 6), np.float32), y=[0, 1, 2])
    data = {"kind": "npz", "path": tmp_path / "d.npz"}
    loaded = load_artifacts(artifacts, "mlp", chunk_bytes=1024)
    for said, is_open in ((None, True), ({"range": [0, 1]}, True), ({"labels": NAMES}, False)):
        context, _ = open_test_sets(
            prepare_run("run", fleet(tmp_path, artifacts, data, said), loaded)
        )
        assert context.open_labels is is_open


WORDS = """
from torch import nn
from shoal import Cut, architecture


class Words(nn.Module):
    def __init__(self, words, width, classes):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.table(x).mean(1))


@architecture(input_dtype="int64")
def words(cut: Cut, *, input_shape: tuple[int] = (6,), classes: int = 3, entries: int = 40):
    return Words(entries, cut.width("width", 4), cut.classes(classes))
"""


def test_the_vocabulary_is_that_of_the_models_table(tmp_path):
    """Whatever its setting is called; a test set beyond it is refused before a graph runs on it."""
    (tmp_path / "words.py").write_text(WORDS)
    architecture = Registry.zoo().with_file(tmp_path / "words.py").get("words")
    settings = architecture.settings({})
    tiers = (infer_layout(architecture, settings).tier(1.0),)
    out = tmp_path / "artifacts"
    export_architecture(
        ExportRequest(architecture, settings, tiers, Recipe()),
        out,
        ExportOptions(formats=("onnx",)),
    )
    loaded = load_artifacts(out, "words", chunk_bytes=1024)
    x = np.arange(18).reshape(3, 6)
    np.savez(tmp_path / "d.npz", x=x, y=[0, 1, 2])
    config = fleet(tmp_path, out, {"kind": "npz", "path": tmp_path / "d.npz"})
    config = config.model_copy(update={"model": config.model.model_copy(update={"arch": "words"})})
    assert only(open_evaluators(prepare_run("run", config, loaded))).tokens == 40
    np.savez(tmp_path / "d.npz", x=x + 30, y=[0, 1, 2])
    with pytest.raises(ConfigError, match=r"sample 1 .* has the token 40, and .*vocabulary has"):
        open_evaluators(prepare_run("run", config, loaded))


def test_what_looks_wrong_in_the_test_set_is_found(opened, tmp_path):
    """Labels from 1 for a model of three, of which none is 0; and a mark for missing values."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 6)).astype(np.float32)
    np.savez(tmp_path / "plain.npz", x=x, y=np.arange(60) % 3)
    assert opened({"kind": "npz", "path": tmp_path / "plain.npz"}).findings == ()
    x[::6, 2] = -999
    np.savez(tmp_path / "odd.npz", x=x, y=np.arange(60) % 2 + 1)
    mark, labels = opened({"kind": "npz", "path": tmp_path / "odd.npz"}).findings
    assert "column 2 is -999 in 10 of 60 examined samples" in mark
    assert "no sample has the label 0" in labels
