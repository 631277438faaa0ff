"""Logs one line per request that ends: who asked, how it ended, its size and times. On with `--enable-log-requests`.

With `--log-format json` the figures are fields of the line's object, under the same names and in the same units.
"""

import logging
from typing import Any

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
        fields = fields_of(request, outcome)
        logger.info("%s", describe(fields), extra={"fields": fields})
    finally:
        request_id_var.reset(token)


def fields_of(request: Request, outcome: str) -> dict[str, Any]:
    """A request's end as figures; None for what did not happen, times in milliseconds."""
    usage, times = request.usage(), request.timings
    return {
        "outcome": outcome,
        "client": request.client_key,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "preemptions": request.preemption_count,
        "encode_ms": _ms(times.after_arrival(times.submitted_s)),
        "queue_ms": _ms(times.queue_s),
        "prefill_ms": _ms(times.prefill_s),
        "decode_ms": _ms(times.decode_s),
        "ttft_ms": None if request.began_before else _ms(times.after_arrival(times.first_token_s)),
        "itl_ms": _ms(request.mean_gap_s()),
        "total_ms": _ms(times.after_arrival(times.finished_s)),
    }


def describe(fields: dict[str, Any]) -> str:
    """The figures as one line for people."""
    parts = [f"{fields['outcome']}: {fields['prompt_tokens']} tokens in ({fields['cached_tokens']} cached)"]
    parts.append(f"{fields['output_tokens']} out")
    for name, text in (
        ("ttft_ms", "first after {:.0f} ms"),
        ("queue_ms", "queued {:.1f} ms"),
        ("prefill_ms", "prefill {:.1f} ms"),
        ("decode_ms", "decode {:.0f} ms"),
        ("itl_ms", "{:.2f} ms a token"),
        ("total_ms", "done after {:.0f} ms"),
    ):
        if fields[name] is not None:
            parts.append(text.format(fields[name]))
    if fields["preemptions"]:
        parts.append(f"preempted {fields['preemptions']} times")
    if fields["client"]:
        parts.append(f"client {fields['client']}")
    return ", ".join(parts)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
