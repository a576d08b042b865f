"""Names the table of a source in messages about it.

Readers name a board's table ``[data]``, but servers and simulations have other tables.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from fleet_protocol.errors import ConfigError, DataError

_BOARD_TABLE = re.compile(r"\[data\](?: of device\.toml)?")


@contextmanager
def naming_table(table: str) -> Iterator[None]:
    """Make errors of a source name the table in which its user has written it.

    Args:
        table: name of the table for the user, such as ``[data.train] of sim.toml``.
    """
    try:
        yield
    except (DataError, ConfigError) as error:
        text = str(error)
        corrected = _BOARD_TABLE.sub(table, text)
        if corrected == text:
            raise
        raise type(error)(corrected) from error
