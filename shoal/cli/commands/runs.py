"""List the runs of a store, newest first.

Example: shoal runs
"""

from typing import TYPE_CHECKING, Any

from shoal.cli.listing import view_command

if TYPE_CHECKING:
    from shoal.cli.views.view import View


def _load_view() -> "View[Any]":
    from shoal.cli.views.runs import RUNS

    return RUNS


app = view_command(_load_view, __doc__)
