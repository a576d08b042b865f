"""Names and addresses of computers."""


def is_loopback(host: str) -> bool:
    """Return whether a name or address is reached from its own computer only."""
    return host == "localhost" or host.startswith("127.") or host == "::1"
