"""Measure the cost of identities: an update is sealed and opened, beside the TLS wire it takes."""

import contextlib
import os
import queue
import tempfile
import time
import timeit
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from benchmarks.row import Row
from broker_server.service.authority import enroll, found_fleet
from broker_server.service.membership import hosted_broker
from broker_server.service.new_fleet import NewFleet
from broker_server.settings.broker import BrokerConfig
from fleet_protocol.blobs import DEFAULT_CHUNK_BYTES, decode_chunk, iter_chunks
from fleet_protocol.identity.certificate import read_certificate
from fleet_protocol.identity.chunks import ChunkSigner, ChunkVerifier
from fleet_protocol.identity.enrolment import Enrolment, read_enrolment
from fleet_protocol.identity.envelope import Verifier
from fleet_protocol.identity.group import KnownKeys
from fleet_protocol.identity.replay_guard import ReplayGuard
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Received, open_transport
from tests.brokers import free_port

UPDATE_BYTES = 4_000_000
REPEATS = 20
TOPICS = Topics("bench")


def _cpu_ms(work: Callable[[], object]) -> float:
    """Return the processor time of this process, all threads: the best of some tries."""
    return 1000 * min(timeit.repeat(work, timer=time.process_time, number=1, repeat=REPEATS))


def rows() -> list[Row]:
    """Measure both ends of one update, without the broker between them.

    There is no budget, as a wire is cheaper than any signature.
    """
    data = os.urandom(UPDATE_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        wire, device, server = _measure_wire(Path(folder) / "fleet", data)
    ends = _measure_ends(data, device, server)
    added = (
        ends["cut, signed and sealed"]
        - ends["cut"]
        + ends["opened, verified and taken"]
        - ends["taken"]
    )
    title = f"update of {UPDATE_BYTES / 1e6:.0f} MB"
    rows = [Row(f"{title}: wire, TLS", wire, "ms CPU")]
    for name, value in ends.items():
        rows.append(Row(f"{title}: {name}", value, "ms CPU"))
    rows.append(Row(f"{title}: what signing and sealing add", added / wire, "x wire"))
    return rows


def _frames(data: bytes, *, digests: bool = True) -> Iterator[tuple[str, bytes]]:
    """Cut an update into frames, each with its topic."""
    for index, frame in iter_chunks(data, DEFAULT_CHUNK_BYTES, ((0, 2**20),), digests=digests):
        yield TOPICS.upload("t1", index), frame


def _measure_wire(folder: Path, data: bytes) -> tuple[float, Enrolment, Enrolment]:
    """Send an update through a broker over TLS.

    Returns:
        Processor time in ms, and the enrolments of the device and the server of the new fleet.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        port = free_port()
        found_fleet(folder, NewFleet("bench", "127.0.0.1", port))
        device = read_enrolment(enroll(folder, "pi-1"))
        server = read_enrolment(folder / "server.enrolment")
        config = BrokerConfig(url="mosquitto", port=port, identity=folder / "server.enrolment")
        broker = hosted_broker(config, "bench", folder / "broker")
        stack.enter_context(broker or contextlib.nullcontext())
        sender = open_transport(device.address(folder / "device"), "device", queue.SimpleQueue())
        receiver = open_transport(server.address(folder / "server"), "server", inbox)
        for link in (sender, receiver):
            stack.callback(link.close)
            link.connect(10)
        receiver.subscribe(TOPICS.upload("+", "+"))

        def carry() -> None:
            missing = sender.publish_stream(_frames(data), time.monotonic() + 60)
            while missing:
                event = inbox.get(timeout=60)
                if isinstance(event, Received):
                    decode_chunk(event.payload)
                    missing -= 1

        return _cpu_ms(carry), device, server


def _measure_ends(
    data: bytes,
    device: Enrolment,
    server: Enrolment,
) -> dict[str, float]:
    """Return the processor time in ms of both ends, with and without signatures and seals."""
    keys = KnownKeys(device)
    operator = Ed25519PublicKey.from_public_bytes(bytes.fromhex(server.operator))
    keys.record_signer(read_certificate(bytes.fromhex(server.certificate), operator))
    verifier = Verifier(server, ReplayGuard())

    def seal() -> Iterator[tuple[str, bytes]]:
        # A new signer with a new key, as for every update.
        signer = ChunkSigner(device, keys)
        for topic, frame in _frames(data, digests=False):
            yield topic, signer.seal_to_server(topic, frame)

    frames = list(_frames(data))
    envelopes = list(seal())

    def open_all() -> None:
        # A new verifier, which has not seen this update before.
        reader = ChunkVerifier(server, verifier, KnownKeys(server))
        for topic, envelope in envelopes:
            decode_chunk(reader.open(topic, envelope).payload)

    def decode_all() -> None:
        for _, frame in frames:
            decode_chunk(frame)

    return {
        "cut": _cpu_ms(lambda: deque(_frames(data), 0)),
        "cut, signed and sealed": _cpu_ms(lambda: deque(seal(), 0)),
        "taken": _cpu_ms(decode_all),
        "opened, verified and taken": _cpu_ms(open_all),
    }
