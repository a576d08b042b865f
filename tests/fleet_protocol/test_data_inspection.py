"""What looks wrong in samples: every finding with a case beside it that must not be one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn import datasets

from fleet_protocol.data import make_dataset
from fleet_protocol.data.comparison import compare, find_problems
from fleet_protocol.data.facts import SourceFacts
from fleet_protocol.data.inspection import inspect
from fleet_protocol.data.summary import summarise

RNG = np.random.default_rng(0)
COUNT = 300
LABELS = RNG.integers(0, 3, COUNT)
TABLE = np.stack(
    [
        RNG.normal(21.0, 3.0, COUNT),
        RNG.normal(0.0, 1.0, COUNT),
        RNG.uniform(900, 1100, COUNT),
        RNG.exponential(5.0, COUNT),
    ],
    axis=1,
).astype(np.float32)
NAMES = ("indoor", "drift", "pressure", "wait")


def data_of(x, y=LABELS, names=(), **settings):
    made = make_dataset("attic.csv", np.asarray(x), np.asarray(y), **settings)
    return replace(made, facts=SourceFacts(columns=names))


def with_column(column, at=1):
    """The table with another column in the place of one."""
    x = TABLE.copy()
    x[:, at] = column
    return x


def kinds(found):
    return [finding.kind for finding in found]


def only(found, kind):
    """The sentence of the only finding."""
    assert kinds(found) == [kind], found
    return found[0].text


# Alone.


def test_a_plain_table_has_no_finding():
    """Nor has one without names, of few samples, or of whole numbers."""
    assert inspect(data_of(TABLE, names=NAMES)) == ()
    assert inspect(data_of(TABLE[:6], LABELS[:6])) == ()
    assert inspect(data_of(np.round(TABLE))) == ()
    assert inspect(data_of(TABLE[:, 0])) == ()


@pytest.mark.parametrize("value", [0.0, 21.5, -999.0])
def test_a_constant_column(value):
    """A sensor that is stuck is named with its value."""
    text = only(inspect(data_of(with_column(value), names=NAMES)), "constant")
    assert text.startswith(f"column 'drift' is {value:g} in all 300 examined samples")


def test_several_constant_columns_are_one_finding():
    """By name or number; of many some are named."""
    x = np.hstack([TABLE, np.full((COUNT, 5), 7.0, np.float32)])
    assert only(inspect(data_of(x)), "constant").startswith(
        "columns 4, 5, 6 and 2 more are 7 in all"
    )


def test_a_constant_column_among_many_of_the_same_value():
    """Is what a picture's margin is, and a flag among flags; the digits have such columns."""
    digits = datasets.load_digits()
    assert (digits.data.min(0) == digits.data.max(0)).any()
    assert inspect(data_of(digits.data, digits.target)) == ()
    flags = (RNG.random((COUNT, 6)) < 0.3).astype(np.float32)
    flags[:, 2] = 0.0
    assert inspect(data_of(flags)) == ()


def test_tokens_begin_alike():
    """A first token that is always the same, and padding, are as they should be."""
    tokens = RNG.integers(5, 900, (COUNT, 12))
    tokens[:, 0] = 2
    tokens[:, -1] = 0
    assert inspect(data_of(tokens)) == ()


@pytest.mark.parametrize(
    "column",
    [
        LABELS,
        LABELS * 2.0 + 1.0,
        np.array([5.0, -1.0, 3.0])[LABELS],
        LABELS + RNG.normal(0, 0.01, COUNT),
    ],
    ids=["itself", "a multiple", "other codes", "with noise"],
)
def test_the_answer_among_the_inputs(column):
    """A column that is the label, or from which it follows."""
    text = only(inspect(data_of(with_column(column), names=NAMES)), "answer")
    assert text.startswith("column 'drift' determines the label in all 300 examined samples")
    assert "leave it out of `columns`" in text


@pytest.mark.parametrize(
    "column",
    [
        np.where(RNG.random(COUNT) < 0.02, 1, LABELS),
        LABELS + RNG.normal(0, 0.1, COUNT),
        np.minimum(LABELS, 1),
        LABELS * 10.0 + RNG.integers(0, 5, COUNT),
    ],
    ids=["nearly", "with much noise", "a part of it", "many values"],
)
def test_a_column_that_goes_with_the_label(column):
    """Is what a model is for."""
    assert inspect(data_of(with_column(column), names=NAMES)) == ()


def test_numbers_that_are_to_be_learnt_among_the_inputs():
    """In another unit; a column that goes with them is none."""
    target = RNG.normal(50.0, 10.0, COUNT)
    assert only(inspect(data_of(with_column(target * 1.8 + 32), target, names=NAMES)), "answer")
    assert (
        inspect(data_of(with_column(target + RNG.normal(0, 2.0, COUNT)), target, names=NAMES)) == ()
    )
    pair = np.stack([RNG.normal(0, 1, COUNT), target], axis=1)
    assert only(inspect(data_of(with_column(-target), pair, names=NAMES)), "answer")


def test_one_label_or_few_samples_say_nothing_of_an_answer():
    """Any column of two values may agree with ten samples, and all with a single label."""
    assert inspect(data_of(TABLE, np.zeros(COUNT, np.int64))) == ()
    few = np.arange(10) % 2
    assert inspect(data_of(np.stack([few, TABLE[:10, 0]], 1).astype(np.float32), few)) == ()


def test_a_language_model_has_its_input_as_target():
    """Which is no answer among the inputs."""
    text = RNG.integers(0, 50, (COUNT, 9))
    assert inspect(data_of(text[:, :-1], text[:, 1:])) == ()


@pytest.mark.parametrize(
    "column",
    [
        np.arange(COUNT),
        np.arange(COUNT) + 1000,
        RNG.permutation(COUNT),
        RNG.choice(3 * COUNT, COUNT, replace=False),
    ],
    ids=["counts", "counts on", "shuffled", "a part of a shuffled one"],
)
def test_a_column_that_numbers_the_samples(column):
    """As an index of pandas does, also after sorting and splitting."""
    text = only(inspect(data_of(with_column(column), names=NAMES)), "index")
    assert text.startswith("column 'drift' numbers the samples (300 different whole numbers from ")
    assert "index=False" in text


def test_the_name_of_an_index_is_enough():
    """The numbers of ten samples of very many."""
    ids = RNG.choice(10**6, 10, replace=False)
    x = np.stack([ids, TABLE[:10, 0]], 1).astype(np.float32)
    for name in ("", "Unnamed: 0", "index"):
        assert only(inspect(data_of(x, LABELS[:10], (name, "indoor"))), "index").startswith(
            f"column {name!r} numbers"
        )
    assert inspect(data_of(x, LABELS[:10], ("income", "indoor"))) == ()


@pytest.mark.parametrize(
    "column",
    [
        RNG.integers(0, 3 * COUNT, COUNT),
        RNG.choice(10**6, COUNT, replace=False),
        np.arange(COUNT) + 0.5,
    ],
    ids=["with repetitions", "far apart", "no whole numbers"],
)
def test_whole_numbers_that_number_nothing(column):
    """Counts repeat themselves, and large numbers differ by chance."""
    assert inspect(data_of(with_column(column), names=NAMES)) == ()


def test_large_data_is_drawn_from():
    """An index and an answer in a million samples are found in some thousand of them."""
    y = np.arange(1_000_000) % 4
    x = np.stack([np.arange(1_000_000), y * 5.0, RNG.normal(0, 1, 1_000_000)], 1).astype(np.float32)
    found = inspect(data_of(x, y))
    assert kinds(found) == ["answer", "index"]
    assert "in all 4096 examined samples" in found[0].text


def test_a_clock_whose_seconds_are_lost():
    """Seconds since 1970 within an hour; those of a month, and float64, keep their differences."""
    hour = 1.7e9 + RNG.uniform(0, 3600, len(LABELS))
    text = only(inspect(data_of(with_column(hour), names=NAMES)), "coarse")
    assert "column 'drift' has values of up to 1.7e+09" in text
    assert "only every 128th number there" in text
    month = 1.7e9 + RNG.uniform(0, 30 * 86400, len(LABELS))
    assert inspect(data_of(with_column(month))) == ()
    wide = replace(data_of(TABLE), x=with_column(hour).astype(np.float64))
    assert inspect(wide) == ()


# Compared.

FLEET = summarise(data_of(TABLE))
PICTURES = RNG.integers(0, 256, (40, 1, 8, 8)).astype(np.uint8)
WHITE = np.zeros(40, np.int64)
SCALED = summarise(data_of(PICTURES, WHITE, scale=1 / 255))


def differences(x, fleet=FLEET, names=NAMES, y=LABELS, **settings):
    return compare(summarise(data_of(x, y, **settings)), fleet, names)


def test_pixels_up_to_255_where_the_fleet_has_1():
    """With the line to change; the same pixels scaled alike are no finding."""
    text = only(differences(PICTURES, SCALED, (), WHITE), "scale")
    assert text == (
        "values range from 0 to 255, but the fleet's range from 0 to 1 (their deviation is 255 "
        "times larger); "
        "multiply `scale` in"
        " [data] by 0.003922"
    )
    assert differences(PICTURES[::2], SCALED, (), WHITE[::2], scale=1 / 255) == ()


def test_pixels_up_to_1_where_the_fleet_has_255():
    """A board that scales what nobody else does."""
    text = only(
        differences(PICTURES, summarise(data_of(PICTURES, WHITE)), (), WHITE, scale=1 / 255),
        "scale",
    )
    assert "255 times smaller" in text
    assert text.endswith("multiply `scale` in [data] by 255")


@pytest.mark.parametrize(("mean", "std"), [(0.5, 0.25), ((0.13,), (0.31,))])
def test_pixels_that_are_not_normalised(mean, std):
    """Where the fleet has mean 0 and deviation 1; darker pixels, normalised alike, are no
    finding.
    """
    normal = {"scale": 1 / 255, "mean": mean, "std": std}
    fleet = summarise(data_of(PICTURES, WHITE, **normal))
    assert "set `scale`, `mean` and `std`" in only(differences(PICTURES, fleet, (), WHITE), "scale")
    assert differences(PICTURES // 3, fleet, (), WHITE, **normal) == ()


def test_digits_up_to_16_where_the_fleet_has_1():
    """The smallest of such differences that people make."""
    digits = datasets.load_digits()
    fleet = summarise(data_of(digits.data, digits.target, scale=1 / 16))
    assert "16 times larger" in only(differences(digits.data, fleet, (), digits.target), "scale")


def test_a_column_in_another_unit():
    """Kilopascal for pascal, by name; in a colder room it is none."""
    text = only(differences(with_column(TABLE[:, 2] * 1000, at=2)), "scale")
    assert text.startswith("column 'pressure' ranges from 90")
    assert differences(with_column(TABLE[:, 0] - 8.0, at=0)) == ()
    assert "column 'pressure'" in only(differences(with_column(TABLE[:, 2] / 1000, at=2)), "scale")


def test_what_stands_for_a_missing_value():
    """A few numbers far from all others; a wait three times as long as any other is none."""
    column = TABLE[:, 0].copy()
    column[::50] = -999.0
    assert "from -999 to" in only(differences(with_column(column, at=0)), "scale")
    wait = TABLE[:, 3].copy()
    wait[7] = wait.max() * 3
    assert differences(with_column(wait, at=3)) == ()


def test_a_mean_ten_deviations_off():
    """Kelvin for Celsius; nine are none."""
    text = only(differences(with_column(TABLE[:, 0] + 273.15, at=0)), "mean")
    assert text.startswith("column 'indoor' is far off: mean 29")
    assert "deviations away" in text
    spread = float(np.std(TABLE[:, 0], dtype=np.float64))
    assert differences(with_column(TABLE[:, 0] + 9.0 * spread, at=0)) == ()
    assert only(differences(with_column(TABLE[:, 0] + 11.0 * spread, at=0)), "mean")


def test_columns_in_another_order():
    """Seen by their figures: each is where another should be; it says which are whose."""
    text = only(differences(TABLE[:, [2, 1, 0, 3]], names=()), "order")
    assert text.startswith("columns are in a different order from the fleet's: column 0 (mean ")
    assert "looks like the fleet's column 2" in text
    assert "list them in `columns`" in text
    assert "column 2" in only(differences(TABLE[:, [0, 3, 1, 2]], names=()), "order")
    assert differences(TABLE, names=()) == ()


def test_another_column_is_not_another_order():
    """One that is nobody else's is told by itself."""
    assert only(differences(with_column(TABLE[:, 2], at=0)), "mean")


def test_another_shape():
    """Alone, as nothing else can be compared."""
    text = only(differences(TABLE[:, :3]), "shape")
    assert text.startswith("samples have shape [3], but the fleet's have [4]")


def test_fractions_where_the_fleet_has_tokens():
    """By type and figures; tokens of another integer type are none."""
    tokens = RNG.integers(0, 90, (COUNT, 7))
    fleet = summarise(data_of(tokens), tokens=True)
    text = only(differences(tokens * 0.37, fleet, ()), "dtype")
    assert "float64, from 0 to 32.93" in text
    assert "int64, from 0 to 89" in text
    assert differences(tokens.astype(np.uint8), fleet, ()) == ()


def test_few_values_say_nothing():
    """Of a deviation."""
    assert differences(TABLE[:9] * 1000, y=LABELS[:9]) == ()


def test_a_constant_column_is_none_where_it_may_be():
    """In the fleet it is constant as well, or says yes or no; a sensor that is stuck at 0 is
    one.
    """
    flag = (RNG.random(COUNT) < 0.4).astype(np.float32)
    same, flags = (summarise(data_of(with_column(column))) for column in (21.5, flag))
    assert find_problems(data_of(with_column(21.5), names=NAMES), same) == ()
    assert find_problems(data_of(with_column(1.0), names=NAMES), flags) == ()
    assert kinds(find_problems(data_of(with_column(1.0), names=NAMES), None)) == ["constant"]
    assert kinds(find_problems(data_of(with_column(0.0), names=NAMES), FLEET)) == ["constant"]
    stuck = np.round(TABLE).astype(np.int64)
    stuck[:, 1] = 4
    assert kinds(find_problems(data_of(stuck, names=NAMES), FLEET)) == ["constant"]


@given(
    x=st.tuples(st.integers(1, 40), st.integers(1, 4), st.sampled_from([(), (2,)])).flatmap(
        lambda size: arrays.arrays(
            st.sampled_from([np.float32, np.float64, np.uint8, np.int64, np.bool_]),
            (size[0], size[1], *size[2]),
        )
    ),
    targets=st.sampled_from(["labels", "numbers", "several", "none"]),
    seed=st.integers(0, 9),
)
def test_no_samples_make_it_fail(x, targets, seed):
    """Whatever the values, types and targets: what looks wrong is sentences, or nothing, of one
    line each.
    """
    if x.dtype.kind == "f":
        x = np.nan_to_num(x, posinf=1e30, neginf=-1e30).clip(-1e30, 1e30)
    draw = np.random.default_rng(seed)
    y = {
        "labels": draw.integers(0, 2, len(x)),
        "numbers": draw.normal(size=len(x)),
        "several": draw.integers(0, 2, (len(x), 3)),
        "none": np.full(len(x), -100),
    }[targets]
    data = data_of(x, y)
    other = summarise(data_of(np.flip(x, 1) * (seed % 3 + 1), y))
    for finding in (
        *find_problems(data),
        *find_problems(data, summarise(data)),
        *find_problems(data, other),
    ):
        assert finding.text
        assert finding.text.isprintable()
    assert compare(summarise(data), summarise(data)) == ()


def deals(x, y):
    """Boards of one label, of two, and of a few samples."""
    labels = np.unique(y)
    for first in labels:
        for second in labels[labels >= first]:
            yield np.flatnonzero((y == first) | (y == second))
    yield from (np.arange(start, start + 30) for start in range(0, len(y) - 30, len(y) // 10))


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "iris", "digits"])
def test_honest_boards_have_no_finding(name):
    """Of one or two labels each, or thirty samples in the order of the file, against a tenth of all
    as the fleet's.
    """
    bunch = getattr(datasets, f"load_{name}")()
    test = np.random.default_rng(3).permutation(len(bunch.target))[
        : max(30, len(bunch.target) // 10)
    ]
    fleet = summarise(data_of(bunch.data[test], bunch.target[test]))
    for rows in deals(bunch.data, bunch.target):
        assert find_problems(data_of(bunch.data[rows], bunch.target[rows]), fleet) == ()
