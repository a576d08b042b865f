"""Go on with a run that is held."""

from shoal.cli.common import FLEET_FILE, BrokerUrl, FleetFile, PageUrl, RunName
from shoal.cli.extras import needs


def _resume(config: FleetFile = FLEET_FILE, run: RunName = "", broker: BrokerUrl = None, url: PageUrl = "") -> None:
    with needs("server"):
        from shoal.cli.serving import fleet_or_page, steer_run

    steer_run(fleet_or_page(config, broker, url), "resume", run, "goes on")
