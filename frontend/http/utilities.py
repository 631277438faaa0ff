"""The small endpoints: models, health, version, aborts, the prefix cache."""

import dataclasses
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from common.version import own_version
from frontend.engine import Engine
from frontend.http.bodies import read_body
from frontend.http.errors import JsonResponse
from frontend.http.generation import check_model
from frontend.http.metrics import CONTENT_TYPE, Metrics
from frontend.http.requests import AbortRequest

_STARTED_AT_S = int(time.time())


async def health(request: Request) -> Response:
    """200 while the engine serves; 503 with the state while it starts, starts again, drains or is dead."""
    engine: Engine = request.app.state.engine
    now = engine.health()
    body: dict[str, Any] = {"status": now.state}
    if now.detail:
        body["detail"] = now.detail
    if now.restarts:
        body["restarts"] = now.restarts
    return JsonResponse(body, status_code=200 if now.ok else 503)


async def version(_: Request) -> Response:
    """The engine's version."""
    return JsonResponse({"version": own_version()})


async def metrics(request: Request) -> Response:
    """The engine's figures in Prometheus' text format."""
    figures: Metrics = request.app.state.metrics
    return Response(figures.render(), media_type=CONTENT_TYPE)


async def server_info(request: Request) -> Response:
    """What runs here: version, state, models, limits, figures, and the options it was started with, without keys."""
    engine: Engine = request.app.state.engine
    now, limits, stats = engine.health(), engine.limits, engine.stats
    options = dataclasses.asdict(engine.config)
    options["server"]["api_key"] = len(engine.config.server.api_key)
    return JsonResponse(
        {
            "version": own_version(),
            "status": now.state,
            "models": list(engine.model_names),
            "live_requests": engine.core.live_count,
            "limits": dataclasses.asdict(limits) if limits else {},
            "figures": {name: getattr(stats, name) for name in stats.GAUGES},
            "options": options,
        }
    )


async def abort_request(request: Request) -> Response:
    """End live requests, all or one by its `request_id`, `x-request-id` or reply's id; each gets what it has so far."""
    engine: Engine = request.app.state.engine
    body = await read_body(request, AbortRequest)
    name = body.request_id if body.request_id is not None else body.rid
    if (name is None) != bool(body.abort_all):
        raise RequestError("wanted either request_id or abort_all: true", param="request_id")
    return JsonResponse({"aborted": engine.core.abort_named(name)})


async def flush_cache(request: Request) -> Response:
    """Have the engine forget every cached prefix that no live request holds, before any request that comes later."""
    engine: Engine = request.app.state.engine
    engine.core.check_serving()
    engine.core.flush_cache()
    return JsonResponse({"status": "flushed"})


async def models(request: Request) -> Response:
    """All names that the model is served under."""
    engine: Engine = request.app.state.engine
    return JsonResponse({"object": "list", "data": [_card(engine, name) for name in engine.model_names]})


async def model(request: Request) -> Response:
    """One of them; 404 for others."""
    engine: Engine = request.app.state.engine
    return JsonResponse(_card(engine, check_model(engine, request.path_params["model_id"])))


def _card(engine: Engine, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED_AT_S,
        "owned_by": "trireme",
        "root": engine.model_names[0],
        "parent": None,
        "max_model_len": engine.limits.max_model_len if engine.limits else None,
    }
