"""Hold the run in progress after the round it is in."""

from shoal.cli.common import BrokerUrl, FleetFile, RunName
from shoal.cli.extras import needs


def _pause(config: FleetFile, run: RunName = "", broker: BrokerUrl = None) -> None:
    with needs("server"):
        from shoal.cli.serving import read_fleet, steer_run

    steer_run(read_fleet(config, broker), "pause", run, "holds after the round in progress; go on with `shoal resume`")
