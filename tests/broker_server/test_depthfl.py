"""DepthFL and ScaleFL on the server: merging of exits by their entries, and the numbers of a loss."""

import math

import numpy as np
import pytest

from broker_server.rounds.run_checks import require_knobs
from broker_server.strategies.depthfl import DepthFlSettings, ramp
from broker_server.strategies.scalefl import ScaleFlSettings
from broker_server.strategies.strategy import Contribution, Strategy
from fleet_protocol.errors import PlanError
from fleet_protocol.messages import Instructions, TaskMetrics, TrainSettings
from models import Axis, AxisKind, Dim, Layout, Parameter, Tier, compile_plan, make_plan
from tests.broker_server.methods import built, merged

TRAIN = TrainSettings(learning_rate=0.1, epochs=1, batch_size=1, seed=0)


def two_depths() -> Layout:
    """A stem, and two blocks with an exit each."""
    axes = [Axis("k", 4), Axis("classes", 3, AxisKind.FIXED)]
    square = (Dim("k"), Dim("k"))
    head = (Dim("classes"), Dim("k"))
    return Layout(
        arch="exits",
        settings={},
        axes={axis.name: axis for axis in axes},
        parameters=(
            Parameter("stem", (4, 4), square, "stem"),
            Parameter("blocks.0", (4, 4), square, "block1"),
            Parameter("exits.0", (3, 4), head, "block1"),
            Parameter("blocks.1", (4, 4), square, "block2"),
            Parameter("exits.1", (3, 4), head, "block2"),
        ),
        statistics=(),
        depth=2,
        depths=(1, 2),
        label_axes=("classes",),
        input_shape=(4,),
        input_dtype="float32",
        classes=3,
    )


LAYOUT = two_depths()
TIERS = (Tier(1.0, 2), Tier(1.0, 1))


def update(device: str, tier: Tier, value: float, labels=(0, 1, 2)) -> Contribution:
    shapes = LAYOUT.shapes(tier)
    return Contribution(
        device=device,
        tier=tier,
        key=tier.id,
        plan=compile_plan(LAYOUT, make_plan(LAYOUT, tier)),
        weights={name: np.full(shape, value, np.float32) for name, shape in shapes.items()},
        metrics=TaskMetrics(
            examples=5,
            batches=1,
            labels=labels,
            fetch_seconds=0.0,
            train_seconds=0.0,
            resident_bytes=0,
        ),
    )


def knobs_of(strategy: Strategy, closed_rounds: int):
    return strategy.instruct(Instructions(train=TRAIN), closed_rounds).train.knobs


def test_an_exit_is_the_mean_of_the_devices_that_hold_it():
    """The first exit of all devices, whatever their labels; the second of the deep one alone."""
    old = {name: np.zeros(shape, np.float32) for name, shape in LAYOUT.shapes(TIERS[0]).items()}
    updates = [
        update("a", TIERS[1], 1.0, labels=(0,)),
        update("b", TIERS[1], 2.0),
        update("c", TIERS[0], 6.0),
    ]
    new = merged(built({"name": "depthfl"}, LAYOUT, TIERS), updates, old)
    for name in ("stem", "blocks.0", "exits.0"):
        np.testing.assert_array_equal(new[name], np.full_like(new[name], 3.0))
    for name in ("blocks.1", "exits.1"):
        np.testing.assert_array_equal(new[name], np.full_like(new[name], 6.0))


def test_distillation_grows_with_the_rounds():
    """exp(-5 (1 - t)^2) over the rounds of the ramp, from the first round's exp(-5) on."""
    strategy = built({"name": "depthfl", "depthfl": {"ramp_rounds": 10}}, LAYOUT, TIERS)
    shares = [knobs_of(strategy, rounds)["distillation"] for rounds in (0, 5, 10, 90)]
    assert shares == pytest.approx([math.exp(-5), math.exp(-1.25), 1.0, 1.0])
    assert DepthFlSettings().ramp_rounds == 300
    assert ramp(0, 0) == 1.0
    assert knobs_of(strategy, 0)["inner"] == 1.0


def test_baselines_are_numbers_of_the_loss():
    table = {"name": "depthfl", "depthfl": {"ramp_rounds": 0, "baseline": "without_distillation"}}
    assert knobs_of(built(table, LAYOUT, TIERS), 3) == {"distillation": 0.0, "inner": 1.0}
    table["depthfl"]["baseline"] = "last_exit"
    assert knobs_of(built(table, LAYOUT, TIERS), 3) == {"distillation": 0.0, "inner": 0.0}


def test_scalefl_cuts_by_width_and_teaches_after_some_rounds():
    tiers = (Tier(1.0, 2), Tier(0.5, 1))
    strategy = built({"name": "scalefl", "scalefl": {"begin_after": 2}}, LAYOUT, tiers)
    assert strategy.tiers == tiers
    assert knobs_of(strategy, 1) == {"distillation": 0.0}
    assert knobs_of(strategy, 2) == {"distillation": ScaleFlSettings().distillation}


def test_what_does_not_fit_is_refused():
    """Other plans, a model in use by width alone, and a loss without these numbers."""
    for name in ("depthfl", "scalefl"):
        with pytest.raises(PlanError, match=r"remove.*rolling|plan = 'rolling'"):
            built({"name": name, "plan": "rolling"}, LAYOUT, TIERS)
    with pytest.raises(PlanError, match="no tier of width 1 is in use"):
        built({"name": "depthfl"}, LAYOUT, (Tier(0.5, 1),))
    settings = TRAIN.model_copy(update={"knobs": {"distillation": 1.0}})
    with pytest.raises(PlanError, match="cross-entropy of tiny has no parameter 'distillation'"):
        require_knobs(settings, (), "cross-entropy", "tiny")
    numbers = ("inner", "distillation")
    require_knobs(settings, numbers, "all-exits-teach", "tiny")
    # ScaleFL sets one of them, so that the loss is another method's.
    assert built({"name": "scalefl"}, LAYOUT, TIERS).sets_all_numbers
    with pytest.raises(PlanError, match="all-exits-teach of tiny has the parameter 'inner'"):
        require_knobs(settings, numbers, "all-exits-teach", "tiny", all_set=True)
