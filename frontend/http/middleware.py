"""What every request passes through, as plain ASGI: its id, its origin, the API key, the limit on its body.

Plain ASGI, because a middleware that wraps responses costs tens of microseconds for each event of a stream.
"""

import asyncio
import hmac
import logging
import re
import uuid
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import RequestError
from common.log import request_id_var
from frontend.http.direct import CYCLE_KEY
from frontend.http.errors import error_response

logger = logging.getLogger(__name__)

BODY_LIMIT_BYTES = 32 << 20
OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/dashboard"})
"""Paths that need no API key: what load balancers and orchestrators ask, and a page that holds no figures itself."""
_UNASKED_TYPES = frozenset({b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"})
"""Content types of bodies that a browser sends to another origin without asking it first."""
_GOOD_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestId:
    """Gives every request an id, the client's own if it sent `x-request-id`; logs carry it, the response echoes it.

    Also answers errors that nothing inside has handled, so that even those have an id and the form of all errors.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its id in `scope["request_id"]`."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = _header(scope, b"x-request-id")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["request_id"] = request_id.decode()
        request_id_var.set(request_id.decode())

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            logger.debug("a client left while it sent its request")
        except asyncio.CancelledError:
            raise
        except BaseException:  # panics of the tokenizer are no Exceptions
            logger.exception("a request failed")
            if started:
                raise  # closes the connection
            error = RequestError("the server failed on this request", code="internal_error", status=500)
            await error_response(error, scope)(scope, receive, send_with_id)


class ApiKey:
    """Lets requests through that carry one of the keys as `Authorization: Bearer KEY`, or as `X-Api-Key: KEY`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or _path(scope) in OPEN_PATHS or self._is_known(scope):
            return await self._app(scope, receive, send)
        error = RequestError(
            "a valid API key is needed: send the header 'Authorization: Bearer KEY'", code="invalid_api_key", status=401
        )
        await error_response(error, scope)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer":
            key = _header(scope, b"x-api-key")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]  # all of them, in equal time
        return any(matches)


class ForeignPages:
    """Answers 403 to what a page of another origin has a browser send without asking the engine first (CORS).

    Browsers ask before they send JSON, but not before they send text: any page could have had all requests aborted. The
    page cannot read the answer, and does not need it.
    """

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._app = app
        self._allowed = {origin.encode() for origin in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if no browser sends it, or one that has asked."""
        if scope["type"] == "http" and scope["method"] == "POST":
            origin = _header(scope, b"origin")
            kind = _header(scope, b"content-type").partition(b";")[0].strip().lower()
            if origin and kind in _UNASKED_TYPES and not self._allowed & {origin, b"*"}:
                return await error_response(_foreign(origin), scope)(scope, receive, send)
        await self._app(scope, receive, send)


class BodyLimit:
    """Answers 413 to bodies above a limit, before they are in memory, and 415 to those that are compressed."""

    def __init__(self, app: ASGIApp, limit_bytes: int = BODY_LIMIT_BYTES) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its body counted."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        encoding = _header(scope, b"content-encoding").strip().lower()
        if encoding not in (b"", b"identity"):
            return await error_response(_compressed(encoding), scope)(scope, receive, send)
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length[:20]) > self._limit_bytes:
            return await error_response(self._too_large(), scope)(scope, receive, send)
        count_bytes = 0

        async def receive_counted() -> Message:
            nonlocal count_bytes
            message = await receive()
            count_bytes += len(message.get("body", b""))
            if count_bytes > self._limit_bytes:
                raise self._too_large()
            return message

        await self._app(scope, receive_counted, send)

    def _too_large(self) -> RequestError:
        text = f"the body is larger than {self._limit_bytes} bytes"
        return RequestError(text, code="body_too_large", status=413)


class PlainPath:
    """Takes `/v1/models/` for `/v1/models`: a redirect would send clients behind a proxy to another scheme, keyless."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on without the slashes at the end of its path."""
        if scope["type"] == "http" and scope["path"].endswith("/") and _path(scope).startswith("/v1/"):
            scope["path"] = scope["path"].rstrip("/")
        await self._app(scope, receive, send)


class UnknownLength:
    """Answers clients of HTTP/1.0, which know no chunks: a body of unknown length ends where the connection does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; have uvicorn write bodies of unknown length as they are."""
        cycle: Any = scope.get(CYCLE_KEY)
        if scope["type"] != "http" or cycle is None or scope.get("http_version") != "1.0":
            return await self._app(scope, receive, send)

        async def send_plainly(message: Message) -> None:
            if message["type"] == "http.response.start":
                if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                    cycle.chunked_encoding = False
            elif cycle.chunked_encoding is False and not cycle.expected_content_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plainly)


def _compressed(encoding: bytes) -> RequestError:
    text = f"content-encoding {encoding.decode('latin-1'):.40}: wanted the body as it is, not compressed"
    return RequestError(text, code="content_encoding", status=415)


def _foreign(origin: bytes) -> RequestError:
    text = (
        f"pages of {origin.decode('latin-1'):.100} may not call this engine: start it with --allowed-origins, or send "
        "the body as application/json from a page of its own origin"
    )
    return RequestError(text, code="origin_not_allowed", status=403)


def _path(scope: Scope) -> str:
    """The path that routes see: without the prefix that a reverse proxy adds (`--root-path`)."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")
