"""Routes every message to the handler of its topic, in a run and between runs."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from broker_server.rounds.stopping import StopRequested
from broker_server.service.control_socket import LocalRequest
from broker_server.service.limits import Limits
from fleet_protocol.errors import RefusalReason, RefusedError, StorageError
from fleet_protocol.messages import DeviceProfile, DeviceStatus, parse_presence
from fleet_protocol.topics import DeviceTopic, ServerTopic, Topic, Topics, UploadTopic
from fleet_protocol.transport import Received

_LOG = logging.getLogger(__name__)

_SOCKET = "the socket of the store"


@dataclass(frozen=True)
class Handlers:
    """The handler of each kind of topic.

    A handler may raise `RefusedError` for a message that must not be followed.

    Attributes:
        sign_of_life: called with the id of a device before any other message of it is handled.
        presence: gets the status or profile of a device, and the device on whose topic it arrived.
        reply: gets the id of a device and its reply about a task, as received.
        chunk: gets the id of a task and a chunk of its update.
        request: gets a request to the server, over MQTT or over the socket of its store.
        server_status: gets the retained status of a server of this fleet, as received.
        refused: gets a message that was refused, and its device, or None if no device of the fleet
            has that name: invented names are counted together and cannot fill the store.
    """

    sign_of_life: Callable[[str], None]
    presence: Callable[[DeviceStatus | DeviceProfile], None]
    reply: Callable[[str, bytes], None]
    chunk: Callable[[str, Received], None]
    request: Callable[[Received | LocalRequest], None]
    server_status: Callable[[bytes], None]
    refused: Callable[[RefusedError, str | None], None]


class Router:
    """Passes messages to handlers, one at a time.

    Args:
        topics: topics of the fleet.
        limits: rates at which messages of each device are read.
        knows: whether a device has ever announced itself.
        handlers: what to do with each kind of message.
    """

    def __init__(
        self,
        topics: Topics,
        limits: Limits,
        knows: Callable[[str], bool],
        handlers: Handlers,
    ) -> None:
        self._topics = topics
        self._limits = limits
        self._knows = knows
        self._handlers = handlers

    def route(self, event: Received | LocalRequest) -> None:
        """Handle a message.

        A refused message is counted. An unexpected exception is counted, logged with the topic and
        dropped: no message may end the server.

        Raises:
            StopRequested: the server must end.
            StorageError: the server's disk is full.
        """
        name = _SOCKET
        topic = None
        try:
            if isinstance(event, LocalRequest):
                self._handlers.request(event)
            else:
                name = event.topic
                topic = self._topics.parse(name)
                self._dispatch(topic, event)
        except RefusedError as error:
            self._refuse(topic, error)
        # These two concern the server, not the message.
        except (StopRequested, StorageError):
            raise
        except Exception as error:  # noqa: BLE001  (whatever a message brings to light)
            _LOG.exception("a message on %s could not be handled", name)
            detail = f"a message on {name}: {type(error).__name__}: {error}"
            self._refuse(topic, RefusedError(RefusalReason.FAILED, detail))

    def _dispatch(self, topic: Topic | None, event: Received) -> None:
        if not event.payload:
            return  # from `shoal device doctor`, or somebody deleted a retained message
        if isinstance(topic, DeviceTopic):
            # Before anything is parsed: the server spends most time on reading long messages.
            size = len(event.payload)
            self._limits.check(topic.device, topic.channel, time.monotonic(), size)
            # After the limit: a device that floods is not kept in the round by its flood.
            self._handlers.sign_of_life(topic.device)
        # The server subscribes to no other topics, so others match nothing.
        match topic:
            case UploadTopic(task):  # first, because most messages are chunks
                self._handlers.chunk(task, event)
            case DeviceTopic(device, "status" | "profile"):
                self._handlers.presence(self._presence_of(device, event.payload))
            case DeviceTopic(device, "reply"):
                self._handlers.reply(device, event.payload)
            case ServerTopic("control"):
                self._handlers.request(event)
            case ServerTopic("status"):
                self._handlers.server_status(event.payload)

    def _presence_of(self, device: str, payload: bytes) -> DeviceStatus | DeviceProfile:
        fleet = self._topics.fleet
        message = parse_presence(payload).completed(fleet=fleet, device=device)
        if (message.fleet, message.device) != (fleet, device):
            raise RefusedError(
                RefusalReason.UNKNOWN_DEVICE,
                f"a {message.type} from {message.device} in fleet {message.fleet} arrived on the"
                f" topic of {device}",
            )
        return message

    def _refuse(self, topic: Topic | None, error: RefusedError) -> None:
        sender = None
        # Someone who invents names must not fill the store with them.
        if isinstance(topic, DeviceTopic) and self._knows(topic.device):
            sender = topic.device
        self._handlers.refused(error, sender)
