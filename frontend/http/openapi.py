"""`/openapi.json`, the description of the whole API, and `/docs`, the same as a page.

Generated from the table of endpoints and the classes that bodies are decoded into, so it always says what the server
accepts. The meaning of fields comes from docstrings. `endpoints` has the table; nothing here knows it.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from common.sampling_params import SamplingParams
from common.version import own_version
from frontend.http.docs_page import docs_page
from frontend.http.errors import ErrorBody, JsonResponse

_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_SECTION = re.compile(r"^Attributes:\n(.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^ {4}(\w[\w, ]*): (.*?)(?=\n {4}\w|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Endpoint:
    """One endpoint.

    Attributes:
        path: with parameters as Starlette writes them.
        call: answers; the first line of its docstring describes it.
        body: what a body is decoded into; None for no body.
        example: a body that is accepted.
        methods: POST by default where there is a body, GET where there is none.
        answer: the media type of a whole answer.
        streams: whether `stream: true` gets server-sent events instead.
        needs_body: whether the body must be there.
        tells_state: it answers 503 in its own form while the engine does not serve.
    """

    path: str
    call: Callable[[Request], Awaitable[Response]]
    body: type[msgspec.Struct] | None = None
    example: Mapping[str, Any] | None = None
    methods: tuple[str, ...] = ()
    answer: str = "application/json"
    streams: bool = False
    needs_body: bool = True
    tells_state: bool = False

    @property
    def verbs(self) -> tuple[str, ...]:
        """The HTTP methods."""
        return self.methods or (("GET",) if self.body is None else ("POST",))

    @property
    def plain_path(self) -> str:
        """The path as OpenAPI writes it."""
        return _PATH_PARAMETER.sub(r"{\1}", self.path)

    def route(self) -> Route:
        """As Starlette takes it."""
        return Route(self.path, self.call, methods=list(self.verbs))


async def openapi_json(request: Request) -> Response:
    """This description: OpenAPI 3.1."""
    return JsonResponse(request.app.state.openapi)


async def docs(request: Request) -> Response:
    """This description as a page."""
    return HTMLResponse(docs_page(request.app.state.openapi))


def document(endpoints: Sequence[Endpoint], *, root_path: str = "", has_keys: bool = False) -> dict[str, Any]:
    """The OpenAPI document.

    Args:
        root_path: what a reverse proxy puts before every path.
        has_keys: whether requests need an API key.
    """
    bodies = list(dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None))
    bodies.append(ErrorBody)
    template = "#/components/schemas/{name}"
    _, schemas = msgspec.json.schema_components(bodies, ref_template=template)
    for kind in {kind for body in bodies for kind in _structs(body)}:
        _describe(schemas[kind.__name__], kind)
    paths = {
        endpoint.plain_path: {verb.lower(): _operation(endpoint, verb) for verb in endpoint.verbs}
        for endpoint in endpoints
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Trireme", "version": own_version()},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        **({"security": [{"key": []}]} if has_keys else {}),
    }


def _operation(endpoint: Endpoint, verb: str) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.answer: {"schema": {"type": "object"} if "json" in endpoint.answer else {}}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", f"{verb.lower()} {endpoint.plain_path}")),
        "summary": inspect.getdoc(endpoint.call) or "",
        "responses": {
            "200": {"description": "the answer", "content": content},
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
            },
        },
    }
    if endpoint.tells_state:
        operation["responses"]["503"] = {"description": "not now", "content": content}
    if names := _PATH_PARAMETER.findall(endpoint.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.body is not None:
        media = {"schema": {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}, "example": endpoint.example}
        operation["requestBody"] = {"required": endpoint.needs_body, "content": {"application/json": media}}
    return operation


def _structs(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """A class and those of its fields."""
    yield kind
    for field in msgspec.structs.fields(kind):
        for choice in get_args(field.type) or (field.type,):
            if isinstance(choice, type) and issubclass(choice, msgspec.Struct):
                yield from _structs(choice)


def _describe(schema: dict[str, Any], kind: type) -> None:
    """Put the docstrings' words to the fields of a body's schema."""
    known = {**_attributes(SamplingParams), **_attributes(kind)}
    schema["description"] = (inspect.getdoc(kind) or "").partition("\n\n")[0]
    for name, field in schema["properties"].items():
        if field.get("default", ...) is None:
            del field["default"]  # null counts as not given
        if name in known:
            field["description"] = known[name]


def _attributes(kind: type) -> dict[str, str]:
    """Name -> description, from the docstrings of a class and those it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = _SECTION.search(inspect.cleandoc(base.__doc__ or "") + "\n\n")
        for names, text in _ENTRY.findall(section[1] if section else ""):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found
