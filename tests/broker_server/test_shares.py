"""Trained shares on the server: what is merged, what is refused, and which tier a device gets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.coverage import count_coverage
from broker_server.rounds.run_context import prepare_run
from broker_server.rounds.tier_assignment import assign, usable_tiers
from broker_server.settings.combinations import features_of, require_together
from broker_server.settings.fleet import TiersConfig
from broker_server.store import Store
from broker_server.store.export import load_version
from broker_server.strategies.strategy import PlanRequest
from broker_server.strategies.trained_window import move_windows
from broker_server.strategies.traits import Feature, Trait
from broker_server.strategies.whalefl import tiers_within
from fleet_protocol import control
from fleet_protocol.errors import ConfigError, PlanError, RefusalReason
from fleet_protocol.messages import UploadRefused
from fleet_protocol.weights import encode_weights
from models import Tier, compile_plan, make_plan
from models.tier import HEAD_SHARE
from tests.broker_server.artifacts import ARCH, export_tiny, manifest_of
from tests.broker_server.merging import BLOCKS, CLASSES, LAYOUT, f32, merged, oracle
from tests.broker_server.methods import built
from tests.broker_server.peer import Peer, profile

HEAD_TIER = Tier(1.0, 1, HEAD_SHARE)
FROZEN = ("hidden.weight", "hidden.bias")


def sent_by(tier, window="static", number=0):
    """The entries of an update of a tier."""
    plan = make_plan(LAYOUT, tier, window, round_index=number)
    return compile_plan(LAYOUT, plan).without(plan.frozen)


@st.composite
def updates(draw):
    """Updates of tiers of any width, depth and share, with weights and labels."""
    found = []
    for number in range(draw(st.integers(0, 5))):
        width = draw(st.sampled_from([1.0, 0.5, 0.25]))
        depth = draw(st.sampled_from([1, 2]))
        # Half of one block would be all of it.
        share = draw(st.sampled_from([1.0, HEAD_SHARE, *([0.5] * (depth - 1))]))
        plan = sent_by(Tier(width, depth, share), draw(st.sampled_from(["static", "rolling"])), 3)
        rng = np.random.default_rng(number)
        tensors = {}
        for name in plan.required:
            tensors[name] = f32(rng.normal(size=plan.tensors[name].local_shape))
        labels = draw(st.none() | st.sets(st.integers(0, CLASSES - 1), min_size=1))
        weight = draw(st.sampled_from([1.0, 2.5]))
        found.append((f"{plan.title}/{number}", plan, tensors, weight, labels))
    return found


@settings(max_examples=60, deadline=None)
@given(updates())
def test_any_mix_of_shares_merges_by_coordinates(found):
    """Each entry is the mean of the updates that trained it; an entry that none trained keeps its
    bits.
    """
    rng = np.random.default_rng(99)
    old = {spec.name: f32(rng.normal(size=spec.shape)) for spec in LAYOUT.parameters}
    after = merged(found, old)
    for name, (value, count) in oracle(found, old).items():
        np.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(after[name][count == 0], old[name][count == 0])


def test_an_update_has_nothing_below_its_share():
    """The half of two blocks is the upper one, and ``head`` is none of them."""
    half = sent_by(Tier(1.0, 2, 0.5))
    assert {name for name in BLOCKS if name in half.tensors} == {"deep", "flat"}
    assert not set(BLOCKS) & sent_by(Tier(1.0, 2, HEAD_SHARE)).tensors.keys()


@pytest.fixture
def shares(tmp_path):
    """The tiny architecture with a tier that trains only the head."""
    layout = export_tiny(tmp_path / "sets")
    folder = tmp_path / "sets" / ARCH / HEAD_TIER.id
    manifest = manifest_of(layout, HEAD_TIER, folder)
    manifest = manifest.model_copy(update={"peak_memory_bytes": 10})
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return tmp_path / "sets"


def test_a_set_that_trains_other_parameters_than_its_layout_says_is_refused(shares):
    """Its updates would be merged where nobody expects them."""
    path = shares / ARCH / HEAD_TIER.id / "manifest.json"
    path.write_text(path.read_text().replace('"hidden.bias"\n ],', '"head.bias"\n ],'))
    with pytest.raises(ConfigError, match="the parameters of the manifest and of"):
        load_artifacts(shares, ARCH, chunk_bytes=1024)


def test_a_device_gets_the_tier_that_trains_most_and_fits(shares):
    """One whose memory takes no cut model still trains the head of the whole one."""
    artifacts = load_artifacts(shares, ARCH, chunk_bytes=1024)
    assert list(artifacts.tiers) == ["w1.00-d1", "w0.50-d1", "w1.00-d1-head"]
    profiles = {"large": profile(), "small": profile(free_ram_bytes=100)}
    assigned = assign(profiles, tuple(artifacts.tiers.values()), TiersConfig())
    assert assigned["large"].tier.tier.id == "w1.00-d1"
    assert assigned["small"].tier.tier == HEAD_TIER


def test_a_device_that_chooses_is_offered_no_larger_share():
    """Its largest tier bounds width and share, because its memory does."""
    tiers = [Tier(1.0), Tier(1.0, 1, 0.5), HEAD_TIER, Tier(0.5), Tier(0.5, 1, 0.5)]
    assert tiers_within(tiers, Tier(1.0, 1, 0.5)) == (tiers[1], tiers[2], tiers[4])
    assert set(tiers_within(tiers, Tier(1.0))) == set(tiers)


def test_inclusivefl_leaves_shares_out():
    """Its groups need all their layers."""
    stack = {"name": "inclusivefl"}
    with pytest.raises(PlanError, match="no tier of width 1 is in use"):
        built(stack, LAYOUT, [Tier(1.0, 2, 0.5)])


WINDOW = Tier(1.0, 2, 0.5)
LOWER = Tier(1.0, 2, 0.5, 1)
MIX = (Tier(1.0, 2), WINDOW, Tier(1.0, 2, HEAD_SHARE))


def placed(kind, version, device="d", tier=WINDOW):
    """The tier of a plan."""
    method = move_windows(built({"name": "heterofl"}, LAYOUT, MIX), LAYOUT, kind, (*MIX, LOWER))
    return method.plan(PlanRequest(tier, device, version, 7)).plan.tier


def test_a_window_rolls_from_the_top_down():
    """One block in each round, alike for all devices; a share at the top never moves."""
    assert [placed("rolling", version) for version in range(4)] == [WINDOW, LOWER] * 2
    assert [placed("top", version) for version in range(3)] == [WINDOW] * 3
    assert placed("rolling", 1, tier=MIX[0]) == MIX[0]
    assert placed("rolling", 1, tier=MIX[2]) == MIX[2]


def test_a_window_at_random_is_drawn_for_each_device_and_round():
    """The same draw again for a server that restarts."""
    drawn = [placed("random", version, f"d{device}") for version in range(6) for device in range(6)]
    assert set(drawn) == {WINDOW, LOWER}
    again = [placed("random", version, f"d{device}") for version in range(6) for device in range(6)]
    assert drawn == again
    assert drawn[:6] != drawn[6:12]


def test_a_task_keeps_the_place_that_was_chosen_for_it():
    """A server that restarts makes its plan from the tier that the task names."""
    assert {placed("rolling", version, tier=LOWER) for version in range(3)} == {LOWER}


def test_windows_need_a_share_and_all_its_places():
    """Before a run starts; the message says what to export."""
    whole = built({"name": "heterofl"}, LAYOUT, MIX[:1])
    with pytest.raises(PlanError, match="has nothing to move"):
        move_windows(whole, LAYOUT, "rolling", MIX)
    shares = built({"name": "heterofl"}, LAYOUT, MIX)
    with pytest.raises(PlanError, match=r"needs tier w1\.00-d2-t0\.50-p1, which is not exported"):
        move_windows(shares, LAYOUT, "random", MIX)


@pytest.mark.parametrize(
    ("window", "table", "trait"),
    [
        ("rolling", {"upload": {"encoding": "topk"}}, "a tier keeps the same units"),
        ("random", {"secure_sum": {"clip": 1.0}}, "all devices of a tier train the same units"),
    ],
)
def test_a_conflict_of_a_window_names_the_window(config, window, table, trait):
    """And not the strategy, whose plan is static already."""
    made = config(strategy={"name": "heterofl", "window": window}, **table)
    # The method's own features come last, as in a run.
    plans = Feature("strategy heterofl", "use another", breaks=frozenset({Trait.SHARED_PLANS}))
    with pytest.raises(
        PlanError, match=rf'strategy\.window = "{window}" are incomp.*{trait}.*"top"'
    ):
        require_together([*features_of(made), plans])


def test_no_device_is_assigned_a_place_by_itself():
    """Plans choose it; a configuration may still fix one."""
    assert usable_tiers((*MIX, LOWER), TiersConfig()) == MIX
    fixed = TiersConfig(allowed=(LOWER.id,))
    assert usable_tiers((*MIX, LOWER), fixed) == (LOWER,)


def what_it_trains(peer, work):
    """The update of an honest device."""
    tensors = {}
    for spec in work.manifest.trained:
        tensors[spec.name] = work.weights[spec.name] + np.float32(1)
    peer.send(work, encode_weights(tensors, work.metadata()), labels=(0, 1, 2, 3))


def everything(peer, work):
    """An update with parameters that its tier does not train."""
    tensors = {name: value + np.float32(9) for name, value in work.weights.items()}
    peer.send(work, encode_weights(tensors, work.metadata()), labels=(0, 1, 2, 3))


def test_a_round_of_heads_leaves_the_rest_as_it_is(url, config, running, fleet, shares):
    """The devices receive all weights and send the head; an update with more is refused."""
    tables = {
        "model": {"artifacts": shares, "arch": ARCH},
        "tiers": {"allowed": [HEAD_TIER.id]},
        "round": {"min_devices": 2, "quorum": 0.5},
        "evaluation": {"data": None},
    }
    made = config(**tables)
    with Peer(fleet, "bad", url, everything) as bad, Peer(fleet, "good", url, what_it_trains):
        server = running(made, url)
        server.wait()
        bad.wait_for(lambda peer: peer.got(UploadRefused))
    refused = bad.got(UploadRefused)[0]
    assert refused.reason is RefusalReason.BAD_SHAPE
    assert "an update of w1.00-d1-head has no tensor hidden." in refused.detail
    closed = server.events_of(control.RoundClosed)[0]
    assert closed.merged == {"good": HEAD_TIER.id}
    artifacts = load_artifacts(shares, ARCH, chunk_bytes=1024)
    before = artifacts.initial_weights()
    store = Store(made.store, read_only=True)
    try:
        run = store.runs()[0].id
        after = load_version(store, run, 1).weights
        covered = count_coverage(store, prepare_run(run, made, artifacts))
    finally:
        store.close()
    for name, value in before.items():
        change = np.float32(0 if name in FROZEN else 1)
        np.testing.assert_array_equal(after[name], value + change)
    assert {axis.block: axis.covered for axis in covered.axes} == {"block1": 0, "head": 8}
