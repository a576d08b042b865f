"""The embedded broker: rumqttd from the iotcore wheel, in a child that dies with the server.

Run as a module it is that child: ``python -m broker_server.service.embedded_broker <file.toml>``
serves until its standard input closes, so the broker never outlives its server, however the server
ends.

With a gate the child takes TLS off in front of rumqttd, which shakes one hand after the other and
waits for each without end: a single stranger who connects and says nothing would keep everybody
else out.
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import socket
import ssl
import sys
import threading

from typing_extensions import override

from broker_server.service.broker import (
    MAX_PAYLOAD_BYTES,
    PROBE_SECONDS,
    ChildBroker,
    accepts_connections,
)
from fleet_protocol.child_process import python_module, when_parent_ends
from fleet_protocol.errors import ConfigError
from fleet_protocol.identity.enrolment import write_secret
from fleet_protocol.transport import bracket_host

_HANDSHAKE_SECONDS = 10.0

# rumqttd keeps a log in memory for every topic filter that was ever subscribed to, so for every
# blob, and never frees it: the product of the two is the most one filter may hold. A reader that
# falls further behind loses chunks and asks for them again.
_SEGMENT_BYTES = 1024 * 1024
_SEGMENTS = 8
# What it keeps of a small message is all that came with it from the network, 64 kB or more: logs of
# those stay short.
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
    """The broker of `shoal[broker]`, for one machine; with a gate, for a network."""

    @override
    def _command(self) -> list[str]:
        if importlib.util.find_spec("iotcore") is None:
            raise ConfigError(
                "the embedded broker needs the package iotcore: pip install 'shoal[broker]', "
                'or name a broker of your own with [broker] url = "mqtt://host:1883"'
            )
        config = self._folder / "broker.toml"
        inside = f"{bracket_host(self.listen)}:{self.port}"
        if self._gate is not None:
            # A free port for rumqttd behind the TLS front, on this computer alone.
            with socket.create_server(("127.0.0.1", 0)) as free:
                inside = f"127.0.0.1:{free.getsockname()[1]}"
        write_secret(
            config,
            _CONFIG.format(
                listen=inside,
                segment_bytes=_SEGMENT_BYTES,
                segments=_SEGMENTS,
                small_segment_bytes=_SMALL_SEGMENT_BYTES,
                small_segments=_SMALL_SEGMENTS,
                max_payload_bytes=MAX_PAYLOAD_BYTES,
            )
            + self._gate_text(),
        )
        arguments = [str(config)]
        if self._gate is not None:
            certificate, key = str(self._gate.certificate), str(self._gate.key)
            arguments += [inside, self.listen, str(self.port), certificate, key]
        return python_module("broker_server.service.embedded_broker", *arguments)

    def _gate_text(self) -> str:
        if self._gate is None:
            return ""
        lines = ["\n    [v5.1.connections.auth]\n"]
        for name, password in self._gate.logins().items():
            # A JSON string is a TOML string.
            lines.append(f"    {json.dumps(name)} = {json.dumps(password)}\n")
        return "".join(lines)


async def _admit(inside: str, listen: str, port: str, certificate: str, key: str) -> None:
    """Serve TLS in front of a broker that listens at an address of this machine without it."""
    host, _, inner = inside.partition(":")
    while not accepts_connections(host, int(inner)):  # noqa: ASYNC110
        await asyncio.sleep(PROBE_SECONDS)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            inner_reader, inner_writer = await asyncio.open_connection(host, int(inner))
            directions = [
                asyncio.create_task(copy(reader, inner_writer)),
                asyncio.create_task(copy(inner_reader, writer)),
            ]
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            inner_writer.close()
        writer.close()

    is_ipv6 = ":" in listen
    listening = socket.create_server(
        (listen, int(port)),
        family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=1024,
        dualstack_ipv6=is_ipv6,
    )
    server = await asyncio.start_server(
        connect, sock=listening, ssl=context, ssl_handshake_timeout=_HANDSHAKE_SECONDS
    )
    await server.serve_forever()


def _serve(config: str, *front: str) -> None:
    import iotcore  # noqa: PLC0415  (an optional package, and only the child needs it)

    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # rumqttd reports each packet inside an error span, which would arrive here as an error each.
    logging.getLogger("rumqttd").setLevel(logging.CRITICAL)
    when_parent_ends(lambda: os._exit(0))
    if front:
        threading.Thread(
            target=lambda: asyncio.run(_admit(*front)), name="front", daemon=True
        ).start()
    iotcore.IotCoreBroker(config_path=config).run_forever()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
