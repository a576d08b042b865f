"""Messages in transit while the broker ends the connection for one of them."""

import queue
import sys

import pytest

from fleet_protocol.link import Link
from fleet_protocol.outstanding import Outstanding, SentPacket
from fleet_protocol.refusals import NOT_AUTHORIZED, PACKET_TOO_LARGE
from fleet_protocol.transport import BrokerAddress

LARGE = SentPacket("shoal/v1/test/uploads/1/0", 98_000)
SMALL = SentPacket("shoal/v1/test/devices/a", 300)


def test_a_packet_may_be_refused_before_its_sender_knows_its_id():
    """The network's thread sends it first. It was sent again with the next connection."""
    outstanding = Outstanding()
    outstanding.begin(LARGE)
    assert outstanding.drop_refused(PACKET_TOO_LARGE) == {}
    assert outstanding.packet_bytes == LARGE.size - 1
    assert outstanding.add(7, LARGE) == {7: LARGE.refused(PACKET_TOO_LARGE)}
    assert len(outstanding) == 0


def test_a_packet_that_was_accepted_meanwhile_is_not_refused():
    outstanding = Outstanding()
    outstanding.begin(LARGE)
    assert outstanding.acknowledge(7, 0) == {}
    outstanding.note_limit(1000)
    assert outstanding.add(7, LARGE) == {}
    assert len(outstanding) == 0


def test_small_packets_are_kept():
    outstanding = Outstanding()
    outstanding.begin(SMALL)
    assert outstanding.drop_refused(PACKET_TOO_LARGE) == {}
    assert outstanding.packet_bytes == sys.maxsize
    assert outstanding.add(7, SMALL) == {}
    assert len(outstanding) == 1


def test_a_packet_that_could_not_be_passed_on_is_forgotten():
    outstanding = Outstanding()
    outstanding.begin(LARGE)
    outstanding.cancel(LARGE)
    assert outstanding.drop_refused(PACKET_TOO_LARGE) == {}
    assert outstanding.packet_bytes == sys.maxsize


def test_a_topic_that_cannot_be_sent_to_leaves_nothing_in_transit():
    """The next refusal would have been blamed on its packet, and larger ones never sent."""
    link = Link(BrokerAddress("127.0.0.1", 1), "d", queue.SimpleQueue())
    with pytest.raises(ValueError, match="wildcard"):
        link.publish("shoal/+", b"x" * 98_000)
    assert link._outstanding.drop_refused(PACKET_TOO_LARGE) == {}
    assert link.packet_bytes == sys.maxsize
    link.close()


@pytest.mark.parametrize(("code", "left"), [(NOT_AUTHORIZED, 1), (0x97, 2)])
def test_messages_on_a_topic_that_is_refused_go_with_the_first(code, left):
    """They would be refused, too, and were sent again with each connection; a full queue says
    nothing about a topic.
    """
    outstanding = Outstanding()
    for message, topic in ((1, "status"), (2, "status"), (3, "profile")):
        packet = SentPacket(topic, 300)
        outstanding.begin(packet)
        outstanding.add(message, packet)
    dropped = outstanding.acknowledge(1, code)
    assert set(dropped) == ({1, 2} if left == 1 else {1})
    assert len(outstanding) == left
