"""Names of labels that are probably a mistake are named."""

import pytest

from fleet_protocol.data.label_names import describe_label_names


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("Cat", "cat", "dog"), "the labels 'Cat' and 'cat' differ only in capitals"),
        (("hot-dog", "cat", "hot dog"), "the labels 'hot-dog' and 'hot dog' differ"),
        (("cat", "dog", "test", "train"), "the labels 'test' and 'train' look like parts"),
    ],
)
def test_names_that_are_probably_a_mistake(names, words):
    assert describe_label_names(names).startswith(words)


@pytest.mark.parametrize(
    "names",
    [(), ("cat", "dog"), ("+", "-"), ("1", "-1", "1.5", "15"), ("pass", "test"), ("a", "ä")],
)
def test_names_that_differ(names):
    assert describe_label_names(names) == ""
