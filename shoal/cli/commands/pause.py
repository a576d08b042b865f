"""Pause the run in progress after its current round.

Example: shoal pause
"""

from collections.abc import Callable
from typing import Literal

from shoal.cli.common import FLEET_FILE, BrokerUrl, FleetFile, PageUrl, RunName
from shoal.extras import needs


def steering(verb: Literal["pause", "resume"], done: str) -> Callable[..., None]:
    """A command that does one of both with a run, and says what it does then."""

    def steer(
        config: FleetFile = FLEET_FILE,
        run: RunName = "",
        broker: BrokerUrl = None,
        url: PageUrl = "",
    ) -> None:
        with needs("server"):
            from shoal.cli.serving import fleet_or_page, steer_run

        steer_run(fleet_or_page(config, broker, url), verb, run, done)

    return steer


_pause = steering("pause", "holds after the round in progress; go on with `shoal resume`")
