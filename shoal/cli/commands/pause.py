"""Pause the run in progress after its current round.

Example: shoal pause
"""

from collections.abc import Callable
from typing import Literal

from shoal.cli.common import FLEET_FILE, BrokerUrl, FleetFile, PageUrl, RunInProgress
from shoal.extras import needs


def steering(verb: Literal["pause", "resume"], done: str) -> Callable[..., None]:
    """A command that pauses or resumes a run, and prints the effect."""

    def steer(
        config: FleetFile = FLEET_FILE,
        run: RunInProgress = "",
        broker: BrokerUrl = None,
        url: PageUrl = "",
    ) -> None:
        with needs("server"):
            from shoal.cli.serving import fleet_or_page, steer_run

        steer_run(fleet_or_page(config, broker, url), verb, run, done)

    return steer


_pause = steering("pause", "pauses after the round in progress; continue it with `shoal resume`")
