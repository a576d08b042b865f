"""A transport that signs and seals what a member sends, and opens what it receives.

Data for all devices is sealed to their group, and data for the server to the server; senders and
receivers of messages need not know about it.
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
from fleet_protocol.identity.counter_file import CounterFile
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
    """Opens messages on their way into the owner's inbox; refused ones arrive as `Rejected`.

    Args:
        inbox: inbox of the owner.
        enrolment: enrolment of the member.
        verifier: verifier of messages.
        keys: keys that the member has received.
        notices: notices that the member sends to devices.
    """

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
        # Chunks that arrived before their key: brokers keep only the order within a single topic.
        self._waiting: deque[Received] = deque()

    def put(
        self,
        item: Event,
        block: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Receive an event from the network, in the thread of the network."""
        if isinstance(item, Connected):
            self._notices.forget_all()
        if isinstance(item, Received) and not item.payload:
            return  # somebody deleted a retained message, or checks access rules
        if not isinstance(item, Received):
            self._inbox.put(item, block, timeout)
            return
        try:
            event = self._open(item)
        except MissingKeyError as error:
            event = self._delay(item, error)
        except RefusedError as error:
            event = _reject(item.topic, error.reason, error)
        except StorageError as error:  # what cannot be saved counts as not received
            event = _reject(item.topic, RefusalReason.NO_SPACE, error)
        if event is not None:
            self._inbox.put(event, block, timeout)

    def _open(self, message: Received) -> Event | None:
        """Open a message; None if it was for this transport and not for the owner."""
        topic = self._topics.parse(message.topic)
        if isinstance(topic, BlobTopic | UploadTopic):
            opened = self._chunks.open(message.topic, message.payload)
        else:
            opened = self._verifier.open(message.topic, message.payload, retained=message.retained)
            self._keys.record_signer(opened.signer)
        if isinstance(topic, DeviceTopic) and topic.channel == "profile" and not message.retained:
            self._notices.forget_device(topic.device)  # it has connected again
        if message.topic == self._papers_topic:
            membership = self._keys.membership
            return None if membership is None else membership.accept(opened.payload)
        if message.topic == self._key_topic:
            self._keys.receive_group_key(message.topic, opened.payload)
            self._retry_waiting()
            return None
        return replace(message, payload=opened.payload, signer=opened.signer.name)

    def _retry_waiting(self) -> None:
        """Open the chunks that have waited for a key."""
        waiting = self._waiting
        self._waiting = deque()  # those that still lack a key wait again
        for chunk in waiting:
            self.put(chunk)

    def _delay(self, chunk: Received, error: MissingKeyError) -> Event | None:
        """Keep a chunk until its key arrives; if there are too many, reject the oldest."""
        self._waiting.append(chunk)
        if len(self._waiting) <= SEND_WINDOW:
            return None
        return Rejected(self._waiting.popleft().topic, error)


class SignedTransport:
    """A `fleet_protocol.transport.Transport` whose messages are signed.

    Args:
        inner: transport with an `OpeningInbox`.
        member: member that sends.
        signer: signer of its messages.
        keys: keys that it has received.
        notices: notices that it sends to devices.
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
        self._membership = keys.membership
        self._group: Callable[[], Group | None] = member.group
        self._papers: Callable[[], Mapping[str, bytes]] = member.papers
        self._topics = Topics(member.enrolment.fleet)
        self._signer = signer
        self._chunks = ChunkSigner(member.enrolment, keys)
        self._notices = notices
        # Messages must leave in the order of their counters. A publication may contain another
        # one, so the lock is reentrant.
        self._in_order = threading.RLock()

    @property
    def address(self) -> BrokerAddress:
        """The broker."""
        return self._inner.address

    @property
    def connected(self) -> bool:
        """Whether the broker is connected now."""
        return self._inner.connected

    @property
    def wire(self) -> WireCount:
        """Bytes exchanged so far, including envelopes."""
        return self._inner.wire

    @property
    def packet_bytes(self) -> int:
        """Size of the largest packet that the broker accepts."""
        return self._inner.packet_bytes

    def connect(self, timeout_seconds: float = 30.0) -> None:
        """Connect for the first time."""
        self._inner.connect(timeout_seconds)
        if self._membership is not None:
            self._inner.subscribe(self._topics.papers(self._enrolment.name))
        if self._enrolment.role == "device" and self._enrolment.sealing:
            self._inner.subscribe(self._topics.key(self._enrolment.name))

    def subscribe(
        self,
        topic_filter: str,
        qos: int = 1,
        timeout_seconds: float = 10.0,
    ) -> None:
        """Subscribe, now and after every reconnect."""
        self._inner.subscribe(topic_filter, qos, timeout_seconds)

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
        self._inner.unsubscribe(topic_filter)

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        qos: int = 1,
        retain: bool = False,
    ) -> None:
        """Sign and send a message, or seal and send a chunk of an update."""
        with self._in_order:
            self._use_renewed_certificate()
            if isinstance(self._topics.parse(topic), UploadTopic):
                envelope = self._chunks.seal_to_server(topic, payload)
            else:
                envelope = self._signer.seal(topic, payload)
            # With its status a server sends the papers that have changed since.
            if topic == self._topics.server_status:
                self._publish_notices(self._notices.papers_due(self._papers()))
            self._inner.publish(topic, envelope, qos=qos, retain=retain)

    def _use_renewed_certificate(self) -> None:
        """Sign with the newest certificate; a renewed one is for the same keys."""
        if self._membership is None or self._membership.enrolment is self._enrolment:
            return
        self._enrolment = self._membership.enrolment
        certificate = bytes.fromhex(self._enrolment.certificate)
        self._signer.certificate = certificate
        self._chunks.certificate = certificate

    def publish_stream(self, messages: Iterable[tuple[str, bytes]], deadline: float) -> int:
        """Sign and send chunks of a blob for the devices, a window of them at a time."""
        return self._inner.publish_stream(self._sign_windows(messages), deadline)

    def _sign_windows(self, messages: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        for place, chunks in itertools.groupby(messages, _place_of_message):
            for window in _windows(chunks):
                group = self._group()  # a device may have been revoked since the last window
                self._publish_notices(self._notices.papers_due(self._papers()))
                if group is not None:
                    self._publish_notices(self._notices.keys_due(group))
                topics = [topic for topic, _ in window]
                envelopes = self._chunks.sign_list(place, window, group)
                yield from zip(topics, envelopes, strict=True)

    def _publish_notices(self, notices: Iterable[tuple[str, bytes]]) -> None:
        for topic, payload in notices:
            self.publish(topic, payload, retain=True)

    def drain(self, deadline: float, at_most: int = 0) -> None:
        """Wait until the broker has acknowledged what was sent."""
        self._inner.drain(deadline, at_most)

    def close(self, farewell: Farewell | None = None, timeout_seconds: float = 2.0) -> None:
        """Disconnect for good, with a signed farewell."""
        self._inner.close(_seal_farewell(self._signer, farewell), timeout_seconds)


def open_signed(  # noqa: PLR0913  (options by keyword)
    address: BrokerAddress,
    client_id: str,
    inbox: queue.SimpleQueue[Event],
    member: Member,
    *,
    will: Farewell | None = None,
    session_expiry_seconds: int = 3600,
) -> Transport:
    """Return the transport of a member; the other arguments are those of `open_transport`."""
    enrolment = member.enrolment
    folder = member.folder
    revoked = member.revoked
    replay_guard = ReplayGuard(
        folder / "heard.json" if member.remembers else None,
        patient=enrolment.role == "device",
        counter_file=CounterFile(folder / "heard.counters") if member.saves_counters else None,
    )
    keys = KnownKeys(enrolment, folder / "keys.json" if member.remembers else None)
    notices = DeviceNotices(Topics(enrolment.fleet))
    if keys.membership is not None:
        enrolment = keys.membership.enrolment
        revoked = keys.membership.revoked
        member = replace(member, enrolment=enrolment)
    # The session is saved before anything is signed in it.
    signer = Signer(enrolment, next_session(folder / "session.json"))
    verifier = Verifier(enrolment, replay_guard, revoked)
    # A broker lets a client take over a client id, so part of the id is secret.
    secret_suffix = chunk_digest(enrolment.token.encode()).hex()[:16]
    inner = open_transport(
        address,
        f"{client_id}-{secret_suffix}",
        OpeningInbox(
            inbox,
            enrolment,
            verifier,
            keys,
            notices,
        ),
        will=_seal_farewell(signer, will),
        session_expiry_seconds=session_expiry_seconds,
    )
    return SignedTransport(
        inner,
        member,
        signer,
        keys,
        notices,
    )


def _windows(
    chunks: Iterator[tuple[str, bytes]],
) -> Iterator[tuple[tuple[str, bytes], ...]]:
    """Yield chunks by windows; a window is read only when the previous one was sent."""
    window = tuple(itertools.islice(chunks, SEND_WINDOW))
    while window:
        yield window
        window = tuple(itertools.islice(chunks, SEND_WINDOW))


def _place_of_message(message: tuple[str, bytes]) -> str:
    topic, _ = message
    return shared_topic(topic)


def _reject(
    topic: str,
    reason: RefusalReason,
    error: Exception,
) -> Rejected:
    """Return a refusal without a traceback, whose frames would keep the payload."""
    return Rejected(topic, RefusedError(reason, str(error)))


def _seal_farewell(signer: Signer, farewell: Farewell | None) -> Farewell | None:
    """Return a farewell in its envelope."""
    if farewell is None:
        return None
    envelope = signer.seal(farewell.topic, farewell.payload, farewell=True)
    return Farewell(farewell.topic, envelope)
