"""How the link reads packets: whole ones, however the connection cuts them, acknowledged
together.
"""

import ast
import inspect
import socket
import struct

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode

from fleet_protocol import lean_client
from fleet_protocol.lean_client import PAHO_NAMES, LeanClient

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
    client.close_wakeup_sockets()


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
    client.on_plain_message = lambda *message: taken.append(message)
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
    client.on_plain_message = lambda *message: taken.append(message)
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


@pytest.mark.parametrize("reason", [b"", b"\xe0\2\x87\0"], ids=["silent", "reason"])
def test_a_refusal_is_read_before_a_connection_that_ended_is_closed(connection, reason):
    """Mosquitto refuses a message and ends the connection, perhaps while others are being sent.
    The refused message was sent again and again, and each time the connection ended.
    """
    client, theirs = connection
    refused = []
    ended = []
    client.on_publish = lambda _client, _data, mid, code, _properties: refused.append((mid, code))
    client.on_disconnect = lambda _client, _data, flags, *_about: ended.append(
        flags.is_disconnect_packet_from_server
    )
    first = client.publish("topic", b"not allowed", qos=1)
    assert client.loop_write() == MQTTErrorCode.MQTT_ERR_SUCCESS
    theirs.sendall(struct.pack("!BBHBB", 0x40, 4, first.mid, 0x87, 0) + reason)
    theirs.close()
    client.publish("topic", b"next", qos=1)
    client.loop_write()
    assert refused == [(first.mid, 0x87)]
    assert ended == [bool(reason)]
    assert client.socket() is None


def test_a_length_without_end_closes_the_connection(connection):
    """MQTT has four bytes for it at most."""
    client, theirs = connection
    theirs.sendall(b"\x32\xff\xff\xff\xff\x01")
    assert client.loop_read() == MQTTErrorCode.MQTT_ERR_PROTOCOL
    assert client.socket() is None


def test_the_private_names_of_paho_are_those_of_the_installed_version():
    """The names that the client uses are listed in one place, and all of them exist in paho."""
    assert {name for name in PAHO_NAMES if not hasattr(made_by_paho(), name)} == set()
    assert private_names(lean_client) - own_names(lean_client) == PAHO_NAMES


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_do_on_publish", ["self", "mid", "reason_code", "properties"]),
        ("_loop", ["self", "timeout"]),
        ("_loop_rc_handle", ["self", "rc"]),
        ("_packet_handle", ["self"]),
        ("_packet_queue", ["self", "command", "packet", "mid", "qos", "info"]),
        ("_packet_write", ["self"]),
        ("_reset_sockets", ["self", "sockpair_only"]),
        ("_sock_close", ["self"]),
        ("loop_read", ["self", "max_packets"]),
        ("loop_write", ["self"]),
    ],
)
def test_the_methods_of_paho_have_the_parameters_that_the_client_expects(name, parameters):
    """A version of paho that changes one of them fails here and not on a board."""
    assert list(inspect.signature(getattr(paho.Client, name)).parameters) == parameters


def made_by_paho():
    return paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)


def private_names(module):
    """Private attributes of an object that the module's classes use."""
    attributes = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute)
    ]
    return {node.attr for node in attributes if node.attr.startswith("_")} - {"__init__"}


def own_names(module):
    """Private attributes and methods that are not paho's."""
    own = LeanClient(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    return {name for name in dir(own) if name not in dir(made_by_paho())}
