"""How many tokens a graph has is read from the tables that its samples choose from."""

from types import MappingProxyType

import pytest

from fleet_protocol.graphs.model import Graph, Node, Port
from fleet_protocol.graphs.vocabulary import vocabulary_of

WRAPPED = (
    Node("", "Less", ("x", "zero"), ("negative",)),
    Node("", "Where", ("negative", "last", "x"), ("tokens",)),
)
"""How the exporter lowers an index that may count from the end."""


def graph(*nodes):
    inputs = (
        Port("param.words", "float32", (500, 32)),
        Port("param.letters", "float32", (80, 8)),
        Port("param.places", "float32", (12, 32)),
        Port("x", "int64", ("batch", 12)),
    )
    nothing = MappingProxyType({})
    return Graph(9, nothing, nodes, frozenset({"zero", "last"}), nothing, inputs, ())


def look_up(table, index):
    return Node("", "Gather", (table, index), (f"{table}.rows",))


CASES = {
    "a table": ((look_up("param.words", "x"),), 500),
    "negative indices wrap": ((*WRAPPED, look_up("param.words", "tokens")), 500),
    "the smallest of two": ((look_up("param.words", "x"), look_up("param.letters", "x")), 80),
    "a part of the samples": (
        (Node("", "Slice", ("x", "zero", "last"), ("first",)), look_up("param.letters", "first")),
        80,
    ),
    "a table of places": ((look_up("param.places", "zero"), look_up("param.words", "x")), 500),
    "no table": ((Node("", "Cast", ("x",), ("numbers",)),), None),
    "tokens that the model replaces itself": (
        (
            Node("", "Less", ("x", "last"), ("is_known",)),
            Node("", "Where", ("is_known", "x", "zero"), ("tokens",)),
            look_up("param.words", "tokens"),
        ),
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_vocabulary_of_a_graph(case):
    """None where it is unknown, so that no token is refused that the model could take."""
    nodes, expected = CASES[case]
    assert vocabulary_of(graph(*nodes)) == expected
