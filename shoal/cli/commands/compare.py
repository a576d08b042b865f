"""Show two runs of a store side by side: settings that differ, and the accuracy of each version."""

from typing import Annotated

import typer

from shoal.cli.common import AsJson, PageUrl, StoreFolder
from shoal.extras import needs

Run = Annotated[str, typer.Argument(help="Id of a run, its beginning, or `newest`.")]


def _compare(
    one: Run,
    other: Run,
    store: StoreFolder,
    url: PageUrl = "",
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from shoal.cli.views.comparison import comparison_with

    comparison_with(other).show(store, one, as_json=as_json, url=url)
