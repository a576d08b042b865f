"""Models as strangers write them: exported and equal to PyTorch, or refused with a remedy, which
then exports.
"""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fleet_protocol.errors import ConfigError, ExportError
from models import architecture, infer_layout
from tests.marking import mostly_slow
from tests.trainer_export.helpers import train_report
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.check import open_session
from trainer_export.footprint import count_flops
from trainer_export.formats.onnx import write_graphs
from trainer_export.loss import loss_named
from trainer_export.losses.own import loss
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe

VECTOR = Signature((6,), "float32", 3)


class Layers(nn.Module):
    """Two layers, and a place between them."""

    def __init__(self, hidden=8, classes=3):
        super().__init__()
        self.first = nn.Linear(6, hidden)
        self.last = nn.Linear(hidden, classes)
        self.more(hidden)

    def more(self, hidden):
        pass

    def between(self, y):
        return y

    def forward(self, x):
        return self.last(self.between(self.first(x)))


def arch_of(kind, ask=lambda cut: cut.width("hidden", 8)):
    @architecture()
    def custom(cut, *, input_shape=(6,), classes=3):
        return kind(ask(cut), cut.classes(classes))

    return custom


class WritesInput(Layers):
    def forward(self, x):
        return super().forward(x.mul_(2))


class WritesCopy(Layers):
    def forward(self, x):
        x = x.clone()
        return super().forward(x.mul_(2))


class PlainList(Layers):
    def more(self, hidden):
        self.inner = [nn.Linear(hidden, hidden)]

    def between(self, y):
        return self.inner[0](y)


class ModuleList(PlainList):
    def more(self, hidden):
        self.inner = nn.ModuleList([nn.Linear(hidden, hidden)])


class PlainTensor(Layers):
    def more(self, hidden):
        self.scale = torch.linspace(0.5, 1.5, hidden)

    def between(self, y):
        return y * self.scale


class OwnParameter(PlainTensor):
    def more(self, hidden):
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, hidden))


class Sparse(Layers):
    def more(self, hidden):
        self.register_buffer("mix", torch.eye(6).to_sparse())

    def forward(self, x):
        return super().forward((self.mix @ x.T).T)


class Dense(Sparse):
    def more(self, hidden):
        self.register_buffer("mix", torch.eye(6).to_sparse().to_dense())


class Recomputing(Layers):
    def between(self, y):
        return checkpoint(torch.relu, y, use_reentrant=False)


class Half(Layers):
    def more(self, hidden):
        self.half()

    def forward(self, x):
        return super().forward(x.half()).float()


class Squared(Layers):
    def more(self, hidden):
        self.inner = nn.Linear(6, hidden * hidden)

    def forward(self, x):
        y = self.first(x)
        return self.last((self.inner(x).unflatten(1, (y.shape[1], -1)) @ y[..., None])[..., 0])


class Factors(Squared):
    def more(self, hidden):
        self.inner = nn.Parameter(torch.randn(hidden, hidden, 6))

    def forward(self, x):
        y = self.first(x)
        return self.last(torch.einsum("oif,bf,bi->bo", self.inner, x, y))


class Gated(Layers):
    """Half as many units as the axis has, as the gates of a U-Net have, and the halves of a
    flow.
    """

    def more(self, hidden):
        self.gate = nn.Linear(hidden // 2, hidden // 2)

    def between(self, y):
        left, right = y.chunk(2, 1)
        return torch.cat([left, right * self.gate(left).sigmoid()], 1)


class Nothing(Layers):
    def forward(self, x):
        y = super().forward(x)
        return {"logits": y, "doubled": 2 * y, "loss": None}  # of two tensors neither is taken


class Fails(Layers):
    def between(self, y):
        return y @ torch.ones(3, 3)


class Observing(Layers):
    def more(self, hidden):
        self.quantise = FakeQuantize()

    def between(self, y):
        return self.quantise(y)


class TiedByData(Layers):
    """As many a tutorial ties a decoder."""

    def more(self, hidden):
        self.decoder = nn.Linear(hidden, 6)
        self.decoder.weight.data = self.first.weight.data.T

    def between(self, y):
        return self.first(self.decoder(y))


class TiedByUse(Layers):
    def more(self, hidden):
        self.offset = nn.Parameter(torch.zeros(6))

    def between(self, y):
        return self.first(functional.linear(y, self.first.weight.T, self.offset))


class TiedByName(Layers):
    """One parameter of two layers, in a model without buffers."""

    def more(self, hidden):
        self.second, self.third = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.third.weight = self.second.weight

    def between(self, y):
        return self.third(self.second(y).relu())


class HookedParameter(Layers):
    """Bounds the gradient of a parameter, as many a forum says."""

    def more(self, hidden):
        self.first.weight.register_hook(lambda slope: slope.clamp(-0.01, 0.01))


class HookedParameterOfValues(HookedParameter):
    """The same in a model that no meta device builds."""

    def more(self, hidden):
        self.rate = torch.linspace(0, 1, 3).tolist()[1]
        super().more(hidden)


class Counting(Layers):
    """Its second half begins after a hundred steps."""

    steps = 0

    def between(self, y):
        self.steps += self.training
        return y if self.steps <= 100 else torch.relu(y)


class HookedClone(Layers):
    def forward(self, x):
        weight = self.first.weight.clone()
        if weight.requires_grad:
            weight.register_hook(lambda slope: slope.clamp(-0.01, 0.01))
        return self.last(functional.linear(x, weight, self.first.bias))


REFUSED = [
    (TiedByData, "parameters first.weight and decoder.weight share their memory", TiedByUse, None),
    (TiedByData, "give both layers the same nn.Parameter", TiedByName, None),
    (
        HookedParameter,
        "parameter first.weight has a hook on its gradient.*on a clone",
        HookedClone,
        None,
    ),
    (
        HookedParameterOfValues,
        "parameter first.weight has a hook on its gradient",
        HookedClone,
        None,
    ),
    (
        Counting,
        "the number steps of the model changes .* after 100 steps .* remove this dependence",
        Layers,
        None,
    ),
    (WritesInput, r"writes into its input.*x = x\.clone\(\)", WritesCopy, None),
    (
        PlainList,
        "attribute inner of the model .PlainList. is a Python list of modules.*nn.ModuleList",
        ModuleList,
        None,
    ),
    (PlainTensor, "or make attribute scale a parameter", OwnParameter, None),
    (Sparse, r"buffer mix is sparse; make it dense with \.to_dense\(\)", Dense, None),
    (
        Recomputing,
        r"line \d+ of test_strange.*, in module Recomputing .*remove torch.utils.checkpoint",
        Layers,
        None,
    ),
    (Half, r"first.weight is torch.float16; .*remove \.half\(\)", Layers, None),
    (
        Squared,
        "inner.weight has 64 entries.*each factor of a product its own dimension",
        Factors,
        None,
    ),
    (
        Gated,
        r"cut\.width\('hidden', 4\) \* 2 gives the size 8",
        Gated,
        lambda cut: cut.width("hidden", 4) * 2,
    ),
    (Nothing, "not NoneType; remove other values", Layers, None),
    (
        Fails,
        r"the model fails at line \d+ of test_strange_models.py, in module Fails",
        Layers,
        None,
    ),
    (
        Observing,
        r"buffer quantise.scale of module quantise \(FakeQuantize\) changes while the model runs",
        Layers,
        None,
    ),
]


@pytest.mark.parametrize(
    ("kind", "message", "remedy", "ask"), REFUSED, ids=[row[0].__name__ for row in REFUSED]
)
def test_what_cannot_be_cut(kind, message, remedy, ask):
    """The message says what to do, and what it says is enough."""
    with pytest.raises(ConfigError, match=message):
        infer_layout(arch_of(kind))
    assert infer_layout(arch_of(remedy, ask) if ask else arch_of(remedy)).parameters


class Tracing(Layers):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def between(self, y):
        return self.inner(y)


def _fills(y):
    y = y.clone()
    y.data.fill_(0.0)
    return y


def _counts(y):
    return y * int(y.abs().sum() > 0)


def _scatters(y):
    return y.scatter_reduce(1, torch.zeros_like(y).long(), y, "amax")


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (lambda y: y + y.kthvalue(2, 1).values[:, None], r"line \d+ .*kthvalue.*use topk"),
        (
            lambda y: y / y.max(),
            r"line \d+ .*aten.max.default.*use amax or amin along dimensions after the batch",
        ),
        (
            lambda y: y + torch.bucketize(y, torch.tensor([0.0, 1.0])),
            r"line \d+ .*\(x.unsqueeze\(-1\) > edges\)",
        ),
        (
            _scatters,
            r"line \d+ .*scatter_reduce.*use index_add, or amax over torch.where with a mask",
        ),
        (
            lambda y: y + torch.stft(y, 4, return_complex=True).abs().sum((1, 2))[:, None],
            r"line \d+ .*tables of cosines and sines",
        ),
        (
            lambda y: y.half().float(),
            r"line \d+ .*torch.float16 cannot be exported; convert with \.float\(\), or with \.long\(\)",
        ),
        (
            lambda y: y + torch.from_numpy(y.detach().numpy()),
            r"at line \d+ of .*use PyTorch's functions instead of Num",
        ),
        (
            lambda y: torch.fake_quantize_per_tensor_affine(y, 0.1, 0, -9, 9),
            "at line .*write it with simpler operators",
        ),
        (
            _counts,
            r"at line \d+ of .*, in module Tracing: .* must not depend on the values of its input",
        ),
    ],
)
def test_what_cannot_be_traced(inner, message):
    """The line of the user's file, and an operator to take instead; the next test takes them
    all.
    """
    with pytest.raises(ExportError, match=message):
        train_report(Tracing(inner), VECTOR)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
def test_what_is_scripted_knows_one_batch_size():
    """The line that calls it is named."""

    def gate(y: torch.Tensor) -> torch.Tensor:
        return y * torch.sigmoid(y)

    scripted = torch.jit.script(gate)
    with pytest.raises(
        ExportError,
        match=r"only for some batch sizes, .*, line \d+ of test_str.*\.py; .* and do not call functions "
        r"of torch\.jit\.script",
    ):
        train_report(Tracing(lambda y: scripted(y)), VECTOR)  # noqa: PLW0108 - a module that holds it cannot be copied
    assert train_report(Tracing(gate), VECTOR).worst_absolute < 1e-5


@pytest.mark.parametrize("size", [1, 32])
def test_a_way_that_is_taken_by_the_size_of_the_batch_is_refused(size):
    """A board's last batch is smaller, and the graph knows one way alone; conditions that always
    hold are none.
    """

    def doubled(y):
        assert y.shape[0] > 0
        return y * 2 if y.shape[0] > size else y

    with pytest.raises(
        ExportError,
        match=r"only for some batch sizes, .*, line \d+ of test_strange_models\.py; ",
    ):
        train_report(Tracing(doubled), VECTOR)


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand()])  # noqa: NPY002, PLW0108
def test_chance_that_pytorch_does_not_draw_is_refused(draw):
    """A layer that is left out now and then, which a graph would leave out always or never."""

    class LayerDrop(Layers):
        def between(self, y):
            return y if self.training and draw() < 0.01 else torch.relu(y)

    with pytest.raises(
        ExportError, match=r"draws random numbers with Python or NumPy in training, .* NoiseLayer"
    ):
        train_report(LayerDrop(), VECTOR)


class Tails(Layers):
    """Logarithms and powers of numbers that are next to nothing."""

    def between(self, y):
        y = torch.log(functional.softplus(20 * y - 40)) + 1e8 * torch.log1p(y.abs() * 1e-9)
        return (
            y
            + 1e8 * torch.expm1(y * 1e-9)
            + functional.softplus(y, 2.0, 1.0)
            + functional.logsigmoid(9 * y)
        )


def test_what_is_next_to_nothing_keeps_its_digits():
    """PyTorch's functions for small numbers lose none, and the graph's do not either."""
    assert train_report(Tails(), VECTOR).worst_relative < 1e-4


class Remedied(Layers):
    """What the messages above say."""

    def more(self, hidden):
        self.mask = nn.Parameter(torch.tensor([1.0, 0.0] * (hidden // 2)), requires_grad=False)
        places = torch.arange(hidden)
        rows = torch.arange(5)[:, None]
        self.cosines = torch.cos(2 * torch.pi * rows * places / hidden)

    def between(self, y):
        y = y / y.abs().amax(1, keepdim=True) + y.topk(7, 1, largest=False).values[:, -1:]
        y = y + (y.unsqueeze(-1) > torch.tensor([0.0, 1.0])).sum(-1)
        y = y + torch.where(self.mask > 0, y, -9.0).amax(1, keepdim=True)
        y = y.index_add(1, torch.tensor([0, 2]), y[:, :2])
        spectrum = y @ self.cosines.T
        quantised = y + (torch.round(y * 10) / 10 - y).detach()
        return quantised * self.mask + y.long().float() + spectrum.sum(1, keepdim=True)


class WritesPlaces(Layers):
    """Writes columns, adds to some and fills one, in place."""

    def forward(self, x):
        x = x.clone()
        places = torch.tensor([0, 2, 4])
        x[:, places] = x[:, places] * 2
        x.index_add_(1, places, torch.ones(x.shape[0], 3)).index_fill_(1, torch.tensor([1]), 0.5)
        return super().forward(x)


class Standardised(Layers):
    """Its weights are standardised by a batch norm of one sample, as timm does."""

    def between(self, y):
        rows = functional.batch_norm(
            self.last.weight[None], None, None, training=True, momentum=0.0
        )[0]
        return y + functional.linear(y, rows) @ self.last.weight


class Energy(Layers):
    """Takes the gradient of an energy inside its forward pass."""

    def forward(self, x):
        return super().forward(torch.func.grad(lambda z: torch.tanh(self.first(z)).sum())(x))


class Adapting(Layers):
    """Takes a step of its own before it answers, as meta-learning does."""

    def slope(self, x):
        return torch.func.grad(lambda weight: functional.linear(x, weight).square().mean())(
            self.first.weight
        )

    def forward(self, x):
        return self.last(
            functional.linear(x, self.first.weight - 0.1 * self.slope(x), self.first.bias)
        )


class AdaptingInTraining(Adapting):
    def slope(self, x):
        weight = self.first.weight
        return torch.autograd.grad(
            functional.linear(x, weight).square().mean(), weight, create_graph=True
        )[0]


TRAINED = [Remedied, WritesPlaces, Standardised, Energy, Adapting, HookedClone, TiedByUse]


@pytest.mark.parametrize("kind", mostly_slow(TRAINED, lambda kind: kind in {WritesPlaces, Energy}))
def test_what_trains_as_in_pytorch(kind):
    """Over six steps."""
    torch.manual_seed(1)
    assert train_report(kind(), VECTOR).worst_absolute < 1e-5


def test_gradients_inside_a_forward_pass_are_counted():
    """Where they are taken costs no less."""
    assert count_flops(Energy(), VECTOR)[0] > count_flops(Layers(), VECTOR)[0] > 0


@loss("int64")
def forgiving(outputs, targets):
    """Takes every label, as its author wants it."""
    return functional.cross_entropy(outputs, targets % outputs.shape[1], reduction="none")


def test_an_own_loss_that_takes_any_label_computes_with_it_what_pytorch_does():
    """Nobody refuses a label for it, and boards read none in another way."""
    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    x = torch.randn(5, 6)
    y = torch.tensor([-100, -1, 2, 3, 8])
    own = forgiving()
    low, high = own.spec((3,), torch.zeros(1, 3)).whole[""][:2]
    assert low < -100 < 8 < high
    graph = next(
        file for file in write_graphs(model, VECTOR, Recipe(loss=own)) if file.path == "eval.onnx"
    )
    feed = {"param.weight": model.weight, "param.bias": model.bias, "x": x, "y": y.float()}
    found = open_session(graph.data).run(
        ["loss_sum"], {name: value.detach().numpy() for name, value in feed.items()}
    )
    assert float(found[0]) == pytest.approx(forgiving.function(model(x), y).sum().item(), rel=1e-5)


class Moody(Layers):
    def between(self, y):
        if self.training:
            raise LookupError("no such table\nat all")
        return y


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Moody, "LookupError: no"),
        (
            AdaptingInTraining,
            "RuntimeError: .*compute gradients inside a model with torch.func.grad",
        ),
    ],
)
def test_what_fails_in_the_middle_of_an_export_is_named(kind, what, tmp_path):
    """Not as a bare exception of whatever library."""
    place = (
        rf"custom: w1.00-d1: the model fails at line \d+ of test_strange_models.py, in module "
        rf"{kind.__name__}: "
    )
    arch = arch_of(kind)
    with pytest.raises(ExportError, match=place + what):
        export_architecture(
            ExportRequest(arch, None, [infer_layout(arch).tier(1.0)], Recipe()),
            tmp_path / "set",
            ExportOptions(formats=("onnx",)),
        )


@pytest.mark.parametrize(
    ("heads", "says"),
    [
        ({"logits.0": (3,)}, r"returns its single output in a tuple .*`return output\.logits`"),
        ({"logits.a": (3,), "logits.b": (3,)}, r"2 outputs \(logits\.a, .*@shoal\.loss\(\)"),
    ],
)
def test_a_model_that_wraps_its_logits_is_named_what_to_return(heads, says):
    """A named tuple or dictionary of one tensor needs no loss of the user's."""
    with pytest.raises(ExportError, match=says):
        loss_named("masked-cross-entropy").require_outputs(heads)
