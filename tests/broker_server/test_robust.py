"""One device does not own the model: what is unlike the other updates is refused or clipped, named
and counted.
"""

import contextlib
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from broker_server.settings.fleet import FleetConfig
from broker_server.settings.robust import RobustConfig
from broker_server.stages.bounds import EarlierNorms, Measured, lower_median, screen
from broker_server.stages.krum import left_out, squared_distances
from broker_server.store import Store, TaskPhase
from broker_server.store.queries.round_views import count_bounded
from broker_server.updates.distance import measure
from broker_server.updates.quarantine import quarantine_ends, quarantined
from fleet_protocol import control
from fleet_protocol.digests import blob_path
from fleet_protocol.errors import ConfigError, PlanError, RefusalReason
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.weights import encode_weights
from shoal.cli.main import app
from tests.broker_server.artifacts import tiny_layout, tiny_weights
from tests.broker_server.peer import Peer, honest, profile, silent
from tests.broker_server.test_fedmedian import LAYOUT, OLD, update
from tests.broker_server.test_refused_runs import prepare

REFUSED = TaskPhase.REFUSED
MERGED = TaskPhase.MERGED
MISSED = TaskPhase.MISSED
BOUNDED = RobustConfig(norm_bound=5)


# The rules.


def measured(*norms, tier="w1.00-d1", declared=10, announced=10, values=100):
    return {
        f"t{i}": Measured(tier, norm, values, declared, announced) for i, norm in enumerate(norms)
    }


def reasons(updates, config=None, earlier=None):
    return {
        task: screened.reason
        for task, screened in screen(updates, earlier or {}, config or BOUNDED).items()
    }


def test_norms_are_bounded_by_the_median_of_their_tier():
    """Five times the median is taken, more is refused or scaled to the bound."""
    updates = measured(1.0, 2.0, 3.0, 10.0, 11.0)
    assert set(reasons(updates).values()) == {None}  # the median is 3
    updates = measured(1.0, 2.0, 2.0, 10.0, 11.0)
    assert reasons(updates)["t4"] is RefusalReason.TOO_FAR
    assert reasons(updates)["t3"] is None
    clipped = screen(updates, {}, RobustConfig(norm_bound=5, beyond_norm="clip"))["t4"]
    assert (clipped.reason, clipped.screening.scale) == (None, pytest.approx(10 / 11))
    assert set(reasons(updates, RobustConfig(norm_bound=0)).values()) == {None}
    assert (
        reasons(measured(1.0, 1e31), RobustConfig(norm_bound=1e40, beyond_norm="clip"))["t1"]
        is RefusalReason.TOO_FAR
    )


def test_a_small_tier_is_compared_with_the_last_round_or_with_all():
    """Three devices make a median, now or in the last round; of fewer all tiers make it. Where
    nobody has moved there is nothing to compare with.
    """
    tier = "w1.00-d1"
    alone = measured(1e6)
    assert reasons(alone)["t0"] is None
    three = EarlierNorms((1.0, 2.0), frozenset({"a", "b", "c"}))
    assert reasons(alone, earlier={tier: three})["t0"] is RefusalReason.TOO_FAR
    bounded = EarlierNorms((1.0,), frozenset({"a"}), bound=10.0)
    assert reasons(alone, earlier={tier: bounded})["t0"] is RefusalReason.TOO_FAR
    assert reasons(measured(9.0), earlier={tier: bounded})["t0"] is None
    assert reasons(measured(1.0, 1e6))["t1"] is RefusalReason.TOO_FAR
    mixed = measured(1.0, 1.0) | {"narrow": Measured("w0.50-d1", 1e6, 50, 10, 10)}
    assert reasons(mixed)["narrow"] is RefusalReason.TOO_FAR
    assert set(reasons(measured(0.0, 0.0, 5.0)).values()) == {None}


def test_the_norms_of_a_device_raise_no_bound_of_its_own():
    """Its last norms were the median of its tier, so that it grew 4.9 times a round."""
    tier = "w1.00-d1"
    honest_updates = {
        f"n{i}": Measured("w0.50-d1", 1.0, 100, 10, 10, device=f"n{i}") for i in range(4)
    }
    own = EarlierNorms((4.9, 4.9, 4.9), frozenset({"grows"}), bound=5.0)
    grows = {"grows": Measured(tier, 24.0, 100, 10, 10, device="grows")}
    assert reasons(grows | honest_updates, earlier={tier: own})["grows"] is RefusalReason.TOO_FAR
    steady = {"steady": Measured(tier, 4.9, 100, 10, 10, device="grows")}
    settled = {
        name: replace(honest_update, norm=0.01) for name, honest_update in honest_updates.items()
    }
    assert reasons(steady | settled, earlier={tier: own})["steady"] is None


def test_one_that_does_nothing_keeps_nobody_out_of_a_tier_of_two():
    """Its norms of the last round and of this were half of four: the other was refused round by
    round.
    """
    honest_updates = {f"n{i}": Measured("w0.50-d1", 1.0, 100, 10, 10) for i in range(3)}
    lazy = {
        "lazy": Measured("w1.00-d1", 1e-6, 100, 10, 10),
        "honest": Measured("w1.00-d1", 2.0, 100, 10, 10),
    }
    before = EarlierNorms((1e-6, 2.0), frozenset({"lazy", "honest"}))
    of_three = EarlierNorms((1e-6, 2.0), frozenset({"lazy", "honest", "gone"}))
    for earlier in (before, of_three):
        assert set(reasons(lazy | honest_updates, earlier={"w1.00-d1": earlier}).values()) == {None}
    large = {
        "large": Measured("w1.00-d1", 100.0, 100, 10, 10),
        "honest": Measured("w1.00-d1", 2.0, 100, 10, 10),
    }
    before = EarlierNorms((2.0,), frozenset({"honest"}))
    verdicts = reasons(large | honest_updates, earlier={"w1.00-d1": before})
    assert verdicts["large"] is RefusalReason.TOO_FAR


def test_nobody_counts_for_more_samples_than_it_announced_or_ten_times_the_median():
    """By default such an update counts with as many as it may; it can be refused instead."""
    updates = measured(1.0, 1.0, 1.0) | {
        "liar": Measured("w1.00-d1", 1.0, 100, 10**15, 12),
        "giant": Measured("w1.00-d1", 1.0, 100, 10**15, 10**15),
    }
    screened = screen(updates, {}, RobustConfig())
    assert [screened[task].screening.samples for task in ("t0", "liar", "giant")] == [10, 12, 100]
    assert not any(result.reason for result in screened.values())
    refused = reasons(updates, RobustConfig(beyond_weight="refuse"))
    assert {task for task, reason in refused.items() if reason is RefusalReason.TOO_HEAVY} == {
        "liar",
        "giant",
    }


def test_who_has_no_samples_any_more_is_refused():
    """It announced that after it was asked; merged with a weight of 0 it had failed the run for
    everybody.
    """
    updates = measured(1.0, 1.0) | {"empty": Measured("w1.00-d1", 1.0, 100, 10, 0)}
    screened = screen(updates, {}, RobustConfig())
    assert [
        task for task, result in screened.items() if result.reason is RefusalReason.TOO_HEAVY
    ] == ["empty"]
    assert "10 samples (0 announced); up to 0" in screened["empty"].detail


@pytest.mark.attack(
    "member",
    "Tries to raise the norm bound together with a minority of devices",
    "the bound does not rise, because it depends on the median",
    "2026-11-22",
)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=9), st.floats(1e3, 1e37), st.integers(1, 4)
)
def test_a_minority_cannot_raise_its_bound(norms, size, bad):
    """However large, the updates of fewer than half are refused, and none of the others is."""
    bad = min(bad, (len(norms) - 1) // 2)
    refusals = list(reasons(measured(*norms, *[size] * bad)).values())
    assert refusals == [None] * len(norms) + [RefusalReason.TOO_FAR] * bad


def test_by_default_a_tier_of_few_devices_has_no_bound():
    """The largest of three honest boards is often five times the middle one; of five it counts."""
    four = {f"d{at}": Measured("w1.00-d1", 1.0, 100, 10, 10, f"d{at}") for at in range(3)}
    four["far"] = Measured("w1.00-d1", 9.0, 100, 10, 10, "far")
    assert set(reasons(four, RobustConfig()).values()) == {None}
    five = {**four, "d3": Measured("w1.00-d1", 1.0, 100, 10, 10, "d3")}
    assert reasons(five, RobustConfig())["far"] is RefusalReason.TOO_FAR
    earlier = {"w1.00-d1": EarlierNorms((1.0, 1.0), frozenset({"d3", "d4"}))}
    assert reasons(four, RobustConfig(), earlier)["far"] is RefusalReason.TOO_FAR
    assert reasons(four, BOUNDED)["far"] is RefusalReason.TOO_FAR


def test_by_default_every_update_counts_where_all_are_to_count_alike(config):
    """With a method that promises it, and where somebody asks for it; who writes a bound has it."""
    assert config().robust.norm_bound == "auto"
    assert config(strategy={"name": "fml"}).robust.norm_bound == 0
    assert config(strategy={"weighting": "uniform"}).robust.norm_bound == 0
    assert config(strategy={"name": "fml"}, robust={"norm_bound": 5}).robust.norm_bound == 5
    clipped = config(strategy={"name": "fml"}, robust={"beyond_norm": "clip"})
    assert clipped.robust.norm_bound == "auto"


def test_the_norm_is_that_of_the_difference():
    """In float64: what float32 cannot square is still measured; tensors that were not sent back do
    not count.
    """
    sent = {
        "a": np.ones((3, 70_000), np.float32),
        "b": np.zeros(2, np.float32),
        "stays": np.ones(1, np.float32),
    }
    new = {"a": sent["a"] + 2, "b": np.array([3e38, -3e38], np.float32)}
    norm, values = measure({"a": new["a"]}, sent)
    assert (norm, values) == (pytest.approx(2 * 210_000**0.5), 210_000)
    assert measure(new, sent).norm == pytest.approx(3e38 * 2**0.5)
    assert lower_median([4, 1]) == 1


def test_quarantine_follows_from_refusals_and_ends():
    """Three refusals with none taken between; then every further one brings it back; a release
    clears.
    """
    config = RobustConfig(quarantine_after=3, quarantine_rounds=5)

    def until(*phases, releases=None):
        history = [("d", number, phase) for number, phase in enumerate(phases, 1)]
        return quarantine_ends(history, releases or {}, config).get("d")

    assert until(REFUSED, REFUSED) is None
    assert until(REFUSED, REFUSED, REFUSED) == 8
    assert until(REFUSED, MISSED, REFUSED, REFUSED) == 9
    assert until(REFUSED, REFUSED, MERGED, REFUSED) is None
    assert until(REFUSED, REFUSED, REFUSED, REFUSED) == 9
    assert until(REFUSED, REFUSED, REFUSED, MERGED) is None
    assert until(REFUSED, REFUSED, REFUSED, releases={"d": 3}) is None
    assert until(REFUSED, REFUSED, REFUSED, REFUSED, releases={"d": 3}) is None
    # Rounds that waited for it until their deadline.
    assert until(MISSED, MISSED) is None
    assert until(MISSED, MISSED, MISSED) == 8
    assert until(MISSED, MISSED, REFUSED, REFUSED) is None
    assert until(MISSED, MERGED, MISSED, MISSED) is None
    assert until(*[MISSED] * 9) == 14


# Krum and the trimmed mean.


@given(count=st.integers(2, 8), seed=st.integers(0, 99))
def test_distances_are_those_of_all_pairs(count, seed):
    """Compared with plain subtraction, pair by pair."""
    rng = np.random.default_rng(seed)
    updates = {
        f"t{i}": {
            "a": rng.normal(100, 1, (3, 5)).astype(np.float32),
            "b": rng.normal(size=7).astype(np.float32),
        }
        for i in range(count)
    }
    distances = squared_distances(updates)
    for (i, left), (j, right) in itertools.product(enumerate(updates.values()), repeat=2):
        expected = sum(float(((left[n].astype(float) - right[n]) ** 2).sum()) for n in left)
        assert distances[i, j] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_krum_leaves_out_what_is_far_from_the_others():
    """Two of seven are elsewhere; a tier of four has nobody to spare, one of five has one."""
    rng = np.random.default_rng(0)

    def tier(count, bad):
        offsets = [5.0 * (index < bad) for index in range(count)]
        return {
            f"t{i}": {"w": (rng.normal(size=50) * 0.1 + off).astype(np.float32)}
            for i, off in enumerate(offsets)
        }

    assert set(left_out(tier(7, 2), 0.2)) == {"t0", "t1"}
    assert left_out(tier(5, 1), 0.3) == ("t0",)
    assert left_out(tier(4, 1), 0.4) == ()


@given(count=st.integers(1, 9), faulty=st.sampled_from([0.1, 0.2, 0.3, 0.4]))
def test_the_trimmed_mean_of_full_models(count, faulty):
    """Of each entry so many are dropped at either end, and the rest is averaged."""
    updates = [update(f"d{i}", 1.0, i) for i in range(count)]
    mean = merge(updates, average="trimmed_mean", faulty=faulty)
    cut = min(int(np.ceil(round(faulty * count, 9))), (count - 1) // 2)
    for name in OLD:
        ordered = np.sort(
            np.stack([device_update.weights[name] for device_update in updates]).astype(np.float64),
            axis=0,
        )
        np.testing.assert_allclose(
            mean[name], ordered[cut : count - cut].mean(axis=0), rtol=1e-6, atol=1e-7
        )


def merge(updates, name="heterofl", **settings):
    from dataclasses import replace  # noqa: PLC0415

    from broker_server.settings.method import StrategyConfig  # noqa: PLC0415
    from broker_server.strategies.registry import build_strategy  # noqa: PLC0415
    from tests.broker_server.methods import merged  # noqa: PLC0415

    settings_of_method = replace(StrategyConfig(name=name).settings, **settings)
    return merged(
        build_strategy(settings_of_method, LAYOUT, (LAYOUT.tier(1.0),), None), updates, OLD
    )


@pytest.mark.parametrize("average", ["median", "trimmed_mean"])
def test_entries_of_sub_models_are_decided_by_their_holders(average):
    """What only wide devices hold is theirs, what nobody holds stays, and a liar in the narrow tier
    moves neither.
    """
    wide = [update(f"w{i}", 0.5, i) for i in range(3)]
    narrow = [update(f"n{i}", 0.25, 10 + i) for i in range(2)]
    for value in narrow[0].weights.values():
        value[...] = 1e30
    model = merge([*narrow, *wide], average=average, faulty=0.3)
    assert (model["w"][4:] == OLD["w"][4:]).all()
    middle = np.sort(np.stack([device_update.weights["w"][2:] for device_update in wide]), axis=0)[
        1
    ]
    np.testing.assert_allclose(model["w"][2:4], middle, rtol=1e-6)
    assert np.abs(model["w"][:2]).max() < 10


@pytest.mark.parametrize("name", ["heterofl", "fedavg", "fedprox", "fedrolex", "whalefl"])
def test_a_robust_merge_is_a_setting_of_every_selective_average(name):
    """One liar of five does not move the result out of the range of the others."""
    updates = [update(f"d{i}", 1.0, i) for i in range(5)]
    for value in updates[0].weights.values():
        value[...] = -1e30
    for average in ("median", "trimmed_mean"):
        model = merge(updates, name, average=average)
        assert max(np.abs(value).max() for value in model.values()) < 10


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"strategy": {"name": "inclusivefl"}, "robust": {"merge": "median"}},
            "requires that another aggregation rule can replace the strategy's own",
        ),
        (
            {"strategy": {"name": "fedmedian"}, "robust": {"merge": "trimmed_mean"}},
            "strategy fedmedian .*another aggregation rule can replace",
        ),
        (
            {
                "strategy": {"name": "fedrolex", "fedrolex": {"weighting": "width"}},
                "robust": {"merge": "trimmed_mean"},
            },
            "requires that another aggregation rule can replace the strategy's own",
        ),
        (
            {"strategy": {"weighting": "samples"}, "robust": {"merge": "median"}},
            "requires that every update has the same weight",
        ),
        (
            {"strategy": {"plan": "random"}, "robust": {"merge": "krum"}},
            "requires that all devices of a tier train the same units",
        ),
        (
            {"strategy": {"name": "federated_dropout"}, "robust": {"merge": "krum"}},
            "requires that all devices of a tier train the same units",
        ),
    ],
)
def test_a_wrong_combination_is_an_error_when_planned(config, tables, message):
    """It says what does not go together before any device is asked."""
    with pytest.raises(PlanError, match=message):
        prepare(config, **tables)


# Attacks over a real broker.


def scaled(factor):
    def script(peer, work):
        tensors = {name: value * np.float32(factor) for name, value in work.weights.items()}
        peer.send(work, encode_weights(tensors, work.metadata()))

    return script


def constant(number):
    def script(peer, work):
        tensors = {name: np.full_like(value, number) for name, value in work.weights.items()}
        peer.send(work, encode_weights(tensors, work.metadata()))

    return script


def attacked(scripts, settings, url, running, fleet, widths=None):
    """A run in which some of the devices attack; its server, and the stored tasks of its last round
    by device.
    """
    with contextlib.ExitStack() as stack:
        for name, script in scripts.items():
            width = (widths or {}).get(name, 1.0)
            stack.enter_context(Peer(fleet, name, url, script, profile=profile(max_width=width)))
        server = running(settings, url)
        finished = server.wait()
    assert finished.status == "finished", finished.error
    store = stack.enter_context(contextlib.closing(Store(settings.store, read_only=True)))
    record = store.last_round(finished.run)
    weights = open_tensors(_blob(settings.store, store.version(finished.run).digest))
    return (
        server,
        {task.device: task for task in store.tasks(finished.run, record.number, "train")},
        weights,
    )


def _blob(folder, digest):
    return folder / "blobs" / "objects" / blob_path(digest)


GOOD = {f"good{i}": honest(1.0) for i in range(3)}


def farthest(weights):
    before = tiny_weights(tiny_layout())
    return max(float(np.abs(weights[name] - value).max()) for name, value in before.items())


@pytest.mark.attack(
    "member",
    "Claims 10^15 samples, so that other updates would have almost no weight",
    "the update is weighted by the number of samples that the device announced earlier",
    "2026-11-28",
)
def test_a_device_that_claims_ten_to_the_fifteen_samples_counts_as_announced(
    url, config, running, fleet
):
    """Under FedAvg it had all the weight; now it has that of the samples it announced, and its
    claim is stored.
    """
    settings = config(
        strategy={"name": "fedavg"}, round={"min_devices": 4}, evaluation={"data": None}
    )
    scripts = {**GOOD, "bad": honest(5.0, examples=10**15)}
    _, tasks, weights = attacked(scripts, settings, url, running, fleet)
    assert farthest(weights) == pytest.approx((3 * 1 + 5) / 4, rel=1e-5)
    screening = tasks["bad"].screening
    assert (tasks["bad"].phase, screening.samples, screening.declared) == (MERGED, 10, 10**15)


@pytest.mark.attack(
    "member",
    "Sends weights multiplied by a million",
    "refused as `too-far`; the log names the device",
    "2026-11-28",
)
@pytest.mark.parametrize(
    ("bad", "count"),
    [pytest.param(scaled(1e6), 1, id="times 1e6"), pytest.param(constant(3.4e38), 2, id="3.4e38")],
)
def test_an_update_that_is_unlike_the_others_is_refused_and_named(
    bad, count, url, config, running, fleet
):
    """It neither moves the model nor fails the run; the offender is told of, counted, and stands in
    the store.
    """
    settings = config(
        round={"rounds": 3, "min_devices": 3 + count},
        robust={"norm_bound": 5},
        evaluation={"data": None},
    )
    names = {f"bad{i}" for i in range(count)}
    server, tasks, weights = attacked(
        {**GOOD, **dict.fromkeys(names, bad)}, settings, url, running, fleet
    )
    assert farthest(weights) == pytest.approx(3.0, rel=1e-5)
    refusals = server.events_of(control.UpdateRefused)
    assert {event.device for event in refusals} == names
    assert {event.reason for event in refusals} == {RefusalReason.TOO_FAR}
    assert len(refusals) == 3 * count
    for name in names:
        assert tasks[name].phase is REFUSED
        assert "differs by" in tasks[name].detail
        assert tasks[name].screening.norm > tasks[name].screening.bound
    number = next(iter(tasks.values())).round
    assert count_bounded(list(tasks.values()), number) == (0, count)


def shown(*arguments):
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_device_that_is_refused_again_and_again_is_not_asked_until_it_is_released(
    url, config, running, fleet
):
    """After two refusals it is left out, each round says why, and an operator lets it in again."""
    robust = {"norm_bound": 5, "quarantine_after": 2, "quarantine_rounds": 9}
    settings = config(
        round={"rounds": 4, "min_devices": 3}, robust=robust, evaluation={"data": None}
    )
    with contextlib.ExitStack() as stack:
        for name, script in {**GOOD, "bad": scaled(1e6)}.items():
            stack.enter_context(Peer(fleet, name, url, script))
        running(settings, url).wait()
    rounds = {}
    for number in range(1, 5):
        rows = json.loads(shown("rounds", "show", number, "--store", settings.store, "--json"))
        assert all(not isinstance(value, (dict, list)) for row in rows for value in row.values())
        rounds[number] = {row["device"]: row for row in rows}
    # The first round may have begun before all were there.
    refused = [number for number, rows in rounds.items() if rows["bad"]["outcome"] == "refused"]
    assert len(refused) == 2
    assert rounds[4]["bad"]["outcome"] == "not asked"
    assert rounds[4]["bad"]["why"].startswith(f"in quarantine up to round {refused[-1] + 9}")
    refused_row = rounds[refused[0]]["bad"]
    assert refused_row["why"].startswith("too-far: it differs by")
    assert refused_row["norm"] > refused_row["norm_bound"]
    assert refused_row["refusals"] == 1
    good = rounds[4]["good0"]
    assert (good["outcome"], good["ending"], good["samples"]) == ("merged", "answered", 10)
    assert 0 < good["answered_seconds"] <= good["collect_seconds"]
    assert "in quarantine" in shown("rounds", "show", 4, "--store", settings.store)
    assert "may select it again in its next round" in shown(
        "devices", "release", "bad", "--store", settings.store
    )
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        run = store.runs()[0].id
        assert quarantined(store, run, settings) == {}
    for wrong in (["devices", "release", "good0"], ["rounds", "show", 9]):
        with pytest.raises(ConfigError):
            CliRunner().invoke(
                app, [*map(str, wrong), "--store", str(settings.store)], catch_exceptions=False
            )


def test_a_device_alone_in_its_tier_is_held_to_its_own_last_rounds(url, config, running, fleet):
    """Where the others have settled it was refused round by round, though it moves as it always
    did.
    """

    def settling(peer, work):
        honest(0.5**work.offer.round)(peer, work)

    settings = config(round={"rounds": 8, "min_devices": 2}, evaluation={"data": None})
    narrow = Peer(fleet, "narrow", url, honest(1.0), profile=profile(max_width=0.5))
    with narrow, Peer(fleet, "wide", url, settling):
        server = running(settings, url)
        assert server.wait().status == "finished"
    assert server.events_of(control.UpdateRefused) == []


def test_a_device_alone_in_its_tier_that_was_away_is_held_to_its_own_last_rounds(
    url, config, running, fleet
):
    """After three rounds without it its norms were forgotten, and where the others have settled it
    was refused.
    """

    def settling(peer, work):
        honest(1.0 if work.offer.round <= 2 else 0.01)(peer, work)

    def away(peer, work):
        if 2 < work.offer.round < 7:
            peer.refuse(work, RefusalReason.NO_SPACE)
        else:
            honest(1.0)(peer, work)

    settings = config(
        round={"rounds": 7, "min_devices": 3, "quorum": 0.6}, evaluation={"data": None}
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(Peer(fleet, "wide", url, away))
        for name in ("narrow0", "narrow1"):
            stack.enter_context(Peer(fleet, name, url, settling, profile=profile(max_width=0.5)))
        server = running(settings, url)
        assert server.wait().status == "finished"
    assert [len(event.merged) for event in server.events_of(control.RoundClosed)] == [
        3,
        3,
        2,
        2,
        2,
        2,
        3,
    ]
    assert not [event for event in server.events_of(control.UpdateRefused) if event.by == "server"]


@pytest.mark.attack(
    "member",
    "Is the only device of its tier, and sends a larger update in every round",
    "the server bounds the update by those of other tiers and by the device's earlier ones, and "
    "quarantines the device",
    "2026-11-28",
)
def test_a_device_alone_in_its_tier_does_not_grow(url, config, running, fleet):
    """Its own last norms were its bound: it moved an entry by 17,399 in eight rounds. Now five times
    what the others move is the most, in each round.
    """

    def growing(peer, work):
        number = work.offer.round
        honest(4.9 if number <= 3 else 4.9 ** (number - 2))(peer, work)

    settings = config(
        round={"rounds": 8, "min_devices": 4}, robust={"norm_bound": 5}, evaluation={"data": None}
    )
    scripts = {f"narrow{at}": honest(1.0) for at in range(3)} | {"wide": growing}
    widths = {name: 0.5 for name in scripts if name != "wide"}
    server, _, weights = attacked(scripts, settings, url, running, fleet, widths)
    refused = [event.device for event in server.events_of(control.UpdateRefused)]
    assert set(refused) == {"wide"}
    assert len(refused) >= 3
    assert farthest(weights) <= 8 * 5


def test_of_two_boards_neither_is_unlike_the_other(url, config, running, fleet):
    """The one with most of the data was refused in every round, as the median of two is the
    smaller.
    """
    settings = config(round={"rounds": 3, "min_devices": 2}, evaluation={"data": None})
    scripts = {"few": honest(0.01), "many": honest(1.0)}
    _, tasks, weights = attacked(scripts, settings, url, running, fleet)
    assert {task.phase for task in tasks.values()} == {MERGED}
    assert farthest(weights) == pytest.approx(1.515, rel=1e-4)


@pytest.mark.attack(
    "member",
    "Keeps reporting its status until each deadline, but sends no update",
    "the server quarantines the device after repeated misses",
    "2026-11-28",
)
def test_a_device_that_holds_up_rounds_is_not_asked_for_a_while(url, config, running, fleet):
    """It says that it is alive until every deadline: each round took all of its time."""
    deadline = 1.5
    settings = config(
        round={"rounds": 6, "min_devices": 3, "deadline_seconds": deadline},
        robust={"quarantine_after": 2, "quarantine_rounds": 9},
        evaluation={"data": None},
    )
    with contextlib.ExitStack() as stack:
        for name, script in {**GOOD, "idler": silent}.items():
            stack.enter_context(Peer(fleet, name, url, script))
        running(settings, url).wait()
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        (run,) = store.runs()
        whole = [record for record in store.rounds(run.id) if record.collect_seconds >= deadline]
        # The first round may have begun before all were there.
        assert 2 <= len(whole) <= 3
        last = store.tasks(run.id, 6)
        assert "idler" not in {task.device for task in last}
    release(settings.store, run.id)


def release(folder, run):
    """The idler is let in again, and may hold up rounds anew."""
    assert "may select it again in its next round" in shown(
        "devices", "release", "idler", "--store", folder
    )
    with contextlib.closing(Store(folder, read_only=True)) as store:
        config = FleetConfig.stored(store.run(run).config)
        assert quarantined(store, run, config) == {}


def test_quarantine_leaves_no_round_without_enough_devices(url, config, running, fleet):
    """A board alone in its ways is refused round by round; the run had ended where it was needed
    for `min_devices`.
    """
    robust = {"norm_bound": 5, "quarantine_after": 2, "quarantine_rounds": 9}
    rounds = {"rounds": 4, "min_devices": 4, "wait_seconds": 30}
    settings = config(round=rounds, robust=robust, evaluation={"data": None})
    server, tasks, _ = attacked({**GOOD, "bad": scaled(1e6)}, settings, url, running, fleet)
    assert [event.device for event in server.events_of(control.UpdateRefused)] == ["bad"] * 4
    assert {name: task.phase for name, task in tasks.items()} == {
        **dict.fromkeys(GOOD, MERGED),
        "bad": REFUSED,
    }


def test_two_of_three_that_are_too_large_are_all_refused(url, config, running, fleet):
    """Where the majority lies the median is theirs; what no sum can hold is still refused and
    named.
    """
    scripts = {"good": honest(1.0), "bad0": constant(3.4e38), "bad1": constant(3.4e38)}
    settings = config(round={"min_devices": 3}, evaluation={"data": None})
    server, _, weights = attacked(scripts, settings, url, running, fleet)
    assert {event.device for event in server.events_of(control.UpdateRefused)} == {"bad0", "bad1"}
    assert farthest(weights) == pytest.approx(1.0, rel=1e-5)


def test_a_share_that_nothing_trims_is_refused():
    """Who sets it believes that the merge is robust."""
    assert RobustConfig(merge="krum", faulty=0.3).faulty == 0.3
    for merge in ("mean", "median"):
        with pytest.raises(
            ValueError,
            match=rf'faulty has no effect on merge = "{merge}"; set merge = "trimmed_mean" or '
            rf'"krum"',
        ):
            RobustConfig(merge=merge, faulty=0.3)
