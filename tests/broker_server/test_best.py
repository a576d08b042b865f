"""The best version by any metric, and the end of a run whose versions no longer get better."""

import pytest

from broker_server.rounds.best import (
    _label_accuracies,
    kept_versions,
    metric_names,
    reason_to_stop,
    require_metric,
    score,
)
from broker_server.settings.evaluation import EvaluationConfig, EvaluationKeys
from broker_server.store import Store, VersionRecord
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.errors import ConfigError
from fleet_protocol.messages import Evaluation, Measured
from fleet_protocol.weights import encode_weights
from tests.broker_server.peer import Peer, honest


def version(number, **numbers):
    """A version with these numbers; without any it was not judged."""
    found = None
    if numbers:
        own = [
            Measured(name=name, rule="ratio", value=value, sums=())
            for name, value in numbers.items()
        ]
        found = VersionEvaluation(
            examples=9,
            loss=numbers.get("loss", 1.0),
            accuracy=numbers.get("accuracy"),
            metrics=tuple(item for item in own if item.name not in {"loss", "accuracy"}),
        )
    return VersionRecord("run", number, number, f"d{number}", None, None, 0.0, found)


CASES = [
    ({}, [{"accuracy": a} for a in (0.5, 0.7, 0.6, 0.7)], 2),
    ({"metric": "loss"}, [{"loss": x, "accuracy": 1 - x} for x in (0.9, 0.4, 0.5, 0.4)], 2),
    ({"metric": "f1"}, [{"f1": f, "accuracy": 1 - f} for f in (0.2, 0.3, 0.1, 0.25)], 2),
    ({"metric": "rmse", "min_delta": 0.1}, [{"rmse": r} for r in (3.0, 2.95, 2.91, 2.95)], 3),
    ({"metric": "mine", "direction": "lower"}, [{"mine": m} for m in (5.0, 4.0, 6.0, 4.5)], 2),
    ({}, [{"accuracy": 0.5}, {}, {"accuracy": 0.4}, {}], 1),
]


@pytest.mark.parametrize(("keys", "numbers", "since"), CASES)
def test_patience_counts_evaluations_that_are_not_better(keys, numbers, since):
    """Any metric, its direction by name or as said, by more than a least difference; what was not
    judged counts not.
    """
    versions = [version(0), *(version(number, **item) for number, item in enumerate(numbers, 1))]
    assert reason_to_stop(EvaluationKeys(patience=since, **keys), versions) is not None
    assert reason_to_stop(EvaluationKeys(patience=since + 1, **keys), versions) is None
    assert reason_to_stop(EvaluationKeys(**{**keys, "min_delta": 0.0}), versions) is None


def test_the_reason_names_the_best():
    """With metric, how many evaluations, and the version."""
    config = EvaluationKeys(metric="loss", patience=1, min_delta=0.05)
    versions = [version(1, loss=0.5), version(2, loss=0.46)]
    said = (
        "loss did not improve by more than 0.05 in 1 evaluations; the best was 0.5000 of version 1"
    )
    assert reason_to_stop(config, versions) == said


def test_a_negative_score_is_told_as_it_is():
    """A correlation may be below 0, and so may a loss of one's own."""
    told = [
        reason_to_stop(
            EvaluationKeys(metric=metric, patience=1, direction=way),
            [version(1, **{metric: -0.02}), version(2, **{metric: worse})],
        )
        for metric, way, worse in (("r2", None, -0.3), ("mine", "lower", 0.1))
    ]
    assert [said.partition("the best was ")[2] for said in told] == ["-0.0200 of version 1"] * 2


def test_the_best_by_a_metric_keeps_its_weights():
    """Not the one of the highest accuracy."""
    versions = [
        version(1, accuracy=0.9, f1=0.1),
        version(2, accuracy=0.5, f1=0.8),
        version(3, accuracy=0.6, f1=0.2),
    ]
    assert [item.number for item in kept_versions(versions, 1, EvaluationKeys(metric="f1"))] == [
        2,
        3,
    ]
    assert [item.number for item in kept_versions(versions, 1, EvaluationKeys())] == [1, 3]
    assert score(EvaluationKeys(metric="f1"), versions[0].evaluation) == 0.1


def test_a_metric_that_nobody_computes_is_refused():
    """Before anything is trained, with those that there are."""
    reported = metric_names(("loss_sum", "correct"), ["f1"])
    for name in ("f1", "loss", "accuracy"):
        require_metric(EvaluationKeys(metric=name), reported)
    with pytest.raises(ConfigError, match="do not report 'rmse', only"):
        require_metric(EvaluationKeys(metric="rmse"), reported)
    with pytest.raises(ValueError, match=r"goes with evaluation\.metric"):
        EvaluationKeys(direction="lower")
    with pytest.raises(ValueError, match=r"needs evaluation\.data"):
        EvaluationConfig(patience=2)
    with pytest.raises(ValueError, match="min_delta has no effect without patience"):
        EvaluationKeys(min_delta=0.01)


def test_a_run_ends_when_patience_does(url, config, running, fleet):
    """Devices that send back what they got make equal versions: the run finishes early, and the
    store says why.
    """

    def echo(peer, work):
        if work.offer.routine == "statistics":
            return honest()(peer, work)
        return peer.send(work, encode_weights(dict(work.weights), work.metadata()))

    settings = config(
        round={"rounds": 9}, evaluation={"patience": 2, "metric": "loss", "min_delta": 1e-3}
    )
    with Peer(fleet, "d", url, echo):
        finished = running(settings, url).wait()
    assert (finished.status, finished.rounds, finished.exit_code) == ("finished", 3, 0)
    store = Store(settings.store, read_only=True)
    run = store.run(finished.run)
    assert (run.status, run.detail) == ("finished", finished.early)
    assert "loss did not improve by more than 0.001 in 2 evaluations" in finished.early
    store.close()


def test_a_metric_of_classes_tells_the_accuracy_of_each_label():
    """Of judged tiers, too; that of a label which no sample has is not known, nor any without such
    a metric.
    """
    counted = Measured(
        name="own", rule="iou", value=0.5, sums=((3.0, 1.0, 0.0), (4.0, 5.0, 1.0), (4.0, 2.0, 0.0))
    )
    plain = Evaluation(examples=6, loss=1.0, accuracy=0.5)
    judged = VersionEvaluation(
        **dict(plain), tiers={"w0.50-d1": plain.model_copy(update={"metrics": (counted,)})}
    )
    assert _label_accuracies(judged) == {"w0.50-d1": (0.75, 0.5, None)}
