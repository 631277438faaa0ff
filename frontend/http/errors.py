"""The one form of every HTTP error: `{"error": {"message", "type", "param", "code"}}` with the right status.

Endpoints raise `RequestError`; nothing else is meant to reach a client. The engine calls a field what `SamplingParams`
and `Core.submit` call it; an endpoint whose clients have another name for it says so with `name_fields`. Under
`/v1/messages` the body has Anthropic's form, which is this one with a type around it and some types of its own.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from common.errors import RequestError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
_UNREAD = ("body_too_large", "bodies_too_large")
"""Codes of errors after which the rest of a body would have to be read, if the connection stayed open."""
_ANTHROPIC_PATH = "/v1/messages"
_RESPONSES_PATH = "/v1/responses"
_NAMES_KEY = "trireme.field_names"


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


def name_fields(scope: Scope, names: Mapping[str, str]) -> None:
    """Have the errors of this request call the engine's fields by these names, which its client knows."""
    scope[_NAMES_KEY] = {**scope.get(_NAMES_KEY, {}), **names}


def error_body(error: RequestError, scope: Scope) -> ErrorBody | dict[str, Any]:
    """The body that tells the client of a request of an error."""
    kind = ERROR_TYPES.get(error.status, "internal_error" if error.status >= 500 else "invalid_request_error")
    detail = ErrorDetail(message=str(error), type=kind, param=error.param, code=error.code)
    if name := scope.get(_NAMES_KEY, {}).get(error.param):
        detail.param = name
        if detail.message.startswith(f"{error.param}: "):
            detail.message = name + detail.message.removeprefix(str(error.param))
    if not is_anthropic(scope):
        return ErrorBody(detail)
    detail.type = ANTHROPIC_TYPES.get(error.status, kind)
    return {"type": "error", "error": detail, "request_id": scope.get("request_id")}


def error_event(error: RequestError, scope: Scope) -> bytes:
    """The event that ends a stream with an error, in a form that the clients of its endpoint take for one."""
    body: Any = error_body(error, scope)
    if isinstance(body, ErrorBody) and _path(scope) == _RESPONSES_PATH:
        body = {**msgspec.structs.asdict(body.error), "type": "error", "error": body.error}
    name = b"" if isinstance(body, ErrorBody) else b"event: error\n"
    return name + b"data: " + msgspec.json.encode(body) + b"\n\n"


def is_anthropic(scope: Scope) -> bool:
    """Whether this is a request to Anthropic's API."""
    return _path(scope).startswith(_ANTHROPIC_PATH)


def _path(scope: Scope) -> str:
    return str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))


def error_response(error: RequestError, scope: Scope) -> JsonResponse:
    """The whole response for an error, with `retry-after` where asking again makes sense."""
    headers = {"connection": "close"} if error.code in _UNREAD else {}
    if error.retry_after_ms is not None or error.status == 429:
        headers["retry-after"] = str(max(1, math.ceil((error.retry_after_ms or 1000) / 1000)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JsonResponse(error_body(error, scope), status_code=error.status, headers=headers)


def not_supported(what: str, param: str) -> RequestError:
    """The error for something that the API knows and this engine cannot do yet."""
    return RequestError(f"{what} not supported yet", code="not_supported", param=param)
