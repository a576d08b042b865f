"""Shows a part of a store as text or JSON, once or whenever it changes."""

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
        read: reads it for a run, given by its name or a prefix of its id; "" is the newest run.
        draw: prints it as text.
        as_records: converts it into a record or a list of records, which is printed as JSON.
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
        """Print the view of a run (None: the newest) from a store or from the page at an address.

        With `watch` it prints the view again whenever the store changes; JSON then takes one line.

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
            # Programs read the lines one after the other, so only text clears the screen.
            output_console().clear()
        self.draw(content)


def follow(source: Source, run: str, read: Callable[[Source, str], _Content]) -> Iterator[_Content]:
    """Read a store now and after each change, until the run ends or the user interrupts.

    If no run is named, only an interrupt ends the reading.
    """
    stop = threading.Event()
    until_stopped: AbstractContextManager[None] = on_signals(lambda _: stop.set())
    if not isinstance(source, LocalStore):
        # Reading from a network blocks until data arrives, so only an interrupt ends it.
        until_stopped = suppress(KeyboardInterrupt)
    with until_stopped:
        for _ in changes(source, stop):
            # Checked before the content is read, so that the content includes the end of the run.
            ended = bool(run) and source.runs(run)[0].run.ended_at is not None
            yield read(source, run)
            if ended:
                return


def without_field(field: str, view: Any) -> dict[str, Any]:
    """Return the record of a view without the field that another command lists."""
    return {name: value for name, value in queries.to_json_values(view).items() if name != field}
