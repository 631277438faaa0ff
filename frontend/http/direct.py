"""The fast path of a token into its stream: from the core's call straight to the connection, without waking a task.

Waking the task that writes a stream, and going through the application's layers, cost more than everything else that
happens to a token. That slow path is taken for a stream's start and end, for errors, for clients that read too slowly,
and by servers other than ours. Nothing can overtake anything: a token takes the fast path only while the task waits for
one, which means that everything before it has been written.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Scope

CYCLE_KEY = "trireme.cycle"
"""Where our protocol leaves uvicorn's record of a response in the request's scope."""

_encoder = msgspec.json.Encoder()


class DirectWriter:
    """Writes events of one response to its connection.

    Args:
        scope: of the request.

    Attributes:
        silent: nothing was written since this was last set.
    """

    def __init__(self, scope: Scope) -> None:
        self.silent = True
        self._cycle: Any = scope.get(CYCLE_KEY)
        self._is_open = False

    def open(self) -> None:
        """The response's head is written."""
        self._is_open = self._cycle is not None and bool(self._cycle.chunked_encoding)

    def close(self) -> None:
        """From now on everything takes the slow path."""
        self._is_open = False

    def of(self, render: Callable[[str], bytes]) -> Callable[[str], bool]:
        """A function that writes what `render` makes of a text.

        It returns False, without rendering, if the text has to take the slow path: the client may be slow, or gone.
        """
        cycle = self._cycle

        def write(text: str) -> bool:
            if not self._is_open or cycle.flow.write_paused or cycle.disconnected:
                return False
            if event := render(text):
                cycle.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
                self.silent = False
            return True

        return write

    def of_texts(self, start: bytes, end: bytes) -> Callable[[str], bool]:
        """The same for events that consist of the text, as JSON, between two constants.

        Nearly every token takes this way, so all of it is in one function.
        """
        if self._cycle is None:
            return lambda text: False
        cycle, flow, put, encode = self._cycle, self._cycle.flow, self._cycle.transport.write, _encoder.encode
        constant_bytes, chunk_end = len(start) + len(end), end + b"\r\n"

        def write(text: str) -> bool:
            if not self._is_open or flow.write_paused or cycle.disconnected:
                return False
            if text:
                json = encode(text)
                put(b"%x\r\n%b%b%b" % (constant_bytes + len(json), start, json, chunk_end))
                self.silent = False
            return True

        return write
