"""Finds chunks that the broker takes before a run begins, instead of in its first round.

Some brokers say when a client connects how large a packet may be. Others refuse larger ones, or end
the connection, so one packet is sent on trial, on the topic of a blob that nobody waits for.
"""

import time

from fleet_protocol.chunk_sizes import PACKET_ROOM, smaller_chunks
from fleet_protocol.errors import BrokerRefusedError, ConfigError, TransportError
from fleet_protocol.refusals import PACKET_TOO_LARGE, explain
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Transport

TRIAL_SECONDS = 15.0  # for a packet to be acknowledged; a broker that is away says nothing
_NO_BLOB = "0" * 64


def find_chunk_bytes(link: Transport, topics: Topics, wanted: int) -> int:
    """Return the payload bytes of the largest chunk up to a size that the broker takes.

    Raises:
        ConfigError: it takes none.
    """
    chunk_bytes = wanted
    while not _is_taken(link, topics, chunk_bytes):
        smaller = smaller_chunks(chunk_bytes, link.packet_bytes)
        if smaller is None:
            raise ConfigError(
                f"the broker at {link.address} takes packets of {link.packet_bytes:,} bytes, which "
                f"has no room for any chunk {explain(PACKET_TOO_LARGE)}"
            )
        chunk_bytes = smaller
    return chunk_bytes


def _is_taken(link: Transport, topics: Topics, chunk_bytes: int) -> bool:
    """Return whether the broker takes chunks of a size, as far as it says."""
    if chunk_bytes > link.packet_bytes - PACKET_ROOM:
        return False
    packet = bytes(chunk_bytes + PACKET_ROOM // 2)
    try:
        link.publish(topics.blob(_NO_BLOB, 0), packet)
        link.drain(time.monotonic() + TRIAL_SECONDS)
    except BrokerRefusedError:
        return False
    except TransportError:
        return True
    return chunk_bytes <= link.packet_bytes - PACKET_ROOM
