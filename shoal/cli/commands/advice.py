"""Show recommended next steps for a run, and the reasons for them.

Example: shoal advice --watch
"""

from typing import TYPE_CHECKING, Any

from shoal.cli.listing import view_command

if TYPE_CHECKING:
    from shoal.cli.views.view import View


def _load_view() -> "View[Any]":
    from shoal.cli.views.advice import ADVICE

    return ADVICE


app = view_command(_load_view, __doc__)
