"""Opens the source of commands: a store on this machine, or the page of another machine."""

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from broker_server.rounds.advice import Advice, find_advice
from broker_server.rounds.best import VersionView, read_versions
from broker_server.store import EventRecord, Store, following, queries
from broker_server.store.event_table import EVERY_LINE, LineFilter
from broker_server.store.explaining import DeviceInRound, explain_round
from fleet_protocol.errors import ConfigError
from shoal.client import Client, Verb
from shoal.store_actions import act_on_run

_PAGE_SECONDS = 60.0
"""Seconds to follow a page before a new request, which checks that it still answers."""
_AFTER_EVERY_EVENT = 2**62
"""An id above those of all lines, so that a page only reports that the store changed."""


class LocalStore:
    """A store on this machine, with the methods and answers of `shoal.client.Client`.

    A run is given by its name, its id or a prefix of its id; by default it is the newest. Each
    method raises a `ConfigError` if the store has no such run.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def status(self, run: str = "") -> queries.StatusView:
        """Return the summary of the store."""
        return queries.status(self.store, run or None)

    def runs(self, run: str = "") -> list[queries.RunView]:
        """Return all runs, newest first, or only the named one."""
        return queries.runs(self.store, run or None)

    def rounds(
        self, run: str = "", *, first: int = 1, last: int | None = None, tasks: int = 1
    ) -> list[queries.RoundView]:
        """Return the rounds of a run from `first` to `last`; without tasks if `tasks` is 0."""
        return queries.rounds(self.store, run or None, first=first, last=last, tasks=bool(tasks))

    def devices(self, run: str = "") -> list[queries.DeviceView]:
        """Return every device, with the reason if it does not train."""
        return queries.devices(self.store, run or None)

    def versions(self, run: str = "") -> list[VersionView]:
        """Return the global versions of a run with their evaluations."""
        return read_versions(self.store, run or None)

    def advice(self, run: str = "") -> list[Advice]:
        """Return advice about a run, with the evidence."""
        return find_advice(self.store, run or None)

    def explained(self, number: int, run: str = "") -> list[DeviceInRound]:
        """Return the outcome of every device in a round, and the reason."""
        return explain_round(self.store, number, run or None)

    def compare(self, one: str, other: str) -> queries.Comparison:
        """Return the differences between two runs."""
        return queries.compare(self.store, one, other)

    def log(
        self,
        last: int = 50,
        run: str = "",
        *,
        after: int = 0,
        matching: LineFilter = EVERY_LINE,
    ) -> list[EventRecord]:
        """Return the newest lines that pass a filter, with an id above `after`, oldest first."""
        return queries.log(self.store, run or None, last=last, after=after, matching=matching)

    def act(
        self, verb: Verb, run: str = "", *, version: int | None = None, device: str = ""
    ) -> str:
        """Promote a version, roll back to one, or release a device, and return the run's id."""
        return act_on_run(self.store, verb, run or None, version, device)


Source = LocalStore | Client


def connect(url: str) -> Client:
    """Return a client of the page at an address, with the token from the environment.

    The token is in SHOAL_TOKEN, or in the file that SHOAL_TOKEN_FILE names.

    Raises:
        ConfigError: the address is invalid, or the token cannot be read.
    """
    token = os.environ.get("SHOAL_TOKEN", "")
    file = os.environ.get("SHOAL_TOKEN_FILE")
    # The variable with the token itself has priority.
    if file and not token:
        try:
            token = Path(file).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"SHOAL_TOKEN_FILE: cannot read a token from {file}: {error}"
            ) from error
    # A file usually ends with a line break.
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            "the token in SHOAL_TOKEN or in the file SHOAL_TOKEN_FILE is invalid: it must be one"
            " line of ASCII characters"
        )
    return Client(url, token)


@contextmanager
def open_source(store: Path, url: str, *, read_only: bool = True) -> Iterator[Source]:
    """Open the page at an address or, without an address, the store in a folder.

    Raises:
        ConfigError: as `connect`.
        StorageError: there is no store, or it cannot be read.
    """
    if url:
        yield connect(url)
        return
    with open_local_store(store, read_only=read_only) as opened:
        yield LocalStore(opened)


@contextmanager
def open_local_store(store: Path, *, read_only: bool = True) -> Iterator[Store]:
    """Open the store in a folder, which must have one.

    Raises:
        StorageError: there is no store, or it cannot be read.
    """
    # Opening a store for writing would create a missing one, which commands must not do.
    Store(store, read_only=True).close()
    with closing(Store(store, read_only=read_only)) as opened:
        yield opened


def changes(source: Source, stop: threading.Event) -> Iterator[None]:
    """Yield now, and again after each change of the store.

    A local store is followed until `stop` is set, a page until the process is interrupted.
    """
    if isinstance(source, LocalStore):
        yield from following.changes(source.store.folder, stop)
        return
    while True:
        for _ in source.events(_PAGE_SECONDS, after=_AFTER_EVERY_EVENT):
            yield
