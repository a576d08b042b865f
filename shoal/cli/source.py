"""Whom a command asks: what lies on this machine, or the page that ``--url`` names, with the same
answers.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from broker_server.store import Store, following
from fleet_protocol.errors import ConfigError
from shoal.client import Client

_FOLLOWED_SECONDS = 60.0  # until a page is asked anew, which tells whether it is still there
_NO_LINE = 2**62  # comes after every line of a log
_Here = TypeVar("_Here")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Asked(Generic[_Here, _Answer]):
    """Asks, or does, something about a run, by the beginning of its id: `here`, or of the page that
    is `there`.
    """

    here: Callable[[_Here, str | None], _Answer]
    there: Callable[[Client, str], _Answer]

    def __call__(self, source: _Here | Client, run: str | None = None) -> _Answer:
        """The answer, which is the same of both; without a run about the newest."""
        return (
            self.there(source, run or "") if isinstance(source, Client) else self.here(source, run)
        )


def where(here: _Here, url: str) -> _Here | Client:
    """What lies here, or the page at an address.

    Its token stands in SHOAL_TOKEN, or in the file SHOAL_TOKEN_FILE.

    Raises:
        ConfigError: it is no address, or the token is none or cannot be read.
    """
    if not url:
        return here
    token = os.environ.get("SHOAL_TOKEN", "")
    file = os.environ.get("SHOAL_TOKEN_FILE")
    try:
        token = (Path(file).read_text(encoding="ascii") if file and not token else token).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"SHOAL_TOKEN_FILE: no token can be read from {file}: {error}") from error
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            "SHOAL_TOKEN or the file SHOAL_TOKEN_FILE holds no token, which is one line of plain letters"
        )
    return Client(url, token)


@contextmanager
def opened(store: Path, url: str, *, read_only: bool = True) -> Iterator[Store | Client]:
    """A store by its folder, or the page at an address; errors are those of both."""
    found = where(store, url)
    if isinstance(found, Client):
        yield found
        return
    Store(found, read_only=True).close()  # a store is not made by this
    with closing(Store(found, read_only=read_only)) as known:
        yield known


def changes(source: Store | Client, over: threading.Event) -> Iterator[None]:
    """Once now, and again whenever the store was written since.

    A page is followed until somebody interrupts.
    """
    if isinstance(source, Store):
        yield from following.changes(source.folder, over)
        return
    while True:
        yield from (None for _ in source.events(_FOLLOWED_SECONDS, after=_NO_LINE))
