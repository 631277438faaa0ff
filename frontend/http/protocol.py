"""uvicorn's HTTP protocol with a bound on a request's head, and errors in the API's own form.

The parser keeps what it has not finished, so that a header without an end would grow until memory is gone.
"""

from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import RequestError
from frontend.http.errors import error_body

HEAD_LIMIT_BYTES = 64 << 10


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._in_head = False
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client; ends the connection if a request's head has no end."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES:
                self.send_400_response(f"the request's head is larger than {HEAD_LIMIT_BYTES} bytes")

    def on_message_begin(self) -> None:
        """The parser has seen the start of a request."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser has seen the end of the head."""
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no proper HTTP request, and close."""
        body = msgspec.json.encode(error_body(RequestError(msg, code="bad_request")))
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
