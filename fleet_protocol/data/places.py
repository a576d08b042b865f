"""Names the table of a source in messages about it.

Readers write of a board's table ``[data]``, but servers and simulations have tables of their own.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from fleet_protocol.errors import ConfigError, DataError

_BOARD_TABLE = re.compile(r"\[data\](?: of device\.toml)?")


@contextmanager
def naming_table(table: str) -> Iterator[None]:
    """Let errors of a source name the table that its user has written.

    Args:
        table: as the user finds it, such as ``[data.train] of sim.toml``.
    """
    try:
        yield
    except (DataError, ConfigError) as error:
        text = str(error)
        corrected = _BOARD_TABLE.sub(table, text)
        if corrected == text:
            raise
        raise type(error)(corrected) from error
