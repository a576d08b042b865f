"""Whether a Debian mirror can be reached, for tests that build a card."""

import contextlib
import socket

import pytest

from fleet_protocol.errors import ConfigError
from shoal.flash.image import needs_tools

__all__ = ["needs_mirror"]


def _lacking() -> str:
    try:
        needs_tools()
    except ConfigError as error:
        return str(error)
    with contextlib.suppress(OSError), socket.create_connection(("deb.debian.org", 80), timeout=5):
        return ""
    return "no Debian mirror is reached"


_LACKING = _lacking()
needs_mirror = pytest.mark.skipif(bool(_LACKING), reason=_LACKING or "-")
