"""Models with a mixture of experts."""

from pathlib import Path

import pytest

from trainer_export.packages.loading import package_model
from trainer_export.packages.trial import can_export

pytestmark = [pytest.mark.packages, pytest.mark.filterwarnings("ignore")]


def test_the_experts_of_a_token_are_computed_by_a_graph(tmp_path: Path) -> None:
    """Transformers' default loops over experts, or computes in half precision."""
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        num_hidden_layers=1,
        num_local_experts=4,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["MixtralForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    assert can_export(package_model(f"transformers:{tmp_path}", {"input_shape": (8,)}))
