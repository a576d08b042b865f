"""The text of Mosquitto's configuration and access rules, of one that the server starts or another.

Mosquitto 2 is what the files are written for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from broker_server.service.broker import MAX_PAYLOAD_BYTES
from broker_server.service.topic_rights import rights
from fleet_protocol.topics import Topics

# messages, of the bytes below, for a member that is away; what is dropped is asked for again
_QUEUED = 100_000

_LISTENER = """\
listener {port}{listen}
max_packet_size {packet_bytes}
max_queued_messages {queued}
max_queued_bytes 536870912
set_tcp_nodelay true
{access}"""

_ANYBODY = "allow_anonymous true\n"
_MEMBERS = """\
cafile {authority}
certfile {certificate}
keyfile {key}
require_certificate true
use_identity_as_username true
allow_anonymous false
acl_file {rules}
"""


@dataclass(frozen=True)
class AccessFiles:
    """The files by which a Mosquitto lets members in, and nobody else.

    Attributes:
        certificate: the broker's, in PEM.
        key: its key.
        authority: the certificate that vouches for members.
        rules: which member may use which topics.
        withdrawn: the list of certificates that count for nothing any more; None in a folder from
            before there were such lists.
    """

    certificate: PurePath
    key: PurePath
    authority: PurePath
    rules: PurePath
    withdrawn: PurePath | None

    def lines(self) -> str:
        """Return the lines of the configuration that name them."""
        text = _MEMBERS.format(
            authority=self.authority,
            certificate=self.certificate,
            key=self.key,
            rules=self.rules,
        )
        if self.withdrawn is not None:
            text += f"crlfile {self.withdrawn}\n"
        return text


def listener(port: int, listen: str, access: AccessFiles | None) -> str:
    """Return the lines of ``mosquitto.conf`` for a listener.

    Args:
        port: that it listens on.
        listen: address that it listens on; empty for all.
        access: who is let in; None for anybody.
    """
    return _LISTENER.format(
        port=port,
        listen=f" {listen}" if listen else "",
        packet_bytes=MAX_PAYLOAD_BYTES,
        queued=_QUEUED,
        access=_ANYBODY if access is None else access.lines(),
    )


def access_rules(fleet: str, members: Iterable[str]) -> str:
    """Return the text of the access rules of a fleet's members; see `rights`."""
    lines = []
    for name in members:
        lines.append(f"user {name}")
        for right, topic in rights(Topics(fleet), name):
            lines.append(f"topic {right} {topic}")
        lines.append("")
    return "\n".join(lines)
