"""The contract of a fleet's data: labels and columns are matched by name, and what does not fit is
named.
"""

import re
import time
from dataclasses import replace

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from fleet_protocol.data import DataConfig, load_data, make_dataset
from fleet_protocol.data.contract import complete_contract, reconcile
from fleet_protocol.data.facts import SourceFacts
from fleet_protocol.data.label_order import check_own_labels
from fleet_protocol.data.terms import CONTRACT_FILE, ContractTerms, DataContract, read_contract
from fleet_protocol.errors import ConfigError, DataError, MismatchError
from fleet_protocol.manifest import Manifest
from fleet_protocol.recipe_spec import LossSpec, OptimizerSpec, RecipeSpec

CONFIG = TypeAdapter(DataConfig)
COLUMNS = ("a", "b", "c")


def table(folder, text, **keys):
    """A table as a board reads it."""
    path = folder / f"{len([*folder.iterdir()])}.csv"
    path.write_text(text)
    return load_data(CONFIG.validate_python({"kind": "csv", "path": path, **keys}))


def labelled(*names, said=False, y=(0, 1, 1)):
    """Three samples whose labels have names."""
    data = make_dataset("board", np.zeros((3, 2), np.float32), np.array(y))
    return replace(data, facts=SourceFacts(labels=names, labels_said=said))


def test_labels_are_numbered_by_name():
    """A board that lacks a class, or names them in another order, gets the numbers of the fleet."""
    contract = DataContract(labels=("ant", "bee", "cat"))
    assert reconcile(labelled("bee", "cat"), contract).y.tolist() == [1, 2, 2]
    assert reconcile(
        labelled("cat", "bee", "ant", said=True, y=(0, 1, 2)), contract
    ).y.tolist() == [2, 1, 0]
    assert reconcile(labelled("ant", "bee"), contract).label_names == contract.labels
    same = labelled("ant", "bee", "cat")
    assert reconcile(same, contract).y is same.y


def test_a_label_that_the_fleet_lacks_is_refused_by_name():
    """Only a name that samples have counts: one that is said and has no sample does no harm."""
    contract = DataContract(labels=("ant", "bee"))
    with pytest.raises(
        MismatchError, match="board has the label 'dog', which is not a label of the fleet"
    ):
        reconcile(labelled("ant", "dog"), contract)
    assert reconcile(labelled("bee", "ant", "dog", said=True), contract).y.tolist() == [1, 0, 0]


def test_a_numbering_that_nobody_has_said_is_refused():
    """Without names in the fleet a board would number its folders for itself."""
    for contract in (None, DataContract(), DataContract(columns=COLUMNS)):
        with pytest.raises(MismatchError, match="nothing sets their order") as refusal:
            reconcile(labelled("ant", "bee"), contract)
        server, board = map(
            str(refusal.value).index, ("[contract] of fleet.toml", "[data] of every device.toml")
        )
        assert server < board
        assert 'labels = ["<name of label 0>", "<name of label 1>", ...]' in str(refusal.value)
        assert '"ant"' not in str(
            refusal.value
        )  # a line to copy would number them as this board does
    assert reconcile(labelled("ant", "bee", said=True), None).y.tolist() == [0, 1, 1]
    assert reconcile(labelled("ant", "bee"), None, own_labels=True).y.tolist() == [0, 1, 1]


def test_a_board_names_as_many_labels_as_the_model_has(tmp_path):
    """Without a contract a board that says only its own folders numbers them as nobody else
    does.
    """
    recipe = RecipeSpec(optimizer=OptimizerSpec(name="sgd"), loss=LossSpec())
    manifest = Manifest.model_construct(arch="mlp", tier="b3", classes=3, recipe=recipe)
    own = reconcile(labelled("ant", "bee", said=True), None)
    with pytest.raises(
        MismatchError, match=r"names 2 labels for board \(ant, bee\), but mlp b3 has 3 classes"
    ):
        check_own_labels(own, manifest)
    check_own_labels(reconcile(labelled("ant", "bee", "cat", said=True), None), manifest)
    check_own_labels(
        reconcile(labelled("ant", "bee", said=True), DataContract(labels=("ant", "bee"))), manifest
    )


def test_labels_that_do_not_count_stay():
    """A negative label is none, whatever the order of the names."""
    data = replace(labelled("bee", "ant", y=(0, 1, 1)), y=np.array([0, -1, 1]))
    assert reconcile(data, DataContract(labels=("ant", "bee"))).y.tolist() == [1, -1, 0]


def test_numbers_as_labels_meet_names_that_are_numbers_out_of_place():
    """Whether label 2 is the third name, or the name "2", cannot be known; in order they are the
    same.
    """
    plain = make_dataset("d.npz", np.zeros((3, 2), np.float32), np.array([0, 1, 2]))
    ordered = DataContract(labels=tuple(map(str, range(12))))
    assert reconcile(plain, ordered).y.tolist() == [0, 1, 2]
    assert reconcile(plain, DataContract(labels=("ant", "bee", "cat"))).y.tolist() == [0, 1, 2]
    with pytest.raises(
        MismatchError,
        match=r"d\.npz has numbers as labels.*0, 1, 10, 11.*their meaning is ambiguous",
    ):
        reconcile(plain, DataContract(labels=tuple(sorted(ordered.labels))))


@pytest.mark.parametrize("header", [True, False])
def test_numbers_in_a_table_have_names_or_are_refused(tmp_path, header):
    """The fleet's order need not be that of a board's codes: only the board's own `labels` says
    which is which.
    """
    text = "a,label\n" * header + "1,0\n2,1\n"
    keys = {"header": header, "label_column": 1}
    contract = DataContract(labels=("benign", "malignant"))
    with pytest.raises(
        MismatchError, match=r"\.csv has numbers as labels.*names \(benign, malignant\)"
    ) as refusal:
        reconcile(table(tmp_path, text, **keys), contract)
    assert 'device.toml, labels = ["<name of label 0>", "<name of label 1>", ...], with' in str(
        refusal.value
    )
    named = table(tmp_path, text, labels=["malignant", "benign"], **keys)
    assert reconcile(named, contract).y.tolist() == [1, 0]
    assert reconcile(table(tmp_path, text, **keys), DataContract(labels=("0", "1"))).y.tolist() == [
        0,
        1,
    ]
    assert reconcile(table(tmp_path, text, **keys), DataContract()).y.tolist() == [0, 1]
    with pytest.raises(MismatchError, match="has numbers as labels"):
        reconcile(table(tmp_path, text, **keys), DataContract(labels=("1", "2")))


def test_several_numbers_of_a_sample_are_no_labels_with_names(tmp_path):
    """Each column of `label_columns` holds or does not, in the order in which the board says
    them.
    """
    data = table(tmp_path, "a,b,c\n1,0,1\n", label_columns=["b", "c"])
    assert reconcile(data, DataContract(labels=("b", "c"))).y.tolist() == [[0, 1]]


def test_columns_are_picked_and_ordered_by_name(tmp_path):
    """Another order, further columns, and an index column of pandas change nothing; mean and std go
    along.
    """
    contract = DataContract(columns=COLUMNS)
    data = table(tmp_path, ",c,label,b,x,a\n0,3,1,2,9,1\n1,30,0,20,9,10\n", mean=[7, 3, 2, 9, 1])
    found = reconcile(data, contract)
    assert found.x.tolist() == [[1, 2, 3], [10, 20, 30]]
    assert found.batch(slice(None), "float32")[0][0].tolist() == [0, 0, 0]
    assert found.column_names == COLUMNS
    assert found.y.tolist() == [1, 0]


def test_columns_laid_out_as_an_image_are_ordered_too(tmp_path):
    """Before they have the shape of a sample their names decide."""
    data = table(tmp_path, "d,c,b,a,label\n4,3,2,1,0\n", shape=[1, 2, 2])
    found = reconcile(data, DataContract(columns=("a", "b", "c", "d")))
    assert found.x.tolist() == [[[[1, 2], [3, 4]]]]
    further = table(tmp_path, "d,c,b,a,label\n4,3,2,1,0\n", shape=[1, 2, 2])
    with pytest.raises(MismatchError, match=r'reads them by position: set columns = \["a", "b"\]'):
        reconcile(further, DataContract(columns=("a", "b")))


def test_columns_that_a_function_took_by_place_must_stand_right(tmp_path):
    """A function among `transforms` has had them in the order of the file."""
    (tmp_path / "own.py").write_text("def same(x):\n    return x\n")
    keys = {"transforms": [f"{tmp_path}/own.py:same"]}
    contract = DataContract(columns=("a", "b"))
    with pytest.raises(MismatchError, match=r'set columns = \["a", "b"\]'):
        reconcile(table(tmp_path, "b,a,label\n1,2,0\n", **keys), contract)
    said = table(tmp_path, "b,a,label\n1,2,0\n", columns=["a", "b"], **keys)
    assert reconcile(said, contract).x.tolist() == [[2, 1]]


def test_a_missing_column_is_refused_by_name(tmp_path):
    """The board's file, the column, and what the file has."""
    with pytest.raises(
        MismatchError,
        match=r"0\.csv has no column 'c', which the fleet's model reads \(it has a, b\)",
    ):
        reconcile(table(tmp_path, "a,b,label\n1,2,0\n"), DataContract(columns=COLUMNS))


@pytest.mark.parametrize(
    ("mean", "message"),
    [
        (
            [1, 2, 3],
            r"0\.csv lacks a column: it has the 2 columns a, b, and \[data\] mean has 3 val",
        ),
        (
            [1],
            r"0\.csv has further columns: it has the 2 columns a, b, and \[data\] mean has 1 val",
        ),
    ],
)
def test_a_mean_for_other_columns_names_those_of_the_table(tmp_path, mean, message):
    """Before the fleet's model is known."""
    with pytest.raises(DataError, match=message) as refusal:
        table(tmp_path, "a,b,label\n1,2,0\n", mean=mean)
    assert "channels" not in str(refusal.value)


def test_a_missing_column_says_where_to_look(tmp_path):
    """`columns` is the remedy only where the board's own leaves it out; a name in another case is
    pointed at.
    """
    text = "a,B,label\n1,2,0\n"
    contract = DataContract(columns=("a", "B"))
    with pytest.raises(
        MismatchError,
        match=r"the file has it, and `columns` in \[data\] of device.toml leaves it out",
    ):
        reconcile(table(tmp_path, text, columns=["a"]), contract)
    for keys in ({}, {"columns": ["a"]}):
        with pytest.raises(
            MismatchError, match="'B' is spelled differently: rename it in the file to 'b'"
        ) as refusal:
            reconcile(table(tmp_path, text, **keys), DataContract(columns=("a", "b")))
        assert "`columns`" not in str(refusal.value)
    with pytest.raises(MismatchError, match="add it to the file, or rename the column") as refusal:
        reconcile(table(tmp_path, text, columns=["a"]), DataContract(columns=("a", "c")))
    assert "`columns`" not in str(refusal.value)


@pytest.mark.parametrize(
    ("own", "fleet", "remedy"),
    [
        (
            (3, 8, 8),
            (1, 8, 8),
            "for a folder of images, set channels = 1 in [data]; otherwise, change",
        ),
        ((3, 9, 8), (3, 8, 8), "for a folder of images, set size = [8, 8] in [data]"),
        (
            (3, 9, 8),
            (1, 8, 8),
            "for a folder of images, set channels = 1 and size = [8, 8] in [data]",
        ),
        ((3, 8, 8), (6, 8, 8), ": change the samples with a function in `transforms` of [data]"),
        ((64,), (1, 8, 8), "set shape = [1, 8, 8] in [data]"),
        ((4,), (3,), "for a table, name the 3 to use as `columns` in [data]"),
        ((3,), (4,), "for a table, add the missing columns, so that there are 4"),
        ((3, 4), (5,), ": change the samples with a function in `transforms` of [data]"),
    ],
)
def test_another_shape_than_the_fleets_is_refused(own, fleet, remedy):
    """Before anything is fetched, with the key that can change it; nothing is known without samples
    of the server.
    """
    contract = complete_contract(make_dataset("server", np.zeros((3, *fleet)), np.arange(3)))
    board = make_dataset("board", np.zeros((3, *own)), np.arange(3))
    with pytest.raises(
        MismatchError, match=re.escape(f"samples in board have shape {[*own]}, ")
    ) as refusal:
        reconcile(board, contract)
    assert remedy in str(refusal.value)
    assert reconcile(board, DataContract(labels=("a", "b", "c"))).x is board.x


def test_inputs_that_a_model_lays_flat_have_any_shape():
    """Of a model of several inputs the server knows the number of values alone."""
    contract = complete_contract(make_dataset("server", np.zeros((3, 12)), np.arange(3)))
    board = make_dataset("board", np.zeros((3, 3, 4)), np.arange(3))
    assert reconcile(board, contract).x is board.x


@pytest.mark.parametrize("title", ["", " ", "Unnamed: 0"])
def test_a_column_without_a_name_is_refused_unless_columns_are_named(tmp_path, title):
    """It is an index as pandas writes it: a model would learn the order of the lines."""
    text = f"{title},a,b,label\n0,1,2,0\n1,3,4,1\n"
    with pytest.raises(MismatchError, match=r'column 0 of .* has no name.*columns = \["a", "b"\]'):
        reconcile(table(tmp_path, text), None)
    with pytest.raises(MismatchError, match="has no name"):
        complete_contract(table(tmp_path, text))
    chosen = table(tmp_path, text, columns=["a", "b"])
    assert reconcile(chosen, None).x.tolist() == [[1, 2], [3, 4]]


def test_what_stands_for_missing_values_is_the_fleets(tmp_path):
    """A board that puts another number there, or any where the fleet has no rule, is refused."""
    data = table(tmp_path, "a,b,label\n1,,0\n", missing=-1)
    assert data.x.tolist() == [[1, -1]]
    with pytest.raises(
        MismatchError, match=r"and the fleet uses 0: set missing = 0 in \[data\] of device"
    ):
        reconcile(data, DataContract(columns=("a", "b"), missing=0))
    with pytest.raises(
        MismatchError, match=r"set missing = -1 in \[evaluation\.data\] or \[contract\] of fleet"
    ):
        reconcile(data, DataContract(columns=("a", "b")))
    assert reconcile(data, DataContract(columns=("a", "b"), missing=-1)).x.tolist() == [[1, -1]]


def test_tokens_lie_below_the_bound():
    """Beyond the vocabulary the lookup of a graph fails in the middle of a step."""
    data = make_dataset("text", np.array([[0, 4], [7, 2]]), np.array([0, 1]))
    assert reconcile(data, DataContract(tokens=8)) is data
    with pytest.raises(
        MismatchError, match="sample 1 in text has the token 7, and the fleet's vocabulary has 7"
    ):
        reconcile(data, DataContract(tokens=7))


def test_values_lie_in_the_range_that_is_said():
    """As the model sees them: pixels of 0 to 255 need a scale."""
    pixels = make_dataset("pixels", np.array([[0.0, 255.0]]), np.array([0]))
    with pytest.raises(
        MismatchError, match=r"values in pixels range from 0 to 255 .* from 0 to 1: set `scale`"
    ):
        reconcile(pixels, DataContract(range=(0, 1)))
    scaled = replace(pixels, scale=1 / 255)
    assert reconcile(scaled, DataContract(range=(0, 1))) is scaled


def test_a_servers_samples_make_the_contract(tmp_path):
    """Names and a summary; what is said beforehand stays."""
    data = table(tmp_path, "b,a,label\n1,2,no\n3,5,yes\n")
    contract = complete_contract(data)
    assert (contract.labels, contract.columns) == (("no", "yes"), ("b", "a"))
    assert contract.summary.highest == (3.0, 5.0)
    terms = ContractTerms(labels=("yes", "no"), columns=("a",))
    assert complete_contract(reconcile(data, terms), terms).labels == ("yes", "no")
    again = DataContract.model_validate_json(contract.to_bytes())
    assert again == contract


def test_names_that_cannot_travel_are_refused(tmp_path):
    """Twice the same, endless, too many, or not to be printed."""
    for names in (
        ("a", "a"),
        ("a" * 201,),
        ("a\n",),
        ("",),
        tuple(f"{i:0100}" for i in range(1000)),
    ):
        with pytest.raises(ValidationError):
            DataContract(labels=names)
    data = labelled(*(f"{i:0100}" for i in range(1000)))
    with pytest.raises(
        ConfigError, match="board: the names: Value error, the names of labels and columns take"
    ):
        complete_contract(data)
    assert read_contract(tmp_path) is None
    (tmp_path / CONTRACT_FILE).write_text("{")
    assert read_contract(tmp_path) is None


def test_many_names_are_refused_before_they_are_compared():
    """Their size is looked at first, and equal ones are found in one pass."""
    began = time.monotonic()
    with pytest.raises(ValidationError, match="the names of labels and columns take "):
        ContractTerms(labels=[f"n{number}" for number in range(100_000)] * 2)
    with pytest.raises(ValidationError, match="labels has the name 'n9999' twice"):
        ContractTerms(labels=[*(f"n{number}" for number in range(7000)), "n9999", "n9999"])
    assert time.monotonic() - began < 2
