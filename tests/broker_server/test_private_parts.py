"""Private parts on the server: what a round merges, what is refused, and what it asks of devices."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.new_version import first_version
from broker_server.rounds.run_context import prepare_run
from broker_server.rounds.sent_weights import cut_weights
from broker_server.rounds.tier_version import tier_version
from broker_server.settings.private import PrivateConfig
from broker_server.store import Store
from broker_server.store.export import load_version
from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.private_parts import PrivateModel, keep_private
from broker_server.strategies.strategy import Contribution, GlobalModel, PlanRequest
from broker_server.strategies.trained_window import move_windows
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import PlanError, RefusalReason
from fleet_protocol.messages import TaskMetrics, UploadRefused
from fleet_protocol.units import read_units
from fleet_protocol.weights import encode_weights
from models import Registry, compile_plan, infer_layout, make_plan
from models.parts import parameters_in
from models.shares import tiers_of_window
from models.tier import HEAD_SHARE, Tier
from tests.broker_server.artifacts import ARCH
from tests.broker_server.methods import built, merged
from tests.broker_server.peer import Peer
from tests.broker_server.test_low_rank import LAYOUT as ADAPTERS
from tests.models.layouts import noise

METRICS = TaskMetrics(
    examples=7, batches=1, labels=(), fetch_seconds=0, train_seconds=0, resident_bytes=0
)
AVERAGING = ["heterofl", "fedavg", "fedrolex", "fedprox", "fml"]


@pytest.fixture(scope="module")
def layout():
    return infer_layout(
        Registry.zoo().get("conv"), {"channels": (3, 4), "input_shape": (1, 6, 6), "classes": 5}
    )


@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize(
    "optimizer", [None, OptimizerSettings(name="fedadam")], ids=["plain", "fedadam"]
)
def test_a_round_merges_what_travels_and_keeps_the_rest(layout, name, optimizer):
    """Updates lack the private part, which keeps its bits here, whatever the server optimizer."""
    table = {"name": name, "label_rule": False} if name == "heterofl" else {"name": name}
    method = keep_private(
        built(table, layout, optimizer=optimizer), layout, PrivateModel(("head",))
    )
    plan = compile_plan(layout, make_plan(layout, layout.tier(1.0))).without(method.stays)
    old = noise(layout, 9)
    tier = layout.tier(1.0)
    updates = []
    for number in (1, 2):
        weights = noise(layout, number)
        for private in method.stays:
            del weights[private]
        updates.append(Contribution(f"d{number}", tier, tier.id, plan, weights, METRICS))
    after = merged(method, updates, old)
    assert set(after) == set(old)
    for tensor, before in old.items():
        if tensor in method.stays:
            np.testing.assert_array_equal(after[tensor], before)
            continue
        assert not np.array_equal(after[tensor], before)
        if optimizer is None:
            mean = (updates[0].weights[tensor] + updates[1].weights[tensor]) / 2
            np.testing.assert_allclose(after[tensor], mean, atol=1e-6)


def test_parts_may_be_patterns(layout):
    """So the norms of all blocks are named at once, as FedBN keeps them."""
    names = [parameter.name for parameter in layout.parameters]
    weights = tuple(name for name in names if name.endswith(".weight"))
    assert parameters_in(layout, ["*.weight"]) == weights
    assert parameters_in(layout, ["hea?"]) == ("head.weight", "head.bias")
    with pytest.raises(
        PlanError, match=r"neither a block nor a module norm\*; its blocks are head, stem"
    ):
        parameters_in(layout, ["norm*"])


def test_what_a_method_leaves_on_the_devices_stays_there(layout):
    """A strategy of a user may have such parameters; a copy of the model does not send them."""
    method = replace(built({"name": "fedavg"}, layout), stays=("head.bias",))
    assert keep_private(method, layout, PrivateModel(copy_model=True)).stays == ("head.bias",)
    both = keep_private(method, layout, PrivateModel(("head.weight",))).stays
    assert both == ("head.weight", "head.bias")


def test_all_parameters_cannot_stay(layout):
    with pytest.raises(PlanError, match="nothing is left to merge"):
        keep_private(built({"name": "fedavg"}, layout), layout, PrivateModel(("*",)))


def test_what_devices_keep_has_the_same_meaning_in_every_round():
    """FlexLoRA's units are those of a new basis in each round, whatever their numbers."""
    renewed = built({"name": "flexlora"}, ADAPTERS)
    with pytest.raises(PlanError, match=r"devices keep a\.down, but strategy flexlora"):
        keep_private(renewed, ADAPTERS, PrivateModel(("a.down",)))


@pytest.mark.parametrize("name", ["fedrolex", "federated_dropout"])
@pytest.mark.parametrize("tier", ["w1.00-d1", "w0.50-d1"])
@pytest.mark.parametrize("encoding", ["fp32", "bf16", "int8"])
def test_weights_come_with_the_units_of_what_devices_keep(config, tmp_path, name, tier, encoding):
    """A device needs them where its units move, even at full width, which changes their order."""
    made = config(
        strategy={"name": name},
        private={"parts": ["head"]},
        download={"encoding": encoding},
        evaluation={"data": None},
    )
    version, sent, units = cut(made, tier, tmp_path)
    # The bias of the labels has the same entries in every round.
    assert units.keys() == {"head.weight"}
    if encoding == "fp32":
        for parameter, positions in units.items():
            np.testing.assert_array_equal(version[parameter][np.ix_(*positions)], sent[parameter])
    assert sent.keys() == version.keys()


@pytest.mark.parametrize(
    ("strategy", "private", "expected"),
    [
        ("heterofl", {"parts": ["head"]}, set()),
        ("fedrolex", {"parts": ["head.bias"]}, set()),
        (
            "fedrolex",
            {"copy_model": True, "mu": 0.0},
            {"hidden.weight", "hidden.bias", "head.weight"},
        ),
    ],
)
def test_only_units_that_move_are_sent(config, tmp_path, strategy, private, expected):
    made = config(
        strategy={"name": strategy},
        private=private,
        evaluation={"data": None},
    )
    _version, _sent, units = cut(made, "w0.50-d1", tmp_path)
    assert units.keys() == expected


def cut(config, tier, folder):
    """The initial version, what a device of a tier is sent of it, and the units that come along."""
    artifacts = load_artifacts(config.model.artifacts, ARCH, chunk_bytes=1024)
    context = prepare_run("run", config, artifacts)
    request = PlanRequest(Tier.parse(tier), "d1", 3, config.seed)
    plan = context.strategy.plan(request).plan
    version = artifacts.initial_weights()
    blobs = BlobStore(folder / "sent")
    sent = cut_weights(context, request, plan, GlobalModel(version, {}), blobs)
    path = blobs.path(sent.ref.digest)
    manifest = artifacts.tiers[tier].manifest
    return version, open_weights(path), read_units(path, manifest)


@pytest.fixture(scope="module")
def deep():
    """A layout of linear layers, of which a tier may train the top ones."""
    return infer_layout(Registry.zoo().get("mlp"), {"hidden": (4, 4, 4)})


def test_some_tier_trains_each_private_part(deep):
    """Else all devices would keep the initial values of a part, and no setting would say so."""
    half = Tier(1.0, 1, 0.5)
    method = built({"name": "heterofl"}, deep, [half])
    lowest = PrivateModel(("hidden.0",))
    with pytest.raises(PlanError, match=r"\(w1\.00-d1-t0\.50\) trains hidden\.0"):
        keep_private(method, deep, lowest)
    # The top window leaves the lowest layer out, but the window moves down to it.
    exported = tiers_of_window(deep, half)
    moving = move_windows(method, deep, "rolling", exported)
    assert keep_private(moving, deep, lowest).stays == ("hidden.0.weight", "hidden.0.bias")


def test_some_tier_trains_what_is_merged(deep):
    """A tier of the head alone has nothing to send if the head stays; others may have."""
    head = Tier(1.0, 1, HEAD_SHARE)
    kept = PrivateModel(("head",))
    with pytest.raises(PlanError, match=r"\(w1\.00-d1-head\) train only head, so that nothing"):
        keep_private(built({"name": "heterofl"}, deep, [head]), deep, kept)
    both = built({"name": "heterofl"}, deep, [deep.tier(1.0), head])
    assert keep_private(both, deep, kept).stays == ("head.weight", "head.bias")


@pytest.mark.parametrize(
    ("name", "private", "remedy"),
    [
        ("fml", {"parts": ["head"], "private_epochs": 1}, "remove private.private_epochs, or use"),
        ("fml", {"parts": ["head"], "compare": True}, "remove private.compare, or use"),
        ("fml", {"parts": ["head"], "adapt_epochs": 1}, "remove private.adapt_epochs, or use"),
        ("fml", {"copy_model": True}, r"remove \[private\], or use another strategy"),
        ("feddyn", {"copy_model": True}, r"remove \[private\], or use another strategy"),
        ("feddyn", {"parts": ["head"]}, r"use another strategy, or remove \[private\]"),
    ],
)
def test_a_method_with_its_own_routine_decides_how_it_trains(config, name, private, remedy):
    """Its routine does not know these settings, and would ignore them."""
    strategy = {"name": name}
    if name == "feddyn":
        strategy["feddyn"] = {"fleet_devices": 9}
    made = config(strategy=strategy, private=private, evaluation={"data": None})
    with pytest.raises(PlanError, match=f"strategy {name}.*{remedy}|{remedy}.*strategy {name}"):
        prepare_run("r", made, load_artifacts(made.model.artifacts, ARCH, chunk_bytes=1024))


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({}, "name the parts"),
        ({"parts": ["head"], "copy_model": True}, "but not both"),
        ({"copy_model": True, "private_epochs": 2}, "remove it"),
        ({"parts": ["head"], "mu": 0.1}, "remove mu"),
        ({"part": ["head"]}, "part"),
    ],
)
def test_settings_without_effect_are_errors(table, problem):
    with pytest.raises(ValidationError, match=problem):
        PrivateConfig.model_validate(table)


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({}, r"evaluation\.data and private\.parts are incompatible"),
        (
            {"evaluation": {"data": None}, "strategy": {"label_rule": True}},
            r"private\.parts and strategy\.label_rule = true are incompatible",
        ),
        (
            {
                "evaluation": {"data": None},
                "private": {"parts": ["head"], "compare": True},
                "secure_sum": {"clip": 1.0},
            },
            r"private\.compare and \[secure_sum\] .* send the evaluations of their models",
        ),
        (
            {
                "evaluation": {"data": None},
                "private": {"parts": ["head"], "adapt_epochs": 1},
                "privacy": {"where": "local", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5},
            },
            r"private\.adapt_epochs and privacy\.where = .local. are incompatible",
        ),
    ],
)
def test_what_does_not_go_with_private_parts_is_refused(config, tables, problem):
    made = config(**{"private": {"parts": ["head"]}, **tables})
    with pytest.raises(PlanError, match=problem):
        prepare_run("r", made, load_artifacts(made.model.artifacts, ARCH, chunk_bytes=1024))


def test_a_pull_is_refused_before_anybody_trains_without_its_graph(config):
    made = config(private={"copy_model": True})
    with pytest.raises(PlanError, match=r"private\.mu = 0\.1 would have no effect; export"):
        prepare_run("r", made, load_artifacts(made.model.artifacts, ARCH, chunk_bytes=1024))


def what_travels(peer, work):
    """The update of an honest device."""
    shared = {n: v + np.float32(1) for n, v in work.weights.items() if n not in work.offer.stays}
    peer.send(work, encode_weights(shared, work.metadata()), labels=())


def with_its_head(peer, work):
    """An update with the part that should have stayed."""
    peer.send(work, encode_weights(dict(work.weights), work.metadata()), labels=())


def test_an_update_that_brings_a_private_part_is_refused(url, config, running, fleet):
    """By name; the round goes on with the others, and the server never has the part."""
    tables = {
        "private": {"parts": ["head"]},
        "round": {"min_devices": 2, "quorum": 0.5},
        "evaluation": {"data": None},
    }
    with Peer(fleet, "bad", url, with_its_head) as bad, Peer(fleet, "good", url, what_travels):
        server = running(config(**tables), url)
        server.wait()
        bad.wait_for(lambda peer: peer.got(UploadRefused))
    assert bad.got(UploadRefused)[0].reason is RefusalReason.BAD_SHAPE
    assert server.events_of(control.RoundClosed)[0].merged == {"good": "w1.00-d1"}


def test_an_exported_version_says_which_parameters_nobody_trained(config):
    """So that nobody takes the initial head of a fleet for a trained one."""
    made = config(private={"parts": ["head"]}, evaluation={"data": None})
    artifacts = load_artifacts(made.model.artifacts, ARCH, chunk_bytes=1024)
    context = prepare_run("r", made, artifacts)
    with contextlib.closing(Store(made.store)) as store:
        blobs = BlobStore(store.folder / "blobs")
        store.add_run(context.initial_record(), first_version(context, blobs))
        exported = load_version(store, "r", 0)
        remarks = tier_version(store, exported, None, made.model.artifacts).remarks
    assert "head.weight, head.bias have the fleet's initial values" in remarks


def test_only_settings_that_are_set_go_out():
    """Devices of an older version refuse those that they do not know."""
    assert {"adapt_epochs", "compare"}.isdisjoint(PrivateModel(("head",)).settings)
    asked = PrivateConfig(parts=("head",), adapt_epochs=2, compare=True).kept.settings
    assert (asked["adapt_epochs"], asked["compare"]) == (2, True)
