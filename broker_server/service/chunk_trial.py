"""Finds a chunk size that the broker accepts before a run begins, instead of in its first round.

Some brokers announce the largest packet when a client connects. Others refuse larger packets, or
end the connection, so one packet is sent as a trial, on the topic of a blob that nobody waits for.
"""

import time

from fleet_protocol.chunk_sizes import PACKET_ROOM, smaller_chunks
from fleet_protocol.errors import BrokerRefusedError, ConfigError, TransportError
from fleet_protocol.refusals import PACKET_TOO_LARGE, explain
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Transport

TRIAL_SECONDS = 15.0  # for a packet to be acknowledged; an unreachable broker decides nothing
TRIAL_DIGEST = "0" * 64
"""Digest in the topic of the trial packet. No blob has it."""


def find_chunk_bytes(link: Transport, topics: Topics, wanted: int) -> int:
    """Return the payload bytes of the largest chunk up to a size that the broker accepts.

    Raises:
        ConfigError: it accepts none.
    """
    chunk_bytes = wanted
    while not _is_taken(link, topics, chunk_bytes):
        smaller = smaller_chunks(chunk_bytes, link.packet_bytes)
        if smaller is None:
            raise ConfigError(
                f"the broker at {link.address} accepts packets of {link.packet_bytes:,} "
                f"bytes, which are too small for any chunk {explain(PACKET_TOO_LARGE)}"
            )
        chunk_bytes = smaller
    return chunk_bytes


def _is_taken(link: Transport, topics: Topics, chunk_bytes: int) -> bool:
    """Return whether the broker accepts chunks of a size, or does not answer."""
    # The broker has announced a limit, so no trial is needed.
    if chunk_bytes > link.packet_bytes - PACKET_ROOM:
        return False
    # As large as a chunk with half of the room for its header.
    packet = bytes(chunk_bytes + PACKET_ROOM // 2)
    try:
        link.publish(topics.blob(TRIAL_DIGEST, 0), packet)
        link.drain(time.monotonic() + TRIAL_SECONDS)
    except BrokerRefusedError:
        return False
    # An unreachable broker says nothing about sizes, so the run begins with the configured one.
    except TransportError:
        return True
    # The broker may have announced a limit with a new connection meanwhile.
    return chunk_bytes <= link.packet_bytes - PACKET_ROOM
