"""Parts of a unit are rounded up, as released, or down, as in equation 4 of FedRolex."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest

from broker_server.strategies.fedrolex import plan_window
from broker_server.strategies.strategy import PlanRequest
from fleet_protocol.errors import ConfigError
from models import Axis, Layout, Registry, Window, infer_layout
from models.architecture import architecture, build
from models.axes import kept_units
from models.draws import random_units, rolling_units

RATES = (0.5, 0.25, 0.125, 0.0625)
SMALL = {"input_shape": (1, 4, 4), "classes": 3, "hidden": (7, 5)}


def test_r10_rounding_down():
    """Of 64 sizes at four rates 170 of 256 differ from rounding up; none falls below one unit."""
    differing = 0
    for size in range(1, 65):
        for rate in RATES:
            exact = Fraction(rate) * size
            assert kept_units(size, rate, "floor") == max(1, math.floor(exact))
            differing += kept_units(size, rate, "floor") != kept_units(size, rate)
    assert differing == 170
    for size in (64, 128, 256, 512):
        kept = [kept_units(size, rate, "floor") for rate in RATES]
        assert kept == [kept_units(size, rate) for rate in RATES]
    # 0.29 * 100 is 28.999999999999996 in double precision.
    assert kept_units(100, 0.29, "floor") == 29


def test_windows_have_the_rounded_length():
    axis = Axis("k", 5, rounding="floor")
    assert list(rolling_units(axis, 0.5, shift=4)) == [4, 0]
    assert len(random_units(axis, 0.5, seed=1, round_index=0, label="k")) == 2
    heads = Axis("attention", 10, groups=2, rounding="floor")
    assert list(rolling_units(heads, 0.5, shift=1)) == [1, 2, 6, 7]


@pytest.mark.parametrize(("rounding", "kept"), [("ceil", (4, 3)), ("floor", (3, 2))])
def test_every_architecture_can_round_down(zoo: Registry, rounding, kept):
    """The setting reaches the built model, its layout, the file of that, and the plans."""
    arch = zoo.get("mlp")
    settings = {**SMALL, "rounding": rounding}
    layout = infer_layout(arch, settings)
    tier = layout.tier(0.5)
    module = build(arch, tier, settings=layout.settings)
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    assert shapes == layout.shapes(tier)
    widths = [axis.kept(0.5) for axis in layout.axes.values() if axis.name.startswith("hidden")]
    assert tuple(widths) == kept
    read = Layout.from_json(layout.to_json())
    assert read == layout
    request = PlanRequest(device="board", tier=tier, version=6, seed=1)
    plan = plan_window(read, request, Window())
    units = plan.plan.indices
    assert [len(units[name]) for name in ("hidden1", "hidden2")] == list(kept)
    np.testing.assert_array_equal(units["hidden2"], (np.arange(kept[1]) + 6) % 5)


def test_layouts_that_round_up_are_written_as_before(zoo: Registry):
    """Without the newer key, so that their digests stay."""
    axes = json.loads(infer_layout(zoo.get("mlp"), SMALL).to_json())["axes"]
    assert all("rounding" not in axis for axis in axes)
    axes = json.loads(infer_layout(zoo.get("mlp"), {**SMALL, "rounding": "floor"}).to_json())[
        "axes"
    ]
    assert {axis["rounding"] for axis in axes if axis["kind"] == "width"} == {"floor"}


def test_the_setting_is_checked(zoo: Registry):
    with pytest.raises(ConfigError, match="no rounding 'round'; choose 'ceil' or 'floor'"):
        zoo.get("mlp").settings({"rounding": "round"})
    with pytest.raises(ConfigError, match="did you mean 'rounding'"):
        zoo.get("mlp").settings({"roundin": "floor"})
    with pytest.raises(ConfigError, match="rounding is a setting of every architecture"):

        @architecture()
        def own(cut, *, input_shape=(4,), rounding="up"):
            """A setting that the builder would never receive."""
