"""Asks the API of `shoal view` and `shoal up --view`: its answers as the types of the server, its
refusals as errors.

    client = Client("http://127.0.0.1:8420", token) client.act("promote",
    version=max(client.versions(), key=lambda view: view.score or 0).version.number)

It needs what the extra ``server`` or ``view`` brings, and no torch.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from json import JSONDecodeError, loads
from ssl import SSLError
from typing import Any, Literal, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit

from pydantic import TypeAdapter

from broker_server.rounds.advice import Advice
from broker_server.rounds.best import VersionView
from broker_server.service.rollout import RolloutView
from broker_server.store import EventRecord, queries
from broker_server.store.explaining import DeviceInRound
from fleet_protocol.errors import ConfigError, StorageError, TransportError

RolloutVerb = Literal["pause", "resume", "stop"]
Verb = Literal["start", "stop", "abandon", "pause", "resume", "promote", "rollback", "release"]
_Answer = TypeVar("_Answer")

LOADING = "Shoal-Loading"
"""Header of a response with a model: lines of Python that load it, and a note, as percent-encoded
JSON.
"""


class Client:
    """What one server says, and does.

    A run is named by its id or the beginning of it; no name is the newest.

    The token of operators lets act, too; an answer may take `seconds`. All raise `ConfigError`
    where there is no such thing, the token is wrong, or it cannot be done now, `StorageError` where
    the store, and `TransportError` where the server is away, or of another version.
    """

    def __init__(self, url: str, token: str = "", seconds: float = 60.0) -> None:
        with suppress(ValueError):
            self._url = urlsplit(url)
            self._seconds = seconds
            if self._url.scheme in {"http", "https"} and self._url.hostname and self._url.port != 0:
                self._headers = {"Authorization": f"Bearer {token}"} if token else {}
                return
        raise ConfigError(f"{url} is no address of a page; give one as http://127.0.0.1:8420")

    def ask(self, kind: type[_Answer], path: str, **query: Any) -> _Answer:
        """What any path of ``docs/openapi.json`` after ``/api/v1`` answers, as `kind`."""
        with self._opened("GET", path, query) as (_, answer):
            return TypeAdapter(kind).validate_json(answer.read())

    @contextmanager
    def _opened(
        self, method: str, path: str, query: Mapping[str, Any]
    ) -> Iterator[tuple[Any, HTTPResponse]]:
        make = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        connection = make(self._url.hostname or "", self._url.port, timeout=self._seconds)
        wanted = f"{self._url.path.rstrip('/')}/api/v1{path}?{urlencode(query)}"
        try:
            connection.request(method, wanted, headers=self._headers)
            socket, answer = (
                connection.sock,
                connection.getresponse(),
            )  # which may take the socket away
            if answer.status != 200:
                detail = f"{self._url.geturl()} answers {path} with {answer.status}"
                with suppress(JSONDecodeError, KeyError, TypeError):
                    detail = loads(answer.read())["detail"]
                    if not isinstance(detail, str):  # of a value that no path takes
                        detail = "; ".join(f"{item['loc'][-1]}: {item['msg']}" for item in detail)
                kinds = {
                    503: StorageError,
                    **dict.fromkeys(range(400, 500), ConfigError),
                }
                raise kinds.get(answer.status, TransportError)(detail)
            yield socket, answer
        except SSLError as error:
            what = f"{self._url.geturl()} cannot be asked over TLS: {error.reason or error}"
            remedy = "the file SSL_CERT_FILE names has to hold whoever signed its certificate; without TLS take http://"
            raise TransportError(f"{what}; {remedy}") from error
        except (OSError, HTTPException, ValueError) as error:
            what = f"{self._url.geturl()} does not answer {path} as it should: {' '.join(str(error).split())}"
            raise TransportError(
                f"{what}; is `shoal view` or `up --view` of this version running there?"
            ) from error
        finally:
            connection.close()

    def _of(self, run: str, path: str) -> str:
        return f"/runs/{quote(run, safe='') or 'newest'}{path}"

    def status(self, run: str = "") -> queries.StatusView:
        """The store at a glance."""
        return self.ask(queries.StatusView, self._of(run, ""))

    def runs(self, run: str = "") -> list[queries.RunView]:
        """Every run, newest first; or one."""
        return self.ask(list[queries.RunView], "/runs", **({"run": run} if run else {}))

    def rounds(self, run: str = "", **which: int) -> list[queries.RoundView]:
        """The rounds of a run: those from `first` to `last`, with `tasks` or (0) without."""
        return self.ask(list[queries.RoundView], self._of(run, "/rounds"), **which)

    def devices(self, run: str = "") -> list[queries.DeviceView]:
        """Every device, with why it does not train and what to do."""
        return self.ask(list[queries.DeviceView], self._of(run, "/devices"))

    def versions(self, run: str = "") -> list[VersionView]:
        """The global versions of a run, with what they were judged."""
        return self.ask(list[VersionView], self._of(run, "/versions"))

    def advice(self, run: str = "") -> list[Advice]:
        """What to do next, with the evidence."""
        return self.ask(list[Advice], self._of(run, "/advice"))

    def explained(self, number: int, run: str = "") -> list[DeviceInRound]:
        """What became of every device in a round, and why."""
        return self.ask(list[DeviceInRound], self._of(run, f"/rounds/{number}"))

    def compare(self, one: str, other: str) -> queries.Comparison:
        """Two runs side by side."""
        return self.ask(
            queries.Comparison,
            f"/compare/{quote(one, safe='')}/{quote(other, safe='')}",
        )

    def log(self, last: int = 50, run: str = "", *, after: int = 0) -> list[EventRecord]:
        """The newest lines of the log `after` that of an id, of a run or of everything, oldest
        first.
        """
        return self.ask(
            list[EventRecord],
            "/log",
            last=last,
            after=after,
            **({"run": run} if run else {}),
        )

    def weights(self, version: int, run: str = "", **of: str) -> tuple[bytes, tuple[str, ...], str]:
        """Return a version or a `tier` of it as a file, the lines that load it, and a note.

        For operators.
        """
        with self._opened("GET", self._of(run, f"/versions/{version}/weights"), of) as (
            _,
            answer,
        ):
            told = loads(unquote(answer.headers.get(LOADING, "%7B%7D")))
            return (
                answer.read(),
                tuple(map(str, told.get("lines", ()))),
                str(told.get("note", "")),
            )

    def rollouts(self) -> list[RolloutView]:
        """The release on its way to the boards, and those before it, newest first."""
        return self.ask(list[RolloutView], "/rollout")

    def act_on_rollout(self, verb: RolloutVerb) -> int:
        """Steer the newest rollout, and say its release; for operators."""
        with self._opened("POST", f"/rollout/actions/{verb}", {}) as (_, answer):
            return int(loads(answer.read())["release"])

    def act(self, verb: Verb, run: str = "", **which: str | int) -> str:
        """Steer a run, begin another like it, choose a `version`, free a `device`, and say the run.

        For operators.
        """
        with self._opened("POST", self._of(run, f"/actions/{verb}"), which) as (
            _,
            answer,
        ):
            return str(loads(answer.read())["run"])

    def events(self, seconds: float, after: int = 0) -> Iterator[EventRecord | None]:
        """For so long the lines of the log `after` that of an id, and None where something else was
        written.
        """
        deadline = time.monotonic() + seconds
        rest = b""
        line = TypeAdapter(EventRecord)
        with self._opened("GET", "/events", {"after": after}) as (socket, answer):
            while (left := deadline - time.monotonic()) > 0:
                socket.settimeout(left)
                try:
                    got = answer.read1()
                except TimeoutError:
                    return
                if not got:
                    raise HTTPException("it has ended")
                *whole, rest = (rest + got).split(b"\n\n")
                for kind, data in (part.splitlines()[-2:] for part in whole):
                    yield (line.validate_json(data[6:]) if kind == b"event: line" else None)
