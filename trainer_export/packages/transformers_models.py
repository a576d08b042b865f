"""Models of transformers from a folder with a config.json."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean
from models.zoo.builds import SkippedInitialization
from models.zoo.package_call import PackageCall
from models.zoo.randomized_model import vocabulary_of
from trainer_export.packages.masks import choose_mask
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.sizes import sizes_of, with_sizes

_LENGTH = 64  # tokens of a sample, unless the model takes fewer
_POSITIONS = ("max_position_embeddings", "n_positions")
_BLOCKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LANGUAGE_MODELS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")
_FEWEST_BLOCKS = 2
"""A classifier of the last token sees all of the others in its last block, causal or not. Only the
block before shows what these tokens see."""

_LABEL_FIELDS = ("id2label", "label2id")  # of which the number of labels follows
_NO_PADDING = -1  # a token that no sample has
_VOCABULARY = "vocab_size"
_TEXT = "text_config"
"""Field with the configuration of a model's part for texts, if it also has one for pictures."""


@dataclass(frozen=True)
class _FromConfig:
    """Builds a model from the fields of its configuration."""

    config: type[Any]
    model: type[nn.Module]
    labels: Mapping[int, str]  # the names of a folder's labels

    def __call__(self, **fields: Any) -> nn.Module:
        """Build the model, whose attention and experts are computed step by step."""
        config = self.config.from_dict(fields)
        # A model of another number of labels gets new names from its package.
        if self.labels and len(self.labels) == config.num_labels:
            config.id2label = dict(self.labels)
            config.label2id = {name: number for number, name in self.labels.items()}
        config._attn_implementation = "eager"  # noqa: SLF001 - no public name
        # Others loop over the experts that the samples need, or compute in half precision only.
        if hasattr(config, "_experts_implementation"):  # since version 5
            config._experts_implementation = "batched_mm"  # noqa: SLF001 - no public name
        return self.model(config)


def load_transformers(folder: str, arguments: Mapping[str, Any]) -> PackageModel:
    """Return the model of a folder with a ``config.json``.

    The class is the one that the configuration names (``architectures``), else a classifier of
    texts or pictures.

    Args:
        folder: folder with ``config.json``; its weights are read by ``--start``.
        arguments: fields of the configuration that differ; ``class`` names another class.

    Raises:
        ConfigError: if there is no configuration, or it has no such field, or transformers has no
            class for it.
    """
    transformers: Any = import_module("transformers")
    # It warns of token ids above a vocabulary that an axis makes larger.
    transformers.logging.set_verbosity_error()
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json; give the folder of a model of transformers")
    changes = dict(arguments)
    config = transformers.AutoConfig.from_pretrained(path)
    kind = _class_of(transformers, config, changes.pop("class", None))
    fields = _fields_of(config, kind, by_own_names(config, changes))
    model = PackageModel(
        "",
        str(config.model_type).replace("-", "_"),
        _FromConfig(type(config), kind, dict(config.id2label or {})),
        fields,
        _place_of_vocabulary(fields) if _is_language_model(kind) else "num_labels",
    )
    names = inspect.signature(kind.forward).parameters
    if "input_ids" in names:
        return _with_tokens(model, has_mask="attention_mask" in names)
    if "pixel_values" in names:
        shape = picture_shape(fields)
        return replace(model, input_shape=shape, call=PackageCall("pixel_values"))
    return model


def other_classes(model: PackageModel) -> list[str]:
    """List the classes with a head that transformers has for the configuration of a model.

    Args:
        model: a model; one that is not of transformers has no other classes.

    Returns:
        Their names, those of classifiers first.
    """
    made = model.make
    if not isinstance(made, _FromConfig):
        return []
    found: list[str] = []
    for name, kind in vars(import_module(made.model.__module__)).items():
        is_other = isinstance(kind, type) and issubclass(kind, nn.Module) and kind != made.model
        if is_other and "For" in name and getattr(kind, "config_class", None) is made.config:
            found.append(name)
    return sorted(found, key=lambda name: "Classification" not in name)


def _class_of(
    transformers: Any,
    config: Any,
    name: str | None,
) -> type[nn.Module]:
    """Return the class of the model.

    Raises:
        ConfigError: if transformers has no model of this name, or none for the configuration.
    """
    names = [name] if name else [*(config.architectures or ())]
    for class_name in names:
        kind = getattr(transformers, class_name, None)
        if isinstance(kind, type):
            return kind
    if name:
        raise ConfigError(
            f"transformers has no class {name!r}{did_you_mean(name, dir(transformers))}; see its"
            " documents for the names"
        )
    for auto in (
        transformers.AutoModelForSequenceClassification,
        transformers.AutoModelForImageClassification,
    ):
        mapping = auto._model_mapping  # noqa: SLF001 - no public name
        if type(config) in mapping:
            kinds = mapping[type(config)]
            first: type[nn.Module] = kinds[0] if isinstance(kinds, (tuple, list)) else kinds
            return first
    raise ConfigError(
        f"the configuration of {config.model_type} names no class; give one, for example "
        "--set class=BertForSequenceClassification"
    )


def _is_language_model(kind: type[nn.Module]) -> bool:
    return kind.__name__.endswith(_LANGUAGE_MODELS)


def by_own_names(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the user by the names that a configuration itself gives them.

    Raises:
        ConfigError: if it has no such field, which transformers would store without using it.
    """
    own: dict[str, Any] = {}
    for name, value in changes.items():
        first, dot, rest = name.partition(".")
        if not hasattr(config, first):
            raise ConfigError(
                f"--set {name}: the configuration of {config.model_type} has no field"
                f" {first!r}{did_you_mean(first, config.to_dict())}"
            )
        # GPT-2 also answers to `hidden_size`, and stores `n_embd`.
        own[f"{config.attribute_map.get(first, first)}{dot}{rest}"] = value
    return own


def _fields_of(
    config: Any,
    kind: type[nn.Module],
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fields of a configuration with those of the user."""
    fields: dict[str, Any] = config.to_dict()
    fields["use_cache"] = False
    _drop_derived_lists(config, fields, changes)
    if not _is_language_model(kind):
        fields["num_labels"] = config.num_labels
        for name in _LABEL_FIELDS:
            fields.pop(name, None)
    sizes: dict[str, int] = {}
    for name, value in changes.items():
        if "." in name:
            sizes[name] = value
        else:
            fields[name] = value
    return with_sizes(fields, sizes)


def _drop_derived_lists(
    config: Any,
    fields: dict[str, Any],
    changes: Mapping[str, Any],
) -> None:
    """Drop lists of words that a configuration derives from other fields: the kind of each layer.

    A model with fewer layers needs a shorter list, which its configuration derives anew.
    """
    for name, value in config.to_dict().items():
        if name in changes or not _is_list_of_words(value):
            continue
        remaining = {**fields}
        remaining.pop(name, None)
        try:
            derived = type(config).from_dict(remaining).to_dict()
        except Exception:  # noqa: BLE001, S112 - a configuration without it raises anything
            continue
        if derived.get(name) == value:
            fields.pop(name, None)


def _is_list_of_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def picture_shape(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a picture, by the fields of a configuration."""
    # A model of pictures and texts has a configuration for each within its own.
    nested = {**(fields.get("vision_config") or {}), **fields}
    size = nested.get("image_size", 224)
    sides = (size, size) if isinstance(size, int) else tuple(size)
    return (nested.get("num_channels", 3), *sides)


def text_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration with those of its part for texts.

    Args:
        fields: the fields, of which those that are set have priority over those of the part.
    """
    merged = dict(fields.get(_TEXT) or {})
    for name, value in fields.items():
        if value is not None:
            merged[name] = value
    return merged


def _place_of_vocabulary(fields: Mapping[str, Any]) -> str:
    return _VOCABULARY if _VOCABULARY in fields else f"{_TEXT}.{_VOCABULARY}"


def _with_tokens(model: PackageModel, *, has_mask: bool) -> PackageModel:
    """Return a model of texts, with the mask that hides what the package's own hides."""
    fields = text_fields(model.arguments)
    length = min([_LENGTH, *(fields[name] for name in _POSITIONS if fields.get(name))])
    padding = fields.get("pad_token_id")
    padding = _NO_PADDING if padding is None else padding
    return replace(
        model,
        input_shape=(length,),
        input_dtype="int64",
        call=PackageCall("input_ids", padding=padding),
        choose_call=_choose_call if has_mask else None,
    )


def _choose_call(model: PackageModel) -> PackageCall:
    """Return the call of a model of texts, with a mask that suits the length of its samples."""
    shape = model.input_shape or (_LENGTH,)
    # The choice draws all parameters.
    with SkippedInitialization():
        module = shallow_module(model)
    # A model of characters has tables of their hashes, and no vocabulary.
    vocabulary = text_fields(model.arguments).get(_VOCABULARY) or vocabulary_of(module)
    return choose_mask(module, model.call, vocabulary, shape[-1])


def shallow_module(model: PackageModel) -> nn.Module:
    """Build a model with two blocks, or the fewest that have every kind, or the whole model.

    Blocks of some kinds see only the tokens that are near. The configuration lists the kind of each
    block in words.
    """
    fields = model.arguments
    sizes = sizes_of(fields)
    blocks: dict[str, int] = {}
    for name in _BLOCKS:
        for place in (name, f"{_TEXT}.{name}"):
            if place in sizes:
                blocks[place] = sizes[place]
    most = max(blocks.values(), default=1)
    whole = _kinds_of_blocks(model, fields, most)
    for number in range(_FEWEST_BLOCKS, most):
        fewer: dict[str, int] = {}
        for place, size in blocks.items():
            fewer[place] = min(number, size)
        few = with_sizes(fields, fewer)
        # A configuration may have a list with an entry for each block, which only the whole model
        # fits.
        with suppress(Exception):
            if _kinds_of_blocks(model, few, number) == whole:
                return model.make(**few)
    return model.make(**fields)


def _kinds_of_blocks(
    model: PackageModel,
    fields: Mapping[str, Any],
    number: int,
) -> dict[str, set[str]]:
    """Return the kinds of the first blocks, by the lists of words in a configuration."""
    kinds: dict[str, set[str]] = {}
    builder = model.make
    if not isinstance(builder, _FromConfig):
        return kinds
    config = builder.config.from_dict(dict(fields))
    for name, words in text_fields(config.to_dict()).items():
        if _is_list_of_words(words):
            kinds[name] = set(words[:number])
    return kinds
