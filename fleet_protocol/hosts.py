"""Names and addresses of computers."""


def is_loopback(host: str) -> bool:
    """Return whether a name or address can be reached only from its own computer."""
    return host == "localhost" or host.startswith("127.") or host == "::1"
