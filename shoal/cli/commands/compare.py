"""Compare runs: list the settings that differ, and the score of each version.

Identify each run by its name, its id, a prefix of the id, or `newest`. The folder of a store or a
simulation selects its newest run; FOLDER:RUN selects a run in a folder.

Example: shoal compare runs/fedavg runs/fedrolex --plot methods.png
"""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson, PageUrl, StoreFolder
from shoal.extras import needs


def _compare(
    runs: Annotated[
        list[str], typer.Argument(help="Runs, folders of stores, or folders of simulations.")
    ],
    store: StoreFolder,
    url: PageUrl = "",
    plot: Annotated[
        Path | None, typer.Option(help="Write the curves to this .png, .svg or .pdf file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from shoal.cli.views.comparison import compared_runs, comparison_records, draw
    from shoal.cli.console import error_console, print_json

    if plot is not None:
        with needs("simulate"):
            from shoal.cli.comparison_plot import plot_runs, require_format
        # Refused before anything is printed.
        require_format(plot)
    with compared_runs(runs, store, url) as compared:
        if as_json:
            print_json(comparison_records(compared))
        else:
            draw(compared)
        if plot is None:
            return
        error_console().print(str(plot_runs(compared, plot)), markup=False, soft_wrap=True)
