"""The access rights of each fleet member to topics, in the form of a broker's access rules."""

from fleet_protocol.topics import Topics

SERVER = "server"
"""The server's name at the broker; no device can have it."""


def rights(topics: Topics, name: str) -> list[tuple[str, str]]:
    """Return a member's rights: ``read``, ``write`` or ``readwrite``, and the topics.

    A device publishes under its own name, reads its own messages, and nothing else.
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
