"""Static batch norm and Scaler in their three modes, against torch's own layers and the worked
examples.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fleet_protocol.errors import ConfigError, PlanError
from models import AxisKind, Registry, infer_layout, make_plan
from models.zoo.layers import NormStyle, SampleNorm, Scaler, StaticBatchNorm, set_mode


def random_norm(channels: int) -> StaticBatchNorm:
    """A norm with non-degenerate scale and shift, in double precision."""
    torch.manual_seed(0)
    norm = StaticBatchNorm(channels).double()
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("shape", [(7, 5), (3, 5, 4), (3, 5, 4, 2)])
def test_training_equals_torch_batch_norm_and_so_does_its_gradient(shape):
    """Batch statistics, biased variance; any number of trailing dimensions."""
    norm = random_norm(5)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ours = norm(x)
    reference = functional.batch_norm(
        x, None, None, norm.weight, norm.bias, training=True, eps=1e-5
    )
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(ours)
    grads = [
        torch.autograd.grad(out, (x, norm.weight, norm.bias), cotangent)
        for out in (ours, reference)
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-10)
    assert norm.last_mean is None


@pytest.mark.parametrize("shape", [(2, 5), (3, 5, 4, 2), (1, 5)])
def test_the_mode_of_proofs_computes_what_the_mode_of_statistics_does(shape):
    """In one step, and also for a batch with one value for each channel; it keeps nothing."""
    norm = random_norm(5)
    x = torch.randn(shape, dtype=torch.float64)
    fused = set_mode(norm, "fused")(x)
    assert norm.last_mean is None
    torch.testing.assert_close(fused, set_mode(norm, "statistics")(x), rtol=1e-12, atol=1e-12)


def test_statistics_mode_keeps_the_unbiased_variance():
    """The output is that of training; mean and variance are those torch computes."""
    norm = random_norm(5)
    x = torch.randn(6, 5, 3, 3, dtype=torch.float64)
    trained = norm(x)
    torch.testing.assert_close(set_mode(norm, "statistics")(x), trained)
    torch.testing.assert_close(norm.last_mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(norm.last_var, x.var((0, 2, 3), correction=1))


def test_evaluation_uses_the_buffers():
    """Evaluation does not look at the batch."""
    norm = set_mode(random_norm(5), "eval")
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    x = torch.randn(6, 5, 3, dtype=torch.float64)
    reference = functional.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=1e-5
    )
    torch.testing.assert_close(norm(x), reference, rtol=1e-12, atol=1e-12)


def test_the_statistics_are_no_weights_but_part_of_the_state():
    """A run trains scale and shift alone; what the layer evaluates with goes into a file with
    them.
    """
    assert [name for name, _ in StaticBatchNorm(3).named_parameters()] == ["weight", "bias"]
    assert [*StaticBatchNorm(3).state_dict()] == ["weight", "bias", "running_mean", "running_var"]


@pytest.mark.parametrize("layer", [StaticBatchNorm(3), Scaler(0.5)])
def test_eval_of_pytorch_is_mode_eval(layer):
    """A model that was loaded needs no function of Shoal to be evaluated, and trains again after
    `train()`.
    """
    model = torch.nn.Sequential(layer)
    assert layer.mode == "train"
    model.eval()
    assert layer.mode == "eval"
    model.train()
    assert layer.mode == "train"


def test_h7_scaler(vectors):
    """Training divides by the width, evaluation does not, and a norm after it cancels it up to
    eps.
    """
    inputs = vectors["H7-scaler"]["inputs"]
    expected = vectors["H7-scaler"]["expected"]
    x = torch.tensor(inputs["x"], dtype=torch.float64)
    scaler = Scaler(inputs["s"])
    norm = StaticBatchNorm(1).double()
    np.testing.assert_allclose(scaler(x), expected["train"])
    np.testing.assert_allclose(norm(x[:, None])[:, 0].detach(), expected["bn_of_x"], atol=1e-9)
    np.testing.assert_allclose(
        norm(scaler(x)[:, None])[:, 0].detach(), expected["bn_of_scaled"], atol=1e-9
    )
    for mode in ("eval", "statistics"):
        np.testing.assert_allclose(set_mode(scaler, mode)(x), expected["eval"])


def test_h8_static_norm_statistics(vectors):
    """Each batch gives its mean and unbiased variance; the server averages batches with equal
    weight.
    """
    example = vectors["H8-sbn"]
    norm = set_mode(StaticBatchNorm(1).double(), "statistics")
    mean = var = 0.0
    for count, batch in enumerate(example["inputs"]["batches"], 1):
        norm(torch.tensor(batch, dtype=torch.float64)[:, None])
        mean += (norm.last_mean.item() - mean) / count
        var += (norm.last_var.item() - var) / count
        assert [mean, var] == pytest.approx(example["expected"]["trace"][count - 1])


def test_a_mode_reaches_every_layer_and_torch_too():
    """Dropout and the like follow torch's own flag."""
    model = nn.Sequential(Scaler(0.5), nn.Sequential(StaticBatchNorm(2), nn.Dropout()))
    assert set_mode(model, "eval") is model
    assert not any(layer.training for layer in model.modules())
    assert {layer.mode for layer in model.modules() if hasattr(layer, "mode")} == {"eval"}
    with pytest.raises(ConfigError, match="unknown mode 'test'"):
        set_mode(model, "test")


@pytest.mark.parametrize(
    ("norm", "reference"),
    [("instance", nn.InstanceNorm2d(6, affine=True)), ("layer", nn.GroupNorm(1, 6))],
)
def test_norms_of_a_sample_are_those_of_pytorch(norm, reference):
    """With their gradients; the batch around a sample changes nothing."""
    torch.manual_seed(3)
    own = NormStyle(norm, 1.0).layer(6)
    assert isinstance(own, SampleNorm)
    x = torch.randn(4, 6, 5, 5, requires_grad=True)
    y = own(x)
    expected = reference(x)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    push = torch.randn_like(y)
    (mine,) = torch.autograd.grad(y, x, push, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected, x, push)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(own(x[:1]), y[:1], atol=1e-6, rtol=1e-6)


def test_group_norm_is_that_of_pytorch():
    """Four groups, or one for each of fewer channels; any sides, and no batch around a sample."""
    torch.manual_seed(3)
    for channels, sides in ((8, (5, 5)), (2, (7,)), (12, (3, 4))):
        own = NormStyle("group", 1.0).layer(channels)
        reference = nn.GroupNorm(min(4, channels), channels)
        with torch.no_grad():
            for parameter, twin in zip(own.parameters(), reference.parameters(), strict=True):
                parameter.add_(torch.randn_like(parameter))
                twin.copy_(parameter)
        x = torch.randn(4, channels, *sides, requires_grad=True)
        y = own(x)
        expected = reference(x)
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
        push = torch.randn_like(y)
        (mine,) = torch.autograd.grad(y, x, push)
        (theirs,) = torch.autograd.grad(expected, x, push)
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    with pytest.raises(ConfigError, match="6 channels cannot be split into 4 equal groups"):
        NormStyle("group", 1.0).layer(6)


def test_channels_of_groups_keep_their_places():
    """Windows that move are refused; leading channels are a valid model, whatever the stages."""
    for name, settings in (
        ("conv", {"channels": (8, 16), "input_shape": (1, 8, 8)}),
        ("preresnet18", {"channels": (8, 16), "blocks": (1, 1), "input_shape": (3, 8, 8)}),
    ):
        layout = infer_layout(Registry.zoo().get(name), {**settings, "norm": "group"})
        cut = [axis for axis in layout.axes.values() if axis.kind is AxisKind.WIDTH]
        assert cut
        assert all(axis.leading for axis in cut)
        with pytest.raises(PlanError, match="was declared leading"):
            make_plan(layout, layout.tier(0.5), "rolling", round_index=1)
