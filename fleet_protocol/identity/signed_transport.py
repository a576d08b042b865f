"""A transport on which everything is signed: the border at which an enrolled member puts on and
opens envelopes.

What goes to all devices is sealed to their group, what goes to the server to the server; whoever
sends or takes it does not know.
"""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from fleet_protocol.digests import chunk_digest
from fleet_protocol.errors import RefusalReason, RefusedError, StorageError
from fleet_protocol.identity.chunks import (
    ChunkSigner,
    ChunkVerifier,
    MissingKeyError,
    shared_topic,
)
from fleet_protocol.identity.enrolment import Enrolment
from fleet_protocol.identity.envelope import Signer, Verifier
from fleet_protocol.identity.group import DeviceNotices, Group, KnownKeys
from fleet_protocol.identity.member import Member
from fleet_protocol.identity.replay_guard import ReplayGuard, next_session
from fleet_protocol.topics import BlobTopic, DeviceTopic, Topics, UploadTopic
from fleet_protocol.transport import (
    SEND_WINDOW,
    BrokerAddress,
    Connected,
    Event,
    Farewell,
    Received,
    Rejected,
    Transport,
    WireCount,
    open_transport,
)


class OpeningInbox(queue.SimpleQueue):  # type: ignore[type-arg]
    """Opens what comes on its way into the owner's inbox; what is refused arrives as that."""

    def __init__(
        self,
        inbox: queue.SimpleQueue[Event],
        enrolment: Enrolment,
        verifier: Verifier,
        keys: KnownKeys,
        notices: DeviceNotices,
    ) -> None:
        super().__init__()
        self._inbox = inbox
        self._topics = Topics(enrolment.fleet)
        self._key_topic = self._topics.key(enrolment.name)
        self._papers_topic = self._topics.papers(enrolment.name)
        self._verifier = verifier
        self._chunks = ChunkVerifier(enrolment, verifier, keys)
        self._keys = keys
        self._notices = notices
        self._early: deque[Received] = (
            deque()
        )  # chunks that came before their key: brokers keep the order of one topic

    def put(self, item: Event, block: bool = True, timeout: float | None = None) -> None:
        """Take an event from the network; called in its thread."""
        if isinstance(item, Connected):
            self._notices.forget_all()
        if not isinstance(item, Received):
            self._inbox.put(item, block, timeout)
            return
        try:
            topic = self._topics.parse(item.topic)
            if isinstance(topic, BlobTopic | UploadTopic):
                opened = self._chunks.open(item.topic, item.payload)
            else:
                opened = self._verifier.open(item.topic, item.payload, retained=item.retained)
                self._keys.record_signer(opened.signer)
            if isinstance(topic, DeviceTopic) and topic.channel == "profile" and not item.retained:
                self._notices.forget_device(topic.device)
            if item.topic == self._papers_topic:
                if self._keys.membership is not None:
                    self._inbox.put(self._keys.membership.accept(opened.payload))
                return
            if item.topic == self._key_topic:
                self._keys.receive_group_key(item.topic, opened.payload)
                early, self._early = self._early, deque()
                for chunk in early:
                    self.put(chunk)
                return
        except MissingKeyError as error:
            self._early.append(item)
            if len(self._early) > SEND_WINDOW:
                self._inbox.put(Rejected(self._early.popleft().topic, error), block, timeout)
        except RefusedError as error:  # without its traceback, which holds the payload
            self._inbox.put(
                Rejected(item.topic, RefusedError(error.reason, str(error))),
                block,
                timeout,
            )
        except StorageError as error:  # what cannot be kept was not heard
            self._inbox.put(
                Rejected(item.topic, RefusedError(RefusalReason.NO_SPACE, str(error))),
                block,
                timeout,
            )
        else:
            self._inbox.put(
                replace(item, payload=opened.payload, signer=opened.signer.name),
                block,
                timeout,
            )


class SignedTransport:
    """A `fleet_protocol.transport.Transport` whose messages are signed, around one with an
    `OpeningInbox`.
    """

    authentic = True

    def __init__(
        self,
        inner: Transport,
        member: Member,
        signer: Signer,
        keys: KnownKeys,
        notices: DeviceNotices,
    ) -> None:
        self._inner = inner
        self._enrolment = member.enrolment
        self._standing = keys.membership
        self._group: Callable[[], Group | None] = member.group
        self._papers: Callable[[], Mapping[str, bytes]] = member.papers
        self._topics = Topics(member.enrolment.fleet)
        self._signer = signer
        self._chunks = ChunkSigner(member.enrolment, keys)
        self._notices = notices
        self._one = threading.RLock()  # counters are heard in their order alone

    @property
    def address(self) -> BrokerAddress:
        """The broker."""
        return self._inner.address

    @property
    def connected(self) -> bool:
        """Whether the broker is there now."""
        return self._inner.connected

    @property
    def wire(self) -> WireCount:
        """Bytes exchanged so far, envelopes included."""
        return self._inner.wire

    @property
    def packet_bytes(self) -> int:
        """Size of the largest packet that the broker takes."""
        return self._inner.packet_bytes

    def connect(self, timeout_seconds: float = 30.0) -> None:
        """Connect for the first time."""
        self._inner.connect(timeout_seconds)
        if self._standing is not None:
            self._inner.subscribe(self._topics.papers(self._enrolment.name))
        if self._enrolment.role == "device" and self._enrolment.sealing:
            self._inner.subscribe(self._topics.key(self._enrolment.name))

    def subscribe(self, topic_filter: str, qos: int = 1, timeout_seconds: float = 10.0) -> None:
        """Subscribe, now and after every reconnect."""
        self._inner.subscribe(topic_filter, qos, timeout_seconds)

    def unsubscribe(self, topic_filter: str) -> None:
        """Forget a subscription."""
        self._inner.unsubscribe(topic_filter)

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Sign and send a message, or seal and send a chunk of an update."""
        with self._one:
            self._publish(topic, payload, qos=qos, retain=retain)

    def _publish(self, topic: str, payload: bytes, *, qos: int, retain: bool) -> None:
        if (
            self._standing is not None and self._standing.enrolment is not self._enrolment
        ):  # renewed, for the same keys
            self._enrolment = self._standing.enrolment
            self._signer.certificate = self._chunks.certificate = bytes.fromhex(
                self._enrolment.certificate
            )
        if isinstance(self._topics.parse(topic), UploadTopic):
            envelope = self._chunks.seal_to_server(topic, payload)
        else:
            envelope = self._signer.seal(topic, payload)
        if topic == self._topics.server_status:
            self._tell(self._notices.papers_due(self._papers()))
        self._inner.publish(topic, envelope, qos=qos, retain=retain)

    def publish_stream(self, messages: Iterable[tuple[str, bytes]], deadline: float) -> int:
        """Sign and send chunks of a blob for the devices, a window of them at a time."""
        return self._inner.publish_stream(self._listed(messages), deadline)

    def _listed(self, messages: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        for place, chunks in itertools.groupby(messages, lambda message: shared_topic(message[0])):
            while window := tuple(itertools.islice(chunks, SEND_WINDOW)):
                group = self._group()  # somebody may have been revoked since the last window
                self._tell(self._notices.papers_due(self._papers()))
                self._tell(self._notices.keys_due(group) if group is not None else ())
                yield from zip(
                    (topic for topic, _ in window),
                    self._chunks.sign_list(place, window, group),
                    strict=True,
                )

    def _tell(self, messages: Iterable[tuple[str, bytes]]) -> None:
        for topic, payload in messages:
            self.publish(topic, payload, retain=True)

    def drain(self, deadline: float, at_most: int = 0) -> None:
        """Wait until the broker has acknowledged what was sent."""
        self._inner.drain(deadline, at_most)

    def close(self, farewell: Farewell | None = None, timeout_seconds: float = 2.0) -> None:
        """Disconnect for good, with a signed farewell."""
        self._inner.close(self.sealed(self._signer, farewell), timeout_seconds)

    @staticmethod
    def sealed(signer: Signer, farewell: Farewell | None) -> Farewell | None:
        """A farewell in its envelope."""
        if farewell is None:
            return None
        return Farewell(
            farewell.topic, signer.seal(farewell.topic, farewell.payload, farewell=True)
        )


def open_signed(
    address: BrokerAddress,
    client_id: str,
    inbox: queue.SimpleQueue[Event],
    member: Member,
    *,
    will: Farewell | None = None,
    session_expiry_seconds: int = 3600,
) -> Transport:
    """Make the transport of a member, who speaks and listens; the rest as for `open_transport`."""
    enrolment = member.enrolment
    folder = member.folder
    revoked = member.revoked
    marks = ReplayGuard(
        folder / "heard.json" if member.remembers else None,
        patient=enrolment.role == "device",
    )
    keys = KnownKeys(enrolment, folder / "keys.json" if member.remembers else None)
    notices = DeviceNotices(Topics(enrolment.fleet))
    if keys.membership is not None:
        enrolment = keys.membership.enrolment
        revoked = keys.membership.revoked
        member = replace(member, enrolment=enrolment)
    signer = Signer(enrolment, next_session(folder / "session.json"))
    inner = open_transport(
        address,
        # a name that others know they could take
        f"{client_id}-{chunk_digest(enrolment.token.encode()).hex()[:16]}",
        OpeningInbox(inbox, enrolment, Verifier(enrolment, marks, revoked), keys, notices),
        will=SignedTransport.sealed(signer, will),
        session_expiry_seconds=session_expiry_seconds,
    )
    return SignedTransport(inner, member, signer, keys, notices)
