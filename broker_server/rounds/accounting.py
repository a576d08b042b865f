"""Defines the byte counters of a run.

payload_bytes: bytes of the weights and artifacts that were published, each chunk once however often
it had to be repaired, plus the bytes of every update that was stored. A server without any protocol
would also have to transfer these bytes; ``wire_bytes / payload_bytes`` is the overhead of the
protocol. After a restart of the server a chunk that is published again is counted again.
wire_bytes: MQTT packets that carried messages on the server's own connection, both ways, with
headers, acknowledgements, control messages and repairs; without keep-alives, TCP and TLS. The
broker's fan-out to the devices does not pass this connection: a blob that six devices wait for is
published, and counted, once.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ByteCount:
    """Bytes of a run since some moment."""

    wire: int
    payload: int
