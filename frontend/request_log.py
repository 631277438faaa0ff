"""One log line for each request that ends: how, how large, how long. On with `--enable-log-requests`."""

import logging

from common.log import request_id_var
from frontend.core import Core
from frontend.request import Request

logger = logging.getLogger(__name__)


def attach(core: Core) -> None:
    """Log every request that ends from now on."""
    core.observers.append(log_end)


def log_end(request: Request, outcome: str) -> None:
    """Log one request's end, under the id that its asker knows."""
    token = request_id_var.set(request.name)
    try:
        logger.info("%s", describe(request, outcome))
    finally:
        request_id_var.reset(token)


def describe(request: Request, outcome: str) -> str:
    """A request's end as one line."""
    usage, times = request.usage(), request.timings
    parts = [f"{outcome}: {usage.prompt_tokens} tokens in ({usage.cached_tokens} cached)"]
    parts.append(f"{usage.completion_tokens} out")
    if times.first_token_s is not None:
        parts.append(f"first after {(times.first_token_s - times.arrived_s) * 1000:.0f} ms")
    if times.finished_s is not None:
        parts.append(f"done after {(times.finished_s - times.arrived_s) * 1000:.0f} ms")
    return ", ".join(parts)
