"""Models with a mixture of experts."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from trainer_export.packages.builder import architecture_of
from trainer_export.packages.loading import package_model
from trainer_export.packages.stored_names import current_names, merged_tensors
from trainer_export.packages.trial import can_export

_SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "architectures": ["MixtralForCausalLM"],
}

pytestmark = [pytest.mark.packages, pytest.mark.filterwarnings("ignore")]


def test_the_experts_of_a_token_are_computed_by_a_graph(tmp_path: Path) -> None:
    """Transformers' default loops over experts, or computes in half precision."""
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.MixtralConfig(**_SIZES, num_local_experts=4)
    config.save_pretrained(tmp_path)
    assert can_export(package_model(f"transformers:{tmp_path}", {"input_shape": (8,)}))


def test_the_experts_of_a_checkpoint_are_one_tensor_of_the_model(tmp_path: Path) -> None:
    """Transformers stores them one by one; twelve of them show whether their order is kept."""
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.MixtralConfig(**{**_SIZES, "num_local_experts": 12})
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".experts.11." in name for name in stored)
    arch = architecture_of(package_model(f"transformers:{tmp_path}", {"input_shape": (8,)}), ())
    merged = merged_tensors(arch, None, stored)
    names = current_names(arch, None, merged)
    read = {names.get(name, name): value for name, value in merged.items()}
    state = model.state_dict()
    assert read.keys() <= state.keys()
    assert {name for name, _ in model.named_parameters()} <= read.keys()
    for name, value in read.items():
        assert (state[name].numpy() == value).all(), name


def test_experts_that_a_model_lacks_keep_their_names(tmp_path: Path) -> None:
    """The report then has the names of the checkpoint."""
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.LlamaConfig(**{**_SIZES, "architectures": ["LlamaForCausalLM"]})
    config.save_pretrained(tmp_path)
    arch = architecture_of(package_model(f"transformers:{tmp_path}", {"input_shape": (8,)}), ())
    stored = {"model.layers.0.mlp.experts.0.w1.weight": np.zeros((2, 2), np.float32)}
    assert merged_tensors(arch, None, stored).keys() == stored.keys()
