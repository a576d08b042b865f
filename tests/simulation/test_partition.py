"""Non-IID splits: shards as HeteroFL deals them, and one device for each subject."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_protocol.errors import ConfigError
from simulation.data.partition import by_subject, cut_shards, deal_shards, in_proportion
from simulation.data_tables import PartitionTable

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "vectors.json"


@given(st.integers(2, 12), st.integers(1, 12), st.integers(1, 4), st.integers(0, 3))
def test_shards_are_balanced_and_go_to_one_device(classes, devices, per_device, seed):
    """Every device has as many shards as the others, few labels, and no sample that another one
    has.
    """
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), 50))
    if devices * per_device < classes:
        with pytest.raises(ConfigError, match="cannot cover"):
            deal_shards(classes, devices, per_device, seed)
        return
    dealt = deal_shards(classes, devices, per_device, seed)
    assert {len(held) for held in dealt.labels} == {per_device}
    assert Counter(label for held in dealt.labels for label in held) == dict(
        enumerate(dealt.counts)
    )
    assert max(dealt.counts) - min(dealt.counts) <= 1
    shares = dealt.split(labels, seed)
    assert sorted(np.concatenate(shares)) == list(range(len(labels)))
    for share, held in zip(shares, dealt.labels, strict=True):
        assert set(labels[share]) == set(held)
        assert (np.diff(share) > 0).all()
    again = deal_shards(classes, devices, per_device, seed).split(labels, seed)
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))


def test_shards_have_the_published_sizes():
    """Vector H10: remainders go to the first shards; 100 devices with two of 200 shards of 250
    samples.
    """
    if not VECTORS.is_file():
        pytest.skip("worked examples are not beside this checkout")
    entries = json.loads(VECTORS.read_text())["vectors"]
    entry = next(example for example in entries if example["id"].startswith("H10"))
    given_ = entry["inputs"]
    expected = entry["expected"]
    for case, devices, classes, size in zip(
        ("tiny", "cifar"), given_["users"], given_["classes"], given_["class_sizes"], strict=True
    ):
        dealt = deal_shards(classes, devices, given_["shards_per_user"], seed=0, as_released=True)
        shards = set(dealt.counts)
        assert shards == {expected[case]["shards_per_class"]}
        sizes = [len(shard) for shard in cut_shards(np.arange(size), shards.pop())]
        assert sizes == expected[case].get("sizes", sizes)
        assert set(sizes) == set(expected[case].get("sizes_set", sizes))


def test_the_released_split_leaves_shards_unused():
    """A device whose draws coincide has one label and half the data; that happens to 19/199 of
    them.
    """
    labels = np.repeat(np.arange(10), 5000)
    single = 0
    for seed in range(100):
        dealt = deal_shards(10, 100, 2, seed, as_released=True)
        assert all(len(set(held)) == len(held) for held in dealt.labels)
        single += sum(len(held) == 1 for held in dealt.labels)
    share = single / 10_000
    expected = 19 / 199
    assert abs(share - expected) < 5 * (expected * (1 - expected) / 10_000) ** 0.5
    shares = dealt.split(labels, seed=0)
    assert {len(dealt_share) for dealt_share in shares} == {250, 500}
    assert len(set(np.concatenate(shares))) == sum(map(len, shares)) < len(labels)
    even = deal_shards(10, 100, 2, seed=0).split(labels, seed=0)
    assert {len(dealt_share) for dealt_share in even} == {500}


def test_a_test_set_is_split_with_the_same_labels():
    """One deal serves training and test; a device is tested on what it has seen."""
    dealt = deal_shards(10, 6, 2, seed=4)
    train = np.repeat(np.arange(10), 30)
    test = np.tile(np.arange(10), 12)
    for a, b in zip(dealt.split(train, 0), dealt.split(test, 1), strict=True):
        assert set(train[a]) == set(test[b])


@given(
    devices=st.integers(1, 7),
    classes=st.integers(1, 5),
    more=st.integers(0, 60),
    seed=st.integers(0, 2**16),
)
def test_further_samples_are_dealt_like_the_first(devices, classes, more, seed):
    """Every device gets its share of every class to within a sample; what nobody holds the like of
    goes to nobody.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=40)
    further = rng.integers(classes + 1, size=more)
    order = rng.permutation(40)
    shares = np.split(order, np.sort(rng.integers(41, size=devices - 1)))
    dealt = in_proportion(shares, labels, further, seed)
    of_seen_labels = np.flatnonzero(np.isin(further, labels))
    assert sorted(np.concatenate(dealt)) == list(of_seen_labels)
    for label in np.unique(labels):
        wanted = [
            np.mean(labels[share] == label) * len(share) / np.count_nonzero(labels == label)
            for share in shares
            if len(share)
        ]
        got = [
            np.count_nonzero(further[mine] == label)
            for share, mine in zip(shares, dealt, strict=True)
            if len(share)
        ]
        np.testing.assert_allclose(
            got, np.array(wanted) * np.count_nonzero(further == label), atol=1
        )
    for share, mine in zip(shares, dealt, strict=True):
        assert (np.diff(mine) > 0).all()
        assert set(further[mine]) <= set(labels[share])


def test_impossible_deals_are_errors():
    """Uneven shards as released, labels outside the classes, classes with too few samples."""
    with pytest.raises(ConfigError, match="not a multiple of 10 classes"):
        deal_shards(10, 6, 2, 0, as_released=True)
    dealt = deal_shards(2, 4, 1, 0)
    with pytest.raises(ConfigError, match="outside the 2 classes"):
        dealt.split(np.array([0, 2]), 0)
    with pytest.raises(ConfigError, match="class 1 has 1 training samples for 2 shards"):
        dealt.split(np.array([0, 0, 1]), 0)


def test_subjects_keep_their_samples():
    """A device for each subject, or a few subjects for each device; never more devices than
    subjects.
    """
    groups = np.array([3, 1, 1, 7, 3, 9])
    assert [share.tolist() for share in by_subject(groups)] == [[1, 2], [0, 4], [3], [5]]
    assert [share.tolist() for share in by_subject(groups, 2)] == [[0, 1, 2, 4], [3, 5]]
    with pytest.raises(ConfigError, match="4 subjects cannot be divided among 5"):
        by_subject(groups, 5)


@pytest.mark.parametrize(
    ("table", "key", "kind"),
    [
        ({"alpha": 0.1}, "alpha", "dirichlet"),
        ({"kind": "dirichlet", "per_device": 3}, "per_device", "shards"),
    ],
)
def test_a_key_of_another_kind_of_split_is_refused(table, key, kind):
    """Whoever sets alpha alone would publish an IID split as a Dirichlet one."""
    with pytest.raises(ValueError, match=f'{key} has no effect on kind = .*; set kind = "{kind}"'):
        PartitionTable(**table)
    assert PartitionTable(**{**table, "kind": kind}).kind == kind
