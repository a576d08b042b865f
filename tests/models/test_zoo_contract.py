"""The contract every architecture keeps: a sub-model built small is the slice of the big one, also
as a function.

The oracle of the function is the whole model with all that the plan does not keep set to zero. A
unit without weights sends nothing on, so both compute the same, whatever the activation. Two things
know the width of a model by themselves and are told: a layer norm averages over the kept units
alone, and attention divides by the width of the thin head. Everything runs in double precision with
random weights, norms included, since the initial ones and zeros of a norm would hide mistakes.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models import Layout, Plan, Registry, build, infer_layout, make_plan, slice_weights
from models.zoo.layers import set_mode
from tests.models.layouts import scatter

ZOO = Registry.zoo()
LANGUAGE = {
    "classes": 19,
    "embed": 16,
    "heads": 2,
    "ffn": 20,
    "blocks": 2,
    "input_shape": (7,),
    "dropout": 0.0,
}
MINILM = {**LANGUAGE, "classes": 3, "vocab": 40, "pretrained": False}
DECODER = {
    "input_shape": (7,),
    "classes": 23,
    "embed": 12,
    "heads": 8,
    "shared_heads": 4,
    "head_dim": 4,
    "ffn": 12,
}
DECODER = {**DECODER, "blocks": 2}
TEXT = {"vocab": 50, "input_shape": (7,), "embed": 16, "heads": 2, "ffn": 20}
SMALL = {
    "cnn1": {"input_shape": (3, 8, 8), "hidden": (10,)},
    "cnn2": {"input_shape": (2, 16, 16), "channels": (8, 6, 9)},
    "conv": {"channels": (8, 16), "input_shape": (1, 8, 8)},
    "exit_resnet": {"channels": (8, 12), "blocks": (1, 2), "input_shape": (3, 8, 8)},
    "exit_text_encoder": {**TEXT, "blocks": 3},
    "har_cnn": {"channels": (8, 16), "input_shape": (6, 12)},
    "lenet5": {"input_shape": (2, 16, 16)},
    "minilm_adapters": {key: value for key, value in MINILM.items() if key != "dropout"}
    | {"rank": 8, "dropout": 0.0},
    "minilm_encoder": MINILM,
    "mlp": {"hidden": (12, 9, 10), "input_shape": (5,)},
    "next_word": {**LANGUAGE, "classes": 21, "head_dim": 6},
    "preresnet18": {"channels": (8, 12), "blocks": (1, 2), "input_shape": (3, 8, 8)},
    "smollm": DECODER,
    "text_encoder": {**TEXT, "blocks": 3},
    "token_classifier": MINILM,
    "transformer_mlm": {**LANGUAGE, "mask_rate": 0.0},
}
# Tens of millions of parameters show here what a few thousand do.
LARGE = {
    "exit_resnet",
    "minilm_adapters",
    "minilm_encoder",
    "next_word",
    "preresnet18",
    "smollm",
    "token_classifier",
    "transformer_mlm",
}
CASES = [
    *((name, None) for name in ZOO.names if name not in LARGE),
    *SMALL.items(),
    ("conv", {**SMALL["conv"], "norm": "none"}),
    ("conv", {"channels": (32, 64), "input_shape": (1, 8, 8)}),
    ("har_cnn", {**SMALL["har_cnn"], "norm": "none", "kernel": 3}),
    ("minilm_encoder", {**MINILM, "pooling": "first"}),
    ("next_word", {**SMALL["next_word"], "activation": "relu", "dropout": 0.3}),
    ("preresnet18", {**SMALL["preresnet18"], "blocks": (2, 1), "norm": "none"}),
    ("smollm", {**DECODER, "rank": 4, "shared_heads": 8}),
    ("text_encoder", {**SMALL["text_encoder"], "scaler": False, "heads": 1}),
    ("transformer_mlm", {**LANGUAGE, "mask_row": "shared", "dropout": 0.2}),
]
IDS = [
    f"{name}-{'default' if settings is None else index}"
    for index, (name, settings) in enumerate(CASES)
]
WIDTHS = (1.0, 0.5, 0.3, 0.0625)


def random_weights(layout: Layout) -> dict[str, np.ndarray]:
    """Normal weights of the global shapes, float64, about as large as trained ones."""
    generator = np.random.default_rng(7)
    return {
        item.name: generator.standard_normal(item.shape) / np.sqrt(max(1, np.prod(item.shape[1:])))
        for item in layout.parameters
    }


def random_inputs(layout: Layout, batch: int = 3) -> Tensor:
    """A batch of samples; tokens with padding among them."""
    generator = torch.Generator().manual_seed(3)
    if layout.input_dtype == "float32":
        return torch.randn(batch, *layout.input_shape, dtype=torch.float64, generator=generator)
    return torch.randint(0, 20, (batch, *layout.input_shape), generator=generator)


def outputs_of(returned: Tensor | list[Tensor]) -> list[Tensor]:
    """The logits of every exit of a model, or its only ones."""
    return [returned] if isinstance(returned, Tensor) else returned


def last_of(returned: Tensor | list[Tensor]) -> Tensor:
    return outputs_of(returned)[-1]


def loaded(module: nn.Module, weights: dict[str, np.ndarray]) -> nn.Module:
    """Load weights strictly into a double-precision model that takes its batch norms from the
    batch.
    """
    given = {name: torch.from_numpy(value) for name, value in weights.items()}
    generator = torch.Generator().manual_seed(9)  # what is frozen is the same in every tier
    for name, value in module.double().named_parameters():
        if not value.requires_grad:
            given[name] = (
                torch.randn(value.shape, generator=generator, dtype=torch.float64)
                / value[:1].numel() ** 0.5
            )
    trained = {name for name, _ in module.named_parameters()}
    statistics = {name: value for name, value in module.state_dict().items() if name not in trained}
    module.load_state_dict({**statistics, **given})
    return set_mode(module, "statistics")


class MaskedLayerNorm(nn.Module):
    """A layer norm of the whole width that averages over the kept units alone."""

    def __init__(self, norm: nn.LayerNorm, kept: Tensor) -> None:
        super().__init__()
        self.weight = norm.weight
        self.bias = norm.bias
        self.eps = norm.eps
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        count = self.kept.sum()
        mean = (x * self.kept).sum(-1, keepdim=True) / count
        centred = (x - mean) * self.kept
        variance = (centred**2).sum(-1, keepdim=True) / count
        return centred / torch.sqrt(variance + self.eps) * self.weight + self.bias


def told_of_the_plan(module: nn.Module, layout: Layout, plan: Plan) -> nn.Module:
    """Tell the layers of a zeroed whole model that depend on their own width which units are
    kept.
    """
    dims = {item.name: item.dims for item in layout.parameters}
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.LayerNorm) and f"{name}.weight" in dims:
            axis = dims[f"{name}.weight"][0].axis
            kept = torch.zeros(layout.axes[axis].size, dtype=torch.float64)
            kept[torch.tensor(plan.indices[axis])] = 1.0
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, MaskedLayerNorm(layer, kept))
        if name.endswith("attention") and f"{name}.query.weight" in dims:
            axis = layout.axes[dims[f"{name}.query.weight"][0].axis]
            ratio = axis.kept(plan.tier.width) / axis.size
            with torch.no_grad():
                layer.query.weight /= np.sqrt(ratio)
                layer.query.bias /= np.sqrt(ratio)
    return module


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
@pytest.mark.parametrize(
    "kind", ["static", "rolling", pytest.param("random", marks=pytest.mark.slow)]
)
def test_a_sub_model_is_the_slice_of_the_whole(name, settings, kind):
    """At every width and depth: the slice loads strictly, and computes what the zeroed whole
    computes.
    """
    arch = ZOO.get(name)
    layout = infer_layout(arch, settings)
    weights = random_weights(layout)
    x = random_inputs(layout)
    for width in WIDTHS:
        for depth in {1, layout.depth}:
            tier = layout.tier(width, depth)
            plan = make_plan(layout, tier, kind, round_index=5, seed=2)
            cut = slice_weights(layout, plan, weights)
            small = loaded(build(arch, tier, settings=settings), cut)
            trained = {key: value for key, value in small.named_parameters() if value.requires_grad}
            assert {key: tuple(value.shape) for key, value in trained.items()} == layout.shapes(
                tier
            )
            assert sum(value.numel() for value in trained.values()) == layout.parameter_count(tier)
            zeroed = scatter(
                layout, plan, cut, {key: np.zeros_like(value) for key, value in weights.items()}
            )
            whole = build(arch, 1.0, depth, settings)
            kept = {key: value for key, value in zeroed.items() if key in cut}
            whole = told_of_the_plan(loaded(whole, kept), layout, plan)
            with torch.no_grad():
                torch.testing.assert_close(
                    small(x), whole(x), rtol=1e-9, atol=1e-9, msg=f"{tier.id} differs"
                )


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_every_parameter_is_trained_and_nothing_overflows(name, settings):
    """Logits are finite, of the right shape, for any batch; each parameter gets a gradient at every
    width.
    """
    arch = ZOO.get(name)
    layout = infer_layout(arch, settings)
    for width in (1.0, 0.25):
        module = set_mode(build(arch, width, settings=settings), "train")
        for batch in (1, 3):
            x = random_inputs(layout, batch)
            x = x.float() if layout.input_dtype == "float32" else x
            logits = last_of(module(x))
            per_token = name in {"next_word", "smollm", "token_classifier", "transformer_mlm"}
            assert logits.shape == (
                batch,
                *(layout.input_shape if per_token else ()),
                layout.classes,
            )
            assert torch.isfinite(logits).all()
        loss = torch.zeros(())
        for exit_logits in outputs_of(module(x)):
            logits = exit_logits.flatten(0, -2)
            labels = torch.arange(len(logits)) % layout.classes
            loss = loss + torch.nn.functional.cross_entropy(logits, labels)
        trained = {key: value for key, value in module.named_parameters() if value.requires_grad}
        for (key, value), grad in zip(
            trained.items(), torch.autograd.grad(loss, list(trained.values())), strict=True
        ):
            assert torch.isfinite(grad).all(), key
            assert grad.shape == value.shape
        assert not torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("name", [name for name in ZOO.names if "scaler" in ZOO.get(name).defaults])
def test_a_narrow_model_scales_up_in_training_alone(name):
    """The Scaler acts in training at widths below 1, and never in evaluation or at full width."""
    arch = ZOO.get(name)
    settings = {**SMALL[name], **({"norm": "none"} if "norm" in arch.defaults else {})}
    layout = infer_layout(arch, settings)
    x = random_inputs(layout)
    for width, same in ((1.0, True), (0.5, False)):
        tier = layout.tier(width)
        cut = slice_weights(layout, make_plan(layout, tier), random_weights(layout))
        with torch.no_grad():
            module = loaded(build(arch, tier, settings=settings), cut)
            trained = last_of(set_mode(module, "train")(x))
            evaluated = last_of(set_mode(module, "eval")(x))
            plain = loaded(build(arch, tier, settings={**settings, "scaler": False}), cut)
            torch.testing.assert_close(evaluated, last_of(plain(x)))
        assert torch.allclose(trained, evaluated) is same


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("conv", {}, [1556874, 391370, 98922, 25274, 6594]),
        ("preresnet18", {"blocks": (1, 1, 1, 2)}, [9622090, 2408746, 603802, 151762, 38350]),
        ("preresnet18", {"blocks": (2, 2, 2, 2)}, [11172170, 2796714, 701018, 176178, 44510]),
        ("transformer_mlm", {}, [19263999, 9107967, 4435455, 2200575, 1108479]),
        ("transformer_mlm", {"mask_row": "shared"}, [19263999, 9107967, 4435455, 2200575, 1108479]),
    ],
)
def test_models_have_the_published_sizes(name, settings, expected):
    """Parameters of HeteroFL's models at levels a to e (vector H12), to the unit."""
    layout = infer_layout(ZOO.get(name), settings)
    assert [layout.parameter_count(layout.tier(2.0**-level)) for level in range(5)] == expected


def test_a_shallow_text_encoder_is_the_deep_one_without_its_upper_blocks():
    """Removing blocks from the whole module gives the function of the depth prefix."""
    arch = ZOO.get("text_encoder")
    settings = SMALL["text_encoder"]
    layout = infer_layout(arch, settings)
    weights = random_weights(layout)
    x = random_inputs(layout)
    for depth in layout.depths:
        tier = layout.tier(1.0, depth)
        cut = slice_weights(layout, make_plan(layout, tier), weights)
        shallow = loaded(build(arch, tier, settings=settings), cut)
        whole = loaded(build(arch, settings=settings), weights)
        whole.blocks = whole.blocks[:depth]
        with torch.no_grad():
            torch.testing.assert_close(shallow(x), whole(x), rtol=0, atol=0)


def test_padding_changes_nothing():
    """Tokens after the text do not move its logits, and a text of nothing but padding gives finite
    ones.
    """
    arch = ZOO.get("text_encoder")
    settings = {**SMALL["text_encoder"], "input_shape": (9,)}
    layout = infer_layout(arch, settings)
    module = loaded(build(arch, settings=settings), random_weights(layout))
    text = torch.tensor([[4, 8, 15, 16, 23, 0, 0, 0, 0]])
    with torch.no_grad():
        near = module(text)
        # Not a constant: the layer norm would take it out again.
        module.positions[5:].normal_(std=5.0, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(module(text), near)
        torch.testing.assert_close(module(torch.zeros_like(text)), module.head.bias[None])
