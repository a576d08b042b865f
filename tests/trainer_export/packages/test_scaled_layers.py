"""Models whose arguments hide the sizes of their layers are cut in all layers together."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fleet_protocol.errors import ConfigError
from models import infer_layout
from models.architecture import Architecture
from models.axes import AxisKind
from models.layout import Layout
from models.zoo.builds import ModelBuilder
from models.zoo.growth import Shapes
from models.zoo.inference import RefutedAxisError, judge_layout
from models.zoo.randomized_model import TimeUpError
from tests.trainer_export.packages.small_models import Rounded
from trainer_export.packages.axis_forms import parse_pins
from trainer_export.packages.builder import architecture_of
from trainer_export.packages.discovery import discover_axes
from trainer_export.packages.loading import package_model
from trainer_export.packages.narrow_run import FirstRun, require_run
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.scaled_layers import LAYER_PARTS, PARTS, WHOLE, with_layer_parts
from trainer_export.packages.search_record import Discovery
from trainer_export.packages.survey import LATE, ShapeProber, survey

HERE = "tests.trainer_export.packages.small_models"
LAYERS = f"cut.groups('{LAYER_PARTS}', 8)"


def model_of(name: str, shape: tuple[int, ...], **arguments: Any) -> PackageModel:
    return package_model(f"{HERE}:{name}", {"input_shape": shape, **arguments})


def calls(discovery: Discovery) -> list[str]:
    return [form.call for form in discovery.forms]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Architecture]:
    """The architectures whose layouts a search tries to prove."""
    tried: list[Architecture] = []

    def recorded(builder: ModelBuilder, *, screens: bool = False) -> Layout:
        tried.append(builder.arch)
        return judge_layout(builder, screens=screens)

    monkeypatch.setattr("trainer_export.packages.axis_trials.judge_layout", recorded)
    return tried


def test_layers_of_hidden_and_rounded_sizes_are_cut_together() -> None:
    """Samples, labels, and sizes that eighths do not divide stay whole; a slice is proved."""
    model = model_of("Rounded", (3, 8, 8))
    discovery = discover_axes(model)
    assert calls(discovery) == ["cut.classes(classes)", LAYERS]
    layout = infer_layout(architecture_of(model, discovery.forms))
    shapes = layout.shapes(layout.tier(0.25))
    assert shapes["stem.weight"] == (4, 3, 3, 3)
    assert shapes["depthwise.weight"] == (12, 1, 3, 3)
    assert shapes["gate.weight"] == (5, 4)
    assert shapes["head.weight"] == (3, 4)


def test_layers_are_cut_in_quarters_where_eighths_do_not_fit() -> None:
    """Eighths divide 24 and not 12, so the halves of a map would stay whole beside it."""
    model = model_of("Halves", (3, 8, 8))
    discovery = discover_axes(model)
    assert calls(discovery) == ["cut.classes(classes)", "cut.groups('layer_quarters', 4)"]
    reasons = {entry.places: entry.reason for entry in discovery.findings}
    assert "the model fails at width 0.5" in reasons[LAYER_PARTS,]
    layout = infer_layout(architecture_of(model, discovery.forms))
    shapes = layout.shapes(layout.tier(0.25))
    assert shapes["stem.weight"] == (6, 3, 3, 3)
    assert shapes["cheap.weight"] == (3, 1, 3, 3)
    assert discovery.layout == layout


def test_each_size_is_built_once_for_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search asks for the shapes of the same model many times."""
    built: list[dict[str, int]] = []
    build = PackageModel.build

    def noted(model: PackageModel, sizes: Mapping[str, int]) -> nn.Module:
        built.append(dict(sizes))
        return build(model, sizes)

    monkeypatch.setattr(PackageModel, "build", noted)
    prober = ShapeProber.for_model(model_of("Rounded", (3, 8, 8)))
    for _ in range(2):
        assert prober.shapes({"width": 24})["stem.weight"] == (24, 3, 3, 3)
        assert prober.shapes({"width": 12}) is prober.whole
    assert built == [{}, {"width": 24}]


def test_of_many_arguments_no_more_are_tried_if_the_layers_are_cut() -> None:
    """Each costs a build of the model; numbers of blocks are tried all the same."""

    class Many(nn.Module):
        def __init__(
            self, widths: tuple[int, ...] = (8,) * 20, blocks: int = 2, num_classes: int = 3
        ) -> None:
            super().__init__()
            sizes = (4, *widths)
            self.layers = nn.Sequential(*map(nn.Linear, sizes, widths))
            self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(blocks)))
            self.head = nn.Linear(8, num_classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.blocks(self.layers(x)).tanh())
            return logits

    arguments = {"widths": (8,) * 20, "blocks": 2, "num_classes": 3}
    plain = PackageModel("", "many", Many, arguments, "num_classes", input_shape=(4,))
    discovery = discover_axes(with_layer_parts(plain))
    assert calls(discovery) == ["cut.classes(classes)", "cut.depth(2)", LAYERS]
    reasons = {entry.places: entry.reason for entry in discovery.findings}
    assert "was not tried, because the layers are cut together" in reasons["widths.19",]


def test_of_many_numbers_of_branches_only_a_few_are_tried_as_the_depth() -> None:
    """As in MobileOne, where each layer has its own, so that no time was left for the layers."""

    class Branches(nn.Module):
        def __init__(self, branches: tuple[int, ...] = (2,) * 14, num_classes: int = 3) -> None:
            super().__init__()
            layers: list[nn.Module] = [nn.Linear(4, 8)]
            for number in branches:
                layers.append(nn.Sequential(*(nn.Linear(8, 8) for _ in range(number))))
            self.layers = nn.Sequential(*layers)
            self.head = nn.Linear(8, num_classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.layers(x).tanh())
            return logits

    arguments = {"branches": (2,) * 14, "num_classes": 3}
    plain = PackageModel("", "branches", Branches, arguments, "num_classes", input_shape=(4,))
    discovery = discover_axes(with_layer_parts(plain))
    assert calls(discovery) == ["cut.classes(classes)", "cut.depth(2)", LAYERS]
    reasons = {entry.places: entry.reason for entry in discovery.findings}
    assert "is a depth as well" in reasons["branches.5",]
    assert "was not tried, because the layers are cut together" in reasons["branches.13",]


def test_a_survey_leaves_time_to_cut_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each argument costs a build, which takes long where a model has many layers."""
    now = 0.0

    def slow(prober: ShapeProber, sizes: Mapping[str, int]) -> Shapes:
        nonlocal now
        now += 1
        return prober.whole

    sizes = {f"width{number}": 8 for number in range(9)}

    def make(**widths: int) -> nn.Module:
        return nn.Linear(4, sum(widths.values()))

    plain = PackageModel("", "x", make, sizes, input_shape=(4,))
    monkeypatch.setattr(ShapeProber, "shapes", slow)
    monkeypatch.setattr("time.process_time", lambda: now)
    all_tried = survey(ShapeProber.for_model(plain), PARTS, deadline=now + 18)
    assert [entry.reason for entry in all_tried] == [""] * 9
    layered = ShapeProber.for_model(with_layer_parts(plain))
    some_tried = survey(layered, PARTS, deadline=now + 18)
    assert [entry.reason for entry in some_tried] == [""] * 4 + [LATE] * 5


def test_labels_that_eighths_divide_stay_whole() -> None:
    model = model_of("Rounded", (3, 8, 8), num_classes=16, width=24)
    half = model.build({LAYER_PARTS: WHOLE // 2, "num_classes": 8})
    assert half.get_submodule("head").weight.shape == (8, 12)


def test_the_first_layer_takes_whole_samples() -> None:
    """Their features may be as many as the units of a layer; a later layer of this size is cut."""

    def make(hidden: int = 32) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, hidden), nn.LayerNorm((hidden,)))

    model = with_layer_parts(PackageModel("", "x", make, {}, input_shape=(16,)))
    shapes = [tuple(value.shape) for value in model.build({LAYER_PARTS: 2}).parameters()]
    assert shapes == [(4, 16), (4,), (8, 4), (8,), (8,), (8,)]
    # The constructors are those of PyTorch again.
    assert nn.Linear(16, 8).weight.shape == (8, 16)


def test_tensors_outside_of_layers_become_thinner_with_them() -> None:
    """If a layer has their size; the first layer's inputs and a tensor for each head stay whole."""
    model = model_of("LayerScale", (4, 5))
    discovery = discover_axes(model)
    assert calls(discovery) == ["cut.classes(classes)", LAYERS]
    half = model.build({LAYER_PARTS: WHOLE // 2})
    shapes = {name: tuple(value.shape) for name, value in half.named_parameters()}
    assert shapes["token"] == (1, 1, 5)
    assert shapes["gamma"] == (12,)
    assert "same" not in shapes
    assert shapes["attention.in_proj_weight"] == (36, 12)
    assert shapes["attention.out_proj.weight"] == (12, 12)
    assert shapes["temperature"] == (8, 1, 1)
    assert model.build({}).get_parameter("gamma").shape == (24,)


class TokenFirst(nn.Module):
    """A tensor that is made before the layers of its size, as in NesT, and a normed weight."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(4, 48))
        self.stem = nn.Linear(5, 48)
        self.normed = weight_norm(nn.Linear(48, 24))
        self.small = nn.Linear(24, 24)
        self.head = nn.Linear(24, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.normed((self.stem(x) + self.places).tanh()).tanh()
        logits: torch.Tensor = self.head(self.small(mixed).mean(1))
        return logits


def test_tensors_may_be_made_before_their_layers() -> None:
    """The weight of a layer that has a parametrization is as thin as the layer, and no thinner."""
    arguments = {"num_classes": 3}
    plain = PackageModel("", "x", TokenFirst, arguments, "num_classes", input_shape=(4, 5))
    model = with_layer_parts(plain)
    discovery = discover_axes(model)
    assert calls(discovery) == ["cut.classes(classes)", LAYERS]
    half = model.build({LAYER_PARTS: WHOLE // 2})
    shapes = {name: tuple(value.shape) for name, value in half.named_parameters()}
    assert shapes["places"] == (4, 24)
    assert shapes["normed.parametrizations.weight.original1"] == (12, 24)


def test_sizes_that_a_module_noted_become_smaller_with_its_layers() -> None:
    """The heads stay as many, and each becomes thinner."""
    model = model_of("NotedHeads", (4, 5))
    discovery = discover_axes(model)
    assert calls(discovery) == ["cut.classes(classes)", LAYERS]
    layout = infer_layout(architecture_of(model, discovery.forms))
    assert layout.shapes(layout.tier(0.5))["qkv.weight"] == (144 // 2, 5)


def test_channels_that_a_module_noted_become_fewer_with_its_layers() -> None:
    model = model_of("NotedChannels", (5,))
    discovery = discover_axes(model)
    assert calls(discovery) == ["cut.classes(classes)", LAYERS]
    layout = infer_layout(architecture_of(model, discovery.forms))
    assert layout.shapes(layout.tier(0.5))["first.weight"] == (16, 8)


def test_a_table_of_biases_keeps_its_heads() -> None:
    """They may be as many as the units of a layer, as in LeViT, MaxViT, and GC ViT."""
    model = model_of("BiasOfHeads", (4, 5))
    discovery = discover_axes(model)
    assert calls(discovery) == ["cut.classes(classes)", LAYERS]
    layout = infer_layout(architecture_of(model, discovery.forms))
    shapes = layout.shapes(layout.tier(0.5))
    assert shapes["bias_table"] == (4, 16)
    assert shapes["heads.weight"] == (64, 8)


def test_layers_that_cannot_be_thinner_are_refused_with_a_reason() -> None:
    discovery = discover_axes(model_of("RoundedHeads", (4, 5)))
    assert calls(discovery) == ["cut.classes(classes)"]
    (finding,) = (entry for entry in discovery.findings if entry.places == (LAYER_PARTS,))
    assert "the model fails at width 0.5" in finding.reason


@pytest.mark.parametrize(
    ("pin", "expected"),
    [
        (f"{LAYER_PARTS}=groups:4,name=layers", ["cut.groups('layers', 4)"]),
        (f"{LAYER_PARTS}=off", []),
    ],
)
def test_a_user_decides_about_the_layers(pin: str, expected: list[str]) -> None:
    model = model_of("Rounded", (3, 8, 8))
    discovery = discover_axes(model, parse_pins([pin, "width=off"], model.sizes))
    assert calls(discovery) == [*expected, "cut.classes(classes)"]


def test_arguments_that_leave_most_of_a_model_whole_give_way(judged: list[Architecture]) -> None:
    """The width of the stem can be cut, but only all layers together make the model small."""

    class Stem(nn.Module):
        def __init__(self, stem: int = 6, num_classes: int = 3) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(4, stem), nn.Tanh(), nn.Linear(stem, 64), nn.Tanh(), nn.Linear(64, 64)
            )
            self.head = nn.Linear(64, num_classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.layers(x).tanh())
            return logits

    arguments = {"stem": 6, "num_classes": 3}
    plain = PackageModel("", "stem", Stem, arguments, "num_classes", input_shape=(4,))
    assert calls(discover_axes(plain)) == ["cut.classes(classes)", "cut.width('stem', 6)"]
    judged.clear()
    discovery = discover_axes(with_layer_parts(plain))
    assert calls(discovery) == ["cut.classes(classes)", LAYERS]
    # The stem is not tried before, because a large model has no time for both.
    assert len(judged) == 1
    (finding,) = (entry for entry in discovery.findings if entry.places == ("stem",))
    assert "leaves most of the model whole" in finding.reason


class GroupsOfEight(nn.Module):
    """As in RegNet: convolutions with groups of eight channels, whose number is 3 and then 8."""

    def __init__(self, stem: int = 6, group_size: int = 8, num_classes: int = 3) -> None:
        super().__init__()
        if group_size < WHOLE:
            raise ValueError("a group has 8 channels or more")
        narrow = 3 * group_size
        wide = 8 * group_size
        self.stem = nn.Conv2d(3, stem, 3)
        self.narrow = nn.Conv2d(stem, narrow, 1)
        self.three = nn.Conv2d(narrow, narrow, 3, padding=1, groups=3)
        self.wide = nn.Conv2d(narrow, wide, 1)
        self.eight = nn.Conv2d(wide, wide, 3, padding=1, groups=8)
        self.head = nn.Linear(wide, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = self.three(self.narrow(self.stem(x)).tanh()).tanh()
        wide = self.eight(self.wide(narrow).tanh()).tanh()
        logits: torch.Tensor = self.head(wide.mean((2, 3)))
        return logits


def _groups_of_eight() -> PackageModel:
    arguments = {"stem": 6, "group_size": 8, "num_classes": 3}
    return with_layer_parts(
        PackageModel("", "groups", GroupsOfEight, arguments, "num_classes", input_shape=(3, 9, 9))
    )


def test_groups_of_eight_channels_stay_and_become_smaller() -> None:
    model = _groups_of_eight()
    discovery = discover_axes(model)
    assert calls(discovery) == ["cut.classes(classes)", LAYERS]
    layout = infer_layout(architecture_of(model, discovery.forms))
    shapes = layout.shapes(layout.tier(0.25))
    assert shapes["three.weight"] == (6, 2, 3, 3)
    assert shapes["eight.weight"] == (16, 2, 3, 3)
    quarter = model.build({LAYER_PARTS: 2})
    assert quarter.get_submodule("three").groups == 3
    assert quarter.get_submodule("eight").groups == 8


def test_arguments_that_cannot_be_halved_together_are_not_tried_first(
    judged: list[Architecture],
) -> None:
    """The constructor takes half of the stem only, which leaves nearly all of the model."""
    discovery = discover_axes(_groups_of_eight())
    assert calls(discovery) == ["cut.classes(classes)", LAYERS]
    assert len(judged) == 1


class Product(nn.Module):
    """As in ResNet-50: the size of a layer is a product of two arguments."""

    def __init__(self, base: int = 8, planes: int = 16, num_classes: int = 3) -> None:
        super().__init__()
        inner = planes * base // 8
        self.layers = nn.Sequential(
            nn.Linear(4, planes), nn.Tanh(), nn.Linear(planes, inner), nn.Tanh()
        )
        self.head = nn.Linear(inner, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(x))
        return logits


def _product() -> PackageModel:
    arguments = {"base": 8, "planes": 16, "num_classes": 3}
    return PackageModel("", "product", Product, arguments, "num_classes", input_shape=(4,))


class ProductAndMore(Product):
    """With a layer of a size that no argument cuts."""

    def __init__(self, base: int = 8, planes: int = 16, num_classes: int = 3) -> None:
        super().__init__(base, planes, num_classes)
        inner = planes * base // 8
        self.head = nn.Sequential(nn.Linear(inner, 24), nn.Tanh(), nn.Linear(24, num_classes))


def test_layers_are_cut_instead_of_arguments_that_do_not_hold_together() -> None:
    """If they cut more; otherwise the argument stays that makes the model smaller."""
    one = ["cut.classes(classes)", "cut.width('planes', 16)"]
    assert calls(discover_axes(_product())) == one
    assert calls(discover_axes(with_layer_parts(_product()))) == one
    arguments = {"base": 8, "planes": 16, "num_classes": 3}
    more = PackageModel("", "more", ProductAndMore, arguments, "num_classes", input_shape=(4,))
    discovery = discover_axes(with_layer_parts(more))
    assert calls(discovery) == ["cut.classes(classes)", LAYERS]
    reasons = {entry.places: entry.reason for entry in discovery.findings}
    assert "not with the others" in reasons["planes",]
    assert "not with the others" in reasons["base",]


def test_layers_are_cut_before_slow_trials_use_up_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in SKNet, where no usual form holds, and each trial takes a few seconds."""
    now = 0.0

    def slow(builder: ModelBuilder, *, screens: bool = False) -> Layout:
        nonlocal now
        now += 4
        return judge_layout(builder, screens=screens)

    monkeypatch.setattr("time.process_time", lambda: now)
    monkeypatch.setattr("trainer_export.packages.axis_trials.judge_layout", slow)
    discovery = discover_axes(with_layer_parts(_product()))
    assert calls(discovery) == ["cut.classes(classes)", LAYERS]
    reasons = {entry.places: entry.reason for entry in discovery.findings}
    assert "others would leave no time for layer_parts" in reasons["planes",]


def test_separate_trials_leave_time_to_cut_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ResNeSt, where no argument holds in any form."""
    now = 0.0

    def refusing(builder: ModelBuilder, *, screens: bool = False) -> Layout:
        nonlocal now
        now += 2.5
        if now > builder.until:
            raise TimeUpError("the time for the proof ran out")
        layout = judge_layout(builder, screens=screens)
        widths = [axis.name for axis in layout.axes.values() if axis.kind is AxisKind.WIDTH]
        if widths and LAYER_PARTS not in widths:
            raise RefutedAxisError(builder.arch.name, widths[0])
        return layout

    monkeypatch.setattr("time.process_time", lambda: now)
    monkeypatch.setattr("trainer_export.packages.axis_trials.judge_layout", refusing)
    assert calls(discover_axes(with_layer_parts(_product()))) == ["cut.classes(classes)", LAYERS]


def test_layers_are_cut_before_arguments_of_a_slow_model_are_tried_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Usual forms may be refused at once, which does not show how long the others take."""
    now = 0.0

    def slow_run(arch: Architecture) -> FirstRun:
        nonlocal now
        now += 1
        return require_run(arch)

    def slow(builder: ModelBuilder, *, screens: bool = False) -> Layout:
        nonlocal now
        layout = judge_layout(builder, screens=screens)
        now += 2.5
        return layout

    monkeypatch.setattr("time.process_time", lambda: now)
    monkeypatch.setattr("trainer_export.packages.axis_trials.require_run", slow_run)
    monkeypatch.setattr("trainer_export.packages.axis_trials.judge_layout", slow)
    assert calls(discover_axes(with_layer_parts(_product()))) == ["cut.classes(classes)", LAYERS]


def test_trials_leave_as_much_time_as_the_proof_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof takes as long as two trials that found no fault, however short a run is."""
    now = 0.0

    def slow(builder: ModelBuilder, *, screens: bool = False) -> Layout:
        nonlocal now
        layout = judge_layout(builder, screens=screens)
        ends = now + (4 if screens else 8)
        now = min(ends, builder.until)
        if ends > builder.until:
            raise TimeUpError("the time for the proof ran out")
        return layout

    monkeypatch.setattr("time.process_time", lambda: now)
    monkeypatch.setattr("trainer_export.packages.axis_trials.judge_layout", slow)
    discovery = discover_axes(_product())
    assert calls(discovery) == ["cut.classes(classes)", "cut.width('base', 8)"]
    assert discovery.seconds <= 15


@pytest.mark.parametrize(
    ("pooled", "sides"), [(True, [64, 128]), (False, [128])], ids=["any size", "one size"]
)
def test_axes_are_tried_on_small_pictures_if_the_model_runs_on_them(
    judged: list[Architecture], pooled: bool, sides: list[int]
) -> None:
    """Then they are proved on pictures of their own size, so that the export need not do it."""

    class Pictures(nn.Module):
        def __init__(self, hidden: int = 6, num_classes: int = 3) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, hidden, 8, stride=8)
            self.head = nn.Linear(hidden if pooled else hidden * 16**2, num_classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            maps = self.convolution(x).tanh()
            logits: torch.Tensor = self.head(maps.mean((2, 3)) if pooled else maps.flatten(1))
            return logits

    arguments = {"hidden": 6, "num_classes": 3}
    model = PackageModel(
        "", "pictures", Pictures, arguments, "num_classes", input_shape=(3, 128, 128)
    )
    discovery = discover_axes(model)
    assert calls(discovery) == ["cut.classes(classes)", "cut.width('hidden', 6)"]
    shapes = [arch.settings({})["input_shape"] for arch in judged]
    assert shapes == [(3, side, side) for side in sides]
    assert discovery.layout == infer_layout(architecture_of(model, discovery.forms))


def test_a_proof_ends_when_its_time_is_up() -> None:
    """No layout counts as proved that there was no time to prove."""
    model = model_of("Rounded", (3, 8, 8))
    arch = architecture_of(model, discover_axes(model).forms)
    with pytest.raises(ConfigError, match="the time for the proof ran out"):
        judge_layout(ModelBuilder(arch, until=0.0))


def test_a_model_of_many_parts_is_the_class_itself() -> None:
    """Whole, it is what the package builds."""
    built = model_of("Rounded", (3, 8, 8)).build({})
    own = Rounded()
    assert {name: value.shape for name, value in built.named_parameters()} == {
        name: value.shape for name, value in own.named_parameters()
    }
