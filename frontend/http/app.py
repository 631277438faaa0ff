"""The HTTP application: routes, errors, and what every request passes through."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from common.config import ServerOptions
from common.errors import RequestError
from frontend.engine import Engine
from frontend.http import dashboard, utilities
from frontend.http.anthropic import count_tokens, messages
from frontend.http.chat import chat_completions
from frontend.http.completions import completions
from frontend.http.errors import error_response
from frontend.http.history import History
from frontend.http.metrics import CONTENT_TYPE, Metrics
from frontend.http.middleware import ApiKey, BodyLimit, RequestId
from frontend.http.profiling import start_profile, stop_profile
from frontend.http.responses import responses

ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/models", utilities.models),
    Route("/v1/models/{model_id:path}", utilities.model),
    Route("/health", utilities.health),
    Route("/ready", utilities.health),
    Route("/ping", utilities.health, methods=["GET", "POST"]),
    Route("/version", utilities.version),
    Route("/tokenize", utilities.tokenize, methods=["POST"]),
    Route("/detokenize", utilities.detokenize, methods=["POST"]),
    Route("/start_profile", start_profile, methods=["POST"]),
    Route("/stop_profile", stop_profile, methods=["POST"]),
    Route("/flush_cache", utilities.flush_cache, methods=["POST"]),
]


def build_app(engine: Engine, options: ServerOptions) -> Starlette:
    """The application.

    Args:
        engine: what serves the requests.
        options: API keys, CORS origins, the prefix of the metrics.
    """
    figures, history = Metrics(engine, options.metrics_prefix), History(engine)

    async def metrics(_: Request) -> Response:
        return Response(figures.render(), media_type=CONTENT_TYPE)

    middleware = [Middleware(RequestId)]
    if options.allowed_origins:
        middleware.append(Middleware(_cors(options.allowed_origins)))
    if options.api_key:
        middleware.append(Middleware(ApiKey, keys=options.api_key))
    middleware.append(Middleware(BodyLimit))
    app = Starlette(
        routes=[*ROUTES, Route("/metrics", metrics), *dashboard.routes(history)],
        middleware=middleware,
        exception_handlers={RequestError: _on_refused, HTTPException: _on_http_error},
    )
    app.state.engine = engine
    app.state.history = history
    return app


def _cors(origins: tuple[str, ...]) -> Callable[[ASGIApp], ASGIApp]:
    def wrap(app: ASGIApp) -> ASGIApp:
        return CORSMiddleware(
            app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
        )

    return wrap


async def _on_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), f"registered for RequestError, got {type(error).__name__}"
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"registered for HTTPException, got {type(error).__name__}"
    text = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    message = text.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return error_response(RequestError(message, code=code, status=error.status_code))
