"""An installed Mosquitto as the server's broker, with TLS, client certificates and access rules.

Run as a module it is the child that holds Mosquitto: ``python -m broker_server.service.mosquitto
<program> <file>`` serves until its standard input closes, so that the broker never outlives its
server.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from typing_extensions import override

from broker_server.service.broker import MAX_PAYLOAD_BYTES, ChildBroker, Gate
from fleet_protocol.child_process import python_module, when_parent_ends
from fleet_protocol.errors import ConfigError
from fleet_protocol.identity.enrolment import write_secret
from fleet_protocol.topics import Topics

_SERVER = "server"
# messages, of the bytes below, for a member that is away; what is dropped is asked for again
_QUEUED = 100_000

_CONFIG = """\
listener {port} {listen}
persistence true
persistence_location {folder}/
autosave_interval 60
max_packet_size {packet_bytes}
max_queued_messages {queued}
max_queued_bytes 536870912
set_tcp_nodelay true
log_type error
log_type warning
{user}{gate}"""

_GATE = """\
cafile {authority}
certfile {certificate}
keyfile {key}
require_certificate true
use_identity_as_username true
allow_anonymous false
acl_file {rules}
"""


def configuration(folder: Path, port: int, listen: str, gate: Gate | None) -> str:
    """Return the text of ``mosquitto.conf``; without a gate it lets anybody in."""
    access = "allow_anonymous true\n"
    if gate is not None:
        access = _GATE.format(
            authority=gate.authority,
            certificate=gate.certificate,
            key=gate.key,
            rules=folder / "acl",
        )
        if gate.withdrawn.exists():  # not in a folder from before there were such lists
            access += f"crlfile {gate.withdrawn}\n"
    return _CONFIG.format(
        port=port,
        listen=listen,
        folder=folder,
        packet_bytes=MAX_PAYLOAD_BYTES,
        queued=_QUEUED,
        # Started as root it would become a user who may read none of the fleet's keys.
        user="user root\n" if hasattr(os, "geteuid") and os.geteuid() == 0 else "",
        gate=access,
    )


def access_rules(fleet: str, members: Iterable[str]) -> str:
    """Return the text of the access rules.

    A device publishes under its own name, reads what is for it, and nothing else.
    """
    lines = []
    for name in members:
        lines.append(f"user {name}")
        for right, topic in rights(Topics(fleet), name):
            lines.append(f"topic {right} {topic}")
        lines.append("")
    return "\n".join(lines)


def rights(topics: Topics, name: str) -> list[tuple[str, str]]:
    """Return what a member may do: ``read``, ``write`` or ``readwrite``, and on which topics."""
    if name == _SERVER:
        return [("readwrite", f"{topics.root}/#")]
    return [
        ("write", topics.status(name)),
        ("write", topics.profile(name)),
        ("write", topics.reply(name)),
        ("write", f"{topics.root}/uploads/#"),
        ("read", topics.task(name)),
        ("read", topics.key(name)),
        ("read", topics.papers(name)),
        ("read", topics.server_status),
        ("read", f"{topics.root}/blobs/#"),
    ]


class MosquittoBroker(ChildBroker):
    """Mosquitto as a child of the server; with the access rules of the members when it starts."""

    def __init__(
        self,
        folder: Path,
        fleet: str,
        *,
        port: int = 1883,
        listen: str = "127.0.0.1",
        gate: Gate | None = None,
    ) -> None:
        super().__init__(folder.resolve(), port=port, listen=listen, gate=gate)
        self._fleet = fleet

    @override
    def _command(self) -> list[str]:
        program = shutil.which("mosquitto") or shutil.which(
            "mosquitto", path="/usr/sbin:/usr/local/sbin"
        )
        if program is None:
            raise ConfigError(
                'url = "mosquitto" needs an installed Mosquitto (apt install mosquitto), or take '
                'url = "embedded"'
            )
        if self._gate is not None:
            write_secret(self._folder / "acl", access_rules(self._fleet, self._gate.logins()))
        config = self._folder / "mosquitto.conf"
        write_secret(config, configuration(self._folder, self.port, self.listen, self._gate))
        # Not Mosquitto itself, which would not end with its input.
        return python_module("broker_server.service.mosquitto", program, str(config))


def _hold(program: str, config: str) -> int:
    """Serve until our input closes or the broker ends."""
    # Our input stays with us, so that it closes with the server alone.
    broker = subprocess.Popen([program, "-c", config], stdin=subprocess.DEVNULL)  # noqa: S603
    signal.signal(signal.SIGTERM, lambda *_: broker.terminate())
    when_parent_ends(broker.terminate)
    return broker.wait()


if __name__ == "__main__":
    sys.exit(_hold(*sys.argv[1:]))
