"""A transport on which everything is signed: the border at which an enrolled member puts on and opens envelopes."""

import queue
from collections.abc import Iterable
from dataclasses import replace

from fleet_protocol.errors import RefusedError
from fleet_protocol.identity.envelope import Signer, Verifier
from fleet_protocol.identity.marks import Marks, next_session
from fleet_protocol.identity.member import Member
from fleet_protocol.transport import (
    BrokerAddress,
    Event,
    Farewell,
    Received,
    Rejected,
    Transport,
    WireCount,
    open_transport,
)


class OpeningInbox(queue.SimpleQueue):  # type: ignore[type-arg]
    """Opens what comes on its way into the owner's inbox; what is refused arrives as that.

    Args:
        inbox: the owner's.
        verifier: opens envelopes.
    """

    def __init__(self, inbox: queue.SimpleQueue[Event], verifier: Verifier) -> None:
        super().__init__()
        self._inbox = inbox
        self._verifier = verifier

    def put(self, item: Event, block: bool = True, timeout: float | None = None) -> None:
        """Take an event from the network; called in its thread."""
        if isinstance(item, Received):
            try:
                opened = self._verifier.open(item.topic, item.payload, retained=item.retained)
            except RefusedError as error:
                self._inbox.put(Rejected(item.topic, error), block, timeout)
                return
            signer = opened.signer
            item = replace(item, payload=opened.payload, signer=signer.name, sealing=signer.sealing)
        self._inbox.put(item, block, timeout)


class SignedTransport:
    """A transport whose messages are signed; see `fleet_protocol.transport.Transport`.

    Args:
        inner: carries the envelopes; opened with an `OpeningInbox`.
        signer: signs.
    """

    def __init__(self, inner: Transport, signer: Signer) -> None:
        self._inner = inner
        self._signer = signer

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

    def connect(self, timeout_seconds: float = 30.0) -> None:
        """Connect for the first time."""
        self._inner.connect(timeout_seconds)

    def subscribe(self, topic_filter: str, qos: int = 1, timeout_seconds: float = 10.0) -> None:
        """Subscribe, now and after every reconnect."""
        self._inner.subscribe(topic_filter, qos, timeout_seconds)

    def unsubscribe(self, topic_filter: str) -> None:
        """Forget a subscription."""
        self._inner.unsubscribe(topic_filter)

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Sign and send a message."""
        self._inner.publish(topic, self._signer.seal(topic, payload), qos=qos, retain=retain)

    def publish_stream(self, messages: Iterable[tuple[str, bytes]], deadline: float) -> int:
        """Sign and send many payloads, one at a time."""
        return self._inner.publish_stream(((t, self._signer.seal(t, payload)) for t, payload in messages), deadline)

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
        return Farewell(farewell.topic, signer.seal(farewell.topic, farewell.payload, farewell=True))


def open_signed(
    address: BrokerAddress,
    client_id: str,
    inbox: queue.SimpleQueue[Event],
    member: Member,
    *,
    will: Farewell | None = None,
    session_expiry_seconds: int = 3600,
) -> Transport:
    """Make the transport of a member, who speaks and listens; the rest as for `open_transport`.

    Raises:
        ConfigError: as for `open_transport`.
        StorageError: the member's folder cannot be written.
    """
    signer = Signer(member.enrolment, next_session(member.folder / "session.json"))
    marks = Marks(member.folder / "heard.json" if member.remembers else None)
    inner = open_transport(
        address,
        client_id,
        OpeningInbox(inbox, Verifier(member.enrolment, marks, member.revoked)),
        will=SignedTransport.sealed(signer, will),
        session_expiry_seconds=session_expiry_seconds,
    )
    return SignedTransport(inner, signer)
