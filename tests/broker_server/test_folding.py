"""Folding does not depend on the order of arrival, and folds as early as the order of the devices
allows.
"""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_server.stages.moves import limit_samples
from broker_server.stages.update import Distance, Update
from broker_server.store import TaskPhase, TaskRecord
from broker_server.strategies.strategy import GlobalModel
from broker_server.updates.folding import Folding
from fleet_protocol.messages import BlobRef, TaskMetrics
from models.plan import compile_plan, make_plan
from tests.broker_server.artifacts import tiny_layout, tiny_weights
from tests.broker_server.methods import built

LAYOUT = tiny_layout(inputs=5, hidden=6)


def metrics(labels=(0, 1, 2, 3), examples=10):
    return TaskMetrics(
        examples=examples,
        batches=1,
        labels=labels,
        fetch_seconds=0,
        train_seconds=0,
        resident_bytes=0,
    )


def update_of(index: int) -> Update:
    tier = LAYOUT.tier((1.0, 0.5)[index % 2])
    plan = compile_plan(LAYOUT, make_plan(LAYOUT, tier))
    rng = np.random.default_rng(index)
    weights = {
        n: rng.standard_normal(t.local_shape, np.float32)
        for n, t in plan.tensors.items()
        if n in plan.required
    }
    blob = BlobRef(digest="0" * 64, size=1, chunk_bytes=1024)
    task = TaskRecord(str(index), "r", 1, f"d{index}", "train", tier.id, plan.title, 0, blob, blob)
    return Update(
        device=task.device,
        tier=tier,
        key=plan.title,
        plan=plan,
        weights=weights,
        metrics=metrics((index % 4, 3), 1 + index),
        version=task.version,
        sent=lambda: weights,
    )


def merge_in(order, answers, weighting="samples"):
    """Let updates arrive in an order; answers says of each whether it is an update or a refusal."""
    loaded = []

    def load(task):
        loaded.append(task)
        return update_of(int(task))

    merge = built({"weighting": weighting}, LAYOUT).merge
    folding = Folding(merge, [str(i) for i in range(len(answers))], load)
    phases = {str(i): TaskPhase.OFFERED for i in range(len(answers))}
    for index in order:
        phases[str(index)] = answers[index]
        folding.advance(phases)
    result = folding.finish(GlobalModel(tiny_weights(LAYOUT), {})).weights
    assert loaded == folding.folded == sorted(folding.folded, key=int)
    return {name: value.tobytes() for name, value in result.items()}, loaded


@given(
    st.lists(
        st.sampled_from([TaskPhase.RECEIVED, TaskPhase.REFUSED, TaskPhase.MISSED]),
        min_size=1,
        max_size=7,
    ),
    st.randoms(use_true_random=False),
)
@settings(max_examples=50, deadline=None)
def test_any_order_of_arrival_gives_the_same_bits(answers, shuffle: random.Random):
    """The merged weights are equal bit by bit, weighted sums included."""
    order = list(range(len(answers)))
    straight = merge_in(order, answers)
    shuffle.shuffle(order)
    assert merge_in(order, answers) == straight


def test_an_update_is_folded_as_soon_as_its_turn_comes():
    """What arrives out of turn waits on disk; when the gap closes, everything behind it follows."""
    loaded = []
    folding = Folding(
        built({}, LAYOUT).merge,
        ["0", "1", "2"],
        lambda task: loaded.append(task) or update_of(int(task)),
    )
    phases = dict.fromkeys(("0", "1", "2"), TaskPhase.OFFERED)
    phases["2"] = TaskPhase.RECEIVED
    folding.advance(phases)
    assert loaded == []
    phases["0"] = TaskPhase.RECEIVED
    folding.advance(phases)
    assert loaded == ["0"]
    phases["1"] = TaskPhase.DECLINED
    folding.advance(phases)
    assert loaded == ["0", "2"]


class Stored(dict):
    """The tensors of an update on disk, which are read once each time that they are looked at."""

    def __init__(self, tensors, reads, task):
        super().__init__(tensors)
        self.reads = reads
        self.task = task

    def __getitem__(self, name):
        self.reads.add((self.task, id(self)))
        return super().__getitem__(name)


def test_an_update_that_waits_is_read_when_it_is_folded():
    """The intake has measured it. A screen that compares all updates keeps those that it opens."""
    reads = set()
    kept = []

    def load(task):
        update = update_of(int(task))
        weights = Stored(update.weights, reads, task)
        kept.append(weights)  # so that no two have the same id
        return replace(update, weights=weights, sent=None, distance=Distance(1.0, 100))

    folding = Folding(
        built({}, LAYOUT).merge, ["0", "1", "2"], load, is_doubtful=lambda measured: True
    )
    folding.advance(dict.fromkeys(("0", "1", "2"), TaskPhase.RECEIVED))
    assert not reads
    for task in ("0", "1"):
        assert folding.open(task).weights["hidden.weight"].size
    folding.settle({"1": lambda update: None})
    assert folding.folded == ["0", "2"]
    assert sorted(task for task, _ in reads) == ["0", "1", "2"]


def settled(doubted, changed):
    """Fold five updates, some of which are in doubt, and treat some when the round closes.

    Returns:
        The merged weights, the tasks in the sums, and how often each update was folded.
    """
    merge = built({"weighting": "samples"}, LAYOUT).merge
    counts = Counter()

    def fold(sums, update):
        counts[update.device.removeprefix("d")] += 1
        merge.fold(sums, update)

    folding = Folding(
        replace(merge, fold=fold),
        [str(i) for i in range(5)],
        lambda task: update_of(int(task)),
        is_doubtful=lambda measured: measured.device in doubted,
    )
    folding.advance({str(i): TaskPhase.RECEIVED for i in range(5)})
    treatments = {task: lambda update: limit_samples(update, 1) for task in changed}
    if changed:
        treatments[changed[-1]] = lambda update: None
    folding.settle(treatments)
    new = folding.finish(GlobalModel(tiny_weights(LAYOUT), {})).weights
    return {name: value.tobytes() for name, value in new.items()}, folding.folded, dict(counts)


def test_an_update_in_doubt_and_all_behind_it_are_folded_once_when_the_round_closes():
    """The bits are those of sums that are made again, which nobody in doubt costs a second pass."""
    again, folded, counts = settled((), ("2", "3"))
    assert folded == ["0", "1", "2", "4"]
    assert counts == {"0": 2, "1": 2, "2": 2, "3": 1, "4": 2}
    once, folded_once, counts = settled(("d2",), ("2", "3"))
    assert (once, folded_once) == (again, folded)
    assert counts == {"0": 1, "1": 1, "2": 1, "4": 1}


def test_a_doubt_that_comes_to_nothing_changes_no_bit():
    """The updates are folded as they are, each once."""
    plain, folded, _ = settled((), ())
    late, folded_late, counts = settled(("d0", "d3"), ())
    assert (late, folded_late) == (plain, folded)
    assert counts == dict.fromkeys(folded, 1)


def test_an_update_that_changes_before_the_first_in_doubt_has_the_sums_made_again():
    """Doubt is about time alone: what counts is what was found when the round closed."""
    again, folded, _ = settled((), ("0", "4"))
    mixed, folded_mixed, counts = settled(("d2",), ("0", "4"))
    assert (mixed, folded_mixed) == (again, folded)
    assert counts == {"0": 2, "1": 2, "2": 1, "3": 1}
