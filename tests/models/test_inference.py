"""Layouts are inferred from plain modules; a module whose axes are unclear is refused with
advice.
"""

import sys
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from fleet_protocol.errors import ConfigError
from models import AxisKind, Dim, Layout, architecture, infer_layout
from models.block_names import HEAD, STEM
from models.zoo import proof
from models.zoo.initial_state import initial_weights
from models.zoo.layers import StaticBatchNorm
from tests.models.test_zoo_contract import SMALL


def arch_of(build):
    """Make an architecture of a function that takes a cut alone."""

    @architecture()
    def custom(cut, *, input_shape=(4,), classes=3):
        return build(cut)

    return custom


def test_a_flattened_convolution_carries_its_channels(zoo):
    """The first linear layer of LeNet-5 has 25 positions for each channel, channel-major."""
    layout = infer_layout(zoo.get("lenet5"))
    by_name = {item.name: item for item in layout.parameters}
    assert by_name["fc1.weight"].dims == (Dim("fc1"), Dim("conv2", 25))
    assert by_name["conv2.weight"].dims == (
        Dim("conv2"),
        Dim("conv1"),
        Dim("fixed.5"),
        Dim("fixed.5"),
    )
    assert layout.shapes(layout.tier(0.5))["fc1.weight"] == (60, 8 * 25)


def test_the_text_encoder_has_heads_blocks_and_one_stream(zoo):
    """Every layer adds to the axis embed; attention is grouped by head; each block has parameters
    of its own.
    """
    layout = infer_layout(zoo.get("text_encoder"))
    assert layout.depths == (1, 2, 3, 4)
    assert layout.axes["block2.attention"].groups == 4
    assert layout.axes["classes"].kind is AxisKind.FIXED
    assert layout.label_axes == ("classes",)
    assert (layout.input_shape, layout.input_dtype, layout.classes) == ((32,), "int64", 4)
    by_name = {item.name: item for item in layout.parameters}
    assert by_name["blocks.1.attention.output.weight"].dims == (
        Dim("embed"),
        Dim("block2.attention"),
    )
    assert by_name["blocks.1.attention.output.weight"].block == "block2"
    assert (by_name["tokens.weight"].block, by_name["head.bias"].block) == ("stem", "head")


def test_a_model_without_a_depth_unit_has_a_stem_and_a_head(zoo):
    """Its depth is 1; the classifier is its head; static norms are listed with their axis."""
    layout = infer_layout(zoo.get("conv"), {"channels": (32, 64), "input_shape": (1, 8, 8)})
    assert layout.depths == (1,)
    assert [item.name for item in layout.parameters if item.block == "head"] == [
        "head.weight",
        "head.bias",
    ]
    assert [(item.name, item.dims) for item in layout.statistics] == [
        ("units.0.norm", (Dim("conv1"),)),
        ("units.1.norm", (Dim("conv2"),)),
    ]
    assert layout.statistics[0].tensors == ("stat.units.0.norm.mean", "stat.units.0.norm.var")
    assert layout.settings["channels"] == (32, 64)


@pytest.mark.parametrize("sizes", ["small", pytest.param("published", marks=pytest.mark.slow)])
def test_every_layout_survives_its_file(zoo, sizes):
    """The server reads what the exporter wrote."""
    for arch in zoo:
        layout = infer_layout(arch, SMALL[arch.name] if sizes == "small" else None)
        assert Layout.from_json(layout.to_json()) == layout


def _ignored(cut):
    cut.width("a", 4)
    return nn.Linear(4, cut.classes(3))


def _no_labels(cut):
    return nn.Linear(4, cut.width("a", 4))


class _Twice(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.hidden = nn.Linear(4, kept)
        self.first = nn.Linear(kept, 1)
        self.second = nn.Linear(kept, 1)

    def forward(self, x):
        hidden = self.hidden(x)
        return self.first(hidden), self.second(hidden)


def _two_outputs(cut):
    return _Twice(cut.width("a", 4))


def _batch_norm(cut):
    return nn.Sequential(nn.BatchNorm1d(cut.width("a", 4)), nn.Linear(4, cut.classes(3)))


def _divided(cut):
    kept = cut.width("a", 16)
    return nn.Sequential(
        nn.Conv1d(4, kept, 1), nn.Conv1d(kept, kept, 1, groups=2), nn.Linear(4, cut.classes(3))
    )


def _halved(cut):
    return nn.Sequential(nn.Linear(4, 32 - cut.width("a", 16)), nn.Linear(16, cut.classes(3)))


def _among_labels(cut):
    return nn.Linear(4, cut.classes(3) + 2)


def _fails(cut):
    return nn.Sequential(nn.Linear(4, cut.width("a", 6)), nn.Linear(4, cut.classes(3)))


def _lazy(cut):
    return nn.Sequential(nn.LazyLinear(cut.width("a", 4)), nn.Linear(4, cut.classes(3)))


def _counted(cut):
    return nn.ModuleList(nn.Linear(1, cut.classes(3)) for _ in range(cut.width("a", 4)))


def _renamed(cut):
    blocks = cut.depth(3)
    return nn.ModuleDict({"body": nn.Linear(4, blocks + 1), "head": nn.Linear(4, cut.classes(3))})


def _empty_blocks(cut):
    cut.depth(3)
    return nn.Linear(4, cut.classes(3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_ignored, "no parameter grows with axis a; use the size that the cut returns"),
        (_no_labels, r"does not use cut.classes\(n\): if these are its outputs"),
        (_two_outputs, r"has 2 outputs but does not use cut.classes\(n\)"),
        (
            _batch_norm,
            (
                "0 is a BatchNorm1d, whose running averages .* `shoal export --convert` replaces it "
                "with StaticBatchNorm"
            ),
        ),
        (
            _divided,
            (
                r"dimension 1 of 1.weight has 8 entries,? and 9 with 2 more units of a "
                r".*cut.heads\('a', 2, 8\) \* 2"
            ),
        ),
        (
            _halved,
            (
                "dimension 0 of 0.weight has 16 entries,? and 15 with 1 more units of a .*by "
                "multiplication and addition"
            ),
        ),
        (
            _among_labels,
            "5 entries, 3 of them for the labels classes; put the other entries into a separate parameter",
        ),
        (
            _fails,
            r"the model fails on a batch of samples of shape \[4\].*forward must take one tensor",
        ),
        (_lazy, "parameter 0.weight has no shape yet"),
        (_counted, "its set of parameters changes with the size of a"),
        (_renamed, "parameter body.weight of depth 0 differs in a deeper model"),
        (_empty_blocks, "requested a depth of 3, but some blocks have no parameters"),
        (lambda cut: "text", "must return a torch module, not str"),
        (lambda cut: nn.Linear, "must return a torch module, not <class .*Linear'>"),
        (lambda cut: sys.exit(0), r"built at line \d+ of test_inference.py: .* by sys.exit\(0\)"),
        (lambda cut: 1 / 0, r"cannot be built at line \d+ of test_inference.py: ZeroDivisionError"),
    ],
)
def test_a_model_with_unclear_axes_is_refused(build, message):
    """The message names the parameter, the axis and the way out."""
    with pytest.raises(ConfigError, match=f"custom.*{message}"):
        infer_layout(arch_of(build))


@pytest.mark.parametrize(("numbers", "shape"), [(1, (4,)), (3, (4,)), (5, (7, 4))])
def test_a_model_of_numbers_needs_no_classes(numbers, shape):
    """How many numbers it computes is seen when it runs; its last layer is the head."""

    @architecture()
    def custom(cut, *, input_shape=shape):
        kept = cut.width("a", 8)
        return nn.Sequential(nn.Linear(4, kept), nn.ReLU(), nn.Linear(kept, numbers))

    layout = infer_layout(custom)
    assert (layout.classes, layout.label_axes) == (numbers, ())
    blocks = {parameter.name: parameter.block for parameter in layout.parameters}
    assert blocks == {"0.weight": STEM, "0.bias": STEM, "2.weight": HEAD, "2.bias": HEAD}


def test_a_dimension_moved_by_two_axes_is_refused():
    """A dimension that is the product of two axes, each a clean multiple, still has no single
    axis.
    """

    def outer(cut):
        return nn.Sequential(
            nn.Linear(4, cut.width("a", 4) * cut.width("b", 5)), nn.Linear(4, cut.classes(3))
        )

    with pytest.raises(
        ConfigError, match=r"dimension 0 of 0.weight has 20 entries and grows with both a and b"
    ):
        infer_layout(arch_of(outer))


def test_initial_weights_are_a_function_of_the_seed(zoo):
    """The same seed gives the same float32 arrays, and the caller's random state is untouched."""
    arch = zoo.get("lenet5")
    state = torch.random.get_rng_state()
    first, again, other = (initial_weights(arch, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert [*first] == [item.name for item in infer_layout(arch).parameters]
    for name, value in first.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, again[name])
    assert not np.array_equal(first["fc1.weight"], other["fc1.weight"])


def test_linear_biases_and_norms_start_as_in_heterofl(zoo):
    """Linear biases 0, norm scale 1 and shift 0 (specification 1.7)."""
    weights = initial_weights(zoo.get("conv"))
    assert not weights["head.bias"].any()
    assert (weights["units.0.norm.weight"] == 1).all()
    assert not weights["units.0.norm.bias"].any()
    assert weights["units.0.conv.bias"].any()


def test_parameters_must_be_float32():
    """Graphs hold float32 parameters alone."""
    double = arch_of(lambda cut: nn.Linear(4, cut.classes(3)).double())
    with pytest.raises(
        ConfigError, match=r"parameter weight is torch\.float64; parameters must be"
    ):
        infer_layout(double)


def test_a_user_may_use_the_static_norm():
    """It is found wherever it stands."""
    arch = arch_of(
        lambda cut: nn.Sequential(
            nn.Linear(4, cut.width("a", 6)),
            StaticBatchNorm(cut.width("a", 6)),
            nn.Linear(cut.width("a", 6), cut.classes(3)),
        )
    )
    assert [item.name for item in infer_layout(arch).statistics] == ["1"]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda cut: nn.Sequential(
                nn.Linear(4, cut.width("a", 32)), nn.ReLU(), nn.Linear(32, cut.classes(3))
            ),
            r"module 2 \(Linear\) takes 32 inputs at every width, .*axis a, .*take this size from cut",
        ),
        (
            lambda cut: nn.Sequential(
                nn.Unflatten(1, (4, 1)),
                nn.Conv1d(4, cut.width("a", 8), 1),
                nn.Conv1d(8, 8, 1),
                nn.Flatten(),
                nn.Linear(8, cut.classes(3)),
            ),
            r"module 2 \(Conv1d\) takes 8 inputs at every width",
        ),
    ],
)
def test_a_size_that_is_written_into_a_layer_is_named(build, says):
    """With what to ask cut for, not with another form of the axis."""
    with pytest.raises(ConfigError, match=says) as caught:
        infer_layout(arch_of(build))
    assert "leading" not in str(caught.value)


class _NeedsABlock(nn.Module):
    """Refuses to be built without blocks, as some packages do."""

    def __init__(self, width, blocks, classes):
        super().__init__()
        if blocks < 1:
            raise ValueError("at least one block")
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)


def test_a_model_that_needs_a_block_has_its_depths():
    """The stem and the head are told from the first block by the numbers in names."""

    @architecture()
    def needs_a_block(cut, *, input_shape=(6,), classes=3, blocks=3):
        return _NeedsABlock(cut.width("width", 8), cut.depth(blocks), cut.classes(classes))

    layout = infer_layout(needs_a_block)
    assert {parameter.name: parameter.block for parameter in layout.parameters} == {
        "first.weight": "stem",
        "first.bias": "stem",
        "blocks.0.weight": "block1",
        "blocks.0.bias": "block1",
        "blocks.1.weight": "block2",
        "blocks.1.bias": "block2",
        "blocks.2.weight": "block3",
        "blocks.2.bias": "block3",
        "head.weight": "head",
        "head.bias": "head",
    }
    with pytest.raises(ConfigError, match="at least one block"):
        infer_layout(needs_a_block, {"blocks": 1})


class _MagnifiesRounding(nn.Module):
    """Adds many units, and looks at digits of the sum that float32 does not have."""

    def __init__(self, width, classes, gain=1e5, runs=None):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.head = nn.Linear(1, classes)
        self.gain = gain
        self.runs = runs  # counts runs by precision

    def forward(self, x):
        if self.runs is not None:
            self.runs[x.dtype] += 1
        total = self.first(x).relu().sum(-1, keepdim=True)
        return self.head(torch.sin(total * self.gain))


def test_a_model_that_magnifies_rounding_is_proved_in_double_precision():
    """And one that treats its units unlike others is refused there, too."""

    @architecture()
    def magnifying(cut, *, input_shape=(6,), classes=3):
        return _MagnifiesRounding(cut.width("width", 64), cut.classes(classes))

    assert infer_layout(magnifying).axes["width"].size == 64


def _counted(gain, counts):
    @architecture()
    def counted(cut, *, input_shape=(6,), classes=3):
        return _MagnifiesRounding(cut.width("width", 64), cut.classes(classes), gain, counts)

    return counted


def test_no_order_is_looked_for_in_a_precision_that_does_not_decide():
    """A model that magnifies rounding runs in single precision no more often than another one."""
    runs = {1.0: Counter(), 1e5: Counter()}
    for gain, counts in runs.items():
        infer_layout(_counted(gain, counts))
    assert runs[1e5][torch.float32] <= runs[1.0][torch.float32]
    # Variants with rare values are in double precision already, and do not run for it once more.
    assert runs[1e5][torch.float64] - runs[1.0][torch.float64] <= 6


def test_no_right_order_is_refused_for_the_rounding_of_a_permuted_model(monkeypatch):
    """In single precision, a number at the edge of a ReLU may change many others by luck."""
    exactly = proof.deviation_of

    def rounded(task, dims, names):
        return exactly(task, dims, names) if task.whole.model.is_exact else 0.1

    @architecture()
    def plain(cut, *, input_shape=(6,), classes=3):
        width = cut.width("width", 8)
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, cut.classes(classes)))

    monkeypatch.setattr(proof, "deviation_of", rounded)
    assert infer_layout(plain).axes["width"].size == 8


def test_a_model_that_computes_nan_in_double_precision_is_proved_in_single():
    """Its order, in which the entries of a unit lie apart, is looked for there as well."""

    class Single(nn.Module):
        def __init__(self, width, classes):
            super().__init__()
            self.first = nn.Linear(6, 2 * width)
            self.head = nn.Linear(width, classes)

        def forward(self, x):
            gate, value = self.first(x).chunk(2, -1)
            hidden = gate.sigmoid() * value
            return self.head(hidden + (torch.nan if x.dtype == torch.float64 else 0))

    @architecture()
    def single(cut, *, input_shape=(6,), classes=3):
        return Single(cut.width("width", 8), cut.classes(classes))

    assert infer_layout(single).axes["width"].size == 8


def test_a_model_that_remembers_an_earlier_run_is_refused():
    """Its tensor has the precision of that run, as in adapters that share one between layers."""

    class Remembering(nn.Module):
        def __init__(self, width, classes):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, classes))
            self.shared = {}

        def forward(self, x):
            if x.dtype == torch.float64:
                self.shared["scale"] = torch.eye(6).double()
            return self.layers(x @ self.shared.get("scale", torch.eye(6)))

    @architecture()
    def remembering(cut, *, input_shape=(6,), classes=3):
        return Remembering(cut.width("width", 8), cut.classes(classes))

    with pytest.raises(ConfigError, match="remembering: the model ran, but fails at line"):
        infer_layout(remembering)


def test_a_builder_that_needs_the_cpu_is_built_there_whatever_its_error():
    """As with devices of its own, or a constructor that computes."""

    @architecture()
    def computes(cut, *, input_shape=(6,), classes=3):
        width = cut.width("width", 8)
        with torch.device("cpu"):
            scale = torch.arange(1.0, 7.0)
        first = nn.Linear(6, width)
        first.weight.data = first.weight.data * scale
        if first.weight.device.type == "meta":
            raise RuntimeError("this constructor computes")
        return nn.Sequential(first, nn.ReLU(), nn.Linear(width, cut.classes(classes)))

    assert infer_layout(computes).axes["width"].size == 8
