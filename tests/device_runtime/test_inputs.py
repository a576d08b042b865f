"""What a device feeds beside samples: random numbers for layers that draw in training, and a label
per token.
"""

import numpy as np
import pytest
import torch
from torch import nn

from device_runtime.training.backends import ForwardSession, TrainSession
from device_runtime.training.epochs import self_test, train
from device_runtime.training.hooks import Hooks
from device_runtime.training.labels import label_mask, present_labels
from device_runtime.training.measuring import HeldOut, evaluate
from device_runtime.training.schedule import (
    StepSeed,
    TrainingSchedule,
    batches,
    draw_noise,
    sample_order,
)
from fleet_protocol.data import make_dataset
from fleet_protocol.errors import DataError
from fleet_protocol.manifest import NoiseSpec, parse_manifest
from fleet_protocol.messages import TrainSettings
from fleet_protocol.targets import counted
from models import Registry, build
from models.tier import Tier
from models.zoo.layers import set_mode
from models.zoo.noise_inputs import feed_noise
from tests.fleet_protocol.test_data import model
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe

LAYERS = (NoiseSpec(name="drop", shape=(50, 4)), NoiseSpec(name="mask", shape=(7,)))
SETTINGS = {
    "input_shape": (6,),
    "classes": 12,
    "embed": 16,
    "heads": 2,
    "ffn": 12,
    "blocks": 1,
    "mask_rate": 0.3,
}
RECIPE = Recipe(Sgd(momentum=0.5, weight_decay=0.01), clip_norm=1.0)
TRAIN = TrainSettings(learning_rate=0.1, epochs=2, batch_size=4, seed=5, mask_labels=True)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("mlm")
    tier = Tier(0.5, 1)
    arch = Registry.zoo().get("transformer_mlm")
    export_architecture(
        ExportRequest(arch, SETTINGS, [tier], RECIPE), out, ExportOptions(formats=("onnx",))
    )
    folder = out / "transformer_mlm" / tier.id
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    torch.manual_seed(2)
    return folder, manifest, build(arch, tier, settings=SETTINGS)


def text(count=11):
    draw = np.random.default_rng(1)
    x = draw.integers(0, 10, (count, 6))
    return make_dataset("text.npz", x, np.where(draw.random(x.shape) < 0.3, -1, x))


def test_noise_is_a_function_of_its_numbers():
    """The same five numbers give the same noise, any other number gives other noise."""
    first = draw_noise(LAYERS, StepSeed(3, 1, 0, 0), 8)
    again = draw_noise(LAYERS, StepSeed(3, 1, 0, 0), 8)
    assert [(n, v.shape, v.dtype) for n, v in first.items()] == [
        ("drop", (8, 50, 4), np.float32),
        ("mask", (8, 7), np.float32),
    ]
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
    for other in [(4, 1, 0, 0), (3, 2, 0, 0), (3, 1, 1, 0), (3, 1, 0, 1)]:
        assert not np.array_equal(draw_noise(LAYERS, StepSeed(*other), 8)["drop"], first["drop"])
    generator = np.random.Generator(
        np.random.PCG64(np.random.SeedSequence([3, 1, 0, 0], spawn_key=(1,)))
    )
    np.testing.assert_array_equal(first["drop"], generator.random((8, 50, 4), np.float32))
    assert draw_noise((), StepSeed(3, 1, 0, 0), 8) == {}


def test_noise_is_uniform():
    """Ten bins of 40,000 numbers within five standard deviations, all in [0, 1)."""
    values = draw_noise((NoiseSpec(name="a", shape=(400,)),), StepSeed(1, 1, 0, 0), 100)["a"]
    assert values.min() >= 0
    assert values.max() < 1
    counts, _ = np.histogram(values, 10, (0, 1))
    assert np.abs(counts - 4000).max() < 5 * np.sqrt(4000 * 0.9)


@pytest.mark.slow
def test_a_set_lists_its_noise(exported):
    """The manifest lists every active layer with the shape of a sample's noise."""
    _, manifest, _ = exported
    shapes = {spec.name: spec.shape for spec in manifest.noise}
    assert shapes["mask"] == (6,)
    assert shapes["dropout"] == (6, 8)
    assert manifest.label_shape == (6,)


@pytest.mark.slow
def test_a_device_trains_as_pytorch_does(exported):
    """Masks, dropout, a label per token and the device's own order: two epochs end where PyTorch
    does.
    """
    folder, manifest, module = exported
    data = text()
    chosen = np.arange(11)
    round_number = 3
    session = TrainSession(manifest, folder / "train.onnx")
    self_test(session, manifest)
    session.load({n: p.detach().numpy() for n, p in module.named_parameters()})
    result = train(session, manifest, TrainingSchedule(data, chosen, TRAIN, round_number), Hooks())
    set_mode(module, "train")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    mask = torch.from_numpy(label_mask(present_labels(data.y, 12), 12, masked=True))
    assert 0 < mask.sum() < 12
    for epoch in range(2):
        losses = []
        for step, rows in enumerate(batches(sample_order(5, round_number, epoch, 11), 4)):
            noise = draw_noise(manifest.noise, StepSeed(5, round_number, epoch, step), len(rows))
            feed_noise(module, {name: torch.from_numpy(value) for name, value in noise.items()})
            y = torch.from_numpy(data.y[rows])
            logits = module(torch.from_numpy(data.x[rows])) * mask
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item() * int((y >= 0).sum()))
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(
            session.parameters()[name], parameter.detach().numpy(), atol=1e-5, err_msg=name
        )
    assert result.loss == pytest.approx(sum(losses) / counted(data.y), abs=1e-5)


def test_evaluation_counts_tokens(exported):
    """Means are over the labels that count, and nothing is drawn."""
    folder, manifest, module = exported
    data = text()
    parameters = {n: p.detach().numpy() for n, p in module.named_parameters()}
    session = ForwardSession(manifest, folder / "eval.onnx", parameters)
    ones = np.ones(12, np.float32)
    result = evaluate(session, manifest, HeldOut(data, np.arange(11), 4, ones), Hooks())
    with torch.no_grad():
        logits = set_mode(module, "eval")(torch.from_numpy(data.x))
    y = torch.from_numpy(data.y)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
    assert result.examples == int((y >= 0).sum()) < y.numel()
    assert result.loss == pytest.approx(float(expected), abs=1e-5)
    assert result.accuracy == pytest.approx(int((logits.argmax(-1) == y).sum()) / result.examples)


def test_training_without_a_label_that_counts_is_refused(exported):
    """Nothing could be learnt, and the message says whose labels they are."""
    folder, manifest, _ = exported
    data = make_dataset("empty.npz", np.zeros((3, 6), np.int64), np.full((3, 6), -1))
    session = TrainSession(manifest, folder / "train.onnx")
    with pytest.raises(
        DataError, match=r"empty\.npz: every label of the 3 training samples is negative"
    ):
        train(session, manifest, TrainingSchedule(data, np.arange(3), TRAIN, 1), Hooks())


def test_label_shapes_are_checked():
    """A label per token only where the model gives logits per token; too large labels are named by
    sample.
    """
    x = np.zeros((3, 6), np.int64)
    y = np.zeros((3, 6), np.int64)
    each = model((6,), "int64", 4, (6,))
    one = model((6,), "int64", 4)
    make_dataset("a.npz", x, y - 1).fit_to(each)
    with pytest.raises(
        DataError, match=r"labels in a\.npz have shape \[6\] per sample.* one label per sample"
    ):
        make_dataset("a.npz", x, y).fit_to(one)
    with pytest.raises(DataError, match="one label per token"):
        make_dataset("a.npz", x, y[:, 0]).fit_to(each)
    y[2, 3] = 9
    with pytest.raises(DataError, match="label 9 of sample 2"):
        make_dataset("a.npz", x, y).fit_to(each)
    with pytest.raises(DataError, match="label -1 of sample 0"):
        make_dataset("a.npz", x, y[:, 0] - 1).fit_to(one)
