"""Names that users give to runs.

Wherever a command or a request names a run, it accepts the run's id, the beginning of the id, and
the run's name.
"""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

NEWEST = "newest"
"""Names the newest run of a store."""

# Ids begin with a digit, so that nobody can take a name for the beginning of an id.
_PATTERN = r"[A-Za-z][A-Za-z0-9_.-]{0,63}"


def check_run_name(name: str) -> str:
    """Return a name, if a run may have it.

    Raises:
        ValueError: it is too long, has other characters, or means something else.
    """
    if name == NEWEST or not re.fullmatch(_PATTERN, name):
        raise ValueError(
            "a run's name has 1 to 64 letters, digits, '_', '-' or '.', begins with a letter, and "
            f"is not {NEWEST!r}"
        )
    return name


RunName = Annotated[
    str,
    AfterValidator(check_run_name),
    Field(json_schema_extra={"pattern": f"^{_PATTERN}$"}),
]
