"""Sizes of MQTT packets."""

PUBACK_BYTES = 4


def publish_packet_bytes(
    topic: str,
    payload_bytes: int,
    qos: int,
) -> int:
    """Return the size of an MQTT 5 PUBLISH packet without properties."""
    identifier_bytes = 2 if qos else 0
    remaining = 2 + len(topic.encode()) + identifier_bytes + 1 + payload_bytes
    length_bytes = 1
    for limit in (128, 16_384, 2_097_152):
        length_bytes += remaining >= limit
    return 1 + length_bytes + remaining
