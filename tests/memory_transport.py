"""A transport without a network, to show what another one costs: this file, and a row in
`SCHEMES`.
"""

import re
import sys
import threading
from dataclasses import dataclass, field

from fleet_protocol.transport import Connected, Received, WireCount


@dataclass
class Hub:
    """The broker: who listens to what, and what it keeps for later subscribers."""

    links: list = field(default_factory=list)
    retained: dict = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


HUBS: dict[str, Hub] = {}


def matches(topic_filter, topic):
    """Whether a filter with ``+`` for one level accepts a topic."""
    return re.fullmatch("[^/]+".join(map(re.escape, topic_filter.split("+"))), topic) is not None


class MemoryLink:
    """One end of a hub, with the methods of `fleet_protocol.transport.Transport`."""

    authentic = False
    packet_bytes = sys.maxsize

    def __init__(self, address, client_id, inbox, *, will=None, session_expiry_seconds=3600):
        self.address = address
        self.client_id = client_id
        self.session_expiry_seconds = session_expiry_seconds
        self._inbox = inbox
        self._will = will
        self._filters = set()
        self._hub = HUBS.setdefault(address.host, Hub())
        self.connected = False
        self.wire = WireCount(0, 0)

    def connect(self, timeout_seconds=30.0):
        with self._hub.lock:
            self._hub.links.append(self)
            self.connected = True
        self._inbox.put(Connected(session_present=False))

    def subscribe(self, topic_filter, qos=1, timeout_seconds=10.0):
        with self._hub.lock:
            self._filters.add(topic_filter)
            for topic, payload in self._hub.retained.items():
                if matches(topic_filter, topic):
                    self._inbox.put(Received(topic, payload, retained=True))

    def unsubscribe(self, topic_filter):
        self._filters.discard(topic_filter)

    def publish(self, topic, payload, *, qos=1, retain=False):
        with self._hub.lock:
            self.wire = WireCount(self.wire.sent + len(payload), self.wire.received)
            if retain:
                self._hub.retained[topic] = payload
            for link in self._hub.links:
                if any(matches(wanted, topic) for wanted in link._filters):
                    link._inbox.put(Received(topic, payload))

    def publish_stream(self, messages, deadline):
        count = 0
        for topic, payload in messages:
            self.publish(topic, payload)
            count += 1
        return count

    def drain(self, deadline, at_most=0):
        return

    def close(self, farewell=None, timeout_seconds=2.0):
        if farewell is not None:
            self.publish(farewell.topic, farewell.payload, retain=True)
        with self._hub.lock:
            self._hub.links.remove(self)
            self.connected = False
