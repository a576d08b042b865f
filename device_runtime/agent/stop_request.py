"""The request to stop an agent."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StopRequested:
    """A request to stop the agent, with its reason."""

    why: str
