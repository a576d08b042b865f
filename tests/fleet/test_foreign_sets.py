"""An enrolled fleet that trains with an artifact set from somebody else: devices get no other file
of the server.
"""

import contextlib
import json
import queue
import shutil
import threading
import time

import pytest

from broker_server.rounds.artifacts import load_artifacts
from broker_server.service.authority import enroll, found_fleet
from broker_server.service.new_fleet import NewFleet
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from fleet_protocol.blobs import decode_chunk
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import ConfigError
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.identity.member import Member
from fleet_protocol.manifest import digest_of
from fleet_protocol.messages import DeviceProfile, DeviceStatus, NeedChunks
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Received, open_transport
from tests.broker_server.peer import profile
from tests.brokers import mosquitto_broker

TOPICS = Topics("test")


def add_file(tier, path, data, digest):
    """Add a file to the manifest of a tier's set."""
    manifest = json.loads((tier / "manifest.json").read_bytes())
    manifest["files"]["notes"] = {"path": path, "digest": digest, "size": len(data)}
    (tier / "manifest.json").write_text(json.dumps(manifest))


def climbing(tier, key):
    add_file(tier, "../../../operator.pem", key.read_bytes(), "0" * 64)


def absolute(tier, key):
    add_file(tier, str(key), key.read_bytes(), "0" * 64)


def linked(tier, key):
    (tier / "notes").symlink_to(key)
    add_file(tier, "notes", key.read_bytes(), "0" * 64)


def linked_folder(tier, key):
    (tier / "notes").symlink_to(key.parent)
    add_file(tier, f"notes/{key.name}", key.read_bytes(), "0" * 64)


def linked_with_its_digest(tier, key):
    (tier / "notes").symlink_to(key)
    add_file(tier, "notes", key.read_bytes(), digest_of(key.read_bytes()))


def hard_linked(tier, key):
    (tier / "notes").hardlink_to(key)
    add_file(tier, "notes", key.read_bytes(), "0" * 64)


def harmless(tier, key):
    notes = b"it was trained on digits" + bytes(key.stat().st_size)
    (tier / "notes").write_bytes(notes)
    add_file(tier, "notes", notes, digest_of(notes))


@contextlib.contextmanager
def thief(enrolment, url, folder):
    """A device of the fleet that asks for any digest, and what came of it."""
    inbox = queue.SimpleQueue()
    member = Member(enrolment, folder, remembers=True)
    link = open_transport(BrokerAddress.parse(url), "thief", inbox, member=member)
    try:
        link.connect(30)
        yield link, inbox
    finally:
        link.close()


def stolen(link, inbox, digest, until):
    """Bytes of a blob that arrive, asked for again and again until an event is set, and for a
    second beyond.
    """
    name = "pi-1"
    pieces = []
    link.subscribe(TOPICS.blob_filter(digest))
    end = None
    while not pieces and (end is None or time.monotonic() < end):
        if until.is_set() and end is None:
            end = time.monotonic() + 1.0
        said = DeviceProfile(fleet="test", device=name, profile=profile())
        link.publish(TOPICS.profile(name), said.to_bytes(), retain=True)
        status = DeviceStatus(fleet="test", device=name, online=True, state="idle")
        link.publish(TOPICS.status(name), status.to_bytes(), retain=True)
        need = NeedChunks(
            fleet="test", device=name, run="r", round=1, task="t", digest=digest, ranges=((0, 9),)
        )
        link.publish(TOPICS.reply(name), need.to_bytes())
        with contextlib.suppress(queue.Empty):
            event = inbox.get(timeout=0.3)
            if isinstance(event, Received) and f"/blobs/{digest}/" in event.topic:
                pieces.append(decode_chunk(event.payload).payload)
    return b"".join(pieces)


@pytest.mark.attack(
    "file",
    "An artifact set names the operator's key by a relative or absolute path, or by a link",
    "the run does not begin; no byte of the key is published",
    "2026-11-28",
)
@pytest.mark.parametrize(
    "change",
    [climbing, absolute, linked, linked_folder, linked_with_its_digest, hard_linked, harmless],
    ids=lambda change: change.__name__,
)
def test_a_set_that_names_the_operators_key_gives_it_to_nobody(ground, tmp_path, change):
    """A member of the fleet asks for the digest under which the key would be; a file of the set's
    own arrives.
    """
    folder = ground.folder / "lab"
    with mosquitto_broker(tmp_path) as broker, contextlib.ExitStack() as stack:
        found_fleet(folder, NewFleet("test", "127.0.0.1", broker.port, broker.url))
        enrolment = read_enrolment(enroll(folder, "pi-1"))
        shutil.copytree(ground.artifacts, folder / "artifacts")
        tier = folder / "artifacts" / "mlp" / ground.tiers[0]
        change(tier, folder / "operator.pem")
        digest = json.loads((tier / "manifest.json").read_bytes())["files"]["notes"]["digest"]
        config = ground.config(broker.url, min_devices=3)
        model = config.model.model_copy(update={"artifacts": folder / "artifacts"})
        identity = BrokerConfig(url=broker.url, identity=folder / "server.enrolment")
        config = config.model_copy(update={"broker": identity, "model": model})
        server = stack.enter_context(Server(config.fleet, config.store, config.broker))
        refused = []
        over = threading.Event()

        def work():
            try:
                server.run(config)
            except ConfigError as error:
                refused.append(str(error))
            finally:
                over.set()

        running = threading.Thread(target=work)
        running.start()
        stack.callback(running.join, 30)
        stack.callback(server.stop)
        link, inbox = stack.enter_context(thief(enrolment, broker.url, tmp_path / "thief"))
        arrived = stolen(link, inbox, digest, over)
    assert (folder / "server" / "heard.counters").exists()  # of what the thief has sent
    if change is harmless:
        assert arrived == (tier / "notes").read_bytes()
        assert not refused
    else:
        assert b"PRIVATE KEY" not in arrived
        assert arrived == b""
        assert "notes" in refused[0] or "operator.pem" in refused[0]


def test_new_names_of_blobs_are_checked_too(ground):
    """A digest of the newer form is as good as one of the older."""
    shutil.copytree(ground.artifacts, ground.folder / "artifacts")
    tier = ground.folder / "artifacts" / "mlp" / ground.tiers[0]
    (tier / "notes").write_bytes(b"notes")
    add_file(tier, "notes", b"notes", blob_digest(b"other"))
    with pytest.raises(ConfigError, match="does not have the digest"):
        load_artifacts(ground.folder / "artifacts", "mlp", chunk_bytes=1024)
    add_file(tier, "notes", b"notes", blob_digest(b"notes"))
    files = load_artifacts(ground.folder / "artifacts", "mlp", chunk_bytes=1024).files
    assert files[blob_digest(b"notes")] == tier / "notes"
