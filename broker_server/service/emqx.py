"""The files of an EMQX on a host of its own: TLS with client certificates, and access rules by name."""

from collections.abc import Iterable
from pathlib import Path

from broker_server.service.mosquitto import rights
from fleet_protocol.identity.enrolment import write_secret
from fleet_protocol.topics import Topics

FOLDER = "emqx"
_ACTIONS = {"read": "subscribe", "write": "publish", "readwrite": "all"}


def write_listener(folder: Path, port: int) -> None:
    """Write the configuration into the folder of a fleet, for who copies it to the broker's host."""
    text = Path(__file__).with_name("emqx.hocon").read_text(encoding="utf-8")
    write_secret(folder / FOLDER / "emqx.hocon", text.replace("PORT", str(port)))


def write_rules(folder: Path, fleet: str, members: Iterable[str]) -> None:
    """Write ``acl.conf`` for those who are members now, and deny everything else; see `rights`."""
    rules = "".join(
        f'{{allow, {{username, "{name}"}}, {_ACTIONS[right]}, ["{topic}"]}}.\n'
        for name in members
        for right, topic in rights(Topics(fleet), name)
    )
    write_secret(folder / FOLDER / "acl.conf", f"{rules}{{deny, all}}.\n")
