"""End the run in progress after its current round, or immediately.

Example: shoal stop --now
"""

from typing import Annotated

import typer

from shoal.cli.common import FLEET_FILE, BrokerUrl, FleetFile, PageUrl, RunInProgress
from shoal.extras import needs


def _stop(
    config: FleetFile = FLEET_FILE,
    run: RunInProgress = "",
    now: Annotated[bool, typer.Option("--now", help="Abandon the round in progress.")] = False,
    broker: BrokerUrl = None,
    url: PageUrl = "",
) -> None:
    with needs("server"):
        from shoal.cli.serving import fleet_or_page, steer_run

    done = "ends; its round is abandoned" if now else "ends after the round in progress"
    steer_run(fleet_or_page(config, broker, url), "abandon" if now else "stop", run, done)
