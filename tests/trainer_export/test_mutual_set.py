"""A mutual set from export to training on a device."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from device_runtime.backends import ForwardSession, MutualSession
from device_runtime.data import make_dataset
from device_runtime.mutual_training import train_mutual
from device_runtime.training import TaskStopped, batches, draw_noise, evaluate, sample_order
from fleet_protocol.errors import BlobError, ConfigError, RefusedError
from fleet_protocol.manifest import digest_of
from fleet_protocol.messages import MutualSettings, TrainSettings
from fleet_protocol.mutual_manifest import SIDES, parse_mutual_manifest
from fleet_protocol.weights import decode_weights
from models import Registry, build
from models.tier import Tier
from models.zoo.dropout import feed_noise
from models.zoo.layers import set_mode
from trainer_export.mutual_set import MutualModel, MutualPair, export_mutual
from trainer_export.recipe import Recipe

ZOO = Registry.zoo()
RECIPE = Recipe(momentum=0.9, weight_decay=0.01, clip_norm=1.0)
TEXT = {"input_shape": (6,), "classes": 3, "vocab": 20, "embed": 8, "heads": 2, "ffn": 12, "blocks": 1}
MEME = MutualModel(ZOO.get("text_encoder"), Tier(1.0, 1), TEXT)
# Another architecture, with dropout.
PERSONAL = MutualModel(ZOO.get("minilm_encoder"), Tier(0.5, 1), TEXT | {"pretrained": False, "dropout": 0.2})
TRAIN = TrainSettings(learning_rate=0.1, epochs=2, batch_size=4, seed=5, mutual=MutualSettings(alpha=0.4, beta=0.7))
NEVER = {"report": lambda _: None, "stopped": lambda: False}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("mutual")
    (report,) = export_mutual([MutualPair(MEME, PERSONAL)], RECIPE, out, seed=3)
    return report


def modules():
    torch.manual_seed(1)
    return {side: build(m.arch, m.tier, settings=m.settings) for side, m in (("personal", PERSONAL), ("meme", MEME))}


def values(module):
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


def text(count=11):
    draw = np.random.default_rng(1)
    return make_dataset("text.npz", draw.integers(1, 20, (count, 6)), draw.integers(0, 3, count))


def eager_round(pair, optimizers, data, manifest, round_number):
    """The device's order, its noise, and two backward passes before either step."""
    for epoch in range(TRAIN.epochs):
        for step, rows in enumerate(batches(sample_order(TRAIN.seed, round_number, epoch, len(data)), 4)):
            drawn = draw_noise(manifest.noise, TRAIN.seed, round_number, epoch, step, len(rows))
            for side, module in pair.items():
                own = {n.removeprefix(f"{side}."): torch.from_numpy(v) for n, v in drawn.items() if n.startswith(side)}
                feed_noise(module, own)
            logits = {side: module(torch.from_numpy(data.x[rows])) for side, module in pair.items()}
            for side, other, trust in (("personal", "meme", 0.4), ("meme", "personal", 0.7)):
                target = torch.softmax(logits[other].detach(), 1)
                divergence = functional.kl_div(torch.log_softmax(logits[side], 1), target, reduction="batchmean")
                loss = trust * functional.cross_entropy(logits[side], torch.from_numpy(data.y[rows]))
                optimizers[side].zero_grad()
                (loss + (1 - trust) * divergence).backward()
            for side, module in pair.items():
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizers[side].step()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def test_a_device_trains_both_models_as_pytorch_does(exported):
    """Two rounds: the meme and its optimizer start anew, the personal model goes on with its momentum."""
    manifest, data = exported.manifest, text()
    session = MutualSession(manifest, exported.folder / manifest.graph.path)
    pair = {side: set_mode(module, "train") for side, module in modules().items()}
    start = copy.deepcopy(pair["meme"])
    session.load("personal", values(pair["personal"]))
    optimizers = {"personal": sgd(pair["personal"])}
    for round_number in (1, 2):
        pair["meme"] = copy.deepcopy(start)
        optimizers["meme"] = sgd(pair["meme"])
        session.load("meme", values(start))
        if round_number == 2:  # as after a restart: the device kept both on disk
            kept = [
                {n: v.copy() for n, v in t.items()}
                for t in (session.parameters("personal"), session.states("personal"))
            ]
            session = MutualSession(manifest, exported.folder / manifest.graph.path)
            session.load("personal", *kept)
            session.load("meme", values(start))
        result = train_mutual(session, manifest, data, np.arange(11), TRAIN, round_number, **NEVER)
        eager_round(pair, optimizers, data, manifest, round_number)
        assert result.steps == 6
        for side in SIDES:
            for name, value in values(pair[side]).items():
                np.testing.assert_allclose(session.parameters(side)[name], value, atol=1e-5, err_msg=f"{side} {name}")


def test_the_set_is_whole(exported):
    """Every file has the digest of the manifest, and the personal model has first weights of its shape."""
    manifest = exported.manifest
    assert parse_mutual_manifest((exported.folder / "manifest.json").read_bytes()) == manifest
    assert exported.folder.parts[-2:] == ("text_encoder+minilm_encoder", "w1.00-d1+w0.50-d1")
    files = [manifest.graph, manifest.personal_init]
    for side in SIDES:
        assert set(manifest.side(side).graphs) == {"onnx/eval", "onnx/infer"}
        files += manifest.side(side).graphs.values()
    for file in files:
        assert digest_of((exported.folder / file.path).read_bytes()) == file.digest
    weights = decode_weights((exported.folder / manifest.personal_init.path).read_bytes())
    assert {n: w.shape for n, w in weights.items()} == {p.name: p.shape for p in manifest.personal.parameters}
    assert not manifest.meme.noise
    assert {spec.name.split(".")[0] for spec in manifest.noise} == {"personal"}
    assert exported.worst_deviation < 1e-4


def test_each_model_is_evaluated_by_its_own_graphs(exported):
    """The manifest of a side serves an ordinary evaluation."""
    manifest, data, module = exported.manifest.personal, text(), modules()["personal"]
    session = ForwardSession(manifest, exported.folder / manifest.graphs["onnx/eval"].path, values(module))
    result = evaluate(session, manifest, data, np.arange(11), 4, np.ones(3, np.float32), {}, stopped=lambda: False)
    with torch.no_grad():
        loss = functional.cross_entropy(set_mode(module, "eval")(torch.from_numpy(data.x)), torch.from_numpy(data.y))
    assert result.loss == pytest.approx(float(loss), abs=1e-5)


def test_training_can_be_stopped_and_refuses_what_is_not_finite(exported):
    """As ordinary training does."""
    session = MutualSession(exported.manifest, exported.folder / "mutual.onnx")
    for side, module in modules().items():
        session.load(side, {n: v * (np.nan if side == "meme" else 1) for n, v in values(module).items()})
    args = (session, exported.manifest, text(), np.arange(11), TRAIN, 1)
    with pytest.raises(RefusedError, match=r"losses of the personal model and the meme.* round 1 at step 1"):
        train_mutual(*args, **NEVER)
    with pytest.raises(TaskStopped):
        train_mutual(*args, report=lambda _: None, stopped=lambda: True)


def test_pairs_that_cannot_learn_together_are_refused(tmp_path):
    """Other classes, no pair, the same tiers twice: each before anything is written."""
    other = MutualModel(PERSONAL.arch, PERSONAL.tier, dict(PERSONAL.settings) | {"classes": 4})
    with pytest.raises(ConfigError, match=r"for 3 labels, the personal model minilm_encoder .* for 4 labels"):
        export_mutual([MutualPair(MEME, other)], RECIPE, tmp_path)
    with pytest.raises(ConfigError, match="no pair"):
        export_mutual([], RECIPE, tmp_path)
    with pytest.raises(ConfigError, match="different tiers"):
        export_mutual([MutualPair(MEME, PERSONAL)] * 2, RECIPE, tmp_path)
    assert not list(tmp_path.glob("[!.]*"))


def test_an_ordinary_manifest_is_no_mutual_one(exported):
    """The message says what to do."""
    with pytest.raises(BlobError, match="export the pair again"):
        parse_mutual_manifest(exported.manifest.meme.to_bytes())
    assert json.loads(exported.manifest.to_bytes())["kind"] == "mutual"
