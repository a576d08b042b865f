"""Merges of adapters of unequal rank, by entries and by products, against the formulas written out
in numpy.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from broker_server.rounds.run_method import RunMethod
from broker_server.strategies.low_rank import adapters_of
from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.private_parts import PrivateModel, keep_private
from broker_server.strategies.strategy import Contribution
from fleet_protocol.errors import PlanError
from fleet_protocol.messages import TaskMetrics
from tests.broker_server.merging import layout_of, plan_of
from tests.broker_server.methods import built, merged

RANK = 4
OUT = 6
IN = 3
LAYOUT = layout_of(
    {"a.down": ("r", "inputs"), "a.up": ("kernel", "r"), "head": ("classes", "inputs")},
    {"r": RANK, "kernel": OUT, "inputs": IN, "classes": 4},
)
OLD = {
    name: np.full(shape, 9, np.float32) for name, shape in LAYOUT.shapes(LAYOUT.tier(1.0)).items()
}


def update(device: str, width: float, seed: int, examples: int = 10) -> Contribution:
    plan = plan_of(LAYOUT, width)
    draw = np.random.default_rng(seed)
    weights = {
        name: draw.normal(size=tensor.local_shape).astype(np.float32)
        for name, tensor in plan.tensors.items()
    }
    metrics = TaskMetrics(
        examples=examples,
        batches=1,
        labels=(0, 1, 2, 3),
        fetch_seconds=0,
        train_seconds=0,
        resident_bytes=0,
    )
    return Contribution(device, LAYOUT.tier(width), f"{width}", plan, weights, metrics)


UPDATES = [update("a", 1.0, 1, 30), update("b", 0.5, 2, 10), update("c", 0.25, 3, 20)]


def merge(name: str, updates=UPDATES, **config):
    return merged(built({"name": name, **config}, LAYOUT), updates, OLD)


def product(weights) -> np.ndarray:
    return weights["a.up"].astype(np.float64) @ weights["a.down"].astype(np.float64)


def test_an_adapter_is_known_by_its_shape():
    """Two matrices of one module with one cut axis between them; the head is none."""
    assert [(adapter.up, adapter.down, adapter.rank) for adapter in adapters_of(LAYOUT)] == [
        ("a.up", "a.down", RANK)
    ]


def test_adapters_of_one_module_and_two_axes_are_two():
    """What they share tells which factors belong together."""
    names = {f"a.{axis}_up": ("kernel", axis) for axis in "rs"} | {
        f"a.{axis}_down": (axis, "inputs") for axis in "rs"
    }
    layout = layout_of(names, {"r": RANK, "s": RANK, "kernel": OUT, "inputs": IN, "classes": 4})
    assert [(adapter.up, adapter.down) for adapter in adapters_of(layout)] == [
        ("a.r_up", "a.r_down"),
        ("a.s_up", "a.s_down"),
    ]


def test_two_adapters_of_one_module_are_refused():
    """The later matrices had replaced the earlier, in some orders the one adapter's up beside the
    other's down.
    """
    up = ("kernel", "r")
    down = ("r", "inputs")
    fused = {"a.q_up": up, "a.q_down": down, "a.v_down": down, "a.v_up": up}
    layout = layout_of(fused, {"r": RANK, "kernel": OUT, "inputs": IN, "classes": 4})
    with pytest.raises(
        PlanError,
        match=r"which of a\.q_up, a\.v_up, a\.q_down, a\.v_down are one adapter; give each",
    ):
        adapters_of(layout)


def test_by_entries_zeros_pad_and_norms_weigh():
    """Sum of |up down| padded(up) over the sum of the norms: entries of large ranks alone are drawn
    to zero.
    """
    model = merge("hetlora")
    norms = [np.linalg.norm(product(device_update.weights)) for device_update in UPDATES]
    for name, axis in (("a.up", 1), ("a.down", 0)):
        expected = np.zeros(OLD[name].shape)
        for norm, device_update in zip(norms, UPDATES, strict=True):
            rank = device_update.weights[name].shape[axis]
            place = (slice(None), slice(rank)) if axis else (slice(rank), slice(None))
            expected[place] += norm * device_update.weights[name]
        np.testing.assert_allclose(model[name], expected / sum(norms), rtol=1e-5)


@pytest.mark.parametrize("private", ["a.up", "a.down"])
def test_half_of_an_adapter_is_averaged_if_the_other_stays_on_the_devices(private):
    """By coordinates, as HeteroFL averages it; what stays keeps its initial values."""
    kept = PrivateModel((private,))
    results = {}
    for name in ("hetlora", "heterofl"):
        method = keep_private(built({"name": name}, LAYOUT), LAYOUT, kept)
        updates = []
        for whole in UPDATES:
            weights = {key: value for key, value in whole.weights.items() if key != private}
            updates.append(replace(whole, plan=whole.plan.without([private]), weights=weights))
        results[name] = merged(method, updates, OLD)
    for name, old in OLD.items():
        np.testing.assert_array_equal(results["hetlora"][name], results["heterofl"][name])
        assert np.array_equal(results["hetlora"][name], old) == (name == private)


def test_by_products_the_leading_units_are_the_best_of_each_rank():
    """The whole rank has the product's best approximation, and its first r units the best of rank
    r.
    """
    model = merge("flexlora")
    mean = (
        sum(
            device_update.metrics.examples * product(device_update.weights)
            for device_update in UPDATES
        )
        / 60
    )
    left, values, right = np.linalg.svd(mean, full_matrices=False)
    for rank in (1, 2, RANK):
        best = (left[:, :rank] * values[:rank]) @ right[:rank]
        cut = {"a.up": model["a.up"][:, :rank], "a.down": model["a.down"][:rank]}
        np.testing.assert_allclose(product(cut), best, atol=1e-5)
    assert not model["a.up"][:, IN:].any()  # a matrix of three columns has no fourth value
    uniform = merge("flexlora", weighting="uniform")
    np.testing.assert_allclose(
        product(uniform),
        sum(product(device_update.weights) for device_update in UPDATES) / 3,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", ["hetlora", "flexlora"])
def test_what_is_no_adapter_is_averaged(name):
    """A head is the mean of its holders, by the same weighting."""
    share = [1, 1, 1] if name == "hetlora" else [3, 1, 2]
    expected = np.average(
        [device_update.weights["head"] for device_update in UPDATES], axis=0, weights=share
    )
    np.testing.assert_allclose(merge(name)["head"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["hetlora", "flexlora"])
def test_adapters_that_do_nothing_stay_as_they_were_or_do_nothing(name):
    """Where every product is zero there is nothing to weigh by, and nothing becomes nan."""
    idle = [update("a", 1.0, 1), update("b", 0.5, 2)]
    for device_update in idle:
        device_update.weights["a.up"][...] = 0
    model = merge(name, idle)
    assert np.isfinite(model["a.down"]).all()
    if name == "hetlora":
        np.testing.assert_array_equal(model["a.up"], OLD["a.up"])
    else:
        assert not model["a.up"].any()


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["hetlora", "flexlora"])
def test_a_product_that_is_no_number_is_left_to_who_takes_the_result(name):
    """It is checked there; the singular values of what is not finite had ended the server."""
    large = update("a", 1.0, 1)
    for key in ("a.up", "a.down"):
        large.weights[key][...] = 1e25
    model = merge(name, [large, update("b", 0.5, 2)])
    assert not all(np.isfinite(model[key]).all() for key in ("a.up", "a.down"))


def test_what_does_not_go_together_is_refused_with_what_does():
    """No adapters, units of a rank that are not the leading ones, a server optimizer over
    factors.
    """
    plain = layout_of({"w": ("r", "inputs")}, {"r": 4, "inputs": 3, "classes": 4})
    with pytest.raises(PlanError, match=r"t has none .* use heterofl"):
        built({"name": "hetlora"}, plain)
    with pytest.raises(PlanError, match='leading units of each rank; remove plan = "rolling"'):
        built({"name": "flexlora", "plan": "rolling"}, LAYOUT)
    step = OptimizerSettings(name="fedadam")
    with pytest.raises(PlanError, match=r"remove \[server_optimizer\], or use hetlora"):
        built({"name": "flexlora"}, LAYOUT, optimizer=step)
    assert built({"name": "hetlora"}, LAYOUT, optimizer=step).name == "hetlora"


def test_devices_keep_nothing_of_units_that_are_factored_anew():
    """An optimizer's moments, or what an encoding took, would be of other units: as of a plan that
    moves.
    """

    def moving(name):
        run = SimpleNamespace(
            tiers=[LAYOUT.tier(1.0)],
            config=SimpleNamespace(seed=0),
            strategy=built({"name": name}, LAYOUT),
        )
        return RunMethod.moving.fget(run)

    assert (moving("flexlora"), moving("hetlora")) == (LAYOUT.tier(1.0).id, None)
