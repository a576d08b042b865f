"""What each member of a fleet may do on which topics, as brokers with access rules are told it."""

from fleet_protocol.topics import Topics

SERVER = "server"
"""The server's name at the broker; no device can have it."""


def rights(topics: Topics, name: str) -> list[tuple[str, str]]:
    """Return what a member may do: ``read``, ``write`` or ``readwrite``, and on which topics.

    A device publishes under its own name, reads what is for it, and nothing else.
    """
    if name == SERVER:
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
