"""uvicorn's HTTP protocol with limits on connections and on a request's head, and errors in the API's own form.

The limits are needed: the parser keeps what is unfinished, so a header without an end would grow until memory is gone;
and ZeroMQ aborts a process that is out of file descriptors, so idle connections must leave some.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import is_ssl

from common.errors import RequestError
from frontend.connections import Connections
from frontend.http.direct import CYCLE_KEY, StepWrites
from frontend.http.errors import error_body

HEAD_LIMIT_BYTES = 64 << 10
PIPELINE_LIMIT = 256
"""Requests of one connection that may be without an answer: thousands fit into one read, in which the loop waits."""
HEAD_TIMEOUT_S = 60.0
"""How long a connection may take to send a request's head."""
BODY_TIMEOUT_S = 60.0
"""How long a connection may send nothing of a body that it has announced."""
UNWANTED_BODY_S = 30.0
"""How long what comes of a body whose request is answered is read, and thrown away, before the connection is closed."""


class Protocol(HttpToolsProtocol):
    """One connection; `of` gives the class for one application."""

    open_connections: Connections
    step_writes: StepWrites

    @classmethod
    def of(cls, connections: Connections, step_writes: StepWrites) -> "type[Protocol]":
        """The protocol whose connections are counted there, and whose streams gather there what they write."""
        return type(cls.__name__, (cls,), {"open_connections": connections, "step_writes": step_writes})

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._in_head = False
        self._in_body = False
        self._head_bytes = 0
        self._cycles: list[Any] = []  # requests whose responses are not complete, oldest first
        self._refusal: RequestError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closes_after_body = False
        self.fd = -1

    def connection_made(self, transport: Any) -> None:
        """A client has connected; it is refused if there are too many."""
        super().connection_made(transport)
        if not is_ssl(transport):
            transport.set_write_buffer_limits(0)  # while it holds anything, nobody may write past it (`direct`)
            self.fd = transport.get_extra_info("socket").fileno()
        self.open_connections.http_count = len(self.connections)
        try:
            self.open_connections.check()
            self._await_head()
        except RequestError as error:
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and with it whoever waits for responses: uvicorn tells the last one only."""
        self._stop_timer()
        for cycle in self._cycles:
            _end(cycle)
        super().connection_lost(exc)
        self.open_connections.http_count = len(self.connections)

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        super().pause_writing()
        self._note_change()

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._note_change()

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client; ends the connection if a request's head has no end."""
        self._unset_keepalive_if_required()
        rest = data
        try:
            while rest:
                rest = self._parse(rest)
        except httptools.HttpParserError as error:
            refusal = error.__context__
            if not isinstance(refusal, RequestError):
                refusal = RequestError("this is no HTTP request", code="bad_request")
            self._refuse(refusal)
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES:
                self.send_400_response(f"the request's head is larger than {HEAD_LIMIT_BYTES} bytes")
        elif self._in_body and not self.cycle.response_complete:
            self._await_body()

    def on_message_begin(self) -> None:
        """The parser has seen the start of a request; an error raised here ends its work."""
        if len(self._unanswered()) >= PIPELINE_LIMIT:
            text = f"{PIPELINE_LIMIT} requests of this connection wait for their answers already"
            raise RequestError(text, code="too_many", status=429)
        self._in_head, self._head_bytes = True, 0
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser has seen the end of the head."""
        self._in_head = False
        if self.parser.should_upgrade():
            return  # the parser ends here, see `_without_upgrade`
        self._in_body = True
        self._stop_timer()
        super().on_headers_complete()
        self.cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]
        self.scope[CYCLE_KEY] = self.cycle  # type: ignore[literal-required]
        self._cycles = [*self._unanswered(), self.cycle]

    def on_message_complete(self) -> None:
        """The parser has seen the end of a request."""
        if not self.parser.should_upgrade():
            if self._in_body:
                self._in_body = False
                self._stop_timer()
            super().on_message_complete()
            if self._closes_after_body:
                self.transport.close()

    def close_after_body(self) -> None:
        """Close the connection once the request that is being read has been read: its response is complete."""
        if not self._in_body or self.cycle is None:
            self.transport.close()
            return
        self._closes_after_body = True
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _parse(self, data: bytes) -> bytes:
        """Feed the parser; what is to be parsed next, if it has ended before the end."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade(data[upgrade.args[0] :])
        return b""

    def _without_upgrade(self, rest: bytes) -> bytes:
        """The request again without its Upgrade header, with which the body would count as another protocol's."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":  # wishes for another protocol by itself
            self.send_400_response("this is no proxy: CONNECT is not served")
            return b""
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] not in (b"upgrade", b"connection")]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not an HTTP request, and close."""
        self._refuse(RequestError(msg, code="bad_request"))

    def on_response_complete(self) -> None:
        """A response is written; what came behind its request may have to be refused now."""
        super().on_response_complete()
        if self._refusal is not None and not self.transport.is_closing():
            self._refuse(self._refusal)
        elif self._in_body and self.cycle.response_complete:
            self._start_timer(UNWANTED_BODY_S, self.transport.close)

    def _note_change(self) -> None:
        for cycle in self._cycles:
            cycle.transport.on_change()

    def _unanswered(self) -> list[Any]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _refuse(self, error: RequestError) -> None:
        """Answer the request that is being read with an error and close; once those before it are answered."""
        mine = self.cycle if self._in_body else None
        if any(cycle is not mine for cycle in self._unanswered()):
            self._refusal = self._refusal or error
            return
        if mine is not None:
            has_begun = mine.response_started
            _end(mine)
            if has_begun:
                self.transport.close()
                return
        body = msgspec.json.encode(error_body(error, dict(self.scope) if self.cycle else {}))
        status = f"{error.status} {HTTPStatus(error.status).phrase}"
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _await_head(self) -> None:
        self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)

    def _await_body(self) -> None:
        self._start_timer(BODY_TIMEOUT_S, self._body_is_late)

    def _start_timer(self, seconds: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # we do not read while an earlier request of this connection is answered
        elif not self.transport.is_closing():
            text = f"no request's head came within {HEAD_TIMEOUT_S:g} s"
            self._refuse(RequestError(text, code="head_timeout", status=408))

    def _body_is_late(self) -> None:
        if self.flow.read_paused:
            self._await_body()  # it is us who do not read
        elif not self.transport.is_closing():
            text = f"nothing of the request's body came for {BODY_TIMEOUT_S:g} s"
            self._refuse(RequestError(text, code="body_timeout", status=408))


class _ResponseTransport:
    """The connection as a response sees it: to close it waits for the rest of the request.

    A connection that is closed while bytes are on their way is reset, and a client or a proxy that still sends loses
    the response, which says why its body is not wanted.

    Attributes:
        fd: the number of the socket; -1 if nobody else may write to it.
        step_writes: gathers what a step's tokens write.
        on_change: called when the client has gone, reads too slowly, or has caught up.
    """

    __slots__ = ("close", "fd", "is_closing", "on_change", "step_writes", "write")

    def __init__(self, protocol: Protocol) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.fd = protocol.fd
        self.step_writes = protocol.step_writes
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close_after_body


def _end(cycle: Any) -> None:
    """Tell a request's application that its client is gone."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.transport.on_change()
    cycle.message_event.set()
