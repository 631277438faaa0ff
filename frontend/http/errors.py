"""The one form of every HTTP error: `{"error": {"message", "type", "param", "code"}}` with the right status.

Endpoints raise `RequestError`; nothing else is meant to reach a client.
"""

import math
from typing import Any

import msgspec
from starlette.responses import Response

from common.errors import RequestError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong.

    Attributes:
        message: what was wanted, what came, what to do.
        type: a kind of error, as OpenAI names them.
        param: the field at fault.
        code: a short stable name.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every error.

    Attributes:
        error: what went wrong.
    """

    error: ErrorDetail


class JsonResponse(Response):
    """A body encoded by msgspec; numbers that JSON lacks become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return msgspec.json.encode(content)


def error_body(error: RequestError) -> ErrorBody:
    """The body that tells a client of an error."""
    kind = ERROR_TYPES.get(error.status, "internal_error" if error.status >= 500 else "invalid_request_error")
    return ErrorBody(ErrorDetail(message=str(error), type=kind, param=error.param, code=error.code))


def error_response(error: RequestError) -> JsonResponse:
    """The whole response for an error, with `retry-after` where asking again makes sense."""
    headers = {}
    if error.retry_after_ms is not None or error.status == 429:
        headers["retry-after"] = str(max(1, math.ceil((error.retry_after_ms or 1000) / 1000)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JsonResponse(error_body(error), status_code=error.status, headers=headers)


def not_supported(what: str, param: str) -> RequestError:
    """The error for something that the API knows and this engine cannot do yet."""
    return RequestError(f"{what} not supported yet", code="not_supported", param=param)
