"""Go on with a run that is held."""

from shoal.cli.common import BrokerUrl, FleetFile, RunName
from shoal.cli.extras import needs


def _resume(config: FleetFile, run: RunName = "", broker: BrokerUrl = None) -> None:
    with needs("server"):
        from shoal.cli.serving import read_fleet, steer_run

    steer_run(read_fleet(config, broker), "go", run, "goes on")
