"""The contract of a fleet decides labels, vocabulary and padding of a package's model."""

from dataclasses import replace

import pytest
from torch import nn

from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.errors import ConfigError
from trainer_export.packages.contract_arguments import contract_arguments
from trainer_export.packages.package_model import PackageModel

TERMS = ContractTerms(labels=("a", "b", "c"), tokens=50, missing=7)
ARGUMENTS = {"vocab_size": 60, "pad_token_id": 0, "num_labels": 2}
TEXTS = PackageModel("x:Y", "y", nn.Identity, ARGUMENTS, "num_labels", (8,), "int64")


def test_a_contract_decides_labels_and_padding() -> None:
    assert contract_arguments(TEXTS, TERMS, {}) == {"num_labels": 3, "pad_token_id": 7}


def test_a_user_decides_before_the_contract() -> None:
    given = {"pad_token_id": 1}
    assert contract_arguments(TEXTS, TERMS, given) == {"num_labels": 3}


def test_what_a_model_does_not_have_is_left() -> None:
    """Pictures have no padding, and the labels of a language model are its tokens."""
    pictures = replace(TEXTS, input_dtype="float32")
    assert contract_arguments(pictures, TERMS, {}) == {"num_labels": 3}
    language = replace(TEXTS, labels="vocab_size")
    assert contract_arguments(language, TERMS, {}) == {"pad_token_id": 7}
    assert contract_arguments(TEXTS, ContractTerms(), {}) == {}


def test_the_part_for_texts_has_the_padding_and_the_vocabulary() -> None:
    """In a model that also has a part for pictures."""
    parts = {"vision_config": None, "text_config": {"vocab_size": 40, "pad_token_id": None}}
    nested = replace(TEXTS, arguments=parts, labels="text_config.vocab_size")
    terms = ContractTerms(tokens=40, missing=7)
    assert contract_arguments(nested, terms, {}) == {"text_config.pad_token_id": 7}
    with pytest.raises(ConfigError, match=r"50 tokens, and x:Y has text_config\.vocab_size=40"):
        contract_arguments(nested, TERMS, {})


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (ContractTerms(tokens=61), "61 tokens, and x:Y has vocab_size=60"),
        (ContractTerms(missing=0.5), "missing = 0.5 is not a token"),
    ],
)
def test_a_contract_that_does_not_fit_is_refused(terms: ContractTerms, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        contract_arguments(TEXTS, terms, {})
