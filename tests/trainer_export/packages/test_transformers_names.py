"""Names in folders of transformers: fields of a configuration, and tensors of a checkpoint."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fleet_protocol.errors import ConfigError
from models.architecture import Architecture
from models.cut import Cut
from trainer_export.packages.stored_names import current_names
from trainer_export.packages.transformers_models import by_own_names, picture_shape, text_fields


def config() -> Any:
    """Return what transformers' configurations have."""
    fields = {"n_embd": 8, "rates": {"drop": 0.1}}
    return SimpleNamespace(
        **fields, attribute_map={"hidden_size": "n_embd"}, model_type="x", hidden_size=8,
        to_dict=lambda: dict(fields),
    )  # fmt: skip


def test_fields_are_set_by_the_names_that_are_stored() -> None:
    changes = {"hidden_size": 4, "rates.drop": 0.0}
    assert by_own_names(config(), changes) == {"n_embd": 4, "rates.drop": 0.0}


@pytest.mark.parametrize("name", ["n_emd", "n_emd.0"])
def test_a_field_that_nothing_reads_is_refused(name: str) -> None:
    """Transformers would store it, and build the model as if it had not been set."""
    with pytest.raises(ConfigError, match=r"has no field 'n_emd' \(did you mean 'n_embd'\?\)"):
        by_own_names(config(), {name: 4})


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({}, (3, 224, 224)),
        ({"image_size": 32, "num_channels": 1}, (1, 32, 32)),
        ({"image_size": [32, 48], "vision_config": None}, (3, 32, 48)),
        ({"vision_config": {"image_size": 384}}, (3, 384, 384)),
    ],
)
def test_pictures_have_the_size_of_the_configuration(
    fields: dict[str, Any], shape: tuple[int, ...]
) -> None:
    """Also that of the part for pictures, as in CLIP and SigLIP."""
    assert picture_shape(fields) == shape


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"vocab_size": 9}, {"vocab_size": 9}),
        ({"vocab_size": 9, "text_config": None}, {"vocab_size": 9}),
        ({"text_config": {"vocab_size": 9}}, {"vocab_size": 9}),
        ({"pad_token_id": None, "text_config": {"pad_token_id": 2}}, {"pad_token_id": 2}),
        ({"pad_token_id": 1, "text_config": {"pad_token_id": 2}}, {"pad_token_id": 1}),
    ],
)
def test_texts_have_the_vocabulary_of_the_configuration(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Also that of the part for texts, as in CLIP and Gemma 3."""
    assert text_fields(fields).items() >= expected.items()


class Whole(nn.Module):
    """A model of transformers with a head, as Shoal recognises it."""

    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.config = None
        self.base = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)


class Bare(nn.Module):
    """The same without the head, and without a name for what is left."""

    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.config = None
        self.weight = nn.Parameter(Whole().base.weight)


def names_for(kind: type[nn.Module], *names: str) -> dict[str, str]:
    def build(cut: Cut, **_settings: Any) -> nn.Module:
        del cut
        return kind()

    return current_names(Architecture("x", build, "float32", {"input_shape": (2,)}, {}), {}, names)


def test_a_checkpoint_without_a_head_has_the_names_of_the_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the other way round; names that the model has, or the checkpoint has twice, stay."""
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    for kind in (Whole, Bare):
        monkeypatch.setattr(kind, "__module__", "transformers.x")
    renamed = names_for(Whole, "weight", "bias", "base.bias", "head.bias", "unknown")
    assert renamed == {"weight": "base.weight"}
    assert names_for(Bare, "base.weight", "head.weight") == {"base.weight": "weight"}
