"""Tables: names of columns and labels, missing values, and headers that are none."""

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from fleet_protocol.data import DataConfig, load_data
from fleet_protocol.errors import DataError

CONFIG = TypeAdapter(DataConfig)


def load(folder, text, **keys):
    (folder / "d.csv").write_text(text)
    return load_data(CONFIG.validate_python({"kind": "csv", "path": folder / "d.csv", **keys}))


def test_labels_may_be_texts(tmp_path):
    """In the order that is said, else sorted; spaces around them do not count."""
    text = "a,label\n1,no\n2, yes\n3,maybe\n4,no\n"
    data = load(tmp_path, text)
    assert (data.label_names, data.y.tolist()) == (("maybe", "no", "yes"), [1, 2, 0, 1])
    assert not data.facts.labels_said
    said = load(tmp_path, text, labels=["no", "maybe", "yes", "never"])
    assert said.y.tolist() == [0, 2, 1, 0]
    assert said.facts.labels_said
    assert load(tmp_path, "a,label\n1,7\n2,9\n", labels=["9", "7"]).y.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("labels", "said", "message"),
    [
        (["no", "yes", ""], None, "line 4 of .*d.csv has no label"),
        (["0", "1", ""], None, "line 4 of .*d.csv has no label"),
        (["0", "nan"], None, "line 3 of .*d.csv has no label"),
        (["0", "1", "yes"], None, "line 4 of .*d.csv has the label 'yes', expected numbers"),
        (
            ["yes", "1"],
            None,
            r"line 3 of .*d.csv has the label '1', a number, but.*'yes'.*labels = \[\.\.\.\]",
        ),
        (
            ["yes", "no"],
            ["yes"],
            "line 3 of .*d.csv has the label 'no', which `labels` in .* does not list",
        ),
    ],
)
def test_labels_that_are_no_names_are_refused(tmp_path, labels, said, message):
    """Missing ones, and numbers and texts in one column: one of them is a mistake."""
    text = "\n".join(["a,label", *(f"1,{label}" for label in labels)])
    with pytest.raises(DataError, match=message):
        load(tmp_path, text, labels=said)


@pytest.mark.parametrize("gap", ["", " ", "NA", "nan", "NaN", "null", "None", "?", "N/A"])
def test_missing_values_have_a_rule_or_are_refused(tmp_path, gap):
    """The line, the column and the remedy are said; with a rule its number stands there."""
    text = f"a,age,label\n1,2,0\n3,{gap},1\n"
    with pytest.raises(
        DataError, match=r"line 3 of .*d\.csv has no value in column 'age' \(1 such.*set `missing`"
    ):
        load(tmp_path, text)
    data = load(tmp_path, text, missing=-1.5)
    assert (data.x.tolist(), data.facts.filled) == ([[1, 2], [3, -1.5]], -1.5)
    assert load(tmp_path, "a,age,label\n1,2,0\n", missing=-1.5).facts.filled is None
    assert load(tmp_path, text, columns=["a"]).x.tolist() == [[1], [3]]


def test_a_text_among_numbers_is_named(tmp_path):
    """Line, column, what is there, and what to do."""
    with pytest.raises(
        DataError,
        match=r"line 3 of .*: column 'b' contains 'red', expected numbers; correct or remove",
    ):
        load(tmp_path, "a,b,label\n1,2,0\n1,red,0\n")
    with pytest.raises(DataError, match=r"line 1 of .*: column 0 contains 'a'.*set header = true"):
        load(tmp_path, "a,b,label\n1,2,0\n", header=False, label_column=2)


def test_an_underscore_is_no_part_of_a_number(tmp_path):
    """Though Python reads 4_3.5 as 43.5, and labels such as 1_0 would be the number 10."""
    with pytest.raises(DataError, match=r"line 3 of .*: column 'b' contains '4_3.5'.*and a point"):
        load(tmp_path, "a,b,label\n1,2,0\n1,4_3.5,0\n")
    labels = load(tmp_path, "a,label\n1,1_0\n2,0_1\n")
    assert (labels.label_names, labels.y.tolist()) == (("0_1", "1_0"), [1, 0])


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("1.5,2,0\n2.5,3,1\n", {"label_column": 2}),
        ("1.5,2,0\n2.5,3,1\n", {}),
        ("5.1,3.5,setosa\n4.9,3.0,setosa\n", {"label_column": 2}),
        ("5.1,3.5,setosa\n4.9,3.0,virginica\n", {"label_column": -1}),
        ("5.1,NA,0\n4.9,3.0,0\n", {"label_column": -1}),
        ("1.5,2,0\n", {"label_column": 2}),
    ],
)
def test_a_header_that_is_a_sample_is_refused(tmp_path, text, keys):
    """The first sample would be lost without a word."""
    with pytest.raises(
        DataError, match=r"the first line of .*d\.csv contains .*set header = false"
    ):
        load(tmp_path, text, **keys)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("0,1,2\n1.5,2,0\n", {"label_column": 2}),
        (",0,1,2\n0,1.5,2,0\n", {"label_column": 3}),
        ("1990,1991,label\n1,2,0\n", {}),
        ("1990,1991,kind\n1,2,0\n", {"label_column": 2}),
        ("10,20,30\n1,2,0\n", {"label_column": "30"}),
        ("a,b,label\n", {"label_column": 2}),
    ],
)
def test_a_header_of_numbers_may_be_one(tmp_path, text, keys):
    """Columns may be counted, as by pandas; years are names where the label has one."""
    if text.count("\n") == 1:
        with pytest.raises(DataError, match="is empty"):
            load(tmp_path, text, **keys)
    else:
        assert load(tmp_path, text, **keys).y.tolist() == [0]


def test_two_columns_of_one_name_are_refused(tmp_path):
    """Which of them is meant cannot be known; the label a second time is the answer among the
    inputs.
    """
    with pytest.raises(
        DataError, match=r"has 2 columns with the name 'label': rename or remove all but one"
    ):
        load(tmp_path, "label,a,label\n0,1,0\n")
    with pytest.raises(DataError, match="has 2 columns with the name 'a'"):
        load(tmp_path, "a,b,a,label\n0,1,0,1\n")
    assert load(tmp_path, "a,b,a,label\n0,1,0,1\n", columns=["b"]).x.tolist() == [[1]]


def test_labels_name_one_column_alone(tmp_path):
    """Several columns of labels are numbers."""
    with pytest.raises(ValidationError, match="labels applies only to one label_column"):
        load(tmp_path, "a,b,c\n1,2,3\n", label_columns=["a", "b"], labels=["x"])


def test_names_are_kept_in_the_order_of_the_samples(tmp_path):
    """By name or by place; a table without header has none."""
    text = "a, b ,label\n1,2,0\n"
    assert load(tmp_path, text).column_names == ("a", "b")
    chosen = load(tmp_path, text, columns=[1, "a"])
    assert (chosen.column_names, chosen.x.tolist()) == (("b", "a"), [[2, 1]])
    bare = load(tmp_path, "1,2,0\n", header=False, label_column=2)
    assert bare.column_names == ()
    assert bare.y.dtype == np.int64


def test_labels_name_numbers_too(tmp_path):
    """Number i is the name i; names that are numbers stay names, and a number beyond the names is
    refused.
    """
    text = "a,label\n1,0\n2,1.0\n3,1\n"
    data = load(tmp_path, text, labels=["malignant", "benign"])
    assert (data.label_names, data.y.tolist()) == (("malignant", "benign"), [0, 1, 1])
    assert data.facts.labels_said
    for cell in ("2", "-1", "0.5"):
        with pytest.raises(
            DataError, match=rf"line 3 of .*d\.csv has the label {cell}, .*the numbers 0 to 1; name"
        ):
            load(tmp_path, f"a,label\n1,0\n2,{cell}\n", labels=["malignant", "benign"])
    with pytest.raises(
        DataError, match=r"line 3 of .*d\.csv has the label 'benign', expected numbers"
    ):
        load(tmp_path, "a,label\n1,0\n2,benign\n", labels=["malignant", "benign"])
    with pytest.raises(
        DataError, match=r"line 2 of .*d\.csv has the label '0', which `labels` in .* does not list"
    ):
        load(tmp_path, "a,label\n1,0\n2,1\n", labels=["1", "2"])


@pytest.mark.parametrize(
    "content",
    [b"PK\x03\x04" + bytes(300), b"PAR1" + bytes(90) + b"PAR1", b"a,label\n1,0\n2\0,1\n"],
    ids=["workbook", "parquet", "damaged"],
)
def test_a_table_that_is_no_text_is_named_in_one_line(tmp_path, content):
    """The message contained the zero bytes of a workbook, as the names of its columns."""
    (tmp_path / "d.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"d\.csv is not a text table: .*CSV UTF-8") as raised:
        load_data(CONFIG.validate_python({"kind": "csv", "path": tmp_path / "d.csv"}))
    assert "\0" not in str(raised.value)


def test_a_column_that_is_spelt_otherwise_is_suggested(tmp_path):
    with pytest.raises(DataError, match=r"no column 'Weigth' \(did you mean 'weight'\?\)"):
        load(tmp_path, "weight,label\n1,0\n", columns=["Weigth"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"label_columns": ["b", "b"]}, "label_columns lists 'b' 2 times; list it once"),
        ({"label_columns": ["b"], "label_column": "c"}, "both name columns to learn; remove one"),
    ],
)
def test_columns_to_learn_are_named_once(tmp_path, keys, message):
    """The column of label_column would be an input."""
    with pytest.raises(ValidationError, match=message):
        load(tmp_path, "a,b,c\n1,2,3\n", **keys)


def test_a_saved_configuration_with_columns_to_learn_is_read_again(tmp_path):
    """It lists the default of label_column."""
    config = CONFIG.validate_python(
        {"kind": "csv", "path": tmp_path / "d.csv", "label_columns": ["b"]}
    )
    assert CONFIG.validate_json(CONFIG.dump_json(config)) == config
