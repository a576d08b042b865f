"""Suggests the known name that an unknown one is like, and hides logins in addresses."""

import difflib
import re
from collections.abc import Iterable


def closest(
    name: str,
    known: Iterable[str],
    *,
    cutoff: float = 0.6,
) -> str | None:
    """Return the known name that is most similar to another one; None if no name is similar.

    Args:
        name: the unknown one.
        known: names to choose from.
        cutoff: least similarity in [0, 1].
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the closest known name for a message, as in `` (did you mean 'conv'?)``.

    It is empty if no name is like it.
    """
    suggestion = closest(name, known)
    return f" (did you mean {suggestion!r}?)" if suggestion is not None else ""


def without_login(text: str) -> str:
    """Return a text without the logins of the addresses in it.

    A login ends at the last ``@`` of an address, because a password may contain anything.
    """
    return re.sub(r"//\S*@", "//", text)
