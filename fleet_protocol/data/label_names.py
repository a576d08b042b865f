"""Finds names of labels that are probably mistakes: spelled in two ways, or parts of a data set."""

from collections.abc import Sequence

_PARTS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation", "eval"})


def describe_label_names(names: Sequence[str]) -> str:
    """Describe names that differ only in capitals, spaces or signs, or name a part of a data set.

    Args:
        names: names of all labels; empty if they are numbers.

    Returns:
        A sentence with the names and what to do; empty if there is nothing to describe.
    """
    spellings: dict[str, str] = {}
    for name in names:
        plain = "".join(filter(str.isalnum, name.casefold()))
        # Names such as "+" and "-", or "-1" and "1", may differ only in their signs.
        if not plain or plain.isdecimal():
            continue
        first = spellings.setdefault(plain, name)
        if first != name:
            return (
                f"the labels {first!r} and {name!r} differ only in capitals, spaces or signs, and "
                "count as two labels: give them one name if they are one"
            )
    parts = [name for name in names if name.casefold() in _PARTS]
    # With two of them, `path` probably names the folder above the one with the labels.
    if len(parts) > 1:
        return (
            f"the labels {parts[0]!r} and {parts[1]!r} look like parts of a data set: name one of "
            "these folders as `path` in [data], or move them elsewhere"
        )
    return ""
