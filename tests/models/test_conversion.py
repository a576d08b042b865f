"""What cannot be exported is replaced by what can, computes the same, and is named."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError, ExportError
from models.zoo.conversion import convert
from models.zoo.dropout import ChannelDropout, Dropout
from tests.marking import mostly_slow
from tests.trainer_export.helpers import shaken, train_report
from trainer_export.model_inputs import Signature


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Dropout2d(0.3),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(64, 6), nn.BatchNorm1d(6, affine=False), nn.Dropout(0.2), nn.Linear(6, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Text(nn.Module):
    """PyTorch's encoder, with a mask of what is padding."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **settings)
        self.embed = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = (tokens == 0) & (torch.arange(tokens.shape[1]) > 0)
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding)[:, 0])


class Series(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **settings: object) -> None:
        super().__init__()
        self.layer = kind(5, 4, 2, batch_first=True, dropout=0.3, **settings)
        self.head = nn.Linear(8 if self.layer_is_wide else 4, 3)

    @property
    def layer_is_wide(self) -> bool:
        return self.layer.bidirectional

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, 0])


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Signature]] = {
    "image": (Image, Signature((2, 6, 6), "float32", 3)),
    "encoder": (Text, Signature((7,), "int64", 3)),
    "encoder, norm first": (
        lambda: Text(norm_first=True, activation="gelu"),
        Signature((7,), "int64", 3),
    ),
    "lstm": (lambda: Series(nn.LSTM, bidirectional=True), Signature((6, 5), "float32", 3)),
    "gru": (lambda: Series(nn.GRU, bias=False), Signature((6, 5), "float32", 3)),
}


def example(signature: Signature) -> Tensor:
    shape = (4, *signature.input_shape)
    return torch.randint(0, 20, shape) if signature.input_dtype == "int64" else torch.randn(shape)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_predicts_the_same(name: str) -> None:
    """In evaluation, with the same weights and statistics, and without a shortcut that skips the
    parts.
    """
    make, signature = MODELS[name]
    torch.manual_seed(3)
    module = shaken(make())
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
    x = example(signature)
    module.eval()
    expected = copy.deepcopy(module)(x)
    converted, done = convert(module)
    converted.eval()
    for layer in converted.modules():
        layer.mode = "eval"
    assert done
    torch.testing.assert_close(converted(x), expected)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", mostly_slow(MODELS, lambda name: name == "gru"))
def test_a_converted_model_trains_in_a_graph(name: str) -> None:
    """And is refused before, with the option that converts it."""
    make, signature = MODELS[name]
    torch.manual_seed(3)
    module = shaken(make())
    with pytest.raises(ExportError, match="--convert"):
        train_report(module, signature)
    converted, _ = convert(module)
    assert train_report(converted, signature, sizes=(5, 4, 8)).worst_absolute <= 1e-5


def test_what_was_replaced_is_named() -> None:
    """By its path, what it was and what it is now; nothing else changes."""
    module = Image()
    weight = module.body[1].weight
    converted, done = convert(module)
    assert converted is module
    assert converted.body[1].weight is weight
    assert [(replacement.path, replacement.old) for replacement in done] == [
        ("body.1", "BatchNorm2d"),
        ("body.2", "ReLU(inplace=True)"),
        ("body.3", "Dropout2d"),
        ("head.1", "BatchNorm1d"),
        ("head.2", "Dropout"),
    ]
    assert convert(converted)[1] == ()
    assert isinstance(convert(nn.Dropout(0.1))[0], Dropout)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("settings", [{}, {"kdim": 5, "vdim": 6}, {"bias": False}])
def test_attention_in_parts(first: bool, settings: dict[str, object]) -> None:
    """Masks of both types, weights of the heads and the mean over them."""
    torch.manual_seed(3)
    whole = nn.MultiheadAttention(8, 2, batch_first=first, **settings).eval()
    unfused, _ = convert(copy.deepcopy(whole))
    q, k, v = (
        torch.randn(3, 4, size) for size in (8, settings.get("kdim", 8), settings.get("vdim", 8))
    )
    if not first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    masks = [
        {},
        {"attn_mask": torch.ones(4, 4).triu(1).bool()},
        {"attn_mask": torch.randn(6, 4, 4)},
        {"key_padding_mask": torch.tensor([[False, False, True, True]] * 3)},
        {"average_attn_weights": False},
    ]
    for mask in masks:
        torch.testing.assert_close(unfused(q, k, v, **mask), whole(q, k, v, **mask))
    assert unfused(q, k, v, need_weights=False)[1] is None


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("kind", "shown"), [(nn.LSTM, 0), (nn.LSTM, 3), (nn.GRU, 0), (nn.RNN, 0)])
def test_recurrent_layers_in_parts(kind: type[nn.RNNBase], shown: int) -> None:
    """With states to start with, and projected, all that the whole layer returns."""
    torch.manual_seed(3)
    whole = kind(
        5, 4, 3, bidirectional=True, dropout=0.2, **({"proj_size": shown} if shown else {})
    ).eval()
    unfused, _ = convert(copy.deepcopy(whole))
    start = torch.randn(6, 2, 4)
    start_states = (start[..., : shown or 4], start * 2) if kind is nn.LSTM else start
    torch.testing.assert_close(
        unfused(torch.randn(7, 2, 5, generator=torch.Generator().manual_seed(1)), start_states),
        whole(torch.randn(7, 2, 5, generator=torch.Generator().manual_seed(1)), start_states),
    )


def test_channels_are_dropped_whole() -> None:
    """About a third of them, and what is kept is scaled up."""
    layer = ChannelDropout(1 / 3)
    torch.manual_seed(3)
    kept = layer(torch.ones(50, 20, 3, 2)).flatten(2)
    assert ((kept == 0).all(2) | torch.isclose(kept, torch.tensor(1.5)).all(2)).all()
    assert 0.6 < float((kept[:, :, 0] > 0).float().mean()) < 0.73


class DropPath(nn.Module):
    """As timm's, without its function."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob


def test_stochastic_depth_drops_whole_samples() -> None:
    """Of timm's and torchvision's name; a branch with it trains in a graph."""
    layer, done = convert(DropPath(0.25))
    assert [(replacement.old, replacement.new.partition(":")[0]) for replacement in done] == [
        ("DropPath", "SampleDropout")
    ]
    torch.manual_seed(3)
    kept = layer(torch.ones(400, 3, 2)).flatten(1)
    assert ((kept == 0).all(1) | torch.isclose(kept, torch.tensor(4 / 3)).all(1)).all()
    assert 0.68 < float((kept[:, 0] > 0).float().mean()) < 0.82
    branch = convert(nn.Sequential(nn.Linear(5, 4), DropPath(0.5), nn.Linear(4, 3)))[0]
    assert train_report(branch, Signature((5,), "float32", 3), sizes=(5, 4)).worst_absolute <= 1e-5


def test_stochastic_depth_that_holds_its_branch_stays() -> None:
    """The branch had gone with it, and with other scales than ours the model would be another."""

    class StochasticDepth(nn.Module):
        def __init__(self, module: nn.Module, p: float) -> None:
            super().__init__()
            self.module = module
            self.p = p

    scaled = DropPath(0.25)
    scaled.scale_by_keep = False  # type: ignore[assignment]
    module = nn.Sequential(StochasticDepth(nn.Linear(4, 4), 0.2), scaled)
    names = [name for name, _ in module.named_parameters()]
    converted, done = convert(module)
    assert (done, [name for name, _ in converted.named_parameters()]) == ((), names)


@pytest.mark.parametrize(
    "layer", [nn.LazyBatchNorm2d(), nn.MultiheadAttention(4, 2, add_zero_attn=True)]
)
def test_what_has_no_counterpart_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ConfigError, match="cannot be converted"):
        convert(nn.Sequential(layer))


class TokenDropout(nn.Dropout2d):
    """Over another axis."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class LouderAttention(nn.MultiheadAttention):
    """With something of its own behind."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tuple(3.0 * part for part in super().forward(*args, **kwargs))


@pytest.mark.parametrize("layer", [TokenDropout(0.5), LouderAttention(4, 2)])
def test_what_a_subclass_adds_is_not_dropped_without_a_word(layer: nn.Module) -> None:
    """The check of an export compares with the converted model, so another one had been trained,
    and nobody told.
    """
    with pytest.raises(
        ConfigError, match=f"{type(layer).__name__} has its own forward, which .* would drop"
    ):
        convert(nn.Sequential(layer))
