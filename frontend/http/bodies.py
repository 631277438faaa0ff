"""Reads the bodies of requests: within a limit for all of them together, and the large ones parsed off the event loop.

Each body alone is limited before it comes here (`middleware.BodyLimit`); what it may hold is in `requests.py`.
"""

import asyncio
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from common.errors import RequestError
from frontend.engine import Engine
from frontend.http.requests import CompletionRequest, DetokenizeRequest, EmbeddingsRequest, checked, decode

QUICK_BYTES = 1 << 16
"""Bodies up to this size are parsed on the spot: in 3 ms the worst of them, token ids and texts in a tenth of it."""
HELD_LIMIT_BYTES = 512 << 20
"""All large bodies together that are being received or parsed, but for the first QUICK_BYTES of each, so that small
ones are always taken; hundreds of connections could fill any memory otherwise."""
_ID_FIELDS: dict[type[msgspec.Struct], tuple[str, ...]] = {
    CompletionRequest: ("prompt",),
    EmbeddingsRequest: ("input",),
    DetokenizeRequest: ("tokens",),
}
"""Fields that may hold many token ids; in a large body these are arrays, and lists of arrays."""

T = TypeVar("T", bound=msgspec.Struct)


class Bodies:
    """What all requests of an application hold of their bodies.

    Attributes:
        held_bytes: received and not yet parsed, beyond the first of each.
    """

    def __init__(self) -> None:
        self.held_bytes = 0

    def take(self, count: int) -> int:
        """Hold so many bytes more, and return their number; raises RequestError if that is too much for now."""
        if self.held_bytes + count > HELD_LIMIT_BYTES:
            text = f"the engine holds {self.held_bytes} bytes of large request bodies already; try again in a moment"
            raise RequestError(text, code="bodies_too_large", status=429, retry_after_ms=1000)
        self.held_bytes += count
        return count


async def read_body(request: Request, kind: type[T], empty: bytes = b"") -> T:
    """The body of an HTTP request as an object of `kind`. It is not kept.

    Args:
        empty: what stands for a body that is missing.

    Raises:
        RequestError: not JSON, not an object, a field of the wrong type (`param` names it), or too much for now.
    """
    bodies: Bodies = request.app.state.bodies
    chunks: list[bytes] = []
    received_bytes = held_bytes = 0
    try:
        async for chunk in request.stream():
            chunks.append(chunk)
            received_bytes += len(chunk)
            if received_bytes - QUICK_BYTES > held_bytes:
                held_bytes += bodies.take(received_bytes - QUICK_BYTES - held_bytes)
        body = b"".join(chunks) or empty
        del chunks
        return decode(body, kind) if len(body) <= QUICK_BYTES else await _parsed(request, body, kind)
    finally:
        bodies.held_bytes -= held_bytes


async def _parsed(request: Request, body: bytes, kind: type[T]) -> T:
    """A large body, parsed where nobody waits for it."""
    await asyncio.sleep(0)  # it took a few milliseconds to put together
    engine: Engine = request.app.state.engine
    parsed = await engine.parse(body, _ID_FIELDS.get(kind, ()))
    stand_ins: dict[str, Any] = {name: [[]] if isinstance(ids, list) else [] for name, ids in parsed.token_ids.items()}
    values = checked(parsed.values | stand_ins, kind)
    for name, ids in parsed.token_ids.items():
        setattr(values, name, ids)
    return values
