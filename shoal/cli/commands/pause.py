"""Hold the run in progress after the round it is in."""

from shoal.cli.common import FLEET_FILE, BrokerUrl, FleetFile, PageUrl, RunName
from shoal.cli.extras import needs


def _pause(config: FleetFile = FLEET_FILE, run: RunName = "", broker: BrokerUrl = None, url: PageUrl = "") -> None:
    with needs("server"):
        from shoal.cli.serving import fleet_or_page, steer_run

    done = "holds after the round in progress; go on with `shoal resume`"
    steer_run(fleet_or_page(config, broker, url), "pause", run, done)
