"""How a device sizes itself: the four stages of training, the cap, the ablations, and a record that survives."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runtime import adaptive
from device_runtime.adaptive import (
    WhaleSettings,
    WhaleState,
    choose,
    fit,
    initial,
    normalise,
    observe,
    quantise,
    system_efficiency,
    utility,
)
from fleet_protocol.errors import ConfigError

SETTINGS = WhaleSettings(alpha=2.0, target_loss=0.5, stall=0.1, step=0.25, gamma=2.0, theta=4.0)
TIMES = st.floats(0.001, 100)


def after(*losses, settings=SETTINGS):
    state = initial(settings)
    for loss in losses:
        state = observe(state, settings, loss)
    return state


def test_training_efficiency_by_stage():
    """Early it keeps, stalled far from the target it rises, moving it keeps, stalled near the target it falls."""
    assert after().training_efficiency == 1.0
    assert after(3.0).training_efficiency == 1.0
    assert after(3.0, 2.0).training_efficiency == 1.0
    assert after(3.0, 2.0, 1.95).training_efficiency == 1.25
    assert after(3.0, 2.0, 1.95, 1.2).training_efficiency == 1.25
    assert after(3.0, 2.0, 1.95, 1.2, 0.95).training_efficiency == 1.25
    assert after(3.0, 2.0, 1.95, 1.2, 0.95, 0.9).training_efficiency == 1.0
    # The loss may rise: what counts is by how much it changed.
    assert after(1.0, 1.05).training_efficiency == 1.25


def test_the_record_survives_a_restart():
    """JSON out, JSON in; unknown keys are refused."""
    state = after(3.0, 2.0, 1.95)
    assert WhaleState.model_validate_json(state.model_dump_json()) == state
    assert state.rounds == 3
    with pytest.raises(ValueError, match="surprise"):
        WhaleState.model_validate_json('{"training_efficiency": 1.0, "surprise": 1}')


def test_a_loss_that_is_not_finite_is_ignored():
    """A diverged round says nothing about stalling."""
    state = after(3.0, 2.0)
    assert observe(state, SETTINGS, float("nan")) is state
    assert observe(state, SETTINGS, float("inf")) is state


@given(TIMES, TIMES, st.floats(-3, 6), st.sampled_from([1.0, 0.5, 0.25, 0.125, 0.0625]))
def test_the_choice_is_a_level_within_the_maximum(transmit, compute, progress, maximum):
    """Never wider than the device can train, and more efficiency never means a narrower model."""
    state = WhaleState(training_efficiency=progress)

    def width(faster):
        return choose(
            state,
            SETTINGS,
            transmit_seconds=transmit / faster,
            compute_seconds=compute / faster,
            maximum=maximum,
        )

    slow, fast = width(1.0), width(2.0)
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
    for times in ((0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)):
        with pytest.raises(ConfigError, match="positive times"):
            system_efficiency(*times, "sum_of_reciprocals")


def test_both_forms_of_utility_keep_the_sign():
    """A negative training efficiency lowers the utility, whatever the exponent."""
    assert utility(3.0, 2.0, 2.0, "multiplicative") == 12
    assert utility(3.0, -2.0, 2.0, "multiplicative") == -12
    assert utility(3.0, -2.0, 2.0, "additive") == -1
    added = WhaleSettings(combination="additive")
    assert initial(added).training_efficiency == 0
    choice = choose(initial(added), added, transmit_seconds=1, compute_seconds=1, maximum=1.0)
    assert choice.utility == 2.0


def test_ablation_arms():
    """System alone ignores losses; training alone ignores times (METHODS 4.5)."""
    stalled = WhaleState(training_efficiency=2.0)
    times = {"transmit_seconds": 1.0, "compute_seconds": 1.0, "maximum": 1.0}
    slow = {"transmit_seconds": 9.0, "compute_seconds": 9.0, "maximum": 1.0}
    system = SETTINGS.model_copy(update={"arm": "system"})
    assert choose(stalled, system, **times).utility == 2.0
    training = SETTINGS.model_copy(update={"arm": "training", "fixed": 0.5})
    assert choose(stalled, training, **times).utility == choose(stalled, training, **slow).utility == 2.0
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
    assert [normalise(value, 4.0) for value in (-1.0, 0.0, 1.0, 4.0, 9.0)] == [0.0, 0.0, 0.25, 1.0, 1.0]


def test_a_width_is_fitted_to_what_is_offered():
    """The widest that is not wider; the narrowest where all are."""
    assert fit(0.3, [1.0, 0.25, 0.5]) == 0.25
    assert fit(0.1, [1.0, 0.25, 0.5]) == 0.25
    assert fit(1.0, [0.5]) == 0.5


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": 0.5}, {"target_loss": 0}, {"step": 0}, {"gamma": -1}, {"theta": 0}, {"fixed": 0}, {"stall": -0.1}],
)
def test_constants_out_of_range_are_refused(wrong):
    """When they are read, not in the middle of a run."""
    with pytest.raises(ConfigError, match="adaptive sizing"):
        WhaleSettings(**wrong)


def test_it_needs_nothing_but_the_standard_library_and_the_protocol():
    """A board without numpy could size itself."""
    tree = ast.parse(Path(adaptive.__file__).read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    tops = {str(name).split(".")[0] for name in names}
    assert tops <= set(sys.stdlib_module_names) | {"fleet_protocol"}
