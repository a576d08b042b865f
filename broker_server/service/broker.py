"""Brokers that the server starts.

The embedded one is rumqttd from the iotcore wheel, in a child that dies with us.

Run as a module it is that child: ``python -m broker_server.service.broker <file.toml>`` serves
until its standard input closes, so the broker never outlives its server, however the server ends.
It has a session of its own: Ctrl-C in a terminal reaches the server, which says goodbye to the
fleet, and only then stops the broker.

With a gate the child takes TLS off in front of rumqttd, which shakes one hand after the other and
waits for each without end: a single stranger who connects and says nothing would keep everybody
else out.
"""

import asyncio
import contextlib
import errno
import importlib.util
import json
import logging
import math
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self, override

from fleet_protocol.child_process import python_module, when_parent_ends
from fleet_protocol.errors import ConfigError, TransportError
from fleet_protocol.identity.enrolment import write_secret
from fleet_protocol.transport import bracket_host

_DYING_SECONDS = 1.0
_LOOK_SECONDS = 1.0

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
START_SECONDS = 15.0
PROBE_SECONDS = 0.05
_HANDSHAKE_SECONDS = 10.0
_MOST_LOG_BYTES = 4 * 1024 * 1024  # strangers write into it, too

# rumqttd keeps a log in memory for every topic filter that was ever subscribed to, so for every
# blob, and never frees it: the product of the two is the most one filter may hold. A reader that
# falls further behind loses chunks and asks for them again.
_SEGMENT_BYTES = 1024 * 1024
_SEGMENTS = 8
# Nothing bounds how many filters there are: it is started again when it has grown by so much since
# it settled.
_MOST_GROWN_BYTES = 512 * 1024 * 1024
_SETTLING_SECONDS = 600.0
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


@dataclass(frozen=True)
class Gate:
    """How a broker lets members in, and nobody else."""

    certificate: Path  # file of its certificate, in PEM
    key: Path  # file of its key
    authority: Path  # file of the certificate that vouches for members
    withdrawn: Path  # file of the list of certificates that count for nothing any more
    logins: Callable[
        [], Mapping[str, str]
    ]  # names and passwords, asked whenever the broker starts, and every second


class ChildBroker(ABC):
    """A broker in a child process that dies with us, with configuration and log in a folder, which
    is made.

    Without a gate there are neither passwords nor encryption.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 1883,
        listen: str = "127.0.0.1",
        gate: Gate | None = None,
    ) -> None:
        self.port = port
        self.listen = listen
        self._gate = gate
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.RLock()
        self._renewed = False

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        return f"mqtt{'s' if self._gate else ''}://{bracket_host(self._host)}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the child process runs and listens."""
        return (
            self._process is not None
            and self._process.poll() is None
            and _answers(self._host, self.port)
        )

    @property
    def pid(self) -> int | None:
        """The child process, if there is one."""
        return self._process.pid if self._process is not None else None

    @property
    def _host(self) -> str:
        return "127.0.0.1" if self.listen in {"0.0.0.0", "::", ""} else self.listen  # noqa: S104  (compared, not bound)

    def start(self) -> None:
        """Start, and return when connections are accepted.

        Raises:
            ConfigError: the broker is not installed, or its address cannot be listened on.
            TransportError: the port is taken, the address is not there (yet), or the broker does
                not come up.
        """
        known = None if self._gate is None else self._gate.logins()
        command = self._command()
        self._check_port()
        log = self._folder / "broker.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603  (our own module, arguments are ours)
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._wait_until_listening(log)
        watch = threading.Thread(
            target=self._watch,
            args=(self._process, known),
            name="broker-watch",
            daemon=True,
        )
        watch.start()

    def _watch(self, process: "subprocess.Popen[bytes]", known: Mapping[str, str] | None) -> None:
        """Start it again when its members are others, as brokers read them when they start, or it
        has grown large.

        And when it lets nobody in any more: after a panic under its lock, as of a client's name
        with a plus sign.
        """
        young = time.monotonic() + _SETTLING_SECONDS
        bound = math.inf
        log = self._folder / "broker.log"
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
                return
            with contextlib.suppress(
                ConfigError, TransportError, OSError
            ):  # who asks next tries again, and says why
                size = resident_bytes(process.pid)
                bound = (
                    size + _MOST_GROWN_BYTES if time.monotonic() < young else bound
                )  # a large fleet is no growth
                said = log.read_bytes() if log.exists() else b""
                if (broken := b"PoisonError" in said) or len(said) > _MOST_LOG_BYTES:
                    os.truncate(log, 0)
                if (
                    broken
                    or size > bound
                    or (self._gate is not None and self._gate.logins() != known)
                ):
                    with self._changing:
                        if self._process is process:
                            self._renewed = True
                            self.stop()
                            self.start()
                    return

    @abstractmethod
    def _command(self) -> list[str]:
        """Write its configuration, and say how to start it so that it ends with its input.

        A ConfigError without it.
        """

    def _check_port(self) -> None:
        with socket.socket(socket.AF_INET6 if ":" in self.listen else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.listen, self.port))
            except PermissionError as error:
                raise ConfigError(
                    f"port {self.port} needs root; choose one above 1023 in [broker] port"
                ) from error
            except OSError as error:
                if _answers(self._host, self.port):
                    raise TransportError(
                        f"port {self.port} on {self.listen} is taken, probably by another broker: stop that one, "
                        f'use it with [broker] url = "{self.url}", or choose another [broker] port'
                    ) from error
                away = (
                    error.errno == errno.EADDRNOTAVAIL
                )  # an address that comes with the network, after a power cut
                kind = TransportError if away else ConfigError
                raise kind(
                    f"cannot listen on {self.listen}:{self.port}: {error.strerror}"
                ) from error

    def _wait_until_listening(self, log: Path) -> None:
        process = self._process
        deadline = time.monotonic() + START_SECONDS
        while process is not None and not _answers(self._host, self.port):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(PROBE_SECONDS)
                raise TransportError(f"the broker ended with {code}; see {log}")
            if time.monotonic() > deadline:
                self.stop()
                raise TransportError(f"the broker does not listen on port {self.port}; see {log}")

    def ensure(self) -> bool:
        """Start it again if it has died; True if it had to be started, now or since the last call.

        That it does not come up is a ConnectionError, which ends no run, as another program may
        have its port.
        """
        with self._changing:
            renewed = self._renewed
            self._renewed = False
            if self._process is not None:
                # Its connections are closed a moment before a process that dies is gone.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_DYING_SECONDS)
                if self._process.poll() is None:
                    return renewed
            self.stop()
            try:
                self.start()
            except (TransportError, ConfigError) as error:
                raise ConnectionError(str(error)) from error
            return True

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Stop it and free the port; stopping twice is no error."""
        with self._changing:
            process = self._process
            self._process = None
            if process is None:
                return
            if process.stdin is not None:
                process.stdin.close()  # iotcore's own way out waits for connections that are open
            process.terminate()
            try:
                process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout_seconds)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


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
        front = (
            []
            if self._gate is None
            else [
                inside,
                self.listen,
                self.port,
                self._gate.certificate,
                self._gate.key,
            ]
        )
        return python_module("broker_server.service.broker", str(config), *map(str, front))

    def _gate_text(self) -> str:
        if self._gate is None:
            return ""
        # A JSON string is a TOML string.
        logins = "".join(
            f"    {json.dumps(name)} = {json.dumps(word)}\n"
            for name, word in self._gate.logins().items()
        )
        return f"\n    [v5.1.connections.auth]\n{logins}"


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _answers(host: str, port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), timeout=0.5),
    ):
        return True
    return False


async def _admit(inside: str, listen: str, port: str, certificate: str, key: str) -> None:
    """Serve TLS in front of a broker that listens at an address of this machine without it."""
    host, _, inner = inside.partition(":")
    while not _answers(host, int(inner)):  # noqa: ASYNC110  (it does not tell when it listens)
        await asyncio.sleep(PROBE_SECONDS)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def pour(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()

    async def admitted(outer: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            answer, on = await asyncio.open_connection(host, int(inner))
            ways = [
                asyncio.create_task(pour(outer, on)),
                asyncio.create_task(pour(answer, back)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            on.close()
        back.close()

    family, both = (socket.AF_INET6, True) if ":" in listen else (socket.AF_INET, False)
    door = socket.create_server(
        (listen, int(port)), family=family, backlog=1024, dualstack_ipv6=both
    )
    opened = await asyncio.start_server(
        admitted, sock=door, ssl=context, ssl_handshake_timeout=_HANDSHAKE_SECONDS
    )
    await opened.serve_forever()


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
