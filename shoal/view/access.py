"""Access control of the page: who may read it, and who may act.

Response headers restrict browsers: the page runs no script and shows no frame of another server.
"""

import hmac
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Body, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

_COOKIE = "shoal"
_BODY_BYTES = 4096
"""Size limit of a request body; a login is shorter."""
_READER_SECONDS = 30 * 24 * 3600
"""Lifetime of a reader's login in seconds."""
_OPERATOR_SECONDS = 12 * 3600
# Host names under which a browser on this machine reaches the page.
_THIS_MACHINE = ["localhost", "127.0.0.1", "[::1]"]
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_NEEDS_READER = (
    "access denied: set SHOAL_TOKEN to the server's token, which is in view.token of its store"
    " or in the file of its --token-file"
)
_NEEDS_OPERATOR = (
    "access denied: set SHOAL_TOKEN to the operator's token in operator.token of the store,"
    " which `shoal view --actions` creates"
)


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a page: of readers (None: reading is open) and of operators (if any)."""

    reader: str | None
    operator: str | None

    def may_act(self, credential: str) -> bool:
        """Return whether a token or cookie is an operator's."""
        return _proves(credential, self.operator)

    def may_read(self, credential: str) -> bool:
        """Return whether a token or cookie permits reading."""
        if self.reader is None or self.may_act(credential):
            # An operator's token also permits reading.
            return True
        return _proves(credential, self.reader)


def guard(app: FastAPI, token: str | None, operator: str | None = None) -> None:
    """Protect the API: only readers read, only operators act, and browsers are restricted.

    A token is sent as ``Authorization: Bearer``, or as the session cookie that ``POST /login``
    sets.

    Args:
        app: the application. ``app.state.acts`` is true if there are operators, and
            ``request.state.acts`` if a request comes from an operator.
        token: the readers' token. With None reading is open, but requests under other host names
            are refused: a foreign page must not read the fleet under a name that resolves to this
            machine (DNS rebinding).
        operator: the operators' token, which also permits reading; with None nobody can act.
    """
    tokens = _Tokens(token, operator)
    app.state.acts = operator is not None

    @app.middleware("http")
    async def _answer(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        credential = _credential(request)
        # The handlers of actions read this.
        request.state.acts = tokens.may_act(credential)
        refusal = _refusal(request, tokens, credential)
        # Refused before any handler runs.
        if refusal is None:
            response = await call_next(request)
        else:
            status, detail = refusal
            response = JSONResponse({"detail": detail}, status)
        response.headers.update(_HEADERS)
        return response

    @app.post("/login", include_in_schema=False)
    def _login(given_token: Annotated[str, Body(embed=True, alias="token")]) -> JSONResponse:
        # JSON may contain lone surrogates, which cannot be encoded.
        typed = given_token.encode(errors="replace").decode()
        is_operator = tokens.may_act(typed)
        if not (is_operator or _proves(typed, tokens.reader)):
            return JSONResponse({"detail": "this is not the server's token"}, 401)
        seconds = _OPERATOR_SECONDS if is_operator else _READER_SECONDS
        # The cookie holds no token: somebody who reads it can use it only until its end.
        session = _session(typed, str(int(time.time()) + seconds))
        response = JSONResponse({})
        # Neither scripts nor requests from other sites get the cookie.
        response.set_cookie(_COOKIE, session, httponly=True, samesite="strict", max_age=seconds)
        return response

    # Without a token, only the host name protects against DNS rebinding.
    if token is None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=_THIS_MACHINE)


def _credential(request: Request) -> str:
    """Return the token or else the cookie of a request; empty if it has neither."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme == "Bearer":
        return token
    return request.cookies.get(_COOKIE, "")


def _refusal(request: Request, tokens: _Tokens, credential: str) -> tuple[int, str] | None:
    """Return status and reason if a request is refused."""
    path = request.scope["path"]
    # No file and no route has such a path, and older servers of files fail at it.
    if "\0" in path:
        return 404, "no path contains a zero byte"
    changes = request.method not in {"GET", "HEAD"}
    # Checked first, because the body would be read even if the request is refused later.
    if changes and _body_bytes(request) > _BODY_BYTES:
        return 413, (
            f"the body of a request must have at most {_BODY_BYTES} bytes, and its"
            " Content-Length must be set"
        )
    if changes and _is_from_another_server(request):
        return 403, "the request comes from a page of another server"
    # Files of the page and the login need no token: they hold no data of the fleet.
    if path.startswith(("/api/", "/metrics")) and not tokens.may_read(credential):
        return 401, _NEEDS_OPERATOR if changes else _NEEDS_READER
    if changes and path.startswith("/api/") and not request.state.acts:
        return 403, _NEEDS_OPERATOR
    return None


def _body_bytes(request: Request) -> int:
    """Return the size of a body; one in chunks of unknown number counts as too large."""
    if "transfer-encoding" in request.headers:
        return _BODY_BYTES + 1
    return int(request.headers.get("content-length", "0"))


def _is_from_another_server(request: Request) -> bool:
    """Return whether a page of another server makes this request."""
    origin = request.headers.get("origin")
    # Programs send no origin; browsers send one with every request that changes something.
    if origin is None:
        return False
    return origin.partition("//")[2] != request.headers.get("host")


def _session(token: str, end: str) -> str:
    """Return a cookie: the end of the session, and a proof that the token was known."""
    proof = hmac.new(token.encode(), end.encode(), "sha256").hexdigest()
    return f"{end}.{proof}"


def _proves(credential: str, token: str | None) -> bool:
    """Return whether a credential is the token, or the cookie of a valid session with it."""
    if token is None:
        return False
    # Compared in constant time, so that the time of an answer reveals nothing about the token.
    if hmac.compare_digest(credential.encode(), token.encode()):
        return True
    end = credential.partition(".")[0]
    expected = _session(token, end)
    if not hmac.compare_digest(credential.encode(), expected.encode()):
        return False
    # Only a cookie with a valid proof gets here, so its end is a number.
    return int(end) > time.time()
