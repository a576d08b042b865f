"""EMQX's files say what Mosquitto's say, by a reader of each: no EMQX was at hand to run them."""

import itertools
import re

import pytest

from broker_server.service.authority import enroll, found_fleet, revoke
from broker_server.service.broker import MAX_PAYLOAD_BYTES
from broker_server.service.membership import broker_address
from broker_server.service.mosquitto import access_rules
from broker_server.service.new_fleet import NewFleet
from broker_server.service.registry import read_registry
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.configuration import load_config
from fleet_protocol.topics import Topics

TOPICS = Topics("lab")
NAMES = ("server", "pi-1", "pi-2", "gone", "stranger")
ASKED = [
    *(channel(name) for name in NAMES for channel in (TOPICS.status, TOPICS.profile, TOPICS.reply)),
    *(channel(name) for name in NAMES for channel in (TOPICS.task, TOPICS.key, TOPICS.papers)),
    *(
        TOPICS.status("+"),
        TOPICS.reply("+"),
        TOPICS.upload("+", "+"),
        TOPICS.task("+"),
        TOPICS.task("pi-1") + "/x",
    ),
    *(TOPICS.blob("d", 1), TOPICS.blob_filter("d"), TOPICS.upload("t", 1)),
    *(TOPICS.server_status, TOPICS.server_control, TOPICS.server_events),
    *("#", "+/#", "$SYS/#", TOPICS.root, f"{TOPICS.root}/#", "shoal/v1/other/devices/pi-1/task"),
]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "lab"
    found_fleet(folder, NewFleet("lab", "broker.local", 8884, "emqx"))
    for name in ("pi-1", "pi-2", "gone"):
        enroll(folder, name)
    revoke(folder, "gone")
    return folder


def covers(topic_filter, topic):
    """Whether a rule's filter has all that a topic, or the filter of a subscription, asks for."""
    wanted = topic_filter.split("/")
    asked = topic.split("/")
    if wanted[-1] == "#":
        return asked[: len(wanted) - 1] == wanted[:-1]
    return asked == wanted


def by_emqx(text):
    """A judge after acl.conf: Erlang tuples, each ended by a dot; the first that fits counts."""
    rule = re.compile(
        r'\{(allow|deny), (?:all|\{username, "([^"\\\\]*)"\}, (publish|subscribe|all), '
        r'\["([^"\\\\]*)"\])\}\.'
    )
    rules = [rule.fullmatch(line).groups() for line in text.splitlines()]

    def judge(name, action, topic):
        for verdict, user, what, topic_filter in rules:
            if user is None or (
                user == name and what in {action, "all"} and covers(topic_filter, topic)
            ):
                return verdict == "allow"
        return False

    return judge


def by_mosquitto(text):
    """A judge after an acl_file: rules of a user until the next; what none allows is denied."""
    rules = []
    user = None
    for line in filter(None, text.splitlines()):
        match line.split(" "):
            case ["user", user]:
                pass
            case ["topic", right, topic_filter]:
                rules.append((user, right, topic_filter))
    words = {"publish": {"write", "readwrite"}, "subscribe": {"read", "readwrite"}}
    return lambda name, action, topic: any(
        user == name and right in words[action] and covers(topic_filter, topic)
        for user, right, topic_filter in rules
    )


def test_the_rules_decide_as_mosquittos_do(folder):
    """For members, for one that was revoked and for one that never was, on every topic and some
    filters.
    """
    emqx = by_emqx((folder / "emqx" / "acl.conf").read_text())
    mosquitto = by_mosquitto(access_rules("lab", read_registry(folder).names()))
    asked = list(itertools.product(NAMES, ("publish", "subscribe"), ASKED))
    assert [each for each in asked if emqx(*each) != mosquitto(*each)] == []
    allowed = {each for each in asked if emqx(*each)}
    assert {name for name, _, _ in allowed} == {"server", "pi-1", "pi-2"}
    assert ("pi-1", "subscribe", TOPICS.papers("pi-1")) in allowed
    assert ("pi-1", "subscribe", TOPICS.blob_filter("d")) in allowed
    assert ("pi-1", "publish", TOPICS.reply("pi-1")) in allowed
    assert (
        "pi-1",
        "subscribe",
        TOPICS.server_status,
    ) in allowed  # `shoal device doctor` looks for it
    assert (
        not {("pi-1", "publish", TOPICS.task("pi-1")), ("pi-1", "subscribe", TOPICS.task("pi-2"))}
        & allowed
    )


def hocon(text):
    """The subset of HOCON that is written: tables, dotted keys, values up to the end of the line,
    lists of tables.
    """
    values = {}
    path = []
    for line in (line.strip() for line in text.splitlines()):
        if not line or line.startswith("#"):
            continue
        if line.endswith(("{", "[")) and not line.startswith("{"):
            path.append(line.rstrip("{[= "))
        elif line in {"}", "]"}:
            path.pop()
        else:
            key, value = re.fullmatch(r"(?:([\w.]+) = )?(.+)", line).groups()
            values[".".join([*path, key] if key else path)] = value.strip('"')
    assert path == []
    return values


def test_the_listener_asks_for_a_certificate_and_takes_its_name(folder):
    """Every other listener is off; paths are those that the file says to copy to, and limits are
    Mosquitto's.
    """
    found = hocon((folder / "emqx" / "emqx.hocon").read_text())
    tls = "listeners.ssl.default.ssl_options"
    assert found["listeners.ssl.default.bind"] == "0.0.0.0:8884"
    assert [found[f"listeners.{kind}.default.enable"] for kind in ("tcp", "ws", "wss")] == [
        "false"
    ] * 3
    assert (found[f"{tls}.verify"], found[f"{tls}.fail_if_no_peer_cert"]) == ("verify_peer", "true")
    for key, name in {
        "cacertfile": "ca.pem",
        "certfile": "broker.pem",
        "keyfile": "broker.key",
    }.items():
        assert found[f"{tls}.{key}"] == f"${{EMQX_ETC_DIR}}/shoal/{name}"
        assert (folder / name).exists()
    assert found["mqtt.peer_cert_as_username"] == "cn"
    assert int(found["mqtt.max_packet_size"].removesuffix("MB")) * 2**20 == MAX_PAYLOAD_BYTES
    assert found["authorization.no_match"] == "deny"
    assert "type = file" in found["authorization.sources"]
    assert "/shoal/acl.conf" in found["authorization.sources"]


def test_server_and_boards_are_told_where_it_is(folder):
    """It is somebody else's broker to the server, which starts none."""
    config = load_config(folder / "fleet.toml", FleetConfig).resolved(folder)
    assert not config.broker.hosted
    assert str(broker_address(config.broker)) == "mqtts://broker.local:8884"
