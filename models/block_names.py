"""Names of the blocks of a model: the stem, the units of its depth, and the head."""

STEM = "stem"
HEAD = "head"


def block_name(number: int) -> str:
    """Return the name of the depth unit with this number, from 1."""
    return f"block{number}"


def block_names(depth: int) -> frozenset[str]:
    """Return the names of all blocks of a model of this depth."""
    units = map(block_name, range(1, depth + 1))
    return frozenset({STEM, HEAD, *units})
