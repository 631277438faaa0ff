"""The fast path of a token into its stream: from the core's call straight to the connection, without waking a task.

Waking the task that writes a stream, and going through the application's layers, cost more than everything else that
happens to a token. That slow path is taken for a stream's start and end, for errors, for clients that read too slowly,
and by servers other than ours. Nothing can overtake anything: a token takes the fast path only while the task waits for
one, which means that everything before it has been written.

What the tokens of one message write is gathered until the core is through with all of them (`StepWrites`): Python and
the system's network code, in turns for each token, would push each other out of the processor's caches. It then goes to
the sockets themselves, since even the event loop's own function for that takes a seventh of the time of a write. Only
what a socket does not take at once is left to the loop's transport. That keeps the order because the transport pauses
us whenever it holds anything at all (`protocol.Protocol`), and it is safe because a transport says that its connection
is lost before it closes the socket, whose number another client may get.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Scope

from frontend.events import Shortcut

CYCLE_KEY = "trireme.cycle"
"""Where our protocol leaves uvicorn's record of a response in the request's scope."""

_SIZES = [b"%x\r\n" % size for size in range(1024)]
"""The first line of a chunk by its size in bytes."""

_encode = msgspec.json.Encoder().encode

logger = logging.getLogger(__name__)


class StepWrites:
    """Chunks that wait to be written, in order, each with the writer whose it is."""

    __slots__ = ("chunks", "writers")

    def __init__(self) -> None:
        self.writers: list[DirectWriter] = []
        self.chunks: list[bytes] = []

    def flush(self) -> None:
        """Write them."""
        if not self.writers:
            return
        writers, chunks = self.writers, self.chunks
        self.writers, self.chunks = [], []
        for writer, chunk in zip(writers, chunks, strict=True):
            try:
                sent = os.write(writer.fd, chunk) if writer.fd >= 0 else 0
            except OSError:  # it is full, or the client is gone: the transport will find out
                sent = 0
            if sent < len(chunk):
                writer.put(chunk[sent:])


class DirectWriter:
    """Writes events of one response to its connection.

    Args:
        scope: of the request.

    Attributes:
        is_ready: whether an event can take this path now.
        fd: the number of the socket while it may be written to past the transport, otherwise -1.
        silent: nothing was written since this was last set.
        writes: takes what is to be written at the end of the step.
    """

    __slots__ = ("_cycle", "_is_open", "fd", "is_ready", "silent", "writes")

    def __init__(self, scope: Scope) -> None:
        self.is_ready = False
        self.fd = -1
        self.silent = True
        self.writes: StepWrites
        self._is_open = False
        self._cycle: Any = scope.get(CYCLE_KEY)
        if self._cycle is not None:
            self.writes = self._cycle.transport.step_writes
            self._cycle.transport.on_change = self.look

    def open(self) -> None:
        """The response's head is written."""
        self._is_open = self._cycle is not None and bool(self._cycle.chunked_encoding)
        self.look()

    def close(self) -> None:
        """From now on everything takes the slow path."""
        self._is_open = self.is_ready = False
        self.fd = -1

    def look(self) -> None:
        """The connection has changed: take the fast path only while the client is there and not too slow."""
        self.is_ready = self._is_open and not (self._cycle.flow.write_paused or self._cycle.disconnected)
        self.fd = self._cycle.transport.fd if self.is_ready else -1

    def put(self, data: bytes) -> None:
        """Write to the transport; a connection that fails is closed, since its stream would lack a token."""
        try:
            self._cycle.transport.write(data)
        except Exception:
            logger.exception("a stream could not be written")
            self.close()
            self._cycle.transport.close()

    def of(self, render: Callable[[str], bytes]) -> Shortcut:
        """Writes what `render` makes of a text; renders nothing if the text has to take the slow path."""
        return _RenderedEvents(self, render)

    def of_texts(self, start: bytes, end: bytes) -> Shortcut:
        """The same for events that consist of the text, as JSON, between two constants."""
        return _TextEvents(self, start, end)


class _RenderedEvents:
    __slots__ = ("_render", "_writer")

    def __init__(self, writer: DirectWriter, render: Callable[[str], bytes]) -> None:
        self._writer = writer
        self._render = render

    def take(self, text: str) -> bool:
        """See `Shortcut`."""
        writer = self._writer
        if not writer.is_ready:
            return False
        if event := self._render(text):
            writer.writes.writers.append(writer)
            writer.writes.chunks.append(b"%x\r\n%b\r\n" % (len(event), event))
            writer.silent = False
        return True


class _TextEvents:
    """The events of one choice whose tokens are shown as text only: nearly every token takes this way.

    All of it is in one function, and all that it needs in few objects, since none of them is in a cache any more when
    the next token comes.
    """

    __slots__ = ("_chunk_end", "_constant_bytes", "_start", "_writer")

    def __init__(self, writer: DirectWriter, start: bytes, end: bytes) -> None:
        self._writer = writer
        self._start = start
        self._chunk_end = _ended(end)
        self._constant_bytes = len(start) + len(end)

    def take(self, text: str) -> bool:
        """See `Shortcut`."""
        writer = self._writer
        if not writer.is_ready:
            return False
        if text:
            json = _encode(text)
            size = self._constant_bytes + len(json)
            first_line = _SIZES[size] if size < 1024 else b"%x\r\n" % size
            writes = writer.writes
            writes.writers.append(writer)
            writes.chunks.append(b"".join((first_line, self._start, json, self._chunk_end)))
            writer.silent = False
        return True


@functools.lru_cache(maxsize=64)
def _ended(end: bytes) -> bytes:
    """The end of a chunk: one object for all streams, which stays in the caches."""
    return end + b"\r\n"
