"""Train: on the server that is up on the broker, or with a server for this run.

Example: shoal run
"""

import typer

from shoal.cli.common import FLEET_FILE, AsJson, BrokerUrl, FleetFile
from shoal.extras import needs


def _run(config: FleetFile = FLEET_FILE, broker: BrokerUrl = None, as_json: AsJson = False) -> None:
    with needs("server"):
        from shoal.cli.serving import do_run, read_fleet

    exit_code = do_run(read_fleet(config, broker), as_json=as_json)
    if exit_code:
        raise typer.Exit(exit_code)
