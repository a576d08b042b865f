"""Lists names of labels and columns in messages."""

import json
from collections.abc import Sequence

_SHOWN = 12  # names in a sentence
_COPIED = 100  # names in a line that somebody copies


def list_names(names: Sequence[str]) -> str:
    """List names for people; of many only the first."""
    more = f", ... {len(names)} in all" if len(names) > _SHOWN else ""
    return ", ".join(name or "one without a name" for name in names[:_SHOWN]) + more


def toml_list(names: Sequence[str]) -> str:
    """Return names as a TOML list; of very many only the first."""
    quoted = list(map(_quoted, names[:_COPIED]))
    more = ", ..." if len(names) > _COPIED else ""
    return f"[{', '.join(quoted)}{more}]"


def _quoted(name: str) -> str:
    """Return a name as a basic string of TOML."""
    # JSON escapes the same characters in the same way, except for DEL.
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")
