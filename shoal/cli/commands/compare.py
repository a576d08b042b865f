"""Show runs side by side: settings that differ, and the score of each version.

Name a run by its id or the beginning of it, by `newest`, by the folder of a store or of a
simulation (its newest run), or by FOLDER:RUN.

Example: shoal compare runs/fedavg runs/fedrolex --plot methods.png
"""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson, PageUrl, StoreFolder
from shoal.extras import needs


def _compare(
    runs: Annotated[list[str], typer.Argument(help="Runs, stores or folders of simulations.")],
    store: StoreFolder,
    url: PageUrl = "",
    plot: Annotated[
        Path | None, typer.Option(help="Write the curves to this file, .png, .svg or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from shoal.cli.views.comparison import compared_runs, comparison_records, draw
    from shoal.cli.console import error_console, print_json

    if plot is not None:
        with needs("simulate"):
            from shoal.cli.comparison_plot import plot_runs, require_format
        require_format(plot)
    with compared_runs(runs, store, url) as compared:
        if as_json:
            print_json(comparison_records(compared))
        else:
            draw(compared)
        if plot is None:
            return
        error_console().print(str(plot_runs(compared, plot)), markup=False, soft_wrap=True)
