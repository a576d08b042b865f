"""Reads addresses of brokers according to RFC 3986, and explains what is wrong with one.

An address may contain a password, so no message repeats the part before its last ``@``.
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
_RESERVED = re.compile(r"[/?#\[\]\s]")  # would end a login unless they are percent-encoded
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True)
class AddressParts:
    """The parts of an address; a missing part is None."""

    scheme: str
    host: str
    port: int | None
    username: str | None
    password: str | None


def hide_login(address: str) -> str:
    """Return an address without the part before its last ``@``, except the scheme."""
    scheme, separator, remainder = address.partition("://")
    if not separator:
        # Without a scheme, anything before an @ may be a password.
        return address.rpartition("@")[2]
    return f"{scheme}://{remainder.rpartition('@')[2]}"


def split_address(address: str, schemes: Collection[str]) -> AddressParts:
    """Return the parts of an address.

    Args:
        address: address of a broker.
        schemes: supported schemes.

    Raises:
        ValueError: the address is malformed; the message explains why, without the login.
    """
    # The whole text must match: what follows an address would be ignored otherwise.
    match = _ADDRESS.fullmatch(address)
    if match is None or match["scheme"].lower() not in schemes:
        raise ValueError(_describe_problem(address, schemes))
    port = None if match["port"] is None else int(match["port"])
    if port is not None and not 0 < port <= _LAST_PORT:
        raise ValueError(f"its port {port} is not between 1 and {_LAST_PORT}")
    if not match["host"].isprintable():
        raise ValueError("its host has invisible characters; type it again")
    login = match["login"]
    if login is not None and _BROKEN_ESCAPE.search(login):
        raise ValueError(_encode("%"))
    # A colon in a password stays in it.
    username, separator, password = (login or "").partition(":")
    return AddressParts(
        scheme=match["scheme"].lower(),
        # Names of hosts are the same in upper and lower case.
        host=match["host"].strip("[]").lower(),
        port=port,
        username=unquote(username) if login else None,
        # An empty password differs from none.
        password=unquote(password) if separator else None,
    )


def _describe_problem(address: str, schemes: Collection[str]) -> str:
    scheme, separator, remainder = address.partition("://")
    scheme_names = " and ".join(schemes)
    if not separator:
        return f"it has no scheme; supported are {scheme_names}"
    if scheme.lower() not in schemes:
        hint = did_you_mean(scheme, schemes)
        return f"its scheme {scheme!r} is unknown{hint}; supported are {scheme_names}"
    # The last @, because an unencoded password may contain one.
    login, has_login, place = remainder.rpartition("@")
    reserved = sorted(set(_RESERVED.findall(login)))
    if has_login and reserved:
        return _encode(*reserved)
    if re.search(r"\s", place):
        return "it contains a space"
    if place.count(":") > 1 and not place.startswith("["):
        return "an IPv6 address must be in brackets, as in mqtt://[::1]:1883"
    # Brackets of an IPv6 address, and a slash at its end, are allowed.
    if _RESERVED.search(place.strip("[]").rstrip("/")):
        return "a path, a query or a fragment has no meaning for a broker"
    return "it has no host, or no number for a port"


def _encode(*letters: str) -> str:
    """Return the advice to percent-encode characters of a login."""
    encoded = []
    for letter in letters:
        shown = "a space" if letter.isspace() else letter
        encoded.append(f"{shown} as {quote(letter, safe='')}")
    return f"user and password must be percent-encoded: write {', '.join(encoded)}"
