"""How a device sizes itself: the four stages of training, the cap, the ablations, and a record that
survives.
"""

import ast
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from device_runtime.training.choosers import adaptive
from device_runtime.training.choosers.adaptive import (
    Progress,
    choose,
    fit,
    normalise,
    observe,
    quantise,
    system_efficiency,
    utility,
)
from fleet_protocol.errors import ConfigError
from fleet_protocol.sizing import SizingConstants

SETTINGS = SizingConstants(alpha=2.0, target_loss=0.5, stall=0.1, step=0.25, gamma=2.0, theta=4.0)
TIMES = st.floats(0.001, 100)


def after(*losses, settings=SETTINGS):
    state = Progress(training_efficiency=settings.neutral)
    for loss in losses:
        state = observe(state, settings, loss)
    return state


def test_training_efficiency_by_stage():
    """Early it keeps, stalled far from the target it rises, moving it keeps, stalled near the
    target it falls.
    """
    assert after().training_efficiency == 1.0
    assert after(3.0).training_efficiency == 1.0
    assert after(3.0, 2.0).training_efficiency == 1.0
    assert after(3.0, 2.0, 1.95).training_efficiency == 1.25
    assert after(3.0, 2.0, 1.95, 1.2).training_efficiency == 1.25
    assert after(3.0, 2.0, 1.95, 1.2, 0.95).training_efficiency == 1.25
    assert after(3.0, 2.0, 1.95, 1.2, 0.95, 0.9).training_efficiency == 1.0
    # The loss may rise: what counts is by how much it changed.
    assert after(1.0, 1.05).training_efficiency == 1.25


def test_the_edges_of_stalling_belong_to_it():
    """A change of exactly delta has stalled, up or down; one a hair larger has not."""
    settings = SETTINGS.model_copy(update={"stall": 0.125})
    for loss in (2.0 - 0.125, 2.0, 2.0 + 0.125):
        assert after(2.0, loss, settings=settings).training_efficiency == 1.25
    for loss in (math.nextafter(1.875, 0), math.nextafter(2.125, 3)):
        assert after(2.0, loss, settings=settings).training_efficiency == 1.0
    still = SETTINGS.model_copy(update={"stall": 0.0})
    assert after(2.0, 2.0, settings=still).training_efficiency == 1.25
    assert after(2.0, math.nextafter(2.0, 3), settings=still).training_efficiency == 1.0


def test_a_loss_at_alpha_times_the_target_is_still_far():
    """From there on the efficiency rises, a hair below it falls."""
    assert SETTINGS.alpha * SETTINGS.target_loss == 1.0
    assert after(1.0, 1.0).training_efficiency == 1.25
    assert after(1.0, math.nextafter(1.0, 0)).training_efficiency == 0.75


def test_efficiency_falls_below_nothing():
    """Stalled long enough near the target it is zero, then negative: the narrowest model, until the
    loss moves.
    """
    state = after(*[0.5] * 5)
    assert state == Progress(rounds=5, training_efficiency=0.0, last_loss=0.5)
    state = observe(state, SETTINGS, 0.5)
    assert state.training_efficiency == -0.25
    times = {"transmit_seconds": 0.001, "compute_seconds": 0.001, "maximum": 1.0}
    assert choose(state, SETTINGS, **times).width == 0.0625


def test_the_record_survives_a_restart():
    """JSON out, JSON in; unknown keys are refused."""
    state = after(3.0, 2.0, 1.95)
    assert Progress.model_validate_json(state.model_dump_json()) == state
    assert state.rounds == 3
    with pytest.raises(ValueError, match="surprise"):
        Progress.model_validate_json('{"training_efficiency": 1.0, "surprise": 1}')


def test_a_loss_that_is_not_finite_is_ignored():
    """A diverged round says nothing about stalling."""
    state = after(3.0, 2.0)
    assert observe(state, SETTINGS, float("nan")) is state
    assert observe(state, SETTINGS, float("inf")) is state
    assert observe(state, SETTINGS, float("-inf")) is state


@given(TIMES, TIMES, st.floats(-3, 6), st.sampled_from([1.0, 0.5, 0.25, 0.125, 0.0625]))
def test_the_choice_is_a_level_within_the_maximum(transmit, compute, progress, maximum):
    """Never wider than the device can train, and more efficiency never means a narrower model."""
    state = Progress(training_efficiency=progress)

    def width(faster):
        return choose(
            state,
            SETTINGS,
            transmit_seconds=transmit / faster,
            compute_seconds=compute / faster,
            maximum=maximum,
        )

    slow = width(1.0)
    fast = width(2.0)
    assert slow.width in (1.0, 0.5, 0.25, 0.125, 0.0625)
    assert slow.width <= maximum
    assert 0 <= slow.normalised <= 1
    if progress >= 0:
        assert fast.wanted >= slow.wanted
    else:
        assert slow.wanted == 0.0625


def test_both_forms_of_system_efficiency():
    """The first is ruled by the faster of link and processor, the second by the slower."""
    assert system_efficiency(0.5, 4.0, "sum_of_reciprocals") == 2.25
    assert system_efficiency(0.5, 4.0, "reciprocal_of_sum") == pytest.approx(1 / 4.5)
    assert system_efficiency(2.0, 2.0, "reciprocal_of_sum") == 0.25
    for times in ((0.0, 1.0), (1.0, 0.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("nan"))):
        with pytest.raises(ConfigError, match="positive times"):
            system_efficiency(*times, "sum_of_reciprocals")


def test_both_forms_of_utility_keep_the_sign():
    """A negative training efficiency lowers the utility, whatever the exponent."""
    assert utility(3.0, 2.0, 2.0, "multiplicative") == 12
    assert utility(3.0, -2.0, 2.0, "multiplicative") == -12
    assert utility(3.0, -2.0, 2.0, "additive") == -1
    added = SizingConstants(combination="additive")
    assert (added.neutral, SETTINGS.neutral) == (0, 1)
    choice = choose(
        Progress(training_efficiency=added.neutral),
        added,
        transmit_seconds=1,
        compute_seconds=1,
        maximum=1.0,
    )
    assert choice.utility == 2.0


def test_ablation_arms():
    """System alone ignores losses; training alone ignores times (specification 4.5)."""
    stalled = Progress(training_efficiency=2.0)
    times = {"transmit_seconds": 1.0, "compute_seconds": 1.0, "maximum": 1.0}
    slow = {"transmit_seconds": 9.0, "compute_seconds": 9.0, "maximum": 1.0}
    system = SETTINGS.model_copy(update={"arm": "system"})
    assert choose(stalled, system, **times).utility == 2.0
    training = SETTINGS.model_copy(update={"arm": "training", "fixed": 0.5})
    assert (
        choose(stalled, training, **times).utility
        == choose(stalled, training, **slow).utility
        == 2.0
    )
    assert choose(stalled, SETTINGS, **times).utility == 8.0


def test_edges_of_the_cuts_belong_to_the_wider_model():
    """0.2 gives an eighth, just below it a sixteenth; Theta itself gives the full model."""
    assert [quantise(share) for share in (0.0, 0.19999, 0.2, 0.4, 0.6, 0.79999, 0.8, 1.0)] == [
        0.0625,
        0.0625,
        0.125,
        0.25,
        0.5,
        0.5,
        1.0,
        1.0,
    ]
    assert [normalise(value, 4.0) for value in (-1.0, 0.0, 1.0, 4.0, 9.0)] == [
        0.0,
        0.0,
        0.25,
        1.0,
        1.0,
    ]


def test_a_hair_below_a_cut_is_the_next_narrower_model():
    """Every cut, from both sides; nothing is narrower than a sixteenth."""
    cuts = [(0.8, 1.0, 0.5), (0.6, 0.5, 0.25), (0.4, 0.25, 0.125), (0.2, 0.125, 0.0625)]
    for cut, wider, narrower in cuts:
        assert (quantise(cut), quantise(math.nextafter(cut, 0))) == (wider, narrower)
    assert quantise(5e-324) == quantise(0.0) == 0.0625


def test_a_hair_below_theta_is_not_yet_everything():
    """The share reaches 1 at theta and never passes it; the smallest utility above zero is above
    zero.
    """
    assert normalise(math.nextafter(4.0, 0), 4.0) < 1.0
    assert normalise(math.nextafter(4.0, 5), 4.0) == normalise(math.inf, 4.0) == 1.0
    assert normalise(math.nextafter(0.0, 1), 0.5) > 0.0
    assert normalise(-0.0, 4.0) == 0.0


def test_the_cap_is_the_maximum_itself():
    """A device that wants just what it can train gets it; one that wants more gets its maximum, and
    says both.
    """
    times = {"transmit_seconds": 1.0, "compute_seconds": 1.0}
    state = Progress(training_efficiency=1.125)  # U = 2 * 1.125**2
    for maximum, width in ((1.0, 0.5), (0.5, 0.5), (0.25, 0.25), (0.0625, 0.0625)):
        choice = choose(state, SETTINGS, maximum=maximum, **times)
        assert (choice.wanted, choice.width) == (0.5, width)
        assert choice.normalised == 2.53125 / 4
        assert (choice.system_efficiency, choice.training_efficiency) == (
            2.0,
            state.training_efficiency,
        )


def test_no_progress_leaves_nothing_to_weigh():
    """Zero training efficiency: no utility as a factor, the system's alone as a term."""
    for zero in (0.0, -0.0):
        assert utility(3.0, zero, 0.5, "multiplicative") == 0
        assert utility(3.0, zero, 0.5, "additive") == 3.0


def test_a_width_is_fitted_to_what_is_offered():
    """The widest that is not wider; the narrowest where all are."""
    assert fit(0.3, [1.0, 0.25, 0.5]) == 0.25
    assert fit(0.1, [1.0, 0.25, 0.5]) == 0.25
    assert fit(1.0, [0.5]) == 0.5
    assert fit(0.5, [0.25, 0.5, 1.0]) == 0.5
    assert fit(math.nextafter(0.5, 0), [0.25, 0.5, 1.0]) == 0.25
    assert fit(0.0625, [1.0]) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 0.5},
        {"target_loss": 0},
        {"step": 0},
        {"gamma": -1},
        {"theta": 0},
        {"fixed": 0},
        {"stall": -0.1},
    ],
)
def test_constants_out_of_range_are_refused(wrong):
    """When they are read, not in the middle of a run."""
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        SizingConstants(**wrong)


def test_it_needs_nothing_but_the_standard_library_and_the_protocol():
    """A board without numpy could size itself."""
    tree = ast.parse(Path(adaptive.__file__).read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    tops = {str(name).split(".")[0] for name in names}
    assert tops <= set(sys.stdlib_module_names) | {"fleet_protocol"}
