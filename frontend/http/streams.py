"""Replies that take time: server-sent events, and noticing clients that disconnect.

When a client disconnects, from a stream or while it waits for a whole body, its requests are aborted at once. An error
before the first event is an ordinary HTTP error; an error after it is sent as an event, since a stream that is merely
cut off looks complete.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import RequestError
from frontend.http.direct import DirectWriter
from frontend.http.errors import error_event, error_response

KEEP_ALIVE_S = 15.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes each event on as it comes, however it is set up
]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EventStream(Response):
    """A stream of server-sent events.

    Args:
        events: whole events (`data: ...` and the blank line), ready to send; raises RequestError if the request fails.
        abort: called if the client goes away; makes `events` end.
        writer: writes events past this class, once the stream has started.
        keep_alive_s: seconds of silence after which a comment is sent, so that proxies keep the connection.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        abort: Callable[[], None],
        writer: DirectWriter | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.background = None
        self.status_code = 200
        self.raw_headers = list(_HEADERS)
        self._events = events
        self._abort = abort
        self._keep_alive_s = keep_alive_s
        self._started = False
        self._writer = writer or DirectWriter({})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or nobody wants them."""
        alive = asyncio.create_task(self._keep_alive(send))
        try:
            with watch_disconnect(receive, self._abort):
                await self._send_events(scope, receive, send, alive)
        finally:
            alive.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await alive

    async def _send_events(self, scope: Scope, receive: Receive, send: Send, alive: "asyncio.Task[None]") -> None:
        error = None
        try:
            async for event in self._events:
                await self._start(send)
                self._writer.silent = False
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except RequestError as refused:
            error = refused
        except Exception:
            logger.exception("a stream failed")
            error = RequestError("the server failed on this request", code="internal_error", status=500)
        self._writer.close()
        if error is not None and not self._started:
            alive.cancel()
            return await error_response(error, scope)(scope, receive, send)
        await self._start(send)
        last = b"" if error is None else error_event(error, scope)
        await send({"type": "http.response.body", "body": last + b"data: [DONE]\n\n", "more_body": False})

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._writer.open()

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_s)
            if self._writer.silent:
                await self._start(send)
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
            self._writer.silent = True


@contextlib.contextmanager
def watch_disconnect(receive: Receive, abort: Callable[[], None]) -> Iterator[None]:
    """Call `abort` if the client goes away while the block runs."""
    watch = asyncio.create_task(_wait_for_disconnect(receive, abort))
    try:
        yield
    finally:
        watch.cancel()


async def _wait_for_disconnect(receive: Receive, abort: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    abort()


async def answer_or_abort(receive: Receive, work: Awaitable[T], abort: Callable[[], None]) -> T:
    """The result of work that ends early if the client goes away, because `abort` ends what it waits for."""
    with watch_disconnect(receive, abort):
        return await work
