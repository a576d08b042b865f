"""What identities cost: signing and sealing an update, beside the TLS wire that carries it."""

import contextlib
import os
import queue
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.row import Row
from broker_server.service.authority import Founding, enroll, found_fleet
from broker_server.service.membership import hosted_broker
from broker_server.settings.fleet import BrokerConfig
from fleet_protocol.blobs import DEFAULT_CHUNK_BYTES, decode_chunk, iter_chunks
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.identity.envelope import Signer, Verifier
from fleet_protocol.identity.marks import Marks
from fleet_protocol.identity.sealing import Purpose, public_key, seal, unseal
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Received, open_transport
from tests.brokers import free_port

UPDATE_BYTES, REPEATS = 4_000_000, 5
TOPICS = Topics("bench")


def _cpu_ms(work: Callable[[], object]) -> float:
    """Processor time of this process, all threads: the best of some tries."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        times.append(1000 * (time.process_time() - began))
    return min(times)


def rows() -> list[Row]:
    """Measure both ends of one update, without the broker between them.

    There is no budget, as a wire is cheaper than any signature.
    """
    data, purpose = os.urandom(UPDATE_BYTES), Purpose("bench", "r1", 1, "t1", "pi-1", "1e20" + "0" * 64)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def framed() -> list[tuple[str, bytes]]:
        chunks = iter_chunks(data, DEFAULT_CHUNK_BYTES, ((0, 2**20),))
        return [(TOPICS.upload("t1", index), frame) for index, frame in chunks]

    def carry() -> None:
        left = sender.publish_stream(framed(), time.monotonic() + 60)
        while left:
            event = inbox.get(timeout=60)
            if isinstance(event, Received):
                decode_chunk(event.payload)
                left -= 1

    with contextlib.ExitStack() as stack:
        folder, port = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "fleet", free_port()
        found_fleet(folder, Founding("bench", "127.0.0.1", port))
        device, server = read_enrolment(enroll(folder, "pi-1")), read_enrolment(folder / "server.enrolment")
        config = BrokerConfig(port=port, identity=folder / "server.enrolment")
        stack.enter_context(hosted_broker(config, "bench", folder / "broker") or contextlib.nullcontext())
        sender = open_transport(device.address(folder / "device"), "device", queue.SimpleQueue())
        receiver = open_transport(server.address(folder / "server"), "server", inbox)
        for link in (sender, receiver):
            stack.callback(link.close)
            link.connect(10)
        receiver.subscribe(TOPICS.all_uploads)
        wire = _cpu_ms(carry)
    signer, verifier, reader = Signer(device, 1), Verifier(server, Marks()), public_key(server.sealing[0])
    signed = [(topic, signer.seal(topic, frame)) for topic, frame in framed()]
    sealed = b"".join(seal(data, reader, purpose))
    frames = framed()
    parts = {
        "sign": _cpu_ms(lambda: [signer.seal(topic, frame) for topic, frame in frames]),
        "verify": _cpu_ms(lambda: [verifier.open(topic, envelope) for topic, envelope in signed]),
        "seal": _cpu_ms(lambda: seal(data, reader, purpose)),
        "open": _cpu_ms(lambda: unseal(sealed, server.sealing, purpose)),
    }
    found = [(name, value, "ms CPU") for name, value in {"wire, TLS": wire, **parts}.items()]
    found.append(("sign, verify, seal, open", sum(parts.values()) / wire, "x wire"))
    what = f"update of {UPDATE_BYTES / 1e6:.0f} MB"
    return [Row(f"{what}: {name}", value, unit) for name, value, unit in found]
