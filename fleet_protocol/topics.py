"""The MQTT topics of one fleet, spelled in one place.

shoal/v1/<fleet>/devices/<id>/status    device -> all, retained, with a will
shoal/v1/<fleet>/devices/<id>/task      server -> device
shoal/v1/<fleet>/devices/<id>/reply     device -> server
shoal/v1/<fleet>/blobs/<digest>/<i>     server -> all devices that wait for the blob
shoal/v1/<fleet>/uploads/<task>/<i>     device -> server
shoal/v1/<fleet>/server/status          server -> all, retained, with a will
shoal/v1/<fleet>/server/control         command line -> server
shoal/v1/<fleet>/server/events          server -> command line
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fleet_protocol.errors import ConfigError

__all__ = ["NAME_PATTERN", "Topics", "check_name"]

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


def check_name(kind: str, name: str) -> str:
    """Return a name that may stand in a topic.

    Args:
        kind: what the name is for, used in the message.
        name: the name.

    Raises:
        ConfigError: the name has characters that a topic, a file name or a client id cannot carry.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"{kind} name {name!r} is not usable: take 1 to 64 letters, digits, '_', '-' or '.', "
            "a letter or digit first"
        )
    return name


@dataclass(frozen=True)
class Topics:
    """The topics of the fleet ``fleet``.

    Example:
        >>> Topics("lab").task("pi-1")
        'shoal/v1/lab/devices/pi-1/task'

    Attributes:
        fleet: name of the fleet.
    """

    fleet: str

    def __post_init__(self) -> None:
        check_name("fleet", self.fleet)

    @property
    def root(self) -> str:
        """Prefix of every topic of the fleet."""
        return f"shoal/v1/{self.fleet}"

    def status(self, device: str) -> str:
        """Retained presence and profile of a device."""
        return f"{self.root}/devices/{device}/status"

    def task(self, device: str) -> str:
        """Messages from the server to one device."""
        return f"{self.root}/devices/{device}/task"

    def reply(self, device: str) -> str:
        """Messages from one device to the server."""
        return f"{self.root}/devices/{device}/reply"

    def blob(self, digest: str, index: int) -> str:
        """One chunk of a blob on its way to the devices."""
        return f"{self.root}/blobs/{digest}/{index}"

    def blob_filter(self, digest: str) -> str:
        """Subscription to every chunk of a blob."""
        return f"{self.root}/blobs/{digest}/+"

    def upload(self, task: str, index: int) -> str:
        """One chunk of an update on its way to the server."""
        return f"{self.root}/uploads/{task}/{index}"

    @property
    def all_status(self) -> str:
        """Subscription to the presence of every device."""
        return self.status("+")

    @property
    def all_replies(self) -> str:
        """Subscription to the replies of every device."""
        return self.reply("+")

    @property
    def all_uploads(self) -> str:
        """Subscription to the chunks of every update."""
        return f"{self.root}/uploads/+/+"

    @property
    def server_status(self) -> str:
        """Retained presence of the server."""
        return f"{self.root}/server/status"

    @property
    def server_control(self) -> str:
        """Requests from the command line to a running server."""
        return f"{self.root}/server/control"

    @property
    def server_events(self) -> str:
        """What a running server tells about its rounds, for anyone who watches."""
        return f"{self.root}/server/events"

    def parts(self, topic: str) -> tuple[str, ...]:
        """The levels of a topic below the root, or nothing for a foreign topic.

        Args:
            topic: a full topic.

        Returns:
            For example ``("devices", "pi-1", "reply")``.
        """
        prefix = self.root + "/"
        return tuple(topic[len(prefix) :].split("/")) if topic.startswith(prefix) else ()
