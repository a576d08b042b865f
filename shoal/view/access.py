"""Who may read the API and act on it, and what a browser may do with its answers."""

import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Body, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

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


def guarded(app: FastAPI, token: str | None, operator: str | None = None) -> None:
    """Let nobody read the API without a token, nobody act without the operator's, and keep a browser strict.

    The token comes as ``Authorization: Bearer``, or for a while by the cookie that ``POST /login`` sets; None asks for
    none, but refuses other names of this machine: a foreign page must not read the fleet by a name of its own (DNS
    rebinding). Who has the operator's may read, too; None lets nobody act.
    """
    app.state.acts = operator is not None

    @app.middleware("http")
    async def _guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given if scheme == "Bearer" else request.cookies.get(_COOKIE, "")
        path, origin = request.scope["path"], request.headers.get("origin")
        request.state.acts = _holds(given, operator)
        changes, said = request.method not in {"GET", "HEAD"}, (0, "")
        length = "9999" if "transfer-encoding" in request.headers else request.headers.get("content-length", "0")
        if changes and int(length) > _BODY_BYTES:  # which would be read, whoever asks
            said = 413, f"no request has more than {_BODY_BYTES} bytes, or leaves out how many"
        elif changes and origin is not None and origin.partition("//")[2] != request.headers.get("host"):
            said = 403, "a page of another server asked for this"
        elif path.startswith(("/api/", "/metrics")) and not (
            token is None or request.state.acts or _holds(given, token)
        ):
            where = "in view.token of its store, or the file that its --token-file names"
            said = 401, f"this needs the token of the server (SHOAL_TOKEN), {where}"
        elif changes and path.startswith("/api/") and not request.state.acts:
            needed = "this needs the operator's token (SHOAL_TOKEN), in operator.token of the store"
            said = 403, f"{needed}: `shoal view --actions` makes it"
        response = JSONResponse({"detail": said[1]}, said[0]) if said[0] else await answer(request)
        response.headers.update({**_HEADERS, "Cache-Control": "no-cache"})
        return response

    @app.post("/login", include_in_schema=False)
    def _login(given: Annotated[str, Body(embed=True, alias="token")]) -> JSONResponse:
        given = given.encode(errors="replace").decode()  # JSON may name half a character
        if not (_holds(given, operator) or _holds(given, token)):
            return JSONResponse({"detail": "this is not the token of the server"}, 401)
        response, seconds = JSONResponse({}), _ACTS_SECONDS if _holds(given, operator) else _READS_SECONDS
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
    return hmac.compare_digest(given.encode(), _session(token, until).encode()) and int(until) > time.time()
