"""The API of `shoal view`, and the page that reads it: what the command line prints with
``--json``, over HTTP.

``python -m shoal.view.app > docs/openapi.json`` writes the document of the API.
"""

import asyncio
import hmac
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing, suppress
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client.exposition import choose_encoder
from starlette.middleware.trustedhost import TrustedHostMiddleware

from broker_server.rounds.advice import Advice, find_advice
from broker_server.rounds.best import VersionView, read_versions
from broker_server.rounds.coverage import Coverage, count_coverage
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.tier_version import stored_context
from broker_server.service.rollout import RolloutView, read_rollouts
from broker_server.store import EventRecord, Store, TaskRecord, queries
from broker_server.store.explaining import DeviceInRound, explain_round
from broker_server.store.following import LOOK_SECONDS, file_states
from fleet_protocol.errors import ConfigError, PlanError, ShoalError
from fleet_protocol.manifest import Manifest
from shoal.view.actions import Run, Steer, acting
from shoal.view.metrics import StoreMetrics
from shoal.view.tables import tables

_FOLLOWED = 10_000  # lines that may come between two looks at the store

First = Annotated[int, Query(ge=1, description="None before this round.")]
Lines = Annotated[int, Query(ge=1, le=_FOLLOWED)]
After = Annotated[int, Query(ge=0, lt=2**63, description="None up to that of this id.")]
Last = Annotated[int | None, Query(ge=0, description="None after this round.")]
_COOKIE = "shoal"
_BODY_BYTES = 4096  # of what is asked for; a login is shorter
_READS_SECONDS, _ACTS_SECONDS = 30 * 24 * 3600, 12 * 3600  # how long a login lasts
_HERE = ["localhost", "127.0.0.1", "[::1]"]
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


_NEEDS_READER = (
    "this needs the token of the server (SHOAL_TOKEN), in view.token of its store, or the file that its --token-file"
    " names"
)
_NEEDS_ACTOR = "this needs the operator's token (SHOAL_TOKEN), in operator.token of the store: `shoal view --actions` makes it"


def guarded(app: FastAPI, token: str | None, operator: str | None = None) -> None:
    """Let nobody read the API without a token, nobody act without the operator's, and keep a
    browser strict.

    The token comes as ``Authorization: Bearer``, or for a while by the cookie that ``POST /login``
    sets; None asks for none, but refuses other names of this machine: a foreign page must not read
    the fleet by a name of its own (DNS rebinding). Who has the operator's may read, too; None lets
    nobody act.
    """
    app.state.acts = operator is not None

    @app.middleware("http")
    async def _guard(
        request: Request, answer: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given if scheme == "Bearer" else request.cookies.get(_COOKIE, "")
        path = request.scope["path"]
        origin = request.headers.get("origin")
        request.state.acts = _holds(given, operator)
        changes = request.method not in {"GET", "HEAD"}
        said = (0, "")
        length = (
            "9999"
            if "transfer-encoding" in request.headers
            else request.headers.get("content-length", "0")
        )
        if changes and int(length) > _BODY_BYTES:  # which would be read, whoever asks
            said = (
                413,
                f"no request has more than {_BODY_BYTES} bytes, or leaves out how many",
            )
        elif (
            changes
            and origin is not None
            and origin.partition("//")[2] != request.headers.get("host")
        ):
            said = 403, "a page of another server asked for this"
        elif path.startswith(("/api/", "/metrics")) and not (
            token is None or request.state.acts or _holds(given, token)
        ):
            said = 401, _NEEDS_ACTOR if changes else _NEEDS_READER
        elif changes and path.startswith("/api/") and not request.state.acts:
            said = 403, _NEEDS_ACTOR
        response = JSONResponse({"detail": said[1]}, said[0]) if said[0] else await answer(request)
        response.headers.update({**_HEADERS, "Cache-Control": "no-cache"})
        return response

    @app.post("/login", include_in_schema=False)
    def _login(given: Annotated[str, Body(embed=True, alias="token")]) -> JSONResponse:
        given = given.encode(errors="replace").decode()  # JSON may name half a character
        if not (_holds(given, operator) or _holds(given, token)):
            return JSONResponse({"detail": "this is not the token of the server"}, 401)
        response = JSONResponse({})
        seconds = _ACTS_SECONDS if _holds(given, operator) else _READS_SECONDS
        session = _session(given, str(int(time.time()) + seconds))
        response.set_cookie(_COOKIE, session, httponly=True, samesite="strict", max_age=seconds)
        return response

    if token is None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=_HERE)


def _session(token: str, until: str) -> str:
    """What a cookie holds: the end of the session, and that somebody with the token has set it."""
    return f"{until}.{hmac.new(token.encode(), until.encode(), 'sha256').hexdigest()}"


def _holds(given: str, token: str | None) -> bool:
    if token is None or hmac.compare_digest(given.encode(), token.encode()):
        return token is not None
    until = given.partition(".")[0]
    return (
        hmac.compare_digest(given.encode(), _session(token, until).encode())
        and int(until) > time.time()
    )


def make_app(
    store: Path,
    token: str | None = None,
    operator: str | None = None,
    steer: Steer | None = None,
) -> FastAPI:
    """The application of a store, which is read, and changed by operators alone.

    `steer` is for `shoal.view.actions`.

    Tokens are as of `guarded`.
    """
    about = "What a store of Shoal holds: the same values that the commands print with `--json`; and their verbs."
    app = FastAPI(title="Shoal", version=version("shoal"), description=about, docs_url=None, redoc_url=None,
                  openapi_url="/api/v1/openapi.json")  # fmt: skip
    app.state.over = (
        threading.Event()
    )  # set by whoever stops the server: it would wait for those who follow
    app.include_router(_api(store))
    app.include_router(acting(store, steer))
    guarded(app, token, operator)

    @app.get("/metrics", include_in_schema=False)
    def _metrics(accept: Annotated[str, Header()] = "") -> Response:
        encode, kind = choose_encoder(accept)
        with closing(Store(store, read_only=True)) as opened:
            return Response(encode(StoreMetrics(opened)), media_type=kind)

    # Not mounted: it would answer for the API, too, with methods of its own, wherever a method is
    # not allowed.
    app.router.default = StaticFiles(directory=Path(__file__).parent / "static", html=True)

    @app.exception_handler(ShoalError)
    def _refuse(_request: Request, error: ShoalError) -> JSONResponse:
        unknown = isinstance(error, (ConfigError, PlanError))
        return JSONResponse({"detail": str(error)}, 404 if unknown else 503)

    return app


def _api(store: Path) -> APIRouter:
    api = APIRouter(prefix="/api/v1")

    def look(view: Callable[..., Any], *arguments: Any, **named: Any) -> JSONResponse:
        with closing(Store(store, read_only=True)) as opened:
            return JSONResponse(queries.to_json_values(view(opened, *arguments, **named)))

    # What was fixed for a run does not change, and is a folder of files to read.
    @lru_cache(maxsize=8)
    def fixed(run: str) -> RunContext:
        with closing(Store(store, read_only=True)) as opened:
            return stored_context(opened, run)

    def context(run: str | None) -> RunContext:
        with closing(Store(store, read_only=True)) as opened:
            return fixed(queries.find_run(opened, run).id)

    def get(
        path: str, answer: Any, about: str
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return api.get(
            path,
            summary=about,
            responses={200: {"model": answer}, 404: {"description": "no such thing"}},
        )

    @get("/status", queries.StatusView, "The store at a glance.")
    def _status(run: str | None = None) -> JSONResponse:
        return look(queries.status, run)

    @get("/runs", list[queries.RunView], "Every run, newest first.")
    def _runs(run: str | None = None) -> JSONResponse:
        return look(queries.runs, run)

    @get("/runs/{run}", queries.StatusView, "One run, by its id or the beginning of it.")
    def _run(run: Run) -> JSONResponse:
        return look(queries.status, run)

    @get("/runs/{run}/rounds", list[queries.RoundView], "The rounds of a run.")
    def _rounds(
        run: Run, first: First = 1, last: Last = None, *, tasks: bool = True
    ) -> JSONResponse:
        return look(queries.rounds, run, first=first, last=last, tasks=tasks)

    @get(
        "/runs/{run}/rounds/{number}",
        list[DeviceInRound],
        "What became of every device in a round, and why.",
    )
    def _round(run: Run, number: int) -> JSONResponse:
        return look(lambda opened: explain_round(opened, number, run))

    @get(
        "/runs/{run}/devices",
        list[queries.DeviceView],
        "Every device, with why it does not train and what to do.",
    )
    def _devices(run: Run) -> JSONResponse:
        return look(queries.devices, run)

    @get("/runs/{run}/devices/{device}", list[TaskRecord], "What a device did in a run.")
    def _device(run: Run, device: str) -> JSONResponse:
        return look(partial(_tasks_of, device=device, run=run))

    @get(
        "/runs/{run}/versions",
        list[VersionView],
        "The global versions of a run, with what they were judged.",
    )
    def _versions(run: Run) -> JSONResponse:
        return look(read_versions, run)

    @get("/runs/{run}/advice", list[Advice], "What to do next, with the evidence.")
    def _advice(run: Run) -> JSONResponse:
        return look(find_advice, run)

    @get(
        "/runs/{run}/coverage",
        Coverage,
        "Which coordinates of the model the merged updates held.",
    )
    def _coverage(
        run: Run, last: Last = None, tier: str | None = None, device: str | None = None
    ) -> JSONResponse:
        return look(count_coverage, context(run), upto=last, tier=tier, device=device)

    @get(
        "/runs/{run}/artifacts",
        list[Manifest],
        "What was exported for each tier, without parameters and graphs.",
    )
    def _artifacts(run: Run) -> JSONResponse:
        leave = {"parameters", "states", "graphs", "base", "statistics"}
        found = [item.manifest for item in context(run).artifacts.tiers.values()]
        return JSONResponse([item.model_dump(mode="json", exclude=leave) for item in found])

    @get(
        "/rollout",
        list[RolloutView],
        "The release on its way to the boards, and those before it, newest first.",
    )
    def _rollout() -> JSONResponse:
        return look(read_rollouts)

    @get(
        "/tables",
        dict[str, list[dict[str, str]]],
        "The tables of `shoal reproduce` among whose runs the store lies.",
    )
    def _tables() -> JSONResponse:
        return JSONResponse(tables(store))

    @get("/compare/{one}/{other}", queries.Comparison, "Two runs side by side.")
    def _compare(one: str, other: str) -> JSONResponse:
        return look(queries.compare, one, other)

    @get("/log", list[EventRecord], "Lines of the log, oldest first.")
    def _log(run: str | None = None, last: Lines = 50, after: After = 0) -> JSONResponse:
        return look(queries.log, run, last=last, after=after)

    @api.get(
        "/events",
        summary="Lines of the log as they come, as server-sent events; `change` where there is no line.",
    )
    async def _events(
        request: Request,
        after: After = 0,
        last_event_id: Annotated[int | None, Header(ge=0, lt=2**63)] = None,
    ) -> StreamingResponse:
        lines = _follow(store, last_event_id or after, request.app.state.over)
        return StreamingResponse(lines, media_type="text/event-stream")

    return api


def _tasks_of(store: Store, device: str, run: str | None) -> list[TaskRecord]:
    tasks = store.device_tasks(queries.find_run(store, run).id, device)
    if not tasks and all(known.id != device for known in store.devices()):
        raise ConfigError(
            f"the store {store.folder} has no device {device!r}; `shoal devices` lists them"
        )
    return tasks


async def _follow(store: Path, known: int, over: threading.Event) -> AsyncIterator[str]:
    """Look at the files' times, which costs nothing, and into the store where they have changed."""
    seen = None
    while not over.is_set():
        now = file_states(store)
        if now != seen:
            seen = now
            with suppress(ShoalError):  # it is being moved or copied
                for event in await run_in_threadpool(_since, store, known):
                    known = event.id
                    yield f"id: {event.id}\nevent: line\ndata: {json.dumps(queries.to_json_values(event))}\n\n"
            yield "event: change\ndata: {}\n\n"
        await asyncio.sleep(LOOK_SECONDS)


def _since(store: Path, known: int) -> list[EventRecord]:
    with closing(Store(store, read_only=True)) as opened:
        return queries.log(opened, last=_FOLLOWED, after=known)


if __name__ == "__main__":
    print(json.dumps(make_app(Path()).openapi(), indent=1))
