"""Metrics of many devices together, who say what they like."""

import pytest

from fleet_protocol.messages import Evaluation, Measured
from fleet_protocol.metrics import join_metrics


def said(rule, *sums):
    metric = Measured(name="m", rule=rule, value=0.0, sums=sums)
    return Evaluation(examples=1, loss=1.0, accuracy=None, metrics=(metric,))


def test_sums_of_devices_are_judged_as_of_one():
    """Not as the mean of their values."""
    assert join_metrics([said("ratio", (1.0,), (2.0,)), said("ratio", (9.0,), (10.0,))]) == {
        "m": 10 / 12
    }


def test_a_metric_of_some_devices_is_joined_over_these():
    """A deep sub-model has more exits than the shallow one that happens to come first."""

    def exits(*rights):
        metrics = []
        for number, right in enumerate(rights, 1):
            sums = ((right,), (10.0,))
            metrics.append(Measured(name=f"exit{number}", rule="ratio", value=0.0, sums=sums))
        return Evaluation(examples=10, loss=1.0, accuracy=None, metrics=tuple(metrics))

    joined = join_metrics([exits(2.0), exits(4.0, 5.0, 6.0), exits(6.0, 7.0)])
    assert list(joined.items()) == [("exit1", 0.4), ("exit2", 0.6), ("exit3", 0.6)]


@pytest.mark.parametrize(
    ("rule", "sums"),
    [
        ("root", ((-1.0,), (1.0,))),
        ("f1", ((1.0,),)),
        ("f1", ((1.0, 2.0, 3.0), (1.0, 2.0), (1.0, 2.0))),
        ("iou", ((2.0, 2.0), (1.0, 1.0), (1.0, 1.0))),
    ],
)
def test_sums_that_no_rule_can_take_are_left_out(rule, sums):
    """One device must not end what shows all."""
    assert join_metrics([said(rule, *sums)]) == {}
