"""What to say of a name that is not known, and what not of an address."""

import difflib
import re
from collections.abc import Iterable


def closest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is most like another one, at least as much as a share in [0, 1].

    None if none is alike.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The closest known name as a parenthesis for a message, `` (did you mean 'conv'?)``.

    Empty if no name is alike.
    """
    found = closest(name, known)
    return f" (did you mean {found!r}?)" if found is not None else ""


def without_login(text: str) -> str:
    """A text without the user and the password of the addresses in it."""
    return re.sub(r"//[^/\s]*@", "//", text)
