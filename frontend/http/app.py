"""The HTTP application: routes, errors, and what every request passes through."""

import difflib
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from common.config import ServerOptions
from common.errors import RequestError
from frontend.engine import Engine
from frontend.http.bodies import Bodies
from frontend.http.endpoints import ENDPOINTS
from frontend.http.errors import error_response
from frontend.http.history import History
from frontend.http.metrics import Metrics
from frontend.http.middleware import ApiKey, BodyLimit, ForeignPages, PlainPath, RequestId, UnknownLength
from frontend.http.openapi import document

_PATHS = [endpoint.path for endpoint in ENDPOINTS]
_LONGEST_COMPARED = 100


def build_app(engine: Engine, options: ServerOptions) -> Starlette:
    """The application.

    Args:
        engine: what serves the requests.
        options: API keys, CORS origins, the prefix of the metrics.
    """
    middleware = [Middleware(PlainPath), Middleware(UnknownLength), Middleware(RequestId)]
    if options.allowed_origins:
        middleware.append(Middleware(_cors(options.allowed_origins)))
    middleware.append(Middleware(ForeignPages, allowed=options.allowed_origins))
    if options.api_key:
        middleware.append(Middleware(ApiKey, keys=options.api_key))
    middleware.append(Middleware(BodyLimit))
    app = Starlette(
        routes=[endpoint.route() for endpoint in ENDPOINTS],
        middleware=middleware,
        exception_handlers={RequestError: _on_refused, HTTPException: _on_http_error},
    )
    app.state.engine = engine
    app.state.bodies = Bodies()
    app.state.history = History(engine)
    app.state.metrics = Metrics(engine, options.metrics_prefix)
    app.state.openapi = document(ENDPOINTS, root_path=options.root_path, has_keys=bool(options.api_key))
    return app


def _cors(origins: tuple[str, ...]) -> Callable[[ASGIApp], ASGIApp]:
    def wrap(app: ASGIApp) -> ASGIApp:
        return CORSMiddleware(
            app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
        )

    return wrap


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), f"registered for RequestError, got {type(error).__name__}"
    return error_response(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"registered for HTTPException, got {type(error).__name__}"
    text = {
        404: f"there is no {request.url.path}{_meant(request.url.path, request.scope.get('root_path', ''))}",
        405: f"{request.url.path} does not take {request.method}",
    }
    message = text.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    response = error_response(RequestError(message, code=code, status=error.status_code), request.scope)
    response.headers.update(error.headers or {})
    return response


def _meant(path: str, root: str) -> str:
    """The endpoint that a path which does not exist was probably meant to be, behind the prefix that a proxy adds."""
    path = path.removeprefix(root)
    if not path.strip("/"):
        return f"; {root}/docs describes the API, and {root}/dashboard shows the engine"
    tail = path.rpartition("/v1")[2].rstrip("/") or "/models"
    if len(path) > _LONGEST_COMPARED:
        return ""
    near = [f"/v1{tail}"] if f"/v1{tail}" in _PATHS else difflib.get_close_matches(path, _PATHS, n=1, cutoff=0.8)
    hint = f"; did you mean {root}{near[0]}?" if near else f"; {root}/docs describes what there is"
    if root and path.startswith(f"{root}/"):
        hint += f" (if that is what was asked for: a proxy has to take {root} off, as --root-path says)"
    return hint
