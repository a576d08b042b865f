"""The API of `shoal view`, and the page that reads it.

The API returns the values that the command line prints with ``--json``.

``python -m shoal.view.app > docs/openapi.json`` writes the specification of the API.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing, suppress
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client.exposition import choose_encoder

from broker_server.rounds.advice import Advice, find_advice
from broker_server.rounds.best import VersionView, read_versions
from broker_server.rounds.coverage import Coverage, count_coverage
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.tier_version import stored_context
from broker_server.service.rollout import RolloutView, read_rollouts
from broker_server.store import EventRecord, Store, TaskRecord, queries
from broker_server.store.event_table import LineFilter
from broker_server.store.explaining import DeviceInRound, explain_round
from broker_server.store.following import LOOK_SECONDS, file_states
from fleet_protocol.errors import ConfigError, PlanError, ShoalError
from fleet_protocol.manifest import Manifest
from shoal.view.access import guard
from shoal.view.actions import Run, Steer, acting
from shoal.view.metrics import StoreMetrics
from shoal.view.tables import tables

_EVENTS_AT_ONCE = 10_000
"""Largest number of log lines in a response."""

First = Annotated[int, Query(ge=1, description="Only rounds with this number or a larger one.")]
Lines = Annotated[int, Query(ge=1, le=_EVENTS_AT_ONCE)]
After = Annotated[int, Query(ge=0, lt=2**63, description="Only lines with a larger id.")]
Kinds = Annotated[
    Sequence[str], Query(max_length=64, description="Kinds of lines; may be repeated.")
]
Last = Annotated[
    int | None, Query(ge=0, description="Only rounds with this number or a smaller one.")
]


def make_app(
    store: Path,
    token: str | None = None,
    operator: str | None = None,
    steer: Steer | None = None,
) -> FastAPI:
    """Return the application that shows a store and lets operators change it.

    Args:
        store: folder of the store.
        token: the readers' token, see `shoal.view.access.guard`.
        operator: the operators' token.
        steer: steers the server of the store, see `shoal.view.actions`.
    """
    about = (
        "The contents of a store of Shoal, as the commands print them with `--json`, and the"
        " operators' actions."
    )
    app = FastAPI(
        title="Shoal",
        version=version("shoal"),
        description=about,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/v1/openapi.json",
    )
    # Set when the server stops; otherwise it would wait for clients that follow the log.
    app.state.over = threading.Event()
    app.include_router(_api(store))
    app.include_router(acting(store, steer))
    guard(app, token, operator)

    @app.get("/metrics", include_in_schema=False)
    def _metrics(accept: Annotated[str, Header()] = "") -> Response:
        encode, kind = choose_encoder(accept)
        with closing(Store(store, read_only=True)) as opened:
            return Response(encode(StoreMetrics(opened)), media_type=kind)

    # Not mounted, because a mount would also answer requests for the API whose method is not
    # allowed.
    app.router.default = StaticFiles(directory=Path(__file__).parent / "static", html=True)

    @app.exception_handler(ShoalError)
    def _refuse(_request: Request, error: ShoalError) -> JSONResponse:
        # The caller has named something that does not exist; other errors concern the store.
        unknown = isinstance(error, (ConfigError, PlanError))
        return JSONResponse({"detail": str(error)}, 404 if unknown else 503)

    return app


def _api(store: Path) -> APIRouter:  # noqa: C901  (a function for each path)
    """Return the paths that read a store."""
    api = APIRouter(prefix="/api/v1")

    def answer_of(view: Callable[..., Any], *arguments: Any, **named: Any) -> JSONResponse:
        """Return the result of a function of an open store."""
        with closing(Store(store, read_only=True)) as opened:
            return JSONResponse(queries.to_json_values(view(opened, *arguments, **named)))

    # Cached, because the context of a run does not change and takes reading many files.
    @lru_cache(maxsize=8)
    def context_of(run: str) -> RunContext:
        with closing(Store(store, read_only=True)) as opened:
            return stored_context(opened, run)

    def context(run: str | None) -> RunContext:
        # By the id, so that "newest" and prefixes never hit an old entry.
        with closing(Store(store, read_only=True)) as opened:
            return context_of(queries.find_run(opened, run).id)

    def get(
        path: str, answer: Any, about: str
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return api.get(
            path,
            summary=about,
            responses={200: {"model": answer}, 404: {"description": "no such resource"}},
        )

    @get("/status", queries.StatusView, "A summary of the store.")
    def _status(run: str | None = None) -> JSONResponse:
        return answer_of(queries.status, run)

    @get("/runs", list[queries.RunView], "Every run, newest first.")
    def _runs(run: str | None = None) -> JSONResponse:
        return answer_of(queries.runs, run)

    @get("/runs/{run}", queries.StatusView, "One run, by its name, its id or a prefix of its id.")
    def _run(run: Run) -> JSONResponse:
        return answer_of(queries.status, run)

    @get("/runs/{run}/rounds", list[queries.RoundView], "The rounds of a run.")
    def _rounds(
        run: Run, first: First = 1, last: Last = None, *, tasks: bool = True
    ) -> JSONResponse:
        return answer_of(queries.rounds, run, first=first, last=last, tasks=tasks)

    @get(
        "/runs/{run}/rounds/{number}",
        list[DeviceInRound],
        "The outcome of every device in a round, and the reason.",
    )
    def _round(run: Run, number: int) -> JSONResponse:
        return answer_of(lambda opened: explain_round(opened, number, run))

    @get(
        "/runs/{run}/devices",
        list[queries.DeviceView],
        "Every device, with the reason and the remedy if it does not train.",
    )
    def _devices(run: Run) -> JSONResponse:
        return answer_of(queries.devices, run)

    @get("/runs/{run}/devices/{device}", list[TaskRecord], "The work of a device in a run.")
    def _device(run: Run, device: str) -> JSONResponse:
        return answer_of(partial(_tasks_of, device=device, run=run))

    @get(
        "/runs/{run}/versions",
        list[VersionView],
        "The global versions of a run, with their evaluations.",
    )
    def _versions(run: Run) -> JSONResponse:
        return answer_of(read_versions, run)

    @get("/runs/{run}/advice", list[Advice], "Advice, with the evidence.")
    def _advice(run: Run) -> JSONResponse:
        return answer_of(find_advice, run)

    @get(
        "/runs/{run}/coverage",
        Coverage,
        "The coordinates of the model that the merged updates covered.",
    )
    def _coverage(
        run: Run, last: Last = None, tier: str | None = None, device: str | None = None
    ) -> JSONResponse:
        return answer_of(count_coverage, context(run), upto=last, tier=tier, device=device)

    @get(
        "/runs/{run}/artifacts",
        list[Manifest],
        "The exported sets of each tier, without parameters and graphs.",
    )
    def _artifacts(run: Run) -> JSONResponse:
        # These lists are long, and the page does not show them.
        excluded = {"parameters", "states", "graphs", "base", "statistics"}
        answer = []
        for artifacts in context(run).artifacts.tiers.values():
            answer.append(artifacts.manifest.model_dump(mode="json", exclude=excluded))
        return JSONResponse(answer)

    @get(
        "/rollout",
        list[RolloutView],
        "The current and earlier releases, newest first.",
    )
    def _rollout() -> JSONResponse:
        return answer_of(read_rollouts)

    @get(
        "/tables",
        dict[str, list[dict[str, str]]],
        "The tables of `shoal reproduce` to which the runs of the store belong.",
    )
    def _tables() -> JSONResponse:
        return JSONResponse(tables(store))

    @get("/compare/{one}/{other}", queries.Comparison, "A comparison of two runs.")
    def _compare(one: str, other: str) -> JSONResponse:
        return answer_of(queries.compare, one, other)

    @get("/log", list[EventRecord], "Lines of the log, oldest first.")
    def _log(  # noqa: PLR0913  (a parameter for each part of the filter)
        run: str | None = None,
        last: Lines = 50,
        after: After = 0,
        kind: Kinds = (),
        without: Kinds = (),
        device: Annotated[str, Query(max_length=64)] = "",
    ) -> JSONResponse:
        matching = LineFilter(tuple(kind), tuple(without), device)
        return answer_of(queries.log, run, last=last, after=after, matching=matching)

    @api.get(
        "/events",
        summary=(
            "New lines of the log as server-sent events; `change` for other changes of the store."
        ),
    )
    async def _events(
        request: Request,
        after: After = 0,
        last_event_id: Annotated[int | None, Header(ge=0, lt=2**63)] = None,
    ) -> StreamingResponse:
        # A browser that lost the connection continues after the last line that it received.
        lines = _follow(store, last_event_id or after, request.app.state.over)
        return StreamingResponse(lines, media_type="text/event-stream")

    return api


def _tasks_of(store: Store, device: str, run: str | None) -> list[TaskRecord]:
    """Return the work of a device in a run; raise a ConfigError if the store lacks the device."""
    tasks = store.device_tasks(queries.find_run(store, run).id, device)
    # A device without tasks is known, and one without any record is a mistake.
    if not tasks and all(record.id != device for record in store.devices()):
        raise ConfigError(
            f"the store {store.folder} has no device {device!r}; `shoal devices` lists them"
        )
    return tasks


async def _follow(store: Path, newest_id: int, stop: threading.Event) -> AsyncIterator[str]:
    """Yield new lines of the log as server-sent events until `stop` is set.

    The modification times of the files show when to read the store, and are cheap to check.
    """
    last_states = None
    while not stop.is_set():
        states = file_states(store)
        if states != last_states:
            last_states = states
            # A store cannot be read while somebody moves or copies it.
            with suppress(ShoalError):
                for event in await run_in_threadpool(_events_after, store, newest_id):
                    newest_id = event.id
                    data = json.dumps(queries.to_json_values(event))
                    yield f"id: {event.id}\nevent: line\ndata: {data}\n\n"
            # Also without a new line, because rounds and devices change without one.
            yield "event: change\ndata: {}\n\n"
        await asyncio.sleep(LOOK_SECONDS)


def _events_after(store: Path, newest_id: int) -> list[EventRecord]:
    """Return the lines of the log with an id above `newest_id`, oldest first."""
    with closing(Store(store, read_only=True)) as opened:
        return queries.log(opened, last=_EVENTS_AT_ONCE, after=newest_id)


if __name__ == "__main__":
    print(json.dumps(make_app(Path()).openapi(), indent=1))
