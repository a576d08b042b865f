"""How the link reads packets: whole ones, however the connection cuts them, acknowledged together."""

import socket
import struct

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode

from fleet_protocol.link import LeanClient

PAYLOADS = [b"", b"a", bytes(4083), bytes(range(256)) * 16, b"b" * 150_000, b"c", b"d" * 5000, b"e"]


@pytest.fixture
def connection():
    """A client that has a connection, and the other end of it."""
    client = LeanClient(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(60)
    client._sock = ours
    yield client, theirs
    ours.close()
    theirs.close()
    client._reset_sockets(sockpair_only=True)


def publish(mid, payload):
    body = struct.pack("!H5sHB", 5, b"topic", mid, 0) + payload
    length = len(body)
    head = bytearray((0x32,))
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    return bytes((*head, length)) + body


@pytest.mark.parametrize("size", [1, 3, 4095, 4096, 4097, 70_000])
def test_packets_are_taken_however_they_are_cut(connection, size):
    """Small ones many at a time, large ones to their end; each is acknowledged once."""
    client, theirs = connection
    taken = []
    client.plain = lambda *message: taken.append(message)
    payloads = PAYLOADS if size > 3 else PAYLOADS[:3]
    stream = b"".join(publish(mid, payload) for mid, payload in enumerate(payloads, 1))
    for at in range(0, len(stream), size):
        theirs.sendall(stream[at : at + size])
        assert client.loop_read() == MQTTErrorCode.MQTT_ERR_SUCCESS
    assert taken == [("topic", payload, False) for payload in payloads]
    expected = b"".join(struct.pack("!BBH", 0x40, 2, mid) for mid in range(1, len(payloads) + 1))
    assert theirs.recv(len(expected) + 1, socket.MSG_DONTWAIT) == expected


def test_what_a_lost_connection_had_begun_is_forgotten(connection):
    """The next one begins with a packet of its own."""
    client, theirs = connection
    taken = []
    client.plain = lambda *message: taken.append(message)
    theirs.sendall(publish(1, b"x" * 9000)[:5000])
    assert client.loop_read() == MQTTErrorCode.MQTT_ERR_SUCCESS
    theirs.close()
    assert client.loop_read() == MQTTErrorCode.MQTT_ERR_CONN_LOST
    ours, other = socket.socketpair()
    ours.setblocking(False)
    client._sock = ours
    other.sendall(publish(2, b"y"))
    with ours, other:
        assert client.loop_read() == MQTTErrorCode.MQTT_ERR_SUCCESS
    assert taken == [("topic", b"y", False)]


def test_a_length_without_end_closes_the_connection(connection):
    """MQTT has four bytes for it at most."""
    client, theirs = connection
    theirs.sendall(b"\x32\xff\xff\xff\xff\x01")
    assert client.loop_read() == MQTTErrorCode.MQTT_ERR_PROTOCOL
    assert client.socket() is None
