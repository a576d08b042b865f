"""The embedded broker: rumqttd from the iotcore wheel, in a child that ends with the server.

It is for fleets on one computer. The child runs this module: ``python -m
broker_server.service.embedded_broker <file.toml>`` serves until its standard input closes, so the
broker never outlives its server, however the server ends.
"""

import importlib.util
import logging
import os
import sys

from typing_extensions import override

from broker_server.service.broker import MAX_PAYLOAD_BYTES, ChildBroker
from fleet_protocol.child_process import python_module, when_parent_ends
from fleet_protocol.errors import ConfigError
from fleet_protocol.identity.enrolment import write_secret
from fleet_protocol.transport import bracket_host

# rumqttd keeps a log in memory for every topic filter that was ever subscribed to, and so for every
# blob, and never frees it: the product of the two limits is the most that one filter may hold. A
# reader that falls further behind loses chunks and requests them again.
_SEGMENT_BYTES = 1024 * 1024
_SEGMENTS = 8
# For a small message it keeps everything that arrived with it from the network, 64 kB or more: logs
# of small messages stay short.
_SMALL_SEGMENT_BYTES = 16 * 1024
_SMALL_SEGMENTS = 4

_CONFIG = """\
id = 0

[router]
id = 0
max_connections = 10010
max_outgoing_packet_count = 200
max_segment_size = {segment_bytes}
max_segment_count = {segments}

    [router.custom_segment."shoal/v1/+/devices/+/reply"]
    max_segment_size = {small_segment_bytes}
    max_segment_count = {small_segments}

    [router.custom_segment."shoal/v1/+/devices/+/task"]
    max_segment_size = {small_segment_bytes}
    max_segment_count = {small_segments}

[v5.1]
name = "v5"
listen = "{listen}"
next_connection_delay_ms = 1

    [v5.1.connections]
    connection_timeout_ms = 60000
    max_payload_size = {max_payload_bytes}
    max_inflight_count = 100
    dynamic_filters = true
"""


class EmbeddedBroker(ChildBroker):
    """The broker of `shoal[broker]`, for one computer: it requires no login, and encrypts nothing.

    The arguments are those of `ChildBroker`.
    """

    @override
    def _command(self) -> list[str]:
        if importlib.util.find_spec("iotcore") is None:
            raise ConfigError(
                "the embedded broker needs the package iotcore: pip install "
                "'shoal[broker]', or use another broker with [broker] url = "
                '"mqtt://host:1883"'
            )
        config = self._folder / "broker.toml"
        text = _CONFIG.format(
            listen=f"{bracket_host(self.listen)}:{self.port}",
            segment_bytes=_SEGMENT_BYTES,
            segments=_SEGMENTS,
            small_segment_bytes=_SMALL_SEGMENT_BYTES,
            small_segments=_SMALL_SEGMENTS,
            max_payload_bytes=MAX_PAYLOAD_BYTES,
        )
        write_secret(config, text)
        return python_module("broker_server.service.embedded_broker", str(config))


def _serve(config: str) -> None:
    import iotcore  # noqa: PLC0415  (an optional package, and only the child needs it)

    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # rumqttd reports each packet inside an error span, which would appear here as an error.
    logging.getLogger("rumqttd").setLevel(logging.CRITICAL)
    # iotcore's own exit waits for open connections.
    when_parent_ends(lambda: os._exit(0))
    iotcore.IotCoreBroker(config_path=config).run_forever()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
