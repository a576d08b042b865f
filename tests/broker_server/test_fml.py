"""FML on the server: the plain mean of memes or of their trunks, and the dynamic weights."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.run_context import prepare_run
from broker_server.strategies.fml import FmlSettings
from fleet_protocol import control
from fleet_protocol.errors import PlanError, RefusalReason
from fleet_protocol.messages import Instructions, TaskMetrics, TrainSettings, UploadRefused
from fleet_protocol.weights import encode_weights
from models import Registry, infer_layout
from models.parts import parameters_in
from tests.broker_server.artifacts import ARCH
from tests.broker_server.methods import built, merge_memes
from tests.broker_server.peer import Peer
from tests.models.layouts import noise

METRICS = TaskMetrics(
    examples=7, batches=1, labels=(), fetch_seconds=0, train_seconds=0, resident_bytes=0
)


@pytest.fixture(scope="module")
def layout():
    return infer_layout(
        Registry.zoo().get("conv"), {"channels": (3, 4), "input_shape": (1, 6, 6), "classes": 5}
    )


@given(st.integers(1, 6), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_memes_are_averaged_without_weights(layout, devices, seed):
    """The mean over devices, however many samples they have."""
    memes = [noise(layout, seed + number) for number in range(devices)]
    new = merge_memes(layout, noise(layout, 99), memes)
    for name, value in new.items():
        np.testing.assert_allclose(
            value, np.mean([meme[name] for meme in memes], axis=0), atol=1e-6
        )


def test_a_round_without_memes_keeps_the_global_model(layout):
    """As every merge does."""
    old = noise(layout)
    for name, value in merge_memes(layout, old, []).items():
        np.testing.assert_array_equal(value, old[name])


def test_dynamic_weights_move_with_the_learning_rate():
    """Alpha falls to 0.5, beta rises from 0.1; alpha 0.5 stays put (specification 5.5)."""
    steps = [
        FmlSettings(alpha=0.9, beta=0.1, decays=(1, 2, 3, 4)).trust_after(rounds)
        for rounds in range(5)
    ]
    assert [round(step["alpha"], 6) for step in steps] == [0.9, 0.7, 0.5, 0.5, 0.5]
    assert [round(step["beta"], 6) for step in steps] == [0.1, 0.5, 0.9, 1.0, 1.0]
    assert FmlSettings(alpha=0.5, decays=(1,)).trust_after(1)["alpha"] == 0.5
    assert FmlSettings(alpha=0.3, decays=(1, 2)).trust_after(2)["alpha"] == 0.3
    assert FmlSettings(alpha=0.9, beta=0.1).trust_after(3) == {"alpha": 0.9, "beta": 0.1}


def test_what_makes_no_sense_is_refused(layout):
    """A weight above 1, a meme of another model."""
    with pytest.raises(ValidationError, match="alpha"):
        FmlSettings(alpha=1.1)
    with pytest.raises(PlanError, match="missing"):
        merge_memes(layout, noise(layout), [{}])


def test_as_a_strategy_it_sends_the_weights_of_the_labels(layout):
    """Alpha falls and beta rises at each decay."""
    keys = {"alpha": 0.9, "beta": 0.1, "decays": (2, 4)}
    method = built({"name": "fml", "fml": keys}, layout)
    base = Instructions(train=TrainSettings(learning_rate=0.1, epochs=1, batch_size=1, seed=0))
    asked = [method.instruct(base, closed) for closed in (0, 2, 4)]
    assert {found.routine for found in asked} == {"mutual"}
    assert [(found.settings["alpha"], found.settings["beta"]) for found in asked] == [
        pytest.approx((0.9, 0.1)),
        pytest.approx((0.7, 0.5)),
        pytest.approx((0.5, 0.9)),
    ]
    with pytest.raises(PlanError, match="remove weighting"):
        built({"name": "fml", "weighting": "samples"}, layout)


def test_parts_are_blocks_or_modules(layout):
    """A trunk may be named by its modules, so a model need not have its convolutions in a block of
    their own.
    """
    names = [item.name for item in layout.parameters]
    assert parameters_in(layout, ["head"]) == ("head.weight", "head.bias")
    first = names[0].rpartition(".")[0]
    assert parameters_in(layout, [first]) == tuple(
        name for name in names if name.startswith(f"{first}.")
    )
    assert parameters_in(layout, [names[0]]) == (names[0],)
    assert parameters_in(layout, []) == ()
    with pytest.raises(
        PlanError,
        match=r"neither a block nor a module hea; its blocks are head, stem, its modules .*head",
    ):
        parameters_in(layout, ["hea"])


def trunk_alone(peer, work):
    """What an honest device sends: the shared weights plus one, and no labels."""
    shared = {n: v + np.float32(1) for n, v in work.weights.items() if n not in work.offer.stays}
    peer.send(work, encode_weights(shared, work.metadata()), labels=())


def with_its_adaptor(peer, work):
    """Sends what should have stayed."""
    peer.send(work, encode_weights(dict(work.weights), work.metadata()), labels=())


def with_its_labels(peer, work):
    """Tells what its labels are."""
    shared = {n: v for n, v in work.weights.items() if n not in work.offer.stays}
    peer.send(work, encode_weights(shared, work.metadata()), labels=(0,))


@pytest.mark.parametrize(
    ("script", "reason"),
    [(with_its_adaptor, RefusalReason.BAD_SHAPE), (with_its_labels, RefusalReason.BAD_LABELS)],
    ids=["adaptor", "labels"],
)
def test_the_server_takes_trunks_and_nothing_else(script, reason, url, config, running, fleet):
    """An update that brings the adaptor or the labels of its device is refused, and the round goes
    on without it.
    """
    tables = {
        "strategy": {"name": "fml"},
        "private": {"parts": ["head"]},
        "round": {"min_devices": 2, "quorum": 0.5},
    }
    with Peer(fleet, "bad", url, script) as bad, Peer(fleet, "good", url, trunk_alone):
        server = running(config(**tables, evaluation={"data": None}), url)
        server.wait()
        bad.wait_for(lambda peer: peer.got(UploadRefused))
    assert bad.got(UploadRefused)[0].reason is reason
    assert server.events_of(control.RoundClosed)[0].merged == {"good": "w1.00-d1"}


def test_a_trunk_alone_cannot_be_judged(config):
    """The head on the server is never trained, so an accuracy of it would say nothing."""
    made = config(strategy={"name": "fml"}, private={"parts": ["head"]})
    with pytest.raises(
        PlanError,
        match=r"evaluation\.data and private\.parts are incompatible.*remove evaluation\.data",
    ):
        prepare_run("r", made, load_artifacts(made.model.artifacts, ARCH, chunk_bytes=1024))
