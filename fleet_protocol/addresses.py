"""Reads addresses of brokers as RFC 3986 has them, and says what is wrong with one.

An address may hold a password, so no message repeats what stands before its last ``@``.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import quote, unquote

from fleet_protocol.spelling import did_you_mean

FORM = "mqtt://[user:password@]host[:port] (or mqtts://)"

_LAST_PORT = 65_535
_ADDRESS = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://"
    r"(?:(?P<login>[^/?#\[\]\s]*)@)?"
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]/?#@:\s]+)"
    r"(?::(?P<port>[0-9]+))?/?"
)
_RESERVED = re.compile(r"[/?#\[\]\s]")  # end a login unless they are percent-encoded
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True)
class AddressParts:
    """The parts of an address; a part that it lacks is None."""

    scheme: str
    host: str
    port: int | None
    username: str | None
    password: str | None


def hide_login(address: str) -> str:
    """Return an address without what stands before its last ``@``, but for the scheme."""
    scheme, separator, remainder = address.partition("://")
    if not separator:
        return address.rpartition("@")[2]
    return f"{scheme}://{remainder.rpartition('@')[2]}"


def split_address(address: str, schemes: Collection[str]) -> AddressParts:
    """Return the parts of an address.

    Args:
        address: of a broker.
        schemes: that are known.

    Raises:
        ValueError: with what is wrong, and without the login.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None or parts["scheme"].lower() not in schemes:
        raise ValueError(_describe_problem(address, schemes))
    port = None if parts["port"] is None else int(parts["port"])
    if port is not None and not 0 < port <= _LAST_PORT:
        raise ValueError(f"its port {port} is not between 1 and {_LAST_PORT}")
    login = parts["login"]
    if login is not None and _BROKEN_ESCAPE.search(login):
        raise ValueError(_encode("%"))
    username, separator, password = (login or "").partition(":")
    return AddressParts(
        scheme=parts["scheme"].lower(),
        host=parts["host"].strip("[]").lower(),
        port=port,
        username=unquote(username) if login else None,
        password=unquote(password) if separator else None,
    )


def _describe_problem(address: str, schemes: Collection[str]) -> str:
    scheme, separator, remainder = address.partition("://")
    scheme_names = " and ".join(schemes)
    if not separator:
        return f"it has no scheme; known are {scheme_names}"
    if scheme.lower() not in schemes:
        hint = did_you_mean(scheme, schemes)
        return f"its scheme {scheme!r} is not known{hint}; known are {scheme_names}"
    login, has_login, place = remainder.rpartition("@")
    reserved = sorted(set(_RESERVED.findall(login)))
    if has_login and reserved:
        return _encode(*reserved)
    if re.search(r"\s", place):
        return "it contains a space"
    if place.count(":") > 1 and not place.startswith("["):
        return "an address of IPv6 stands in brackets, as in mqtt://[::1]:1883"
    if _RESERVED.search(place.strip("[]").rstrip("/")):
        return "a path, a query or a fragment has no meaning for a broker"
    return "it has no host, or no number for a port"


def _encode(*letters: str) -> str:
    """Return the advice to encode letters of a login."""
    encoded = []
    for letter in letters:
        shown = "a space" if letter.isspace() else letter
        encoded.append(f"{shown} as {quote(letter, safe='')}")
    return f"user and password are percent-encoded: write {', '.join(encoded)}"
