"""Models of transformers get masks of attention that hide what their own masks hide."""

from pathlib import Path

import pytest

from tests.packages.gallery import GALLERY
from trainer_export.packages.builder import exportable
from trainer_export.packages.loading import package_model
from trainer_export.packages.narrow_run import require_run

pytestmark = [pytest.mark.packages, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("title", ["GPT-2", "Llama"])
def test_a_classifier_has_the_mask_of_its_decoder(title: str, tmp_path: Path) -> None:
    """In a model of one block, its last token sees all of the others with any mask."""
    pytest.importorskip("transformers")
    (packaged,) = (entry for entry in GALLERY if entry.title == title)
    language_model = package_model(packaged.in_folder(tmp_path), packaged.arguments)
    assert packaged.config is not None
    name = packaged.config[1].partition("For")[0].removesuffix("LMHeadModel")
    classifier = {"class": f"{name}ForSequenceClassification"}
    model = package_model(f"transformers:{tmp_path}", {**packaged.arguments, **classifier})
    assert model.call.mask == language_model.call.mask == "causal"


def test_a_model_of_pictures_and_texts_is_one_of_texts(tmp_path: Path) -> None:
    """Its vocabulary and its padding are fields of its part for texts."""
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    config = transformers.Gemma3Config(
        text_config={**sizes, "vocab_size": 50, "num_key_value_heads": 2, "head_dim": 16},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        architectures=["Gemma3ForConditionalGeneration"],
    )
    config.save_pretrained(tmp_path)
    model = package_model(f"transformers:{tmp_path}", {"input_shape": (8,)})
    assert model.labels == "text_config.vocab_size"
    assert model.sizes[model.labels] == 50
    assert model.call.padding == 0
    assert model.call.mask != "none"
    require_run(exportable(model, ()))
