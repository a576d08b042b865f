"""End the run in progress after the round it is in, or at once."""

from typing import Annotated

import typer

from shoal.cli.common import BrokerUrl, FleetFile, RunName
from shoal.cli.extras import needs


def _stop(
    config: FleetFile,
    run: RunName = "",
    now: Annotated[bool, typer.Option("--now", help="Give the round in progress up.")] = False,
    broker: BrokerUrl = None,
) -> None:
    with needs("server"):
        from shoal.cli.serving import read_fleet, steer_run

    done = "ends; its round is given up" if now else "ends after the round in progress"
    steer_run(read_fleet(config, broker), "abandon" if now else "stop", run, done)
