"""A client of the API of `shoal view` and `shoal up --view`.

Answers have the server's types, and refusals are raised as errors:

    client = Client("http://127.0.0.1:8420", token)
    newest = client.versions()[-1].version
    client.act("promote", version=newest.number)

It needs the extra ``server`` or ``view``, but not torch.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from json import JSONDecodeError, loads
from ssl import SSLError
from typing import Any, Literal, TypeVar
from urllib.parse import SplitResult, quote, unquote, urlencode, urlsplit

from pydantic import TypeAdapter

from broker_server.rounds.advice import Advice
from broker_server.rounds.best import VersionView
from broker_server.service.rollout import RolloutView
from broker_server.store import EventRecord, queries
from broker_server.store.event_table import EVERY_LINE, LineFilter
from broker_server.store.explaining import DeviceInRound
from fleet_protocol.errors import ConfigError, ShoalError, StorageError, TransportError

RolloutVerb = Literal["pause", "resume", "stop"]
Verb = Literal["start", "stop", "abandon", "pause", "resume", "promote", "rollback", "release"]
_Answer = TypeVar("_Answer")

LOADING = "Shoal-Loading"
"""Header of a response that contains a model.

Its value is percent-encoded JSON: lines of Python that load the model, and a note.
"""


class Client:
    """Reads and steers the runs of one server.

    A run is given by its name, its id or a prefix of its id; by default it is the newest.

    Args:
        url: address of the page, such as ``http://127.0.0.1:8420``.
        token: token of the page; the operators' token also permits actions.
        seconds: longest wait for an answer.

    Raises:
        ConfigError: (each method) there is no such run, version or device, the token is wrong, or
            the action is not possible now.
        StorageError: (each method) the server cannot use its store.
        TransportError: (each method) the server does not answer, or has another version.
    """

    def __init__(self, url: str, token: str = "", seconds: float = 60.0) -> None:
        self._url = _parse_address(url)
        self._seconds = seconds
        self._headers = {}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def ask(self, kind: type[_Answer], path: str, /, **query: Any) -> _Answer:
        """Return the answer of any path of ``docs/openapi.json``, as a value of `kind`.

        Args:
            kind: type of the answer.
            path: the path after ``/api/v1``.
            query: parameters of the path.
        """
        with self._opened("GET", path, query) as (_, answer):
            # The server sends views as JSON, so they have the types of a local store.
            return TypeAdapter(kind).validate_json(answer.read())

    @contextmanager
    def _opened(
        self, method: str, path: str, query: Mapping[str, Any]
    ) -> Iterator[tuple[Any, HTTPResponse]]:
        """Send a request, and yield the socket and the response until the block ends."""
        address = self._url.geturl()
        host = self._url.hostname or ""
        connection = HTTPConnection(host, self._url.port, timeout=self._seconds)
        if self._url.scheme == "https":
            connection = HTTPSConnection(host, self._url.port, timeout=self._seconds)
        # Lists such as `kind` repeat their parameter.
        target = f"{self._url.path.rstrip('/')}/api/v1{path}?{urlencode(query, doseq=True)}"
        try:
            connection.request(method, target, headers=self._headers)
            # Taken before the response is read, because reading may remove it from the connection.
            socket = connection.sock
            answer = connection.getresponse()
            if answer.status != 200:
                refusal = f"{address} answers {path} with {answer.status}"
                raise _error_of(answer.status)(_detail(answer.read()) or refusal)
            yield socket, answer
        except SSLError as error:
            raise TransportError(
                f"{address} cannot be reached over TLS: {error.reason or error}; the file in"
                " SSL_CERT_FILE must contain the authority that signed its certificate; if the"
                " page has no TLS, use http://"
            ) from error
        except OSError as error:
            raise TransportError(
                f"{address} cannot be reached: {error.strerror or error}; check that `shoal view`"
                " or `up --view` of this version runs there, and the address"
            ) from error
        # ValueError also covers pydantic's errors and broken JSON: another version answers there.
        except (HTTPException, ValueError) as error:
            reason = " ".join(str(error).split())
            raise TransportError(
                f"{address} gave an invalid answer to {path}: {reason}; check that `shoal view`"
                " or `up --view` of this version runs there"
            ) from error
        finally:
            connection.close()

    def _path_of_run(self, run: str, path: str) -> str:
        """Return a path below that of a run."""
        # The page resolves `newest` itself, so no request is needed to find the id.
        return f"/runs/{quote(run, safe='') or 'newest'}{path}"

    def status(self, run: str = "") -> queries.StatusView:
        """Return the summary of the store."""
        return self.ask(queries.StatusView, self._path_of_run(run, ""))

    def runs(self, run: str = "") -> list[queries.RunView]:
        """Return all runs, newest first, or only the named one."""
        query = {"run": run} if run else {}
        return self.ask(list[queries.RunView], "/runs", **query)

    def rounds(self, run: str = "", **selection: int) -> list[queries.RoundView]:
        """Return the rounds of a run.

        Args:
            run: the run.
            selection: `first` and `last` bound their numbers; `tasks=0` omits their tasks.
        """
        return self.ask(list[queries.RoundView], self._path_of_run(run, "/rounds"), **selection)

    def devices(self, run: str = "") -> list[queries.DeviceView]:
        """Return every device; if it does not train, with the reason and the remedy."""
        return self.ask(list[queries.DeviceView], self._path_of_run(run, "/devices"))

    def versions(self, run: str = "") -> list[VersionView]:
        """Return the global versions of a run with their evaluations."""
        return self.ask(list[VersionView], self._path_of_run(run, "/versions"))

    def advice(self, run: str = "") -> list[Advice]:
        """Return advice about a run, with the evidence."""
        return self.ask(list[Advice], self._path_of_run(run, "/advice"))

    def explained(self, number: int, run: str = "") -> list[DeviceInRound]:
        """Return the outcome of every device in a round, and the reason."""
        return self.ask(list[DeviceInRound], self._path_of_run(run, f"/rounds/{number}"))

    def compare(self, one: str, other: str) -> queries.Comparison:
        """Return the differences between two runs."""
        path = f"/compare/{quote(one, safe='')}/{quote(other, safe='')}"
        return self.ask(queries.Comparison, path)

    def log(
        self,
        last: int = 50,
        run: str = "",
        *,
        after: int = 0,
        matching: LineFilter = EVERY_LINE,
    ) -> list[EventRecord]:
        """Return the newest lines of the log with an id above `after`, oldest first.

        They are lines of one run or of all runs that pass a filter.
        """
        query: dict[str, object] = {}
        if run:
            query["run"] = run
        if matching.kinds:
            query["kind"] = matching.kinds
        if matching.without:
            query["without"] = matching.without
        if matching.device:
            query["device"] = matching.device
        return self.ask(list[EventRecord], "/log", last=last, after=after, **query)

    def weights(
        self, version: int, run: str = "", **selection: str
    ) -> tuple[bytes, tuple[str, ...], str]:
        """Return a version as a file, the lines of Python that load it, and a note; for operators.

        Args:
            version: number of the version.
            run: the run.
            selection: the `tier`, if not the whole model, and the `format` of the file.
        """
        path = self._path_of_run(run, f"/versions/{version}/weights")
        with self._opened("GET", path, selection) as (_, answer):
            # A server without the header sends only the file.
            loading = loads(unquote(answer.headers.get(LOADING, "%7B%7D")))
            lines = tuple(str(line) for line in loading.get("lines", ()))
            return answer.read(), lines, str(loading.get("note", ""))

    def rollouts(self) -> list[RolloutView]:
        """Return the current and earlier releases, newest first."""
        return self.ask(list[RolloutView], "/rollout")

    def act_on_rollout(self, verb: RolloutVerb) -> int:
        """Steer the newest rollout, and return the number of its release; for operators."""
        with self._opened("POST", f"/rollout/actions/{verb}", {}) as (_, answer):
            return int(loads(answer.read())["release"])

    def act(self, verb: Verb, run: str = "", **target: str | int) -> str:
        """Steer a run, start a similar one, select a version, or release a device; for operators.

        Args:
            verb: the action.
            run: the run.
            target: the `version` to promote or roll back to, or the `device` to release.

        Returns:
            The id of the run.
        """
        path = self._path_of_run(run, f"/actions/{verb}")
        with self._opened("POST", path, target) as (_, answer):
            return str(loads(answer.read())["run"])

    def events(self, seconds: float, after: int = 0) -> Iterator[EventRecord | None]:
        """Yield new lines of the log, and None for other changes of the store.

        Args:
            seconds: how long to follow the server.
            after: only lines with a larger id are yielded.
        """
        deadline = time.monotonic() + seconds
        line = TypeAdapter(EventRecord)
        unfinished = b""
        with self._opened("GET", "/events", {"after": after}) as (socket, answer):
            while (remaining := deadline - time.monotonic()) > 0:
                # The time that remains, so that a silent server does not exceed it.
                socket.settimeout(remaining)
                try:
                    # One read returns what is there, so an event is not delayed until a buffer is
                    # full.
                    received = answer.read1()
                except TimeoutError:
                    return
                if not received:
                    # `_opened` turns this into a TransportError.
                    raise HTTPException("the connection was closed")
                # An empty line ends each event (server-sent events, HTML standard 9.2).
                *events, unfinished = (unfinished + received).split(b"\n\n")
                for event in events:
                    kind, data = event.splitlines()[-2:]
                    if kind == b"event: line":
                        yield line.validate_json(data.removeprefix(b"data: "))
                    else:
                        yield None


def _parse_address(url: str) -> SplitResult:
    """Parse the address of a page; raise a ConfigError if it is invalid."""
    # urlsplit raises ValueError for a malformed port or IPv6 address.
    with suppress(ValueError):
        address = urlsplit(url)
        if address.scheme in {"http", "https"} and address.hostname and address.port != 0:
            return address
    raise ConfigError(f"{url} is not the address of a page; use the form http://127.0.0.1:8420")


def _error_of(status: int) -> type[ShoalError]:
    """Return the error for the status of a response."""
    if status == 503:
        return StorageError
    if 400 <= status < 500:
        return ConfigError
    return TransportError


def _detail(body: bytes) -> str:
    """Return the reason of a refusal; empty if the response does not give it."""
    try:
        detail = loads(body)["detail"]
        if isinstance(detail, str):
            return detail
        # FastAPI lists the invalid values of a request.
        return "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in detail)
    except (JSONDecodeError, KeyError, TypeError):
        return ""
