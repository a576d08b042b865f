"""What identities cost: an update put into sealed envelopes and taken out, beside the TLS wire that
carries it.
"""

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
from broker_server.service.authority import NewFleet, enroll, found_fleet
from broker_server.service.membership import hosted_broker
from broker_server.settings.fleet import BrokerConfig
from fleet_protocol.blobs import DEFAULT_CHUNK_BYTES, decode_chunk, iter_chunks
from fleet_protocol.identity.certificate import read_certificate
from fleet_protocol.identity.chunks import ChunkSigner, ChunkVerifier
from fleet_protocol.identity.enrolment import read_enrolment
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
    """Processor time of this process, all threads: the best of some tries."""
    return 1000 * min(timeit.repeat(work, timer=time.process_time, number=1, repeat=REPEATS))


def rows() -> list[Row]:
    """Measure both ends of one update, without the broker between them.

    There is no budget, as a wire is cheaper than any signature.
    """
    data = os.urandom(UPDATE_BYTES)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def framed(*, digests: bool = True) -> Iterator[tuple[str, bytes]]:
        for index, frame in iter_chunks(data, DEFAULT_CHUNK_BYTES, ((0, 2**20),), digests=digests):
            yield TOPICS.upload("t1", index), frame

    def carry() -> None:
        left = sender.publish_stream(framed(), time.monotonic() + 60)
        while left:
            event = inbox.get(timeout=60)
            if isinstance(event, Received):
                decode_chunk(event.payload)
                left -= 1

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "fleet"
        port = free_port()
        found_fleet(folder, NewFleet("bench", "127.0.0.1", port))
        device = read_enrolment(enroll(folder, "pi-1"))
        server = read_enrolment(folder / "server.enrolment")
        config = BrokerConfig(port=port, identity=folder / "server.enrolment")
        stack.enter_context(
            hosted_broker(config, "bench", folder / "broker") or contextlib.nullcontext()
        )
        sender = open_transport(device.address(folder / "device"), "device", queue.SimpleQueue())
        receiver = open_transport(server.address(folder / "server"), "server", inbox)
        for link in (sender, receiver):
            stack.callback(link.close)
            link.connect(10)
        receiver.subscribe(TOPICS.upload("+", "+"))
        wire = _cpu_ms(carry)
    keys = KnownKeys(device)
    operator = Ed25519PublicKey.from_public_bytes(bytes.fromhex(server.operator))
    keys.record_signer(read_certificate(bytes.fromhex(server.certificate), operator))

    verifier = Verifier(server, ReplayGuard())

    def sealed() -> Iterator[tuple[str, bytes]]:
        signer = ChunkSigner(device, keys)  # with a key of its own, as for every update
        return (
            (topic, signer.seal_to_server(topic, frame)) for topic, frame in framed(digests=False)
        )

    def opened() -> None:
        reader = ChunkVerifier(
            server, verifier, KnownKeys(server)
        )  # which has not heard of this update before
        for topic, envelope in envelopes:
            decode_chunk(reader.open(topic, envelope).payload)

    frames = list(framed())
    envelopes = list(sealed())
    parts = {
        "cut": _cpu_ms(lambda: deque(framed(), 0)),
        "cut, signed and sealed": _cpu_ms(lambda: deque(sealed(), 0)),
        "taken": _cpu_ms(lambda: [decode_chunk(frame) for _, frame in frames]),
        "opened, verified and taken": _cpu_ms(opened),
    }
    cut, cut_sealed, taken, taken_sealed = parts.values()
    found = [(name, value, "ms CPU") for name, value in {"wire, TLS": wire, **parts}.items()]
    found.append(
        (
            "what signing and sealing add",
            (cut_sealed - cut + taken_sealed - taken) / wire,
            "x wire",
        )
    )
    what = f"update of {UPDATE_BYTES / 1e6:.0f} MB"
    return [Row(f"{what}: {name}", value, unit) for name, value, unit in found]
