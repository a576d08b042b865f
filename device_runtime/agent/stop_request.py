"""The request to end an agent."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StopRequested:
    """Someone wants the agent to end, and why."""

    why: str
