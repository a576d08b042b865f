"""Decides who may read the page of a store and who may act on it.

A browser is kept strict by headers: the page runs no script and shows no frame of another server.
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
"""Bound on the body of a request; a login is shorter."""
_READER_SECONDS = 30 * 24 * 3600
"""How long a login of a reader lasts."""
_OPERATOR_SECONDS = 12 * 3600
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
    "this needs the token of the server (SHOAL_TOKEN), in view.token of its store, "
    "or the file that its --token-file names"
)
_NEEDS_OPERATOR = (
    "this needs the operator's token (SHOAL_TOKEN), in operator.token of the store: `shoal view "
    "--actions` makes it"
)


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a page: of readers, None if reading needs none, and of operators, if any."""

    reader: str | None
    operator: str | None

    def may_act(self, credential: str) -> bool:
        """Return whether a token or cookie is an operator's."""
        return _proves(credential, self.operator)

    def may_read(self, credential: str) -> bool:
        """Return whether a token or cookie lets its owner read."""
        if self.reader is None or self.may_act(credential):
            return True
        return _proves(credential, self.reader)


def guard(app: FastAPI, token: str | None, operator: str | None = None) -> None:
    """Let only readers read the API and only operators act, and keep browsers strict.

    A token comes as ``Authorization: Bearer``, or for a while by the cookie that ``POST /login``
    sets.

    Args:
        app: the application. ``app.state.acts`` says whether there are operators, and
            ``request.state.acts`` whether a request comes from one.
        token: of readers. None asks for none, but refuses other names of this machine: a foreign
            page must not read the fleet under a name that points here (DNS rebinding).
        operator: token of operators, who may read as well; None lets nobody act.
    """
    tokens = _Tokens(token, operator)
    app.state.acts = operator is not None

    @app.middleware("http")
    async def _answer(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        credential = _credential(request)
        request.state.acts = tokens.may_act(credential)
        refusal = _refusal(request, tokens, credential)
        if refusal is None:
            response = await call_next(request)
        else:
            status, detail = refusal
            response = JSONResponse({"detail": detail}, status)
        response.headers.update(_HEADERS)
        return response

    @app.post("/login", include_in_schema=False)
    def _login(given_token: Annotated[str, Body(embed=True, alias="token")]) -> JSONResponse:
        # JSON may hold half of a character, which no encoding can write.
        typed = given_token.encode(errors="replace").decode()
        is_operator = tokens.may_act(typed)
        if not (is_operator or _proves(typed, tokens.reader)):
            return JSONResponse({"detail": "this is not the token of the server"}, 401)
        seconds = _OPERATOR_SECONDS if is_operator else _READER_SECONDS
        session = _session(typed, str(int(time.time()) + seconds))
        response = JSONResponse({})
        response.set_cookie(_COOKIE, session, httponly=True, samesite="strict", max_age=seconds)
        return response

    if token is None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=_THIS_MACHINE)


def _credential(request: Request) -> str:
    """Return the token, or else the cookie, of a request; empty without both."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme == "Bearer":
        return token
    return request.cookies.get(_COOKIE, "")


def _refusal(request: Request, tokens: _Tokens, credential: str) -> tuple[int, str] | None:
    """Return status and reason if a request is refused."""
    path = request.scope["path"]
    changes = request.method not in {"GET", "HEAD"}
    # First, since the body of a request that is refused later would be read.
    if changes and _body_bytes(request) > _BODY_BYTES:
        return 413, f"no request has more than {_BODY_BYTES} bytes, or leaves out how many"
    if changes and _is_from_another_server(request):
        return 403, "a page of another server asked for this"
    if path.startswith(("/api/", "/metrics")) and not tokens.may_read(credential):
        return 401, _NEEDS_OPERATOR if changes else _NEEDS_READER
    if changes and path.startswith("/api/") and not request.state.acts:
        return 403, _NEEDS_OPERATOR
    return None


def _body_bytes(request: Request) -> int:
    """Return the size of a body; one that comes in pieces of unknown number counts as too large."""
    if "transfer-encoding" in request.headers:
        return _BODY_BYTES + 1
    return int(request.headers.get("content-length", "0"))


def _is_from_another_server(request: Request) -> bool:
    """Return whether a page that another server sent makes this request."""
    origin = request.headers.get("origin")
    if origin is None:
        return False
    return origin.partition("//")[2] != request.headers.get("host")


def _session(token: str, end: str) -> str:
    """Return a cookie: the end of the session, and a proof that it was set with the token."""
    proof = hmac.new(token.encode(), end.encode(), "sha256").hexdigest()
    return f"{end}.{proof}"


def _proves(credential: str, token: str | None) -> bool:
    """Return whether a credential is a token, or the cookie of a session with it that lasts."""
    if token is None:
        return False
    if hmac.compare_digest(credential.encode(), token.encode()):
        return True
    end = credential.partition(".")[0]
    expected = _session(token, end)
    if not hmac.compare_digest(credential.encode(), expected.encode()):
        return False
    return int(end) > time.time()
