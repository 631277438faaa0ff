"""`/start_profile` and `/stop_profile`: traces of a running engine's processes. Only with `--profile-dir`."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from common.messages import Profile
from common.profiling import STEP_LIMIT
from frontend.engine import Engine
from frontend.http.bodies import read_body
from frontend.http.errors import JsonResponse


class ProfileRequest(msgspec.Struct, kw_only=True):
    """The body of both; may be left out.

    Attributes:
        process: whose steps.
        steps: how many; without it the trace goes on until `/stop_profile`, for a bounded number of steps.
    """

    process: Literal["worker", "scheduler", "frontend"] = "worker"
    steps: int | None = None


async def start_profile(request: Request) -> Response:
    """Trace the next steps of a process."""
    body = await _body(request)
    if body.steps is not None and not 1 <= body.steps <= STEP_LIMIT:
        raise RequestError(f"steps: wanted 1 to {STEP_LIMIT}, got {body.steps}", param="steps")
    return _order(request, Profile(body.process, body.steps or STEP_LIMIT))


async def stop_profile(request: Request) -> Response:
    """Write the trace of a process that runs."""
    return _order(request, Profile((await _body(request)).process, 0))


async def _body(request: Request) -> ProfileRequest:
    return await read_body(request, ProfileRequest, empty=b"{}")


def _order(request: Request, order: Profile) -> Response:
    engine: Engine = request.app.state.engine
    folder = engine.config.profiling.folder
    if not folder or engine.order_profile is None:
        raise RequestError("traces are off: start the engine with --profile-dir FOLDER", code="profiling_off")
    engine.core.check_serving()
    engine.order_profile(order)
    return JsonResponse({"process": order.process, "steps": order.step_count, "folder": folder})
