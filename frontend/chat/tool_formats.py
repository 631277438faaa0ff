r"""The formats in which models write tool calls: which one a model's template uses, and each one as a grammar.

    hermes    <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>      Hermes, Qwen and others
    llama     {"name": ..., "parameters": {...}}, also behind <|python_tag|>    Llama 3
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]              Mistral

For a template that does not support tools, the Hermes format is described in the system message (`tools.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import RequestError
from common.structured_outputs import WHITESPACE


@dataclass(frozen=True)
class ToolFormat:
    """One way to write tool calls.

    Attributes:
        opening: the text before a call.
        closing: the text after it; may be empty.
        arguments_key: the name of the arguments.
        is_bare: a call at the start of an answer may also come without `opening`, if it names a function on offer.
        is_array: the calls are in a JSON array.
        template_mark: a text that templates with this format contain.
    """

    name: str
    opening: str
    closing: str = ""
    arguments_key: str = "arguments"
    is_bare: bool = False
    is_array: bool = False
    template_mark: str = ""


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", template_mark="<tool_call>")
LLAMA = ToolFormat(
    "llama", "<|python_tag|>", arguments_key="parameters", is_bare=True, template_mark='"parameters": '
)  # fmt: skip
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", is_array=True, template_mark="[TOOL_CALLS]")


def knows_tools(template: str) -> bool:
    """Whether the template writes tools into the prompt."""
    return "tools" in template


def format_of(template: str) -> ToolFormat:
    """The format that a template's model was trained on."""
    if MISTRAL.template_mark in template:
        return MISTRAL
    if HERMES.template_mark in template or not knows_tools(template):
        return HERMES
    if LLAMA.opening in template or LLAMA.template_mark in template:
        return LLAMA
    return HERMES


def call_grammar(
    form: ToolFormat, functions: Sequence[Mapping[str, Any]], *, parallel: bool, opening_id: int | None
) -> str:
    """A Lark grammar for an answer that consists of calls of these functions.

    Args:
        functions: those that may be called, with `name` and perhaps `parameters`, a JSON schema.
            Parts of a schema that cannot be enforced are ignored, since tools are rarely described for that purpose.
        parallel: allow any number of calls, else one.
        opening_id: the special token that is the format's opening, if there is one.

    Raises:
        RequestError: a schema that is nested too deeply, or whose definitions are none.
    """
    try:
        return _call_grammar(form, functions, parallel=parallel, opening_id=opening_id)
    except RecursionError:
        raise RequestError("tools: a function's parameters are nested too deeply", param="tools") from None


def _call_grammar(
    form: ToolFormat, functions: Sequence[Mapping[str, Any]], *, parallel: bool, opening_id: int | None
) -> str:
    definitions: dict[str, Any] = {}
    choices = [_call_schema(form, function, f"{i}_", definitions) for i, function in enumerate(functions)]
    call = {"anyOf": choices}
    root = {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": True}, "$defs": definitions}
    opening = f"<[{opening_id}]>" if opening_id is not None else json.dumps(form.opening)
    if form.is_array:
        calls = {"type": "array", "items": call, "minItems": 1, **({} if parallel else {"maxItems": 1})}
        return f"start: {opening} calls\ncalls: %json {json.dumps(calls | root)}"
    if form.closing:
        one = f'{opening} "\\n" object {json.dumps(chr(10) + form.closing)}'
        more = ' ("\\n" call)*'
    else:
        one = "object"
        more = ' ("; " call)*'
    return f"start: call{more if parallel else ''}\ncall: {one}\nobject: %json {json.dumps(call | root)}"


def _call_schema(
    form: ToolFormat, function: Mapping[str, Any], prefix: str, definitions: dict[str, Any]
) -> dict[str, Any]:
    """A call of one function; the definitions of its schema go to the common ones, under names of their own."""
    parameters = _rebased(function.get("parameters") or {"type": "object"}, prefix)
    for key in ("$defs", "definitions"):
        own = parameters.pop(key, None) or {}
        if not isinstance(own, dict):
            text = f"tools: {key} of {function['name']!r:.80}: wanted an object that holds schemas by name"
            raise RequestError(text, param="tools")
        definitions.update({prefix + name: schema for name, schema in own.items()})
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, form.arguments_key: parameters},
        "required": ["name", form.arguments_key],
        "additionalProperties": False,
    }


def _rebased(schema: Any, prefix: str) -> Any:
    """A copy whose references to its own definitions lead to the common ones."""
    if isinstance(schema, list):
        return [_rebased(entry, prefix) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: _rebased(value, prefix) for key, value in schema.items()}
    reference = copy.get("$ref")
    for start in ("#/$defs/", "#/definitions/"):
        if isinstance(reference, str) and reference.startswith(start):
            copy["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(start)}"
    return copy
