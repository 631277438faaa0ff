"""The form of output that a request asks for, in whichever of the API's fields."""

from typing import Any

from common.errors import RequestError
from common.structured_outputs import StructuredOutputs
from frontend.http.requests import GenerationRequest, ResponseFormat

_GUIDED = ("json", "regex", "choice", "grammar")  # vLLM's older fields, `guided_json` and so on


def form_field(body: GenerationRequest) -> str:
    """The field that asks for a form; a required call asks for one too."""
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    guided = [f"guided_{kind}" for kind in _GUIDED if getattr(body, f"guided_{kind}") is not None]
    if guided:
        return guided[0]
    must_call = getattr(body, "tool_choice", None) not in (None, "auto", "none")
    return "tools" if must_call and not body.structured_outputs else "structured_outputs"


def structured_outputs(body: GenerationRequest) -> StructuredOutputs | None:
    """What the output must follow; None for any text.

    Raises:
        RequestError: several fields ask for a form, or one is wrong; `param` names it.
    """
    wanted: dict[str, dict[str, Any]] = {}
    if body.response_format is not None and body.response_format.type != "text":
        wanted["response_format"] = _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        wanted["structured_outputs"] = body.structured_outputs
    for kind in _GUIDED:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            wanted[f"guided_{kind}"] = {kind: value}
    if len(wanted) > 1:
        names = " and ".join(wanted)
        raise RequestError(f"only one of these can be given: {names}", param=list(wanted)[-1])
    for param, value in wanted.items():
        try:
            return StructuredOutputs.from_any(value)
        except RequestError as error:
            raise RequestError(str(error), param=param) from None
    return None


def _of_response_format(given: ResponseFormat) -> dict[str, Any]:
    if given.type == "json_object":
        return {"json_object": True}
    if given.type == "json_schema":
        schema = (given.json_schema or {}).get("schema")
        if schema is None:
            raise RequestError("response_format: wanted json_schema.schema, a JSON schema", param="response_format")
        return {"json": schema}
    raise RequestError(
        f"response_format: wanted type 'text', 'json_object' or 'json_schema', got {given.type!r:.80}",
        param="response_format",
    )
