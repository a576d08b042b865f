"""Who may read the API, and what a browser may do with its answers."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Body, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

_COOKIE = "shoal"
_HERE = ["localhost", "127.0.0.1", "[::1]"]
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def guarded(app: FastAPI, token: str | None) -> None:
    """Let nobody read the API without the token, and answer with headers that keep a browser strict.

    Args:
        app: the application.
        token: as ``Authorization: Bearer``, or in the cookie that ``POST /login`` sets; None asks for none, but refuses
            other names of this machine: a foreign page must not read the fleet by a name of its own (DNS rebinding).
    """

    def known(given: str) -> bool:
        return token is None or hmac.compare_digest(given.encode(), token.encode())

    @app.middleware("http")
    async def _guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ") or request.cookies.get(_COOKIE, "")
        if request.url.path.startswith(("/api/", "/metrics")) and not known(given):
            detail = "this needs the token of the server: the file that --token-file names has it"
            response: Response = JSONResponse({"detail": detail}, 401)
        else:
            response = await answer(request)
        response.headers.update({**_HEADERS, "Cache-Control": "no-cache"})
        return response

    @app.post("/login", include_in_schema=False)
    def _login(given: Annotated[str, Body(embed=True, alias="token")]) -> JSONResponse:
        if not known(given):
            return JSONResponse({"detail": "this is not the token of the server"}, 401)
        response = JSONResponse({})
        response.set_cookie(_COOKIE, given, httponly=True, samesite="strict", max_age=30 * 24 * 3600)
        return response

    if token is None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=_HERE)
