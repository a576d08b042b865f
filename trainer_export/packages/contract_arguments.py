"""Arguments of a package's model that follow from the data contract of a fleet."""

from collections.abc import Mapping
from typing import Any

from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.errors import ConfigError
from trainer_export.packages.package_model import PackageModel

_PADDINGS = ("pad_token_id", "text_config.pad_token_id")
_VOCABULARIES = ("vocab_size", "text_config.vocab_size", "num_tokens")
"""Places of the number of tokens, which in language models is also that of the labels.

A model of pictures and texts has a configuration for each part."""


def contract_arguments(
    model: PackageModel, terms: ContractTerms, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments that a contract decides and a user does not.

    The names of labels decide their number. The number that replaces a missing value is the token
    that fills up short texts, which the mask of attention hides.

    Args:
        model: the model without them.
        terms: ``[contract]`` of the fleet.
        arguments: those that the user gave.

    Raises:
        ConfigError: the contract has more tokens than the model, or they are not whole numbers.
    """
    decided: dict[str, Any] = {}
    if terms.labels and model.labels and model.labels not in _VOCABULARIES:
        decided[model.labels] = len(terms.labels)
    if model.input_dtype == "int64":
        _check_vocabulary(model, terms)
        for place in _PADDINGS:
            if terms.missing is not None and _has_field(model, place):
                decided[place] = _token_of(terms.missing)
    undecided: dict[str, Any] = {}
    for name, value in decided.items():
        if name not in arguments:
            undecided[name] = value
    return undecided


def _has_field(model: PackageModel, place: str) -> bool:
    """Return whether a model has an argument, or a part whose configuration has the field."""
    part, _, name = place.rpartition(".")
    fields = model.arguments.get(part) if part else model.arguments
    return isinstance(fields, Mapping) and name in fields


def _check_vocabulary(model: PackageModel, terms: ContractTerms) -> None:
    """Check that a model has a row for every token of the contract."""
    for place in _VOCABULARIES:
        size = model.sizes.get(place)
        if size is not None and terms.tokens is not None and terms.tokens > size:
            raise ConfigError(
                f"[contract] has {terms.tokens} tokens, and {model.spec} has {place}={size}: use"
                f" the tokenizer of the model, or set tokens = {size} or less"
            )


def _token_of(missing: float) -> int:
    """Return the number of a missing value as a token."""
    if not float(missing).is_integer():
        raise ConfigError(
            f"[contract] missing = {missing:g} is not a token: the model takes whole numbers; set"
            " the number of its padding token"
        )
    return int(missing)
