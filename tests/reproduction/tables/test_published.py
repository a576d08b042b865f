"""The published numbers: as specification appendix B prints them, and consistent with the
models.
"""

import re

import pytest

from broker_server.settings.assignment import LEVEL_RATES
from models.registry import Registry, infer_layout
from reproduction.published import Published, papers, published_tables
from reproduction.table_file import TABLES

# Specification appendix B, copied by hand once more.
SPOT_CHECKS = {
    ("heterofl", "heterofl-1", "a-b-c-d-e", "iid"): 99.46,
    ("heterofl", "heterofl-1", "e", "global"): 92.84,
    ("heterofl", "heterofl-1", "c-d-e", "local"): 99.76,
    ("heterofl", "heterofl-2", "a", "iid"): 91.19,
    ("heterofl", "heterofl-2", "c-e", "global"): 63.47,
    ("heterofl", "heterofl-3", "e", "perplexity"): 7.41,
    ("heterofl", "heterofl-3", "a-b-c-d-e", "perplexity"): 3.55,
    ("inclusivefl", "inclusivefl-2", "inclusivefl", "cola"): 54.85,
    ("inclusivefl", "inclusivefl-2", "exclusivefl", "sst2"): 94.06,
    ("inclusivefl", "inclusivefl-4", "inclusivefl", "sst2"): 520,
    ("inclusivefl", "inclusivefl-5", "without-distillation", "1:2:7"): 60.35,
    ("inclusivefl", "inclusivefl-5", "distillation-only", "7:2:1"): 34.96,
    ("whalefl", "whalefl-1", "whalefl", "90 %"): 0.82,
    ("whalefl", "whalefl-1", "fedavg", "97 %"): 0.30,
    ("whalefl", "whalefl-text", "over-heterofl", "har"): 1.5,
    ("fml", "fml-1", "fml/non-iid-3", "mnist-mlp"): 93.77,
    ("fml", "fml-1", "fedavg/non-iid-3", "mnist-lenet5"): 96.45,
    ("fml", "fml-1", "fedprox/iid", "cifar100-cnn1"): 32.41,
}
WITH_SPREAD = {
    ("fedrolex-3", "fedrolex", "cifar10-high"): (69.44, 1.50),
    ("fedrolex-3", "federated-dropout", "cifar10-low"): (76.20, 2.53),
    ("fedrolex-3", "largest", "stack-overflow"): (29.79, 0.32),
    ("fedrolex-4", "fedrolex/cifar100", "low-local"): (66.31, 0.34),
    ("fedrolex-4", "largest/cifar10", "high-global"): (75.74, 0.41),
}


@pytest.mark.parametrize(("paper", "table", "row", "column"), SPOT_CHECKS)
def test_numbers_as_printed(paper, table, row, column):
    """A cell has the number of the specification."""
    assert published_tables(paper)[table].number(row, column) == Published(
        SPOT_CHECKS[paper, table, row, column], None
    )


@pytest.mark.parametrize(("table", "row", "column"), WITH_SPREAD)
def test_numbers_with_their_spread(table, row, column):
    """FedRolex prints standard deviations."""
    assert published_tables("fedrolex")[table].number(row, column) == Published(
        *WITH_SPREAD[table, row, column]
    )


@pytest.mark.parametrize("paper", papers())
def test_percentages_are_percentages(paper):
    """Every accuracy lies between 0 and 100; a slip of the decimal point would show."""
    for name, table in published_tables(paper).items():
        for row, cells in table.rows.items():
            for column, cell in zip(table.columns, cells, strict=True):
                if isinstance(cell, Published) and name != "inclusivefl-4":
                    assert 0 <= cell.value <= 100, (name, row, column)


def test_averages_agree_with_their_rows():
    """InclusiveFL's averages are those of the eight tasks, to the rounding."""
    table = published_tables("inclusivefl")["inclusivefl-2"]
    for row, cells in table.rows.items():
        *tasks, average = (cell.value for cell in cells if isinstance(cell, Published))
        assert sum(tasks) / len(tasks) == pytest.approx(average, abs=0.006), row


def test_whalefl_speed_ups_are_ratios_of_its_hours():
    """The table prints hours and the speed-up over FedAvg, which agree to the rounding of both."""
    tables = published_tables("whalefl")
    for row in ("whalefl", "heterofl", "fedavg"):
        for column in tables["whalefl-1"].columns:
            base, hours = (tables["whalefl-1"].number(name, column) for name in ("fedavg", row))
            printed = tables["whalefl-1-speedup"].number(row, column)
            assert base is not None
            assert hours is not None
            assert printed is not None
            assert base.value / hours.value == pytest.approx(printed.value, abs=0.051)


def _printed_count(text: str) -> tuple[float, float]:
    """A rounded size and half a unit of its last digit."""
    match = re.fullmatch(r"(\d+)(?:\.(\d+))? ?([KM])", text)
    assert match is not None
    unit = {"K": 1e3, "M": 1e6}[match[3]]
    return float(f"{match[1]}.{match[2] or 0}") * unit, 0.51 * unit / 10 ** len(match[2] or "")


@pytest.mark.parametrize(
    ("table", "arch", "settings"),
    [
        ("heterofl-1", "conv", {"channels": (64, 128, 256, 512)}),
        pytest.param(
            "heterofl-2",
            "preresnet18",
            {"channels": (64, 128, 256, 512), "blocks": (1, 1, 1, 2)},
            marks=pytest.mark.slow,
        ),
        pytest.param("heterofl-3", "transformer_mlm", {}, marks=pytest.mark.slow),
    ],
)
def test_published_sizes_are_those_of_our_models(table, arch, settings):
    """HeteroFL's columns of parameters, megabytes and ratios are means over the levels of the
    models trained here.
    """
    architecture = Registry.zoo().get(arch)
    layout = infer_layout(architecture, settings)
    sizes = {
        level: layout.parameter_count(layout.tier(rate)) for level, rate in LEVEL_RATES.items()
    }
    published = published_tables("heterofl")[table]
    for row in published.rows:
        levels = row.split("-")
        mean = sum(sizes[level] for level in levels) / len(levels)
        count, tolerance = _printed_count(
            str(published.rows[row][published.columns.index("parameters")])
        )
        assert mean == pytest.approx(count, abs=tolerance), row
        megabytes = published.number(row, "megabytes")
        ratio = published.number(row, "ratio")
        assert megabytes is not None
        assert ratio is not None
        assert mean * 4 / 2**20 == pytest.approx(megabytes.value, abs=0.0051), row
        assert mean / sizes[levels[0]] == pytest.approx(ratio.value, abs=0.0151), row


@pytest.mark.parametrize("table", TABLES)
def test_every_published_row_with_data_has_an_arm(table):
    """What an experiment says is published, its paper prints; at least one arm of a table with
    numbers has one.
    """
    without_numbers = {
        "fedrolex-gamma",
        "fedrolex-repeat",
        "fml-models",
        "fml-tasks",
        "whalefl-static",
        "whalefl-mild",
        "whalefl-strong",
        "whalefl-ablations",
        "whalefl-repeat",
        "whalefl-plain",
        "fml-rates",
        "heterofl-4",
        "fedrolex-rho",
        "fedrolex-ablations",
        "inclusivefl-depths",
        "whalefl-alpha",
        "whalefl-tasks",
        "fml-catfish",
        "beyond-1",
        "beyond-repeat",
        "fml-repeat",
        "depthfl-1",
        "depthfl-2",
        "private-1",
        "shares-1",
    }
    assert any(arm.published for arm in TABLES[table].arms) == (table not in without_numbers)
