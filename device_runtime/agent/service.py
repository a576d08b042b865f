"""What systemd hears of the agent: ready, alive, and what it does; nothing where nobody listens.

The protocol is sd_notify(3): lines of text in one datagram to the socket that ``NOTIFY_SOCKET`` names.
"""

import contextlib
import os
import socket
import time
from collections.abc import Mapping

from device_runtime.agent.machine import State

_NOT_READY = frozenset({State.STARTING, State.PROBING})


class Service:
    """The unit that this process is, as its environment says.

    Attributes:
        alive_seconds: how often `alive` must be called at least; infinite without a watchdog.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = environment.get("WATCHDOG_USEC", "") if watched else ""
        # Half of what systemd waits, as sd_watchdog_enabled(3) advises.
        self.alive_seconds = int(microseconds) / 2e6 if microseconds.isdecimal() and int(microseconds) else float("inf")
        self._next = 0.0

    def alive(self) -> None:
        """The agent's loop has come round; of many calls only as many are told as the watchdog needs."""
        now = time.monotonic()
        if now >= self._next and self.alive_seconds != float("inf"):
            self._next = now + self.alive_seconds / 2
            self._send("WATCHDOG=1")

    def entered(self, state: State, round_number: int | None) -> None:
        """Tell what the agent does, with the round of the task in hand; ready is who has reached the broker."""
        doing = state.value if round_number is None else f"{state.value}, round {round_number}"
        mark = "STOPPING=1\n" if state is State.STOPPED else "" if state in _NOT_READY else "READY=1\n"
        self._send(f"{mark}STATUS={doing}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # A board that cannot tell goes on: systemd restarts what it does not hear of.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(text.encode(), self._address)
