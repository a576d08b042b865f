"""Start a run on a running server, or on a new server that serves only this run.

Example: shoal run --name baseline
"""

import typer

from shoal.cli.common import FLEET_FILE, AsJson, BrokerUrl, FleetFile, NewName
from shoal.extras import needs


def _run(
    config: FleetFile = FLEET_FILE,
    name: NewName = None,
    broker: BrokerUrl = None,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from shoal.cli.serving import do_run, read_fleet

    settings = read_fleet(config, broker)
    if name is not None:
        settings = settings.model_copy(update={"run_name": name})
    exit_code = do_run(settings, as_json=as_json)
    if exit_code:
        raise typer.Exit(exit_code)
