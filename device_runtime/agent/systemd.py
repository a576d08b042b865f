"""Reports the agent's state to systemd: alive, ready, stopping, and a status text.

The protocol is sd_notify(3): lines of text in one datagram to the socket that ``NOTIFY_SOCKET``
names.
"""

import contextlib
import math
import os
import socket
import time
from collections.abc import Mapping

from device_runtime.agent.machine import State

_NOT_READY = frozenset({State.STARTING, State.PROBING})


class ServiceNotifier:
    """Notifies the service manager that started this process, as the environment defines it.

    Without one, every call does nothing.

    Attributes:
        alive_seconds: longest time between two calls of `alive`; infinite without a watchdog.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of an abstract socket.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self.alive_seconds = _watchdog_seconds(environment)
        self._next_at = 0.0

    @property
    def is_managed(self) -> bool:
        """Whether a service manager would restart this process."""
        return bool(self._address)

    def wait_outside(self, why: str) -> None:
        """Report that the agent runs, and waits for its operator."""
        self._send(f"READY=1\nSTATUS={why}")

    def alive(self) -> None:
        """Notify the watchdog as often as it needs; called at each turn of the agent's loop."""
        now = time.monotonic()
        if now >= self._next_at and self.alive_seconds != math.inf:
            self._next_at = now + self.alive_seconds / 2
            self._send("WATCHDOG=1")

    def entered(self, state: State, round_number: int | None) -> None:
        """Report the state that the agent entered, and the round of the current task.

        The unit is ready as soon as the agent has reached the broker.
        """
        mark = "READY=1\n"
        if state is State.STOPPED:
            mark = "STOPPING=1\n"
        elif state in _NOT_READY:
            mark = ""
        status = state.value if round_number is None else f"{state.value}, round {round_number}"
        self._send(f"{mark}STATUS={status}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # The board continues even if it cannot report: systemd restarts a service that it receives
        # nothing from.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link,
        ):
            link.sendto(text.encode(), self._address)


def _watchdog_seconds(environment: Mapping[str, str]) -> float:
    """Return half of the watchdog's time limit, as sd_watchdog_enabled(3) advises."""
    process = str(os.getpid())
    if environment.get("WATCHDOG_PID", process) != process:
        return math.inf  # the watchdog watches another process of the unit
    microseconds = environment.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or int(microseconds) == 0:
        return math.inf
    return int(microseconds) / 2e6
