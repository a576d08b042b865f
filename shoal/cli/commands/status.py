"""Show the state of a run and its devices, and whether a server is working on the run.

Example: shoal status --watch
"""

from typing import TYPE_CHECKING, Any

from shoal.cli.listing import view_command

if TYPE_CHECKING:
    from shoal.cli.views.view import View


def _load_view() -> "View[Any]":
    from shoal.cli.views.status import STATUS

    return STATUS


app = view_command(_load_view, __doc__)
