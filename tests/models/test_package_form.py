"""Adapters as transformers and peft store them: merged into weights, or by their factors."""

import numpy as np
import pytest

from fleet_protocol.errors import BlobError
from models.package_form import AdapterForm, PackageForm

LAYERS = ("encoder.0.query", "encoder.1.query")
SCALE = 2.0


def form(*, transposed: bool = False) -> PackageForm:
    """Two adapted layers of a model whose class has a prefix for its package's names."""
    adapters = []
    renamed = {"m.head.weight": "head.weight"}
    for layer in LAYERS:
        names = {"down": f"m.{layer}.down", "up": f"m.{layer}.up"}
        weight = f"m.{layer}.weight"
        adapters.append(
            AdapterForm(layer=layer, weight=weight, scale=SCALE, transposed=transposed, **names)
        )
        renamed |= {weight: f"{layer}.weight", names["down"]: "", names["up"]: ""}
    return PackageForm(class_name="Model", adapters=tuple(adapters), renamed=renamed)


def state(*, rank: int = 3, transposed: bool = False) -> dict[str, np.ndarray]:
    """Layers of 4 inputs and 5 outputs with factors of some rank."""
    draw = np.random.default_rng(7).standard_normal
    tensors = {"m.head.weight": draw((2, 5)).astype(np.float32)}
    for layer in LAYERS:
        shape = (4, 5) if transposed else (5, 4)
        tensors[f"m.{layer}.weight"] = draw(shape).astype(np.float32)
        tensors[f"m.{layer}.down"] = draw((rank, 4)).astype(np.float32)
        tensors[f"m.{layer}.up"] = draw((5, rank)).astype(np.float32)
    return tensors


@pytest.mark.parametrize("transposed", [False, True])
def test_adapters_are_merged_into_their_weights(transposed: bool) -> None:
    """The package's class gets W + scale * up @ down by its own names, and no factor."""
    tensors = state(transposed=transposed)
    merged = form(transposed=transposed).merged_state(tensors)
    assert merged.keys() == {"head.weight", *(f"{layer}.weight" for layer in LAYERS)}
    for layer in LAYERS:
        x = np.ones(4, np.float32)
        weight = tensors[f"m.{layer}.weight"]
        own = weight.T @ x if transposed else weight @ x
        own = own + SCALE * (tensors[f"m.{layer}.up"] @ (tensors[f"m.{layer}.down"] @ x))
        after = merged[f"{layer}.weight"]
        assert after.dtype == np.float32
        product = after.T @ x if transposed else after @ x
        np.testing.assert_allclose(product, own, rtol=1e-5, atol=1e-6)


def test_an_adapter_keeps_its_scale_at_every_rank() -> None:
    """Alpha is divided by the rank of the tier in peft, so it grows with that rank."""
    for rank in (1, 3):
        config = form().adapter_config(state(rank=rank), ("head",))
        assert (config["r"], config["lora_alpha"]) == (rank, SCALE * rank)
        assert config["lora_alpha"] / config["r"] == SCALE
        assert config["target_modules"] == list(LAYERS)
        assert config["modules_to_save"] == ["head"]
        assert config["rank_pattern"] == {}


def test_layers_of_another_rank_are_listed() -> None:
    """The second layer has rank 1, which only its pattern tells."""
    tensors = state()
    tensors |= {
        f"m.{LAYERS[1]}.down": np.ones((1, 4), np.float32),
        f"m.{LAYERS[1]}.up": np.ones((5, 1), np.float32),
    }
    config = form().adapter_config(tensors, ())
    assert config["rank_pattern"] == {LAYERS[1]: 1}
    assert config["alpha_pattern"] == {LAYERS[1]: SCALE}


def test_factors_that_do_not_fit_are_refused() -> None:
    """A damaged description is no reason to write something else."""
    tensors = state()
    tensors[f"m.{LAYERS[0]}.up"] = np.ones((6, 3), np.float32)
    with pytest.raises(BlobError, match=r"encoder\.0\.query.* is \[6, 4\] and its weight \[5, 4\]"):
        form().merged_state(tensors)
