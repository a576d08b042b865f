"""The masks of attention that models of transformers get."""

from pathlib import Path

import pytest

from tests.packages.gallery import GALLERY
from trainer_export.packages.loading import package_model

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
