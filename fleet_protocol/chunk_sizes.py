"""Sizes of chunks that fit into the packets that a broker accepts."""

from fleet_protocol.messages.bounds import LEAST_CHUNK_BYTES

PACKET_ROOM = 1024  # besides the payload of a chunk: topic, numbers, digest, signature
_MOST_CHUNKS = 16_384  # smallest chunks of an update compared with those of its server


def smaller_chunks(chunk_bytes: int, packet_bytes: int) -> int | None:
    """Return a chunk size that a broker may accept after it has refused another size.

    Args:
        chunk_bytes: payload bytes of the refused chunks.
        packet_bytes: largest packet that it accepts, as far as is known.

    Returns:
        At most half of it; None if no chunk is so small.
    """
    smaller = min(chunk_bytes // 2, packet_bytes - PACKET_ROOM)
    return smaller if smaller >= LEAST_CHUNK_BYTES else None


def least_chunk_bytes(size: int, offered: int) -> int:
    """Return the smallest chunks in which an update may be sent.

    A device may use smaller chunks than the server if its broker does not accept larger packets.
    Missing chunks are counted one by one, so tiny ones of a large update would cost the server
    much.

    Args:
        size: bytes of the update.
        offered: payload bytes of the chunks that the server sends.
    """
    return min(offered, max(LEAST_CHUNK_BYTES, -(-size // _MOST_CHUNKS)))
