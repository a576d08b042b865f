"""Writes the files of an EMQX that the operator runs: its TLS listener and access rules."""

from collections.abc import Iterable
from pathlib import Path

from broker_server.service.mosquitto import rights
from fleet_protocol.identity.enrolment import write_secret
from fleet_protocol.topics import Topics

EMQX = "emqx"  # folder of its files within a fleet's
_ACTIONS = {"read": "subscribe", "write": "publish", "readwrite": "all"}


def write_emqx_listener(folder: Path, port: int) -> None:
    """Write the configuration into a fleet's folder, to be copied to the broker's host."""
    text = Path(__file__).with_name("emqx.hocon").read_text(encoding="utf-8")
    write_secret(folder / EMQX / "emqx.hocon", text.replace("PORT", str(port)))


def write_emqx_rules(folder: Path, fleet: str, members: Iterable[str]) -> None:
    """Write ``acl.conf`` for the members of now, which denies everything else; see `rights`."""
    lines = []
    for name in members:
        for right, topic in rights(Topics(fleet), name):
            action = _ACTIONS[right]
            lines.append(f'{{allow, {{username, "{name}"}}, {action}, ["{topic}"]}}.\n')
    lines.append("{deny, all}.\n")
    write_secret(folder / EMQX / "acl.conf", "".join(lines))
