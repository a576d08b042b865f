"""The text of Mosquitto's configuration and access rules, whoever starts it.

The files are written for Mosquitto 2.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from broker_server.service.broker import MAX_PAYLOAD_BYTES
from broker_server.service.topic_rights import rights
from fleet_protocol.topics import Topics

# queued messages, of the bytes below, for an offline member; dropped messages are requested again
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
    """The files with which a Mosquitto authenticates members, and refuses everybody else.

    Attributes:
        certificate: the broker's, in PEM.
        key: its key.
        authority: the certificate that vouches for members.
        rules: which member may use which topics.
        withdrawn: the list of revoked certificates; None in a folder from before such lists
            existed.
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
        port: port that it listens on.
        listen: address that it listens on; empty for all.
        access: how clients are authenticated; None to admit anybody.
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
    # Mosquitto denies what no rule allows.
    for name in members:
        lines.append(f"user {name}")
        for right, topic in rights(Topics(fleet), name):
            lines.append(f"topic {right} {topic}")
        lines.append("")
    return "\n".join(lines)
