"""The forms of a prompt that the engine takes: text, token ids, or a chat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

COUNTED_LIMIT = 4096
"""Values of a chat that are looked at one by one: a millisecond and a half."""


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A chat, to be rendered with the model's template.

    Attributes:
        messages: maps with `role`, `content` and whatever else the template knows.
        tools: JSON descriptions of functions.
        template_kwargs: further variables for the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


Prompt = str | Sequence[int] | ChatPrompt
"""A text, token ids, or a chat."""


def size_of(prompt: Prompt, limit: int) -> int:
    """About how many characters a prompt has: exact below `limit`, at least `limit` above.

    A chat of many small values is not counted one by one: its size on the wire stands for it.
    """
    if not isinstance(prompt, ChatPrompt):
        return len(prompt)
    left: list[Any] = [prompt.messages, prompt.tools, prompt.template_kwargs]
    size = 0
    for _ in range(COUNTED_LIMIT):
        if not left or size >= limit:
            return size
        value = left.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value
        elif value is not None:
            size += 1
    try:
        return size + len(msgspec.msgpack.encode(left))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return limit
