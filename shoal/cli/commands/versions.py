"""List the global versions of a run with their scores.

`shoal export-weights` writes a version to a file.

Example: shoal versions
"""

from typing import TYPE_CHECKING, Any

from shoal.cli.listing import view_command

if TYPE_CHECKING:
    from shoal.cli.views.view import View


def _load_view() -> "View[Any]":
    from shoal.cli.views.versions import VERSIONS

    return VERSIONS


app = view_command(_load_view, __doc__)
