"""What a model does only in training counts: units with places, buffers that move, rates that a
builder computes.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from fleet_protocol.errors import ConfigError
from models import architecture, infer_layout
from models.zoo.conversion import convert
from models.zoo.conversion_plan import converted
from models.zoo.layers import SpectralNorm, set_mode


def arch_of(build):
    @architecture()
    def custom(cut, *, input_shape=(4,), classes=3):
        return build(cut.width("hidden", 6), cut.classes(classes))

    return custom


class Scaled(nn.Sequential):
    """Scales its inputs or its outputs by place, but only in training."""

    def __init__(self, hidden, classes, *, inside):
        super().__init__(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, classes))
        self.inside = inside

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        y = self[0](x)
        places = torch.linspace(0.5, 1.5, y.shape[1] if self.inside else x.shape[1])
        return self[2](y * places) if self.inside else self[2](self[1](self[0](x * places)))


def test_units_that_have_places_in_training_alone():
    """In evaluation they are alike, so only the training pass can tell; other inputs for it do no
    harm.
    """
    assert infer_layout(arch_of(lambda *sizes: Scaled(*sizes, inside=False)))
    with pytest.raises(ConfigError, match="units of axis hidden are not interchangeable"):
        infer_layout(arch_of(lambda *sizes: Scaled(*sizes, inside=True)))


class Average(nn.Module):
    """Subtracts a running mean of its inputs."""

    def __init__(self, hidden, classes):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, classes))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.layers(x - self.mean)


@pytest.mark.parametrize(
    ("layer", "where"),
    [
        (Average, r"buffer mean of module \(the model itself\) \(Average\)"),
        (
            lambda hidden, classes: nn.Sequential(
                nn.Unflatten(1, (1, 4)),
                nn.Conv1d(1, hidden, 1),
                nn.InstanceNorm1d(hidden, track_running_stats=True),
                nn.Flatten(),
                nn.Linear(hidden * 4, classes),
            ),
            r"buffer 2\.running_mean of module 2 \(InstanceNorm1d\)",
        ),
        (
            lambda hidden, classes: nn.Sequential(
                torch.nn.utils.spectral_norm(nn.Linear(4, hidden)), nn.Linear(hidden, classes)
            ),
            r"buffer 0\.weight_u of module 0 \(Linear\)",
        ),
    ],
)
def test_a_buffer_that_training_moves(layer, where):
    """A graph returns parameters alone, so it would stay as it was drawn."""
    with pytest.raises(ConfigError, match=f"{where} changes while the model runs"):
        infer_layout(arch_of(layer))


def test_spectral_norm_is_converted():
    """Of any start it is the largest singular value: that of numpy, in training and evaluation."""
    arch = arch_of(
        lambda hidden, classes: nn.Sequential(
            spectral_norm(nn.Linear(4, hidden)), nn.Linear(hidden, classes)
        )
    )
    assert infer_layout(converted(arch))
    weight = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(3))
    rows = weight.movedim(1, 0).reshape(3, -1)
    for mode in ("train", "eval"):
        found = set_mode(SpectralNorm(1), mode)(weight)
        torch.testing.assert_close(
            found, weight / torch.linalg.matrix_norm(rows, 2), rtol=1e-3, atol=1e-4
        )


class Between(nn.Sequential):
    """A function between two layers, which may count its calls."""

    def __init__(self, hidden, classes, function):
        super().__init__(nn.Linear(4, hidden), nn.Linear(hidden, classes))
        self.function = function
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self[1](self.function(self[0](x), self.calls))


@pytest.mark.parametrize(
    ("function", "message", "instead"),
    [
        (
            lambda y, _: y.log(),
            r"computes NaN .* in or before module 1 \(Linear\).*clamp",
            lambda y, _: y.clamp(min=1e-6).log(),
        ),
        (
            lambda y, _: (y * (y > 0)).sqrt(),  # 0 where it is off, and there a slope without end
            r"computes NaN .* in the gradient of 0\.weight; .*clamp",
            lambda y, _: y.clamp(min=1e-6).sqrt(),
        ),
        (
            lambda y, calls: y * calls,
            r"calls of module the model \(Between\) changes",
            lambda y, _: y * y.mean(),
        ),
        (lambda y, _: y + torch.rand_like(y), "draws random numbers", lambda y, _: y + 1),
    ],
)
def test_a_model_that_computes_no_numbers_or_others_each_time(function, message, instead):
    """What is at fault is named, and what it is advised holds."""
    with pytest.raises(ConfigError, match=message):
        infer_layout(arch_of(lambda *sizes: Between(*sizes, function)))
    assert infer_layout(arch_of(lambda *sizes: Between(*sizes, instead)))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_the_older_weight_norm_is_refused_or_converted():
    """By what the message names, which computes the same."""
    for norm, is_old in (
        (nn.utils.parametrizations.weight_norm, False),
        (nn.utils.weight_norm, True),
    ):
        arch = arch_of(
            lambda hidden, classes, norm=norm: nn.Sequential(
                norm(nn.Linear(4, hidden)), nn.Linear(hidden, classes)
            )
        )
        if is_old:
            with pytest.raises(
                ConfigError,
                match=r"0 \(Linear\) has .*parametrizations\.weight_norm, which .*--convert",
            ):
                infer_layout(arch)
        assert infer_layout(converted(arch) if is_old else arch)
    layer = nn.utils.weight_norm(nn.Linear(4, 6), dim=1)
    x = torch.randn(5, 4)
    expected = layer(x)
    made, done = convert(layer)
    assert [item.old for item in done] == ["weight_norm"]
    torch.testing.assert_close(made(x), expected)
    assert "parametrizations.weight.original0" in dict(made.named_parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (nn.DataParallel, "DataParallel"),
        (
            lambda module: nn.Sequential(torch.jit.script(module)),
            r"custom: 0 is a RecursiveScriptModule",
        ),
        pytest.param(torch.compile, "OptimizedModule", marks=pytest.mark.slow),
    ],
)
def test_a_wrapper_is_refused(wrap, kind):
    """What it wraps is wanted."""

    def bare(hidden, classes):
        return nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, classes))

    with pytest.raises(
        ConfigError,
        match=rf"{kind} .*return the inner module, without DataParallel, torch\.compile or",
    ):
        infer_layout(arch_of(lambda *sizes: wrap(bare(*sizes))))
    assert infer_layout(arch_of(bare))


class Listening(nn.Module):
    """Multiplies its output by what a hook of its first layer kept."""

    def __init__(self, hidden, classes, how):
        super().__init__()
        self.first = nn.Linear(4, hidden)
        self.last = nn.Linear(hidden, classes)
        self.gate = nn.Linear(4, hidden)
        self.kept = {}
        if how == "hook":
            self.first.register_forward_hook(
                lambda _, given, result: result * self.gate(given[0]).sigmoid()
            )
        elif how == "dictionary":
            kept = self.kept
            self.first.register_forward_hook(lambda _, given, result: kept.update(x=result))
        elif how == "attribute":
            self.act = lambda x: x * self.gate.weight.sum(1)
        else:
            self.first.register_forward_hook(self.gated)

    def gated(self, _, given, result):
        return result * self.gate(given[0]).sigmoid()

    def forward(self, x):
        y = self.first(x)
        return self.last(self.act(y) if hasattr(self, "act") else y + self.kept.get("x", 0))


@pytest.mark.parametrize("how", ["hook", "dictionary", "attribute"])
def test_functions_that_hold_the_model_they_were_made_for(how):
    """A copy would compute with what the original has; the method that the message asks for goes
    with it.
    """
    with pytest.raises(
        ConfigError,
        match=r"line \d+ of test_training_mode.py, refers to .* use a method of the module",
    ):
        infer_layout(arch_of(lambda *sizes: Listening(*sizes, how)))
    assert infer_layout(arch_of(lambda *sizes: Listening(*sizes, "method")))
