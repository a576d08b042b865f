"""Shows something of a store, for people or for programs, once or whenever it changes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from broker_server.store import queries
from fleet_protocol.signals import on_signals
from shoal.cli.console import output_console, print_json
from shoal.sources import LocalStore, Source, changes, open_source

_Content = TypeVar("_Content")


@dataclass(frozen=True)
class View(Generic[_Content]):
    """A part of a store that a command shows.

    Attributes:
        read: reads it about a run, by the beginning of its id; "" is the newest run.
        draw: prints it for people.
        as_records: turns it into a record, or a list of them, that is printed as JSON.
    """

    read: Callable[[Source, str], _Content]
    draw: Callable[[_Content], None]
    as_records: Callable[[_Content], Any] = queries.to_json_values

    def show(
        self,
        store: Path,
        run: str | None,
        *,
        as_json: bool,
        watch: bool = False,
        url: str = "",
    ) -> None:
        """Print the view of a run, None for the newest, of a store or of the page at an address.

        With `watch` it is printed again whenever the store changes; JSON then takes one line.

        Raises:
            ConfigError: there is no such run.
            StorageError: there is no store.
        """
        with open_source(store, url) as source:
            if not watch:
                self._print(self.read(source, run or ""), as_json=as_json, watch=False)
                return
            for content in follow(source, run or "", self.read):
                self._print(content, as_json=as_json, watch=True)

    def _print(self, content: _Content, *, as_json: bool, watch: bool) -> None:
        if as_json:
            print_json(self.as_records(content), line=watch)
            return
        if watch:
            output_console().clear()
        self.draw(content)


def follow(source: Source, run: str, read: Callable[[Source, str], _Content]) -> Iterator[_Content]:
    """Read a store now and after each change, until the named run has ended or the user interrupts.

    Without a name of a run only the user ends it.
    """
    stop = threading.Event()
    until_stopped: AbstractContextManager[None] = on_signals(lambda _: stop.set())
    if not isinstance(source, LocalStore):
        # Reading from a network blocks until something comes, so only an interrupt ends it.
        until_stopped = suppress(KeyboardInterrupt)
    with until_stopped:
        for _ in changes(source, stop):
            # Asked before the content is read, so that the content includes the end of the run.
            ended = bool(run) and source.runs(run)[0].run.ended_at is not None
            yield read(source, run)
            if ended:
                return


def without_field(field: str, view: Any) -> dict[str, Any]:
    """Return the record of a view without a field that another command lists."""
    return {name: value for name, value in queries.to_json_values(view).items() if name != field}
