"""Sizes of chunks that fit into the packets that a broker takes."""

from fleet_protocol.messages.bounds import LEAST_CHUNK_BYTES

PACKET_ROOM = 1024  # beside the payload of a chunk: topic, numbers, digest, signature
_MOST_CHUNKS = 16_384  # of an update in smaller chunks than its server cuts


def smaller_chunks(chunk_bytes: int, packet_bytes: int) -> int | None:
    """Return a size of chunks that a broker may take which takes none of another size.

    Args:
        chunk_bytes: payload bytes of the chunks that it does not take.
        packet_bytes: largest packet that it takes, as far as is known.

    Returns:
        At most the half; None if no chunk is so small.
    """
    smaller = min(chunk_bytes // 2, packet_bytes - PACKET_ROOM)
    return smaller if smaller >= LEAST_CHUNK_BYTES else None


def least_chunk_bytes(size: int, offered: int) -> int:
    """Return the smallest chunks in which an update may come.

    A device may cut smaller than the server where its broker takes no larger packets. Missing
    chunks are counted one by one, so tiny ones of a large update would cost the server much.

    Args:
        size: bytes of the update.
        offered: payload bytes of the chunks that the server sends.
    """
    return min(offered, max(LEAST_CHUNK_BYTES, -(-size // _MOST_CHUNKS)))
