"""What a user reads when a model cannot be exported."""

import logging
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn import functional

from fleet_protocol.errors import ConfigError, ExportError
from models.zoo.conversion import convert
from models.zoo.dropout import Dropout
from models.zoo.layers import StaticBatchNorm
from tests.trainer_export.helpers import train_report
from trainer_export.graph import Port
from trainer_export.model_inputs import Signature
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe
from trainer_export.traced_program import BATCH, trace_program

VECTOR = Signature((6,), "float32", 3)
IMAGE = Signature((2, 6, 6), "float32", 3)


class Inner(nn.Module):
    """A module in the middle of a model that does what exporters cannot."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(x.unsqueeze(1) * x.unsqueeze(2)).sum(1)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(x))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if x.sum() > 0 else -x)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 1
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        return self.head(self.stack(x.unsqueeze(1).expand(-1, 4, -1), mask=mask).mean(1))


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.requires_grad_(False)


class Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            functional.interpolate(x, (3, 3), mode="bilinear", antialias=True).flatten(1)
        )


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


class TimeFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., :3].mean(1).transpose(0, 1)


class Apart(nn.Module):
    """Two inputs that came as one."""

    def forward(self, x: Tensor) -> Tensor:
        values = x[:, :3]
        mask = x[:, 3:]
        return torch.cat([values * mask.sigmoid(), torch.atan(values / (1 + mask**2))], 1)


class Pixels(nn.Module):
    """A label for each pixel as one for each token."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps.flatten(2).transpose(1, 2)


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * torch.ones(int(x.shape[0]), 1))


def test_an_unsupported_operator_names_itself_its_module_and_a_way_out() -> None:
    """The message has the operator, the path and class of the module, its line, and what to use
    instead.
    """
    module = nn.Sequential(nn.Linear(6, 6), Inner(), nn.Linear(6, 3))
    place = r"module 1 \(Inner\), line \d+ of test_errors\.py"
    with pytest.raises(
        ExportError,
        match=rf"{place}: operator aten\.linalg_matrix_exp.* cannot be exported; use addit",
    ):
        train_report(module, VECTOR)


@pytest.mark.parametrize(
    ("module", "signature", "message"),
    [
        (Dropping(), VECTOR, r"module drop \(Dropout\).*Dropout of models\.zoo\.dropout"),
        (
            nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)),
            VECTOR,
            r"module 0 \(BatchNorm1d\).*StaticBatchNorm",
        ),
        (Frozen(), VECTOR, "every parameter is frozen.*set requires_grad"),
        (
            Resized(),
            IMAGE,
            r"module \(the model itself\) \(Resized\), line \d+ of test_err.*mode='area'",
        ),
        (
            Masked(),
            VECTOR,
            r"stacks of transformer layers inspect the values of their mask: pass is_causal=False",
        ),
        (
            Branching(),
            VECTOR,
            (
                r"at line \d+ of test_errors\.py, in module Branching: .* must not depend on the "
                r"values"
            ),
        ),
        (
            FixedBatch(),
            VECTOR,
            r"only for some batch sizes, module .*\(FixedBatch\), line \d+ of test_errors\.py; ",
        ),
        (nn.Linear(6, 4), VECTOR, r"must return logits \[batch, 3\], but returned"),
    ],
)
def test_models_that_cannot_be_exported(
    module: nn.Module, signature: Signature, message: str
) -> None:
    """Each is refused with what is wrong and where."""
    with pytest.raises(ExportError, match=message):
        train_report(module, signature)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            TwoInputs(),
            (
                r"module \(the model itself\) \(TwoInputs\) takes 2 inputs \(x, mask\).*\{'x': "
                r"\(...\), 'm"
            ),
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(5, 3)),
            r"fails on float32 samples \[2, 6, 6\]:.*input_shape",
        ),
        (nn.Conv2d(2, 4, 1), r"must return logits \[batch, 3, 6, 6\], but returned"),
        (TimeFirst(), r"must return the batch dimension first, not \[6, 2, 3\]; transpose"),
        (
            nn.Sequential(nn.Flatten(2), nn.Conv1d(2, 3, 1)),
            r"but returned .*\(use \[batch, tokens, 3\] for a label per token",
        ),
    ],
)
def test_a_model_that_does_not_fit_its_samples(module: nn.Module, message: str) -> None:
    """Is refused at its first run, with what it takes or how it fails."""
    with pytest.raises(ExportError, match=message):
        IMAGE.with_places_of(module)


def test_a_label_for_each_place_of_a_volume_is_refused() -> None:
    """As of MONAI's U-Nets of three dimensions; the message says what has labels."""
    volumes = Signature((2, 4, 4, 4), "float32", 3)
    message = r"returns \(2, 3, 4, 4, 4\), a label for each place of a volume.*train on slices"
    with pytest.raises(ExportError, match=message):
        volumes.with_places_of(nn.Conv3d(2, 3, 1))


@pytest.mark.parametrize(
    ("module", "signature"),
    [
        (
            nn.Sequential(
                nn.Upsample(scale_factor=2), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(200, 3)
            ),
            IMAGE,
        ),
        (nn.Sequential(Apart(), nn.Linear(6, 3)), VECTOR),
        (nn.Sequential(nn.Conv2d(2, 3, 1), Pixels()), IMAGE),
        (nn.Conv2d(2, 3, 1), IMAGE),
        (
            nn.Sequential(nn.Upsample(size=(3, 3), mode="area"), nn.Flatten(), nn.Linear(18, 3)),
            IMAGE,
        ),
        (
            nn.Sequential(StaticBatchNorm(6), nn.GroupNorm(1, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
            VECTOR,
        ),
        (nn.Sequential(Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0), nn.Linear(6, 3)), VECTOR),
    ],
)
def test_what_a_refusal_advises_works(module: nn.Module, signature: Signature) -> None:
    """Each remedy that a message names is one."""
    assert train_report(module, signature.with_places_of(module)).worst_absolute <= 1e-5


class Between(nn.Module):
    """A function between two layers, and beside a number that keeps its gradient."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.function = function
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.function(x))


def _image(x: Tensor) -> Tensor:
    return x.view(-1, 1, 2, 3).repeat(1, 1, 2, 2)


def _sampled(x: Tensor, mode: str) -> Tensor:
    places = torch.stack(
        torch.meshgrid(torch.linspace(-1, 1, 2), torch.linspace(-1, 1, 3), indexing="ij")[::-1], -1
    )
    places = places.expand(x.shape[0], 2, 3, 2)
    return functional.grid_sample(_image(x), places, mode=mode, align_corners=True).flatten(1)


def _unpooled(x: Tensor) -> Tensor:
    return functional.max_unpool2d(
        *functional.max_pool2d(_image(x), 2, return_indices=True), 2
    ).flatten(1)[:, :6]


def _cosines(x: Tensor) -> Tensor:
    steps = torch.arange(6)
    return x @ torch.cos(2 * torch.pi / 6 * steps[:, None] * steps)


def _masked(x: Tensor) -> Tensor:
    y = x.clone()
    mask = x > 0
    y[mask] = 0.1 * y[mask]
    return y


def _rows(x: Tensor) -> Tensor:
    return x.sum(0).view(2, 3) * torch.tensor([[1.0], [0.1]])


def _bounded(x: Tensor) -> Tensor:
    rows = functional.embedding((x > 0).long(), _rows(x))
    return (rows * (1.0 / rows.norm(dim=-1, keepdim=True).clamp(min=1.0))).sum(2)


def _log_gamma(x: Tensor) -> Tensor:
    x = x.abs() + 1
    y = x + 5
    product = x * (x + 1) * (x + 2) * (x + 3) * (x + 4)
    return (y - 0.5) * y.log() - y + 0.9189385 + 1 / (12 * y) - 1 / (360 * y**3) - product.log()


def _digamma(x: Tensor) -> Tensor:
    x = x.abs() + 1
    y = x + 5
    return (
        y.log()
        - 1 / (2 * y)
        - 1 / (12 * y**2)
        + 1 / (120 * y**4)
        - sum(1 / (x + k) for k in range(5))
    )


def _inverse_error(x: Tensor) -> Tensor:
    x = x.tanh()
    t = (1 - x * x).log()
    s = 4.3307 + t / 2
    return x.sign() * ((s * s - t / 0.147).sqrt() - s).sqrt()


REMEDIES: Mapping[str, tuple[Callable[[Tensor], Tensor], str, Callable[[Tensor], Tensor]]] = {
    "norm": (
        lambda x: x.norm(0, 1, keepdim=True),
        "use order 1 or 2",
        lambda x: x.norm(1, 1, keepdim=True),
    ),
    "lgamma": (
        lambda x: (x.abs() + 1).lgamma(),
        r"Stirling's series above 0: .* \(x \+ 4\)\)\.log\(\)",
        _log_gamma,
    ),
    "digamma": (
        lambda x: (x.abs() + 1).digamma(),
        r"its series above 0: .* range\(5\)\)",
        _digamma,
    ),
    "erfinv": (lambda x: x.tanh().erfinv(), r"Winitzki's formula.*- s\)\.sqrt\(\)", _inverse_error),
    "roll": (lambda x: x.roll(1), "pass the dimension", lambda x: x.roll(1, 1)),
    "flip": (lambda x: x.flip(0), "use another dimension", lambda x: x.flip(1)),
    "mask": (
        lambda x: x[x > 0].sum(),
        "multiply by the mask",
        lambda x: (x * (x > 0)).sum(1, keepdim=True),
    ),
    "masked": (
        _masked,
        r"use torch\.where\(mask, new, old\)",
        lambda x: torch.where(x > 0, 0.1 * x, x),
    ),
    "product": (
        lambda x: x.sigmoid().prod(),
        "prod or cumprod along one dimension",
        lambda x: x.sigmoid().prod(1, keepdim=True) + x.cumprod(1),
    ),
    "double": (
        lambda x: (x.double() / 3).float(),
        r"double precision cannot be exported.*\.float\(\)",
        lambda x: x.double().float() / 3,
    ),
    "doubled": (
        lambda x: (x * torch.tensor([1.5], dtype=torch.float64)).float(),
        r"double precision cannot be exported.*\.float\(\)",
        lambda x: x * torch.tensor([1.5]),
    ),
    "bounded": (
        lambda x: functional.embedding((x > 0).long(), _rows(x), max_norm=1.0).sum(2),
        (
            r"max_norm cannot.*rows \* \(max_norm / rows\.norm\(dim=-1, "
            r"keepdim=True\)\.clamp\(min=max_norm\)\)"
        ),
        _bounded,
    ),
    "size of the batch": (
        lambda x: x * x.shape[0] ** 0.5,
        "sym_float on the batch size cannot.*use sums or means instead",
        lambda x: x * x.shape[1] ** 0.5,
    ),
    "fourier": (lambda x: torch.fft.fft(x).real, "tables of cosines and sines", _cosines),
    "sampled": (
        lambda x: _sampled(x, "nearest"),
        "use mode='bilinear'",
        lambda x: _sampled(x, "bilinear"),
    ),
    "unpooled": (
        _unpooled,
        "use Upsample or a transposed",
        lambda x: nn.Upsample((2, 3))(_image(x)).flatten(1),
    ),
    "one hot": (
        lambda x: functional.one_hot(x.argmax(1)),
        "pass the number of classes",
        lambda x: functional.one_hot(x.argmax(1), 6),
    ),
    "random": (torch.rand_like, "a NoiseLayer of models.zoo.dropout", Dropout(0.3)),
    "alpha": (
        lambda x: functional.alpha_dropout(x, 0.2, training=True),
        "nn.Dropout and .*--convert",
        convert(nn.Sequential(nn.Dropout(0.2)))[0],
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.slow
def test_a_refusal_and_what_it_advises(name: str) -> None:
    """The function is refused by its line, and what stands in the message trains as in PyTorch."""
    # Some weights make a tanh of 1, for which the formula of erfinv has no finite value.
    torch.manual_seed(5)
    refused, message, instead = REMEDIES[name]
    with pytest.raises(ExportError, match=rf"line \d+ of test_errors\.py: .*{message}"):
        train_report(Between(refused), VECTOR)
    assert train_report(Between(instead), VECTOR, sizes=(4, 3)).worst_absolute <= 1e-5


def test_formulas_that_are_advised_are_right() -> None:
    """Where PyTorch has the function."""
    x = torch.linspace(-3, 3, 50)
    torch.testing.assert_close(_log_gamma(x), (x.abs() + 1).lgamma(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(_digamma(x), (x.abs() + 1).digamma(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(_inverse_error(x), x.tanh().erfinv(), rtol=4e-3, atol=1e-5)


@pytest.mark.parametrize(
    "numbers", [{"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0}, {"clip_norm": 0.0}]
)
def test_a_recipe_out_of_range_is_refused(numbers: dict[str, float]) -> None:
    """The message names the number."""
    with pytest.raises(ConfigError, match=next(iter(numbers))):
        Recipe(**numbers) if "clip_norm" in numbers else Sgd(**numbers)


def test_an_operator_that_fails_is_not_logged_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch writes a traceback of C++ for each, thousands of lines before the error."""
    logged: list[str] = []
    logger = logging.getLogger(fake_tensor.__name__)
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: logged.append(record.msg))
    monkeypatch.setattr(logger, "handlers", [handler])
    port = Port("x", "float32", (BATCH, 2))
    with pytest.raises(ExportError, match="cannot be traced"):
        trace_program("broken", lambda x: [x @ torch.ones(3, 4)], (port,), (port,))
    assert logged == []
    assert logger.isEnabledFor(logging.ERROR)
