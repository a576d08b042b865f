"""A fleet of four boards, one of which reads labels, columns or scale differently: it refuses the
task by name, or has a finding with figures, before it trains; the other three have neither.

That both come before an update counts is held by `tests/fleet/test_data_findings.py` and
`tests/fleet/test_contract.py`.
"""

import re

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter
from sklearn import datasets

from device_runtime.agent.data_findings import sentences
from device_runtime.training.agreed_data import SampleRequirements
from fleet_protocol.data import DataConfig, load_data
from fleet_protocol.data.contract import complete_contract, reconcile
from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.errors import DataError

SAMPLES = 120
COLUMNS = ("age", "height", "weight", "pulse")
MEANS = np.array([40.0, 170.0, 70.0, 90.0])
DEVIATIONS = np.array([9.0, 8.0, 15.0, 12.0])
SPECIES = ("cat", "dog", "fox")


def load(folder, **table):
    return load_data(TypeAdapter(DataConfig).validate_python(table).resolved(folder))


def people(seed):
    """Columns ``[N, 4]`` and labels ``[N]``."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, len(SPECIES), SAMPLES)
    shift = (y[:, None] - 1) * DEVIATIONS / 2
    return generator.normal(MEANS, DEVIATIONS, (SAMPLES, 4)) + shift, y


def write_table(path, x, labels, header=(*COLUMNS, "label")):
    lines = [",".join(header)] if header else []
    for row, label in zip(x, labels, strict=True):
        lines.append(",".join([*map(str, row), str(label)]))
    path.write_text("\n".join(lines))


class Table:
    """Tables of people; a form changes what one board writes, or how it reads."""

    terms = ContractTerms(missing=0)

    def read(self, folder, seed, change=None):
        x, y = people(seed)
        names = [SPECIES[label] for label in y]
        written = {"x": x, "labels": names, "header": (*COLUMNS, "label")}
        keys = {}
        if change is not None:
            keys = change(written) or {}
        write_table(folder / f"{seed}.csv", written["x"], written["labels"], written["header"])
        return load(folder, kind="csv", path=f"{seed}.csv", **keys)


class Arrays:
    """The same as arrays, whose columns and labels have no names."""

    terms = ContractTerms()

    def read(self, folder, seed, change=None):
        x, y = people(seed)
        written = {"x": x.astype(np.float32), "y": y}
        keys = {}
        if change is not None:
            keys = change(written) or {}
        np.savez(folder / f"{seed}.npz", **written)
        return load(folder, kind="npz", path=f"{seed}.npz", **keys)


class Images:
    """A folder of images for each label."""

    terms = ContractTerms()

    def read(self, folder, seed, change=None):
        generator = np.random.default_rng(seed)
        written = {"pixels": generator.integers(0, 256, (30, 6, 6), dtype=np.uint8), "name": "cat"}
        keys = {}
        if change is not None:
            keys = change(written) or {}
        for place, pixels in enumerate(written["pixels"]):
            name = written["name"] if place % 3 == 0 else SPECIES[place % 3]
            path = folder / str(seed) / name / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
        return load(folder, **{"kind": "images", "path": str(seed), "channels": 1, **keys})


class Digits(Images):
    """Handwritten digits, white on black."""

    def read(self, folder, seed, change=None):
        images = datasets.load_digits().images[40 * seed : 40 * seed + 40]
        pixels = (images * 255 / 16).astype(np.uint8)

        def changed(written):
            written["pixels"] = pixels
            return None if change is None else change(written)

        return super().read(folder, seed, changed)


class Tokens:
    """Sentences of a vocabulary of 50 words."""

    terms = ContractTerms(tokens=50)

    def read(self, folder, seed, change=None):
        generator = np.random.default_rng(seed)
        written = {"x": generator.integers(0, 50, (SAMPLES, 8)), "y": np.arange(SAMPLES) % 2}
        if change is not None:
            change(written)
        np.savez(folder / f"{seed}.npz", **written)
        return load(folder, kind="npz", path=f"{seed}.npz")


def setting(**changes):
    """What a board writes instead of what the others do."""

    def change(written):
        for name, value in changes.items():
            written[name] = value(written) if callable(value) else value

    return change


def column(place, change):
    """Another column at a place."""

    def changed(written):
        x = written["x"].copy()
        x[:, place] = change(x[:, place])
        return x

    return setting(x=changed)


def gaps(written):
    written["x"] = written["x"].astype(object)
    written["x"][3, 2] = "NA"
    return {"missing": -1}


def renamed(written):
    return ["wolf" if name == "dog" else name for name in written["labels"]]


def numbered(written):
    return [sorted(SPECIES, reverse=True).index(name) for name in written["labels"]]


def answer_inside(written):
    written["x"] = np.concatenate([written["x"][:, :3], written["y"][:, None]], 1)


FORMS = {
    # Labels.
    "a label that nobody named": (Images(), setting(name="wolf"), "has the label 'wolf', which"),
    "a label by another name": (Table(), setting(labels=renamed), "has the label 'wolf', which is"),
    "numbers for names": (
        Table(),
        setting(labels=numbered),
        r"has numbers as labels, .* names \(cat, dog, fox\)",
    ),
    # Columns.
    "a column by another name": (
        Table(),
        setting(header=("age", "size", "weight", "pulse", "label")),
        "'height'",
    ),
    "an index as a column": (
        Arrays(),
        setting(x=lambda written: np.concatenate([np.arange(SAMPLES)[:, None], written["x"]], 1)),
        r"have shape \[5\], but the fleet's have \[4\]: for a table, name the 4",
    ),
    "another order without names": (
        Arrays(),
        setting(x=lambda written: written["x"][:, ::-1]),
        "columns are in a different order from the fleet's: column 0 .mean ",
    ),
    "a file without header": (
        Table(),
        lambda written: written.update(header=()) or {"label_column": 4},
        "header = false",
    ),
    "the answer among the inputs": (Arrays(), answer_inside, "column 3 determines the label in"),
    "a constant column": (Table(), column(1, lambda _: 170.0), "column 'height' is 170 in all 120"),
    "missing values as a number": (
        Table(),
        column(2, lambda x: np.where(np.arange(SAMPLES) % 10, x, -999)),
        "column 'weight' is -999 in 12 of 120 examined samples",
    ),
    "pictures that repeat": (
        Images(),
        setting(pixels=lambda written: np.repeat(written["pixels"][:1], 30, 0)),
        "30 of 30 examined samples are the same",
    ),
    # Scale.
    "pixels from -1 to 1": (
        Images(),
        lambda _: {"mean": 0.5, "std": 0.5},
        "range from -1 to 1, .* only one of them is standardised or shifted",
    ),
    "standardised columns": (
        Table(),
        setting(x=lambda written: (written["x"] - MEANS) / DEVIATIONS),
        r"values range from -|columns .* have another scale",
    ),
    "pixels from 0 to 255": (
        Images(),
        lambda _: {"scale": 1},
        r"from 0 to 255, but the fleet's range from 0 to 1 .*multiply",
    ),
    "negatives": (
        Digits(),
        setting(pixels=lambda written: 255 - written["pixels"]),
        r"images look inverted, .*: their mean is 0\.6\d*, and the fleet's is 0\.3\d* .*transforms",
    ),
    "another unit": (Table(), column(2, lambda x: x * 1000), "column 'weight' ranges from .*units"),
    "another zero": (
        Table(),
        column(0, lambda x: x + 273),
        "column 'age' is far off: mean .* deviations away",
    ),
    "another rule for gaps": (
        Table(),
        gaps,
        "has -1 for missing values, and the fleet uses 0: set missing = 0",
    ),
    "another shape": (
        Images(),
        lambda _: {"channels": 3},
        r"have shape \[3, 6, 6\], but the fleet's have \[1, 6, 6\]: .* channels = 1",
    ),
    "tokens of another vocabulary": (
        Tokens(),
        setting(x=lambda written: written["x"] + 3),
        "and the fleet's vocabulary has 50",
    ),
    "fractions for tokens": (
        Tokens(),
        setting(x=lambda written: written["x"] + 0.5),
        "values have fractions",
    ),
}


def problem(read, contract):
    """What a board refuses, or else its findings."""
    try:
        data = read()
        SampleRequirements(contract, own_labels=False).apply(data)
    except DataError as error:
        return str(error)
    return "; ".join(sentences(data, contract))


@pytest.mark.parametrize("form", FORMS)
def test_a_board_that_reads_differently_is_named(tmp_path, form):
    """Refused with the line to change, or found with figures; nothing is said of honest boards."""
    source, change, expected = FORMS[form]
    server = reconcile(source.read(tmp_path, 0), source.terms, own_labels=True)
    contract = complete_contract(server, source.terms)
    for seed in (1, 2, 3):
        honest = problem(lambda seed=seed: source.read(tmp_path, seed), contract)
        assert honest == "", honest
    odd = problem(lambda: source.read(tmp_path, 4, change), contract)
    assert re.search(expected, odd), odd
