"""Checks what the broker lets a board publish and subscribe to, for `shoal device doctor`.

A broker answers a refused subscription or message with a reason. The check sends empty messages,
which members of a fleet ignore. The check cannot notice a broker that accepts a subscription and
then delivers nothing, as Mosquitto does with an `acl_file`.
"""

import contextlib
import queue
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from device_runtime.settings import DeviceConfig
from fleet_protocol.errors import BrokerRefusedError
from fleet_protocol.refusals import refusal_of_code
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Refused, Transport, open_transport

ANSWER_SECONDS = 5.0  # for the broker to answer
_MESSAGE_SECONDS = 20.0  # for the broker to answer a message, possibly after a new connection
_SETTLING_SECONDS = 0.2  # after the last refusal
_NO_BLOB = "0" * 64
_NO_TASK = "doctor"


@dataclass(frozen=True)
class AccessRight:
    """An access right that a board needs.

    Attributes:
        kind: what the board does with the topic.
        topic: an example of a topic that the rule covers.
        rule: the topics that the access rules must allow.
    """

    kind: Literal["publish on", "subscribe to"]
    topic: str
    rule: str

    @property
    def mosquitto_rule(self) -> str:
        """Return the line of an `acl_file`."""
        access = "write" if self.kind == "publish on" else "read"
        return f"topic {access} {self.rule}"


def rights_of(config: DeviceConfig) -> list[AccessRight]:
    """Return the access rights that a board needs."""
    topics = Topics(config.fleet)
    device = config.device
    read = [topics.server_status, topics.task(device)]
    if config.identity is not None:
        read += [topics.key(device), topics.papers(device)]
    rights = [AccessRight("subscribe to", topic, topic) for topic in read]
    blobs = f"{topics.root}/blobs/#"
    rights.append(AccessRight("subscribe to", topics.blob_filter(_NO_BLOB), blobs))
    for topic in (topics.status(device), topics.profile(device), topics.reply(device)):
        rights.append(AccessRight("publish on", topic, topic))
    uploads = f"{topics.root}/uploads/#"
    rights.append(AccessRight("publish on", topics.upload(_NO_TASK, 0), uploads))
    return rights


def check_access(config: DeviceConfig) -> str:
    """Check every access right of a board; return a sentence that none is missing.

    Raises:
        BrokerRefusedError: rights are missing; the message lists the topics and the rules.
        TransportError: the broker does not answer.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link = open_transport(config.address(), f"shoal-doctor-{uuid.uuid4().hex[:12]}", inbox)
    rights = rights_of(config)
    with contextlib.closing(link):
        link.connect(ANSWER_SECONDS)
        refused = _refused_subscriptions(link, rights)
        refused |= _refused_messages(link, rights, inbox)
    missing = [right for right in rights if right.topic in refused]
    if missing:
        code = refused[missing[0].topic]
        raise BrokerRefusedError(code, _describe_missing(missing, link.address, code))
    return f"the broker lets this board use its {len(rights)} topics"


def _refused_subscriptions(link: Transport, rights: Iterable[AccessRight]) -> dict[str, int]:
    """Return the reasons for refused subscriptions, by topic."""
    refused: dict[str, int] = {}
    for right in rights:
        if right.kind == "subscribe to":
            try:
                link.subscribe(right.topic, timeout_seconds=ANSWER_SECONDS)
            except BrokerRefusedError as error:
                refused[right.topic] = error.code
    return refused


def _refused_messages(
    link: Transport, rights: Iterable[AccessRight], inbox: queue.SimpleQueue[Any]
) -> dict[str, int]:
    """Return the reasons for refused messages, by topic."""
    for right in rights:
        if right.kind == "publish on":
            # One after the other: Mosquitto 2.0 may end the connection with each refusal, and the
            # answers to later messages are then lost.
            link.publish(right.topic, b"")
            link.drain(time.monotonic() + _MESSAGE_SECONDS)
    refused: dict[str, int] = {}
    with contextlib.suppress(queue.Empty):
        while True:
            event = inbox.get(timeout=_SETTLING_SECONDS)
            if isinstance(event, Refused):
                refused[event.topic] = event.code
    return refused


def _describe_missing(missing: Sequence[AccessRight], address: BrokerAddress, code: int) -> str:
    """Return the rights that the broker refuses, and the rules that grant them."""
    wanted = ", ".join(f"{right.kind} {right.rule}" for right in missing)
    rules = ", ".join(f"`{right.mosquitto_rule}`" for right in missing)
    return (
        f"the broker at {address} does not let this board {wanted} "
        f"({refusal_of_code(code).meaning}); add to its access rules (in the format of "
        f"Mosquitto's acl_file) {rules}"
    )
