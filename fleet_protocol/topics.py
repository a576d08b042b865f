"""The topics of one fleet: spelled and parsed in one place.

shoal/v1/<fleet>/devices/<id>/status    device -> all, retained, with a will
shoal/v1/<fleet>/devices/<id>/profile   device -> all, retained
shoal/v1/<fleet>/devices/<id>/task      server -> device
shoal/v1/<fleet>/devices/<id>/reply     device -> server
shoal/v1/<fleet>/devices/<id>/key       server -> device, retained; where the fleet has identities
shoal/v1/<fleet>/devices/<id>/papers    server -> device, retained; what the operator has signed
shoal/v1/<fleet>/blobs/<digest>/<i>     server -> all devices that wait for the blob
shoal/v1/<fleet>/uploads/<task>/<i>     device -> server
shoal/v1/<fleet>/server/status          server -> all, retained, with a will
shoal/v1/<fleet>/server/control         command line -> server
shoal/v1/<fleet>/server/events          server -> command line
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fleet_protocol.errors import ConfigError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
NAME_RULE = "use 1 to 64 letters, digits, '_', '-' or '.', with a letter or digit first"


_NAME = re.compile(NAME_PATTERN)
_RETAINED = frozenset({"status", "profile", "key", "papers"})
"""Channels of devices and servers whose newest message a broker keeps."""


def may_be_retained(topic: str) -> bool:
    """Return whether a broker may have kept a message on a topic.

    Shoal has nothing else kept: somebody who leaves a request, an offer or a chunk at the broker
    would repeat it at every start of its receiver. Topics of other programs count as kept.

    Example:
        >>> may_be_retained("shoal/v1/lab/server/control")
        False
    """
    parts = topic.split("/")
    if parts[:2] != ["shoal", "v1"]:
        return True
    return parts[3:4] in (["devices"], ["server"]) and parts[-1] in _RETAINED


def check_name(kind: str, name: str) -> str:
    """Return a name that topics, file names and client ids can carry.

    A ConfigError names its kind.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"{kind} name {name!r} is not usable: {NAME_RULE}")
    return name


@dataclass(frozen=True)
class DeviceTopic:
    """A topic of one device, by the id in it; that does not prove who sent the message.

    ``status``, ``profile`` and ``reply`` come from the device, ``task``, ``key`` and ``papers`` go
    to it.
    """

    device: str
    channel: Literal["status", "profile", "task", "reply", "key", "papers"]


@dataclass(frozen=True)
class BlobTopic:
    """The topic of one chunk that is sent to the devices.

    Its index is text, and the chunk's frame repeats it.
    """

    digest: str
    index: str


@dataclass(frozen=True)
class UploadTopic:
    """The topic of one chunk that is sent to the server, by the task whose update it belongs to.

    The index is text.
    """

    task: str
    index: str


@dataclass(frozen=True)
class ServerTopic:
    """A topic of the server: ``control`` carries messages to it, the other channels from it."""

    channel: Literal["status", "control", "events"]


Topic = DeviceTopic | BlobTopic | UploadTopic | ServerTopic


@dataclass(frozen=True)
class Topics:
    """The topics of the fleet ``fleet``.

    With ``+`` for a device or a task they are subscriptions to all.

    Example:
        >>> Topics("lab").task("pi-1")
        'shoal/v1/lab/devices/pi-1/task'
    """

    fleet: str

    def __post_init__(self) -> None:
        check_name("fleet", self.fleet)

    @cached_property
    def root(self) -> str:
        """Prefix of every topic of the fleet."""
        return f"shoal/v1/{self.fleet}"

    def status(self, device: str) -> str:
        """Retained status of a device."""
        return f"{self.root}/devices/{device}/status"

    def profile(self, device: str) -> str:
        """The profile of a device, retained."""
        return f"{self.root}/devices/{device}/profile"

    def task(self, device: str) -> str:
        """Messages from the server to one device."""
        return f"{self.root}/devices/{device}/task"

    def reply(self, device: str) -> str:
        """Messages from one device to the server."""
        return f"{self.root}/devices/{device}/reply"

    def key(self, device: str) -> str:
        """The key with which a device reads what is sent to all."""
        return f"{self.root}/devices/{device}/key"

    def papers(self, device: str) -> str:
        """The operator's statements for a device since it was enrolled."""
        return f"{self.root}/devices/{device}/papers"

    def blob(self, digest: str, index: int) -> str:
        """One chunk of a blob that is sent to the devices."""
        return f"{self.root}/blobs/{digest}/{index}"

    def blob_filter(self, digest: str) -> str:
        """Subscription to every chunk of a blob."""
        return f"{self.root}/blobs/{digest}/+"

    def upload(self, task: str, index: int | str) -> str:
        """One chunk of an update that is sent to the server."""
        return f"{self.root}/uploads/{task}/{index}"

    @property
    def server_status(self) -> str:
        """Retained status of the server."""
        return f"{self.root}/server/status"

    @property
    def server_control(self) -> str:
        """Requests from the command line to a running server."""
        return f"{self.root}/server/control"

    @property
    def server_events(self) -> str:
        """A running server's reports about its rounds, for any reader."""
        return f"{self.root}/server/events"

    def parse(self, topic: str) -> Topic | None:
        """Parse a full topic; None if it belongs to another fleet or is malformed.

        Example:
            >>> Topics("lab").parse("shoal/v1/lab/devices/pi-1/reply")
            DeviceTopic(device='pi-1', channel='reply')
        """
        # Another fleet on the same broker has another prefix.
        prefix = self.root + "/"
        if not topic.startswith(prefix):
            return None
        match topic[len(prefix) :].split("/"):
            case [
                "devices",
                name,
                "status" | "profile" | "task" | "reply" | "key" | "papers" as channel,
            ]:
                return DeviceTopic(name, channel) if _NAME.fullmatch(name) else None
            # Digest and index are checked where the chunk is used.
            case ["blobs", digest, index]:
                return BlobTopic(digest, index)
            case ["uploads", task, index]:
                return UploadTopic(task, index)
            case ["server", "status" | "control" | "events" as channel]:
                return ServerTopic(channel)
            case _:
                return None
