"""Messages: validated on arrival, refused with a reason, described by a document that is never
stale.
"""

import json
from pathlib import Path

import pytest
from pydantic import Field

from fleet_protocol import messages as m
from fleet_protocol.configuration import load_config, parse_config, read_toml, validate_config
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.topics import (
    BlobTopic,
    DeviceTopic,
    ServerTopic,
    Topics,
    UploadTopic,
    check_name,
)
from tests.documents.asyncapi import document

REF = m.BlobRef(digest="ab" * 32, size=100_000, chunk_bytes=98_304)
TASK = {"fleet": "lab", "run": "r1", "round": 3, "task": "r1-3-pi"}
FROM = {**TASK, "device": "pi"}
METRICS = m.TaskMetrics(
    examples=10,
    batches=3,
    labels=(0, 2),
    fetch_seconds=0.1,
    train_seconds=1.5,
    resident_bytes=100,
    train_loss=0.5,
)
KEYS = ("12" * 32, "ef" * 32, "3c" * 32)
SEALED = "5a" * 151
SERVER = [
    m.Offer(
        **TASK,
        version=2,
        choices=(m.TierChoice(tier="w0.50-d4", artifact_set=REF, weights=REF),),
        train=m.TrainSettings(learning_rate=0.1, epochs=1, batch_size=8, seed=1),
        seconds_left=60,
    ),
    m.Cancel(**TASK, reason="round closed"),
    m.UploadAck(**TASK),
    m.UploadMissing(**TASK, ranges=((0, 2),)),
    m.UploadRefused(**TASK, reason=RefusalReason.NOT_FINITE, detail="conv1.weight"),
    m.Sum(**TASK, keys={"pi": KEYS, "nano": KEYS}),
    m.Sum(**TASK, dealt={"pi": SEALED, "nano": SEALED}, challenge="7" * 66),
    m.Sum(**TASK, disputed=("pi",)),
    m.Sum(**TASK, members=("pi", "nano")),
    m.Sum(**TASK, unmatched=("nano",)),
    m.Sum(**TASK, sent=("pi", "nano")),
    m.Ask(task="p1", fleet="lab", device="pi", asked={"x": [[1, 2.5]], "id": "a"}, seconds=5),
]
DEVICE = [
    m.Accept(**FROM, tier="w0.50-d4"),
    m.Progress(**FROM, epoch=1, epochs=3, step=10, loss=0.5),
    m.NeedChunks(**FROM, digest=REF.digest, ranges=((0, 1),)),
    m.Done(**FROM, update=REF, tier="w0.50-d4", metrics=METRICS),
    m.Refuse(**FROM, reason=RefusalReason.NO_SPACE, detail="disk full"),
    m.Accept(**FROM, tier="w0.50-d4", lacks=("weights",), keys=KEYS),
    m.Shares(**FROM, sealed={"pi": SEALED, "nano": SEALED}),
    m.Shares(**FROM, checks={"pi": "7" * 66, "nano": ""}),
    m.Shares(**FROM, openings={"pi": "7" * 262}),
    m.Shares(**FROM, pair_keys={"pi": "7" * 64}),
    m.Shares(**FROM, revealed={"pi": "0" * 65 + "7", "nano": "f" * 66}),
    m.Predicted(
        **FROM, model={"run": "r", "version": 3}, predictions=[{"label": 1, "logits": [0.5, [1]]}]
    ),
    m.Predicted(**FROM, reason=RefusalReason.AWAY, detail="it is not connected"),
]


@pytest.mark.parametrize("message", SERVER, ids=lambda v: v.type)
def test_server_messages_round_trip(message):
    """What the server writes the device reads."""
    assert m.parse_server_message(message.to_bytes()) == message


@pytest.mark.parametrize("message", DEVICE, ids=lambda v: v.type)
def test_device_messages_round_trip(message):
    """What the device writes the server reads; the two directions do not mix."""
    assert m.parse_device_message(message.to_bytes()) == message
    with pytest.raises(RefusedError):
        m.parse_server_message(message.to_bytes())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"v": 5}, RefusalReason.MALFORMED),
        ({"type": "explode"}, RefusalReason.MALFORMED),
        ({"surprise": 1}, RefusalReason.MALFORMED),
        ({"round": 0}, RefusalReason.MALFORMED),
        ({"device": "../pi"}, RefusalReason.MALFORMED),
        ({"device": "x" * 300_000}, RefusalReason.OVERSIZED),
    ],
)
def test_bad_messages_are_refused_with_a_reason(change, reason):
    """Unknown versions, types and fields, and names that are no names, never get past the
    parser.
    """
    payload = json.dumps({**json.loads(DEVICE[0].to_bytes()), **change}).encode()
    with pytest.raises(RefusedError) as caught:
        m.parse_device_message(payload)
    assert caught.value.reason is reason


@pytest.mark.parametrize("payload", [b"", b"{", b"null", b"[1]", b"\xff\xfe", b'{"type":"accept"}'])
def test_noise_is_refused(payload):
    """Bytes that are no message are a refusal, not a crash."""
    for parse in (m.parse_device_message, m.parse_server_message, m.parse_presence):
        with pytest.raises(RefusedError):
            parse(payload)


@pytest.mark.parametrize(("field", "version"), [("schema_version", 5), ("v", 6), ("v", 9)])
def test_a_message_of_another_version_is_refused_by_its_number(field, version):
    """A board that was not brought up to date is told so in the server's log, and is not half
    understood.
    """
    other = {
        field: version,
        "type": "status",
        "fleet": "lab",
        "device": "pi",
        "online": True,
        "state": "idle",
    }
    with pytest.raises(
        RefusedError,
        match=f"version {version} of the protocol, but this Shoal supports version 8: install",
    ):
        m.parse_presence(json.dumps(other).encode())


def test_what_topic_and_task_say_is_not_said_again_and_may_not_differ():
    """Left out it is filled in; said, it stays for whoever receives it to compare; nothing is no
    name.
    """
    said = m.Accept(task="t1")
    assert said.to_bytes() == b'{"v":8,"type":"accept","task":"t1"}'
    heard = m.parse_device_message(said.to_bytes()).completed(
        fleet="lab", device="pi", run="r1", round=3, tier="w1.00-d1"
    )
    assert (heard.fleet, heard.device, heard.run, heard.round, heard.tier) == (
        "lab",
        "pi",
        "r1",
        3,
        "w1.00-d1",
    )
    assert m.Accept(**FROM).completed(fleet="attic", device="nano", run="r2", round=4) == m.Accept(
        **FROM
    )
    for nothing in ({"device": ""}, {"round": 0}, {"run": ""}):
        with pytest.raises(RefusedError):
            m.parse_device_message(
                json.dumps({"v": 8, "type": "accept", "task": "t1", **nothing}).encode()
            )


def test_what_a_task_costs_beside_its_tensors_is_small():
    """The demo's updates have some kilobytes: what is said around each of them stays a few hundred
    bytes.
    """
    task = "t11-9abadfafd7a658df3e98"
    ref = m.BlobRef(digest="1e20" + "ab" * 32, size=79_424)
    metrics = METRICS.model_copy(update={"labels": tuple(range(10)), "mean_loss": 0.25})
    offer = SERVER[0].model_copy(
        update={
            "fleet": "",
            "run": "20261123-104804-254b",
            "round": 11,
            "task": task,
            "seconds_left": 59.989,
        }
        | {"choices": (m.TierChoice(tier="w1.00-d1", artifact_set=ref, weights=ref),)}
    )
    about = [
        offer,
        m.Accept(task=task, lacks=("weights",)),
        m.Done(task=task, update=ref, metrics=metrics),
    ]
    sizes = [
        len(message.to_bytes())
        for message in (*about, m.UploadAck(task=task), m.DeviceStatus(online=True, state="idle"))
    ]
    assert [size <= most for size, most in zip(sizes, (450, 90, 330, 70, 60), strict=True)] == [
        True
    ] * 5, sizes


def test_infinite_numbers_do_not_travel():
    """A loss that is not finite cannot be written into a message."""
    with pytest.raises(ValueError, match="finite"):
        m.Progress(**FROM, epoch=1, epochs=1, step=1, loss=float("nan"))


def test_chunk_count_rounds_up():
    """The last chunk may be short."""
    assert REF.chunks == 2


def test_committed_asyncapi_document_is_what_the_code_says():
    """docs/asyncapi.json is generated: run `make docs` after changing a message."""
    committed = Path(__file__).parents[2] / "docs" / "asyncapi.json"
    assert json.loads(committed.read_text()) == json.loads(json.dumps(document()))


def test_asyncapi_references_resolve():
    """Every $ref of the document leads somewhere."""
    doc = document()

    def walk(node):
        if isinstance(node, dict):
            if "$ref" in node:
                target = doc
                for part in node["$ref"].removeprefix("#/").split("/"):
                    target = target[part]
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(doc)


def test_topics_of_another_fleet_are_foreign():
    """A fleet whose name begins like ours is not ours."""
    topics = Topics("lab")
    assert topics.parse(topics.reply("pi")) == DeviceTopic("pi", "reply")
    assert topics.parse(Topics("lab2").reply("pi")) is None


@pytest.mark.parametrize(
    ("topic", "value"),
    [
        (Topics("lab").status("pi"), DeviceTopic("pi", "status")),
        (Topics("lab").profile("pi"), DeviceTopic("pi", "profile")),
        (Topics("lab").task("pi"), DeviceTopic("pi", "task")),
        (Topics("lab").blob("ab", 3), BlobTopic("ab", "3")),
        (Topics("lab").upload("t1", 0), UploadTopic("t1", "0")),
        (Topics("lab").server_control, ServerTopic("control")),
        (Topics("lab").server_events, ServerTopic("events")),
        (Topics("lab").root, None),
        (Topics("lab").root + "/devices/pi/diary", None),
        (Topics("lab").root + "/devices/pi/reply/again", None),
        (Topics("lab").root + "/uploads/t1", None),
        *(
            (f"{Topics('lab').root}/devices/{name}/status", None)
            for name in ("+", "", "..", "\x1b[2J", "a\n", "x" * 65)
        ),
    ],
)
def test_what_is_spelled_is_parsed(topic, value):
    """Every topic of a fleet is read back as a value; forms that nobody spells are none."""
    assert Topics("lab").parse(topic) == value


@pytest.mark.parametrize("name", ["", "a/b", "+", "#", "a b", "é", "-x", "x" * 65, "a\n"])
def test_names_that_would_break_a_topic_are_refused(name):
    """Wildcards, separators and the like cannot become ids."""
    with pytest.raises(ConfigError):
        check_name("device", name)


class _Inner(FrozenModel):
    learning_rate: float = Field(gt=0)


class _Outer(FrozenModel):
    rounds: int
    train: _Inner | None = None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rounds = 1\nround = 2", "unknown key 'round'; did you mean 'rounds'"),
        (
            "rounds = 1\n[train]\nlearnin_rate = 0.1",
            "unknown key 'train.learnin_rate'; did you mean 'learning_rate'",
        ),
        ("rounds = 1\nxyzzy = 2", "known keys: rounds, train"),
        ("rounds = 'many'", "rounds: "),
        ("rounds = true", "rounds: Input should be a valid integer (got True)"),
        ("rounds = '5'", "rounds: Input should be a valid integer (got '5')"),
        ("rounds = 1\ntrain = 3", "train: Input should be a table (got 3)"),
        ("rounds = ", "not valid TOML"),
        ("", "rounds: Field required"),
        ("rounds = 1\n[train]\nlearning_rate = -1", "train.learning_rate"),
    ],
)
def test_config_errors_name_the_key_and_what_to_do(text, says):
    """A typo in a configuration is an error that names the key and the nearest one that exists."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, _Outer, source="fleet.toml")
    assert says in str(caught.value)
    assert "fleet.toml" in str(caught.value)


ENDLESS = {
    "a key with dots": ".".join(["a"] * 5000) + " = 1",
    "a table with dots": f"[{'.'.join(['a'] * 5000)}]",
    "brackets": "a = " + "[" * 5000 + "]" * 5000,
    "a number in hexadecimal": "rounds = 0x" + "f" * 100_000,
    "a long text": "rounds = '" + "x" * 100_000 + "'",
}


@pytest.mark.attack(
    "file",
    "A configuration has keys with thousands of dots, or numbers with thousands of digits",
    "refused with a short one-line error that names the file and the key",
    "2026-11-29",
)
@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_a_configuration_without_end_is_one_short_line(text, tmp_path):
    """Dots nest tables without a bracket, and hexadecimal numbers have no limit of digits."""
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    for written in (True, False):
        with pytest.raises(ConfigError) as caught:
            validate_config(read_toml(path), _Outer, source="fleet.toml", written=written)
        assert len(str(caught.value)) < 1000


def test_missing_config_file_is_named(tmp_path):
    """A path that leads nowhere is said in the error."""
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml", _Outer)
