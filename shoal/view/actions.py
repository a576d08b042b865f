"""What an operator does on the page: the verbs of the command line.

Each writes a line to the log that says who asked.
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
from shoal.downloads import ELSEWHERE, FileFormat, save_version
from shoal.store_actions import act_on_run

_MOST = 2**31
Steer = Callable[[Wanted, str], str]
Tier = Annotated[str | None, Query(max_length=64, description="Such as w0.50-d2.")]
_CODES: dict[int | str, dict[str, Any]] = {
    403: {"description": "not the operator's token, or asked from a page of another server"},
    404: {"description": "no such run"},
    409: {"description": "it cannot be done; the answer says why"},
    503: {"description": "the store cannot be written, or no server answers"},
}
_FILE = {
    **_CODES,
    200: {
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    },
}


async def _named(
    run: Annotated[str, InPath(description="Its id, the beginning of it, or `newest`.")],
) -> str | None:
    return None if run == "newest" else run


Run = Annotated[str | None, Depends(_named)]


def acting(store: Path, steer: Steer | None) -> APIRouter:
    """The verbs; whoever calls them was let in by `shoal.view.app`.

    They write the store, and `steer` its server as `broker_server.service.launch` does; None if no
    server is running.
    """
    api = APIRouter(prefix="/api/v1")

    @api.get(
        "/access",
        summary="Whether whoever asks may act, and whether runs can be steered here.",
    )
    def _access(request: Request) -> dict[str, bool]:
        return {
            "acts": request.state.acts,
            "offered": request.app.state.acts,
            "steers": steer is not None,
        }

    @api.post(
        "/runs/{run}/actions/{verb}",
        summary="Steer a run, begin another like it, choose a version, free a device.",
        responses=_CODES,
    )
    def _act(
        request: Request,
        run: Run,
        verb: Verb,
        version: Annotated[
            int | None, Query(ge=0, le=_MOST, description="To promote or roll back to.")
        ] = None,
        device: Annotated[str | None, Query(max_length=64, description="To release.")] = None,
    ) -> dict[str, str]:
        Store(store, read_only=True).close()  # a store is not made by this
        with closing(Store(store)) as opened:
            record = queries.find_run(opened, run)
            named = record.id
            asked = f"{verb} {device or ''}{'' if version is None else version}".strip()
            _note(opened, request, asked, run=record.id, device=device)
            with _answered():
                if verb in {"release", "promote", "rollback"}:
                    act_on_run(opened, verb, record.id, version, device or "")
                elif steer is None:
                    raise ConfigError(
                        "a page of `shoal up --view` does this, and so do `shoal stop`, "
                        "pause and resume"
                    )
                else:
                    wish = cast("Wanted", "go" if verb == "resume" else verb)
                    named = steer(wish, record.id)
        return {"done": asked, "run": named}

    about = (
        "A version as the file that `shoal export-weights` writes, whole or a tier of it; "
        "for operators."
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
        if not request.state.acts:
            raise HTTPException(
                403,
                "models are for operators: this needs the token in operator.token of the store",
            )
        with (
            TemporaryDirectory() as folder,
            closing(Store(store, read_only=True)) as opened,
        ):
            path = Path(folder) / "weights"
            download = save_version(opened, run, version, tier, file_format, path, ELSEWHERE)
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
    """Say in the log who asked for something, before it is done."""
    who = request.client.host if request.client else "somebody"
    opened.log(
        "asked",
        f"{asked}, on the page, from {who}",
        run=of.get("run"),
        device=of.get("device"),
    )
    opened.flush()


@contextmanager
def _answered() -> Iterator[None]:
    """Refusals as answers."""
    try:
        yield
    except ShoalError as error:
        away = isinstance(error, (StorageError, TransportError))
        raise HTTPException(503 if away else 409, str(error)) from error
