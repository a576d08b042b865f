"""A mutual set from export to training on a device."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from device_runtime.training.backends import ForwardSession, PairSession
from device_runtime.training.hooks import Hooks, TaskStopped
from device_runtime.training.measuring import HeldOut, evaluate
from device_runtime.training.pair_training import train_pair
from device_runtime.training.schedule import (
    StepSeed,
    TrainingSchedule,
    batches,
    draw_noise,
    sample_order,
)
from fleet_protocol.data import make_dataset
from fleet_protocol.errors import BlobError, ConfigError, RefusedError
from fleet_protocol.manifest import digest_of
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import TrainSettings
from fleet_protocol.pair_manifest import SIDES, parse_pair_manifest
from models import Registry, build
from models.tier import Tier
from models.zoo.layers import set_mode
from models.zoo.noise_inputs import feed_noise
from trainer_export.optimizers.sgd import Sgd
from trainer_export.pair_set import Pair, PairModel, export_pairs
from trainer_export.recipe import Recipe

ZOO = Registry.zoo()
RECIPE = Recipe(Sgd(momentum=0.9, weight_decay=0.01), clip_norm=1.0)
TEXT = {
    "input_shape": (6,),
    "classes": 3,
    "vocab": 20,
    "embed": 8,
    "heads": 2,
    "ffn": 12,
    "blocks": 1,
}
MEME = PairModel(ZOO.get("text_encoder"), Tier(1.0, 1), TEXT)
# Another architecture, with dropout.
PERSONAL = PairModel(
    ZOO.get("minilm_encoder"), Tier(0.5, 1), TEXT | {"pretrained": False, "dropout": 0.2}
)
TRAIN = TrainSettings(learning_rate=0.1, epochs=2, batch_size=4, seed=5)
TRUST = {"alpha": 0.4, "beta": 0.7}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("mutual")
    (report,) = export_pairs([Pair(MEME, PERSONAL)], RECIPE, out, seed=3)
    return report


def modules():
    torch.manual_seed(1)
    return {
        side: build(m.arch, m.tier, settings=m.settings)
        for side, m in (("own", PERSONAL), ("sent", MEME))
    }


def values(module):
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


def text(count=11):
    draw = np.random.default_rng(1)
    return make_dataset("text.npz", draw.integers(1, 20, (count, 6)), draw.integers(0, 3, count))


def eager_round(pair, optimizers, data, manifest, round_number):
    """The device's order, its noise, and two backward passes before either step."""
    for epoch in range(TRAIN.epochs):
        for step, rows in enumerate(
            batches(sample_order(TRAIN.seed, round_number, epoch, len(data)), 4)
        ):
            drawn = draw_noise(
                manifest.noise, StepSeed(TRAIN.seed, round_number, epoch, step), len(rows)
            )
            for side, module in pair.items():
                own = {
                    n.removeprefix(f"{side}."): torch.tensor(v)
                    for n, v in drawn.items()
                    if n.startswith(side)
                }
                feed_noise(module, own)
            logits = {side: module(torch.from_numpy(data.x[rows])) for side, module in pair.items()}
            for side, other, trust in (("own", "sent", 0.4), ("sent", "own", 0.7)):
                target = torch.softmax(logits[other].detach(), 1)
                divergence = functional.kl_div(
                    torch.log_softmax(logits[side], 1), target, reduction="batchmean"
                )
                loss = trust * functional.cross_entropy(
                    logits[side], torch.from_numpy(data.y[rows])
                )
                optimizers[side].zero_grad()
                (loss + (1 - trust) * divergence).backward()
            for side, module in pair.items():
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizers[side].step()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.mark.slow
def test_a_device_trains_both_models_as_pytorch_does(exported):
    """Two rounds: the meme and its optimizer start anew, the personal model goes on with its
    momentum.
    """
    manifest = exported.manifest
    data = text()
    session = PairSession(manifest, exported.folder / manifest.graph.path)
    pair = {side: set_mode(module, "train") for side, module in modules().items()}
    start = copy.deepcopy(pair["sent"])
    session.load("own", values(pair["own"]))
    optimizers = {"own": sgd(pair["own"])}
    for round_number in (1, 2):
        pair["sent"] = copy.deepcopy(start)
        optimizers["sent"] = sgd(pair["sent"])
        session.load("sent", values(start))
        if round_number == 2:  # as after a restart: the device kept both on disk
            kept = [
                {n: v.copy() for n, v in t.items()}
                for t in (session.parameters("own"), session.states("own"))
            ]
            session = PairSession(manifest, exported.folder / manifest.graph.path)
            session.load("own", *kept)
            session.load("sent", values(start))
        result = train_pair(
            session,
            manifest,
            TrainingSchedule(data, np.arange(11), TRAIN, round_number),
            TRUST,
            Hooks(),
        )
        eager_round(pair, optimizers, data, manifest, round_number)
        assert result.steps == 6
        for side in SIDES:
            for name, value in values(pair[side]).items():
                np.testing.assert_allclose(
                    session.parameters(side)[name], value, atol=1e-5, err_msg=f"{side} {name}"
                )


def test_the_set_is_whole(exported):
    """Every file has the digest of the manifest, and the personal model has first weights of its
    shape.
    """
    manifest = exported.manifest
    assert parse_pair_manifest((exported.folder / "manifest.json").read_bytes()) == manifest
    assert exported.folder.parts[-2:] == ("text_encoder+minilm_encoder", "w1.00-d1+w0.50-d1")
    files = [manifest.graph, manifest.own_init]
    for side in SIDES:
        assert set(manifest.side(side).graphs) == {"onnx/eval", "onnx/infer"}
        files += manifest.side(side).graphs.values()
    for file in files:
        assert digest_of((exported.folder / file.path).read_bytes()) == file.digest
    weights = tensors_in((exported.folder / manifest.own_init.path).read_bytes())
    assert {n: w.shape for n, w in weights.items()} == {
        p.name: p.shape for p in manifest.own.parameters
    }
    assert not manifest.sent.noise
    assert {spec.name.split(".")[0] for spec in manifest.noise} == {"own"}
    assert exported.worst_deviation < 1e-4


def test_each_model_is_evaluated_by_its_own_graphs(exported):
    """The manifest of a side serves an ordinary evaluation."""
    manifest = exported.manifest.own
    data = text()
    module = modules()["own"]
    session = ForwardSession(
        manifest, exported.folder / manifest.graphs["onnx/eval"].path, values(module)
    )
    result = evaluate(
        session, manifest, HeldOut(data, np.arange(11), 4, np.ones(3, np.float32)), Hooks()
    )
    with torch.no_grad():
        loss = functional.cross_entropy(
            set_mode(module, "eval")(torch.from_numpy(data.x)), torch.from_numpy(data.y)
        )
    assert result.loss == pytest.approx(float(loss), abs=1e-5)


def test_training_can_be_stopped_and_refuses_what_is_not_finite(exported):
    """As ordinary training does."""
    session = PairSession(exported.manifest, exported.folder / "mutual.onnx")
    for side, module in modules().items():
        session.load(
            side, {n: v * (np.nan if side == "sent" else 1) for n, v in values(module).items()}
        )
    args = (session, exported.manifest, TrainingSchedule(text(), np.arange(11), TRAIN, 1), TRUST)
    with pytest.raises(
        RefusedError, match=r"the losses .* \(own\), nan \(sent\) in round 1 at step 1"
    ):
        train_pair(*args, Hooks())
    with pytest.raises(TaskStopped):
        train_pair(*args, Hooks(stopped=lambda: True))


def test_pairs_that_cannot_learn_together_are_refused(tmp_path):
    """Other classes, no pair, the same tiers twice: each before anything is written."""
    other = PairModel(PERSONAL.arch, PERSONAL.tier, dict(PERSONAL.settings) | {"classes": 4})
    with pytest.raises(
        ConfigError,
        match=r"for 3 labels, but the personal model minilm_encoder takes .* for 4 labels",
    ):
        export_pairs([Pair(MEME, other)], RECIPE, tmp_path)
    with pytest.raises(ConfigError, match="no pair"):
        export_pairs([], RECIPE, tmp_path)
    with pytest.raises(ConfigError, match="different tiers"):
        export_pairs([Pair(MEME, PERSONAL)] * 2, RECIPE, tmp_path)
    assert not list(tmp_path.glob("[!.]*"))


def test_an_ordinary_manifest_is_no_mutual_one(exported):
    """The message says what to do."""
    with pytest.raises(BlobError, match="export it again"):
        parse_pair_manifest(exported.manifest.sent.to_bytes())
    assert json.loads(exported.manifest.to_bytes())["kind"] == "pair"
