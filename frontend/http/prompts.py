"""Converts the prompts that clients send to the forms that the engine takes: text, token ids, chats."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import RequestError
from frontend.chat.tools import check_calls
from frontend.prompt import ChatPrompt, Prompt

PROMPT_LIMIT = 1024
"""Prompts in one completion request."""
MESSAGE_LIMIT = 4096
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts -> the field that holds their text."""
_ROLES = {"developer": "system"}  # roles that no template knows -> the one that means the same


def completion_prompts(prompt: str | list[Any], name: str = "prompt", limit: int = PROMPT_LIMIT) -> list[Prompt]:
    """The prompts of a completion: one from a string or token ids, several from a list of either.

    Args:
        name: of the field.
        limit: how many there may be.

    Raises:
        RequestError: anything else, or too many.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"{name}: wanted a string, token ids, or a list of either; got an empty list", param=name)
    if isinstance(prompt, array) or all(type(entry) is int for entry in prompt):
        return [prompt]
    if len(prompt) > limit:
        raise RequestError(f"{name}: {len(prompt)} prompts, at most {limit} are allowed", param=name)
    for entry in prompt:
        ids = isinstance(entry, list) and all(type(token_id) is int for token_id in entry)
        ids = ids or isinstance(entry, array)
        if not ids and not isinstance(entry, str):
            raise RequestError(
                f"{name}: wanted a string, token ids, or a list of either; got a list that mixes or nests them",
                param=name,
            )
    return prompt


def chat_prompt(
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> ChatPrompt:
    """A chat whose every content is a string; `tools.for_template` does the rest where it is rendered.

    Args:
        tools: checked descriptions of functions.

    Raises:
        RequestError: no messages, one without a role, or content that is not text.
    """
    if not 0 < len(messages) <= MESSAGE_LIMIT:
        raise RequestError(f"messages: wanted 1 to {MESSAGE_LIMIT}, got {len(messages)}", param="messages")
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message cannot both be true", param="continue_final_message"
        )
    chat = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return ChatPrompt(
        messages=chat,
        tools=tools or None,
        add_generation_prompt=add_generation_prompt is not False,
        continue_final_message=bool(continue_final_message),
        template_kwargs=template_kwargs or {},
    )


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role: wanted a string such as 'user', got {role!r:.80}", param="messages")
    check_calls(message, where)
    return {
        **message,
        "role": _ROLES.get(role, role),
        "content": _text_of(message.get("content"), where),
    }


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise RequestError(f"{where}.content: wanted a string or a list of parts", param="messages")
    return "\n".join(_text_of_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _text_of_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise RequestError(f"{where}: this model takes text only; got a part of type {kind!r:.80}", param="messages")
    if not isinstance(part.get(field), str):
        raise RequestError(f"{where}.{field}: wanted a string", param="messages")
    return str(part[field])
