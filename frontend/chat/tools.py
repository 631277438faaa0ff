"""Checks a request's tools and converts them to the form that chat templates take.

For a template that does not support tools, they go into the system message, and earlier calls and their results become
text in the Hermes format.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import RequestError

TOOL_LIMIT = 1024
_INSTRUCTIONS = """You may call functions to help with the user's request. They are described here, one JSON object \
a line:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON between these tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments object>}}
</tool_call>"""


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
        tools: as the client sent them; empty if the model must not see any.
        choice: `none`, `auto`, `required`, or the name of the function that must be called.
        is_named: `choice` is a name.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "none"
    is_named: bool = False

    @classmethod
    def of(cls, tools: Sequence[Any] | None, choice: Any) -> "Tools":
        """Check `tools` and `tool_choice`.

        Raises:
            RequestError: a tool that is no function, or a choice that does not go with the tools.
        """
        for index, tool in enumerate(tools or ()):
            _check_tool(tool, f"tools[{index}]")
        if tools and len(tools) > TOOL_LIMIT:
            raise RequestError(f"tools: {len(tools)} tools, at most {TOOL_LIMIT} are allowed", param="tools")
        name = _chosen_name(choice)
        if choice in (None, "auto", "none") or not (choice == "required" or name):
            if choice not in (None, "auto", "none"):
                raise RequestError(
                    "tool_choice: wanted 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}",
                    param="tool_choice",
                )
            return cls(tuple(tools), "auto") if tools and choice != "none" else cls()
        if not tools:
            raise RequestError("tool_choice: there are no tools to choose from", param="tool_choice")
        if name and name not in [tool["function"]["name"] for tool in tools]:
            raise RequestError(f"tool_choice: no tool is named {name!r:.80}", param="tool_choice")
        return cls(tuple(tools), name or "required", is_named=bool(name))

    @property
    def must_call(self) -> bool:
        """Whether the answer is nothing but calls."""
        return self.is_named or self.choice == "required"

    @property
    def names(self) -> frozenset[str]:
        """The functions on offer."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def callable_functions(self) -> list[Mapping[str, Any]]:
        """The descriptions of the functions that may be called."""
        functions = [tool["function"] for tool in self.tools]
        return [function for function in functions if not self.is_named or function["name"] == self.choice]


def _check_tool(tool: Any, where: str) -> None:
    function = (
        tool.get("function") if isinstance(tool, Mapping) and tool.get("type", "function") == "function" else None
    )
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}: wanted {{'type': 'function', 'function': {{...}}}}", param="tools")
    if not isinstance(function.get("name"), str) or not 0 < len(function["name"]) <= 256:
        raise RequestError(f"{where}.function.name: wanted a string of 1 to 256 characters", param="tools")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise RequestError(f"{where}.function.parameters: wanted a JSON schema, an object", param="tools")


def _chosen_name(choice: Any) -> str:
    """The function that a `tool_choice` names; empty for none."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def check_calls(message: Mapping[str, Any], where: str) -> None:
    """Refuse a message whose `tool_calls` are no calls; raises RequestError."""
    calls = message.get("tool_calls")
    if calls and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise RequestError(f"{where}.tool_calls: wanted a list of calls, each with function.name", param="messages")


def for_template(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, knows_tools: bool
) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]]]:
    """Messages and tools as a chat template expects them: the arguments of calls as objects.

    Takes as long as the chat is: not for the event loop.

    Args:
        knows_tools: whether the template does; if not, there are none left, and everything about them is text.

    Raises:
        RequestError: calls that are none, or values that JSON cannot hold.
    """
    for index, message in enumerate(messages):
        check_calls(message, f"messages[{index}]")
    chat = [_with_decoded_arguments(message) for message in messages]
    try:
        return (chat, tools) if knows_tools else (as_text(chat, tools), ())
    except (TypeError, ValueError, RecursionError) as error:  # the client socket carries more than JSON
        raise RequestError(f"messages: their calls or the tools are no JSON: {error}", param="messages") from None


def _with_decoded_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    return {**message, "tool_calls": [_decoded(call) for call in calls]}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else the template gets what the model once wrote
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
    return {**call, "function": function}


def as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A chat with tools, for a template that does not support them."""
    plain = [_plain_message(message) for message in messages]
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=described)
    if plain and plain[0].get("role") == "system":
        first = {**plain[0], "content": f"{_text_of(plain[0])}\n\n{instructions}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text_of(message)}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    written = [call["function"] for call in message["tool_calls"]]
    calls = [{"name": function["name"], "arguments": function.get("arguments", {})} for function in written]
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = _text_of(message)
    return {"role": message.get("role"), "content": "\n".join([content, *texts] if content else texts)}


def _text_of(message: Mapping[str, Any]) -> str:
    """A message's content as text, whichever form a client of the socket gave it."""
    content = message.get("content") or ""
    if not isinstance(content, list):
        return str(content)
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
