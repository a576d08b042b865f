"""Where the table of a source stands, for messages: readers speak of a board's, and others have
tables, too.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from fleet_protocol.errors import ConfigError, DataError

_OF_A_BOARD = re.compile(r"\[data\](?: of device\.toml)?")


@contextmanager
def naming_table(table: str) -> Iterator[None]:
    """Let refusals of a source name the table that its user has written, instead of ``[data]`` of a
    board.

    Args:
        table: as the user finds it, such as ``[data.train] of sim.toml``.
    """
    try:
        yield
    except (DataError, ConfigError) as error:
        said = str(error)
        named = _OF_A_BOARD.sub(table, said)
        if named == said:
            raise
        raise type(error)(named) from error
