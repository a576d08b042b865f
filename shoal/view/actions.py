"""The operator's actions on the page: the verbs of the command line.

Each one writes a line to the log with the address of the caller.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast
from urllib.parse import quote

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi import Path as InPath

from broker_server.service.rollout import read_rollout, steer_rollout
from broker_server.store import Store, queries
from fleet_protocol.errors import ConfigError, ShoalError, StorageError, TransportError
from fleet_protocol.requests import Wanted
from shoal.client import LOADING, RolloutVerb, Verb
from shoal.downloads import ELSEWHERE, FileFormat, Selection, save_version
from shoal.store_actions import act_on_run

_MOST = 2**31
Steer = Callable[[Wanted, str], str]
Tier = Annotated[str | None, Query(max_length=64, description="Id of the tier, such as w0.50-d2.")]
_CODES: dict[int | str, dict[str, Any]] = {
    403: {"description": "not the operator's token, or a request from a page of another server"},
    404: {"description": "no such run"},
    409: {"description": "the action is not possible; the answer gives the reason"},
    503: {"description": "the store cannot be written, or no server answers"},
}
_FILE = {
    **_CODES,
    200: {
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    },
}


async def _named(
    run: Annotated[
        str, InPath(description="Name or id of the run, a prefix of the id, or `newest`.")
    ],
) -> str | None:
    # None is the newest run for all functions of a store.
    return None if run == "newest" else run


Run = Annotated[str | None, Depends(_named)]


def acting(store: Path, steer: Steer | None) -> APIRouter:
    """The verbs; `shoal.view.app` has already checked the caller's token.

    They write to the store and steer its server with `steer`, as `broker_server.service.launch`
    does; it is None if no server is running.
    """
    api = APIRouter(prefix="/api/v1")

    @api.get(
        "/access",
        summary="Whether the caller may act, and whether runs can be steered here.",
    )
    def _access(request: Request) -> dict[str, bool]:
        return {
            "acts": request.state.acts,
            "offered": request.app.state.acts,
            "steers": steer is not None,
        }

    @api.post(
        "/runs/{run}/actions/{verb}",
        summary="Steer a run, start a similar one, select a version, or release a device.",
        responses=_CODES,
    )
    def _act(
        request: Request,
        run: Run,
        verb: Verb,
        version: Annotated[
            int | None, Query(ge=0, le=_MOST, description="The version to promote or roll back to.")
        ] = None,
        device: Annotated[
            str | None, Query(max_length=64, description="Id of the device to release.")
        ] = None,
    ) -> dict[str, str]:
        Store(store, read_only=True).close()  # this must not create a store
        with closing(Store(store)) as opened:
            record = queries.find_run(opened, run)
            named = record.id
            # The words appear in the log, so they name what the action is about.
            asked = f"{verb} {device or ''}{'' if version is None else version}".strip()
            # Logged before the action, so that one that fails or ends the server is in the log,
            # too.
            _note(opened, request, asked, run=record.id, device=device)
            with _answered():
                # These three only write to the store; the others need a running server.
                if verb in {"release", "promote", "rollback"}:
                    act_on_run(opened, verb, record.id, version, device or "")
                elif steer is None:
                    raise ConfigError(
                        "this page cannot steer runs; use a page of `shoal up --view`, or `shoal"
                        " stop`, `pause` and `resume`"
                    )
                else:
                    # A request calls the state after `resume` "go".
                    wish = cast("Wanted", "go" if verb == "resume" else verb)
                    named = steer(wish, record.id)
        return {"done": asked, "run": named}

    about = (
        "A version or a tier of it, as the file that `shoal export-weights` writes; for operators."
    )

    @api.get(
        "/runs/{run}/versions/{version}/weights",
        summary=about,
        response_class=Response,
        responses=_FILE,
    )
    def _weights(
        request: Request,
        run: Run,
        version: Annotated[int, InPath(ge=0, le=_MOST)],
        tier: Tier = None,
        file_format: Annotated[FileFormat, Query(alias="format")] = "safetensors",
    ) -> Any:
        # Reading is open to readers, but a model is not a figure.
        if not request.state.acts:
            raise HTTPException(
                403,
                "only operators can download models: use the token in operator.token of the store",
            )
        with (
            TemporaryDirectory() as folder,
            closing(Store(store, read_only=True)) as opened,
        ):
            path = Path(folder) / "weights"
            # The caller has none of this machine's files, so the lines must not name them.
            selection = Selection(run, version, tier, file_format)
            download = save_version(opened, selection, path, ELSEWHERE)
            loading = {"lines": download.lines, "note": download.note}
            headers = {LOADING: quote(json.dumps(loading))}
            return Response(
                path.read_bytes(),
                media_type="application/octet-stream",
                headers=headers,
            )

    @api.post("/rollout/actions/{verb}", summary="Steer the newest rollout.", responses=_CODES)
    def _act_on_rollout(request: Request, verb: RolloutVerb) -> dict[str, str | int]:
        Store(store, read_only=True).close()
        with closing(Store(store)) as opened, _answered():
            number = read_rollout(store.resolve().parent).release.number
            asked = f"{verb} the rollout of release {number}"
            _note(opened, request, asked)
            steer_rollout(store.resolve().parent, verb)
        return {"done": asked, "release": number}

    return api


def _note(opened: Store, request: Request, asked: str, **of: str | None) -> None:
    """Log who requested an action, before it runs."""
    who = request.client.host if request.client else "somebody"
    opened.log(
        "asked",
        f"{asked}, on the page, from {who}",
        run=of.get("run"),
        device=of.get("device"),
    )
    # The action may run in another process, whose lines must follow this one.
    opened.flush()


@contextmanager
def _answered() -> Iterator[None]:
    """Return refusals as responses."""
    try:
        yield
    except ShoalError as error:
        # The store or the server did not answer, as opposed to a refusal.
        away = isinstance(error, (StorageError, TransportError))
        raise HTTPException(503 if away else 409, str(error)) from error
