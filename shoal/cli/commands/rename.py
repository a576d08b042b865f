"""Name or rename a run.

Example: shoal rename newest baseline
"""

from typing import Annotated

import typer

from shoal.cli.common import AsJson, StoreFolder, checked_name
from shoal.cli.console import print_json, print_text
from shoal.extras import needs


def _rename(
    run: Annotated[
        str, typer.Argument(help="Name or id of the run, a prefix of the id, or `newest`.")
    ],
    name: Annotated[str, typer.Argument(callback=checked_name, help="New name of the run.")],
    store: StoreFolder,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from broker_server.store import queries
        from shoal.sources import open_local_store

    with open_local_store(store, read_only=False) as opened:
        record = queries.find_run(opened, run)
        opened.rename_run(record.id, name)
    if as_json:
        print_json({"run": record.id, "name": name})
    else:
        print_text(f"run {record.id} has the name {name}")
