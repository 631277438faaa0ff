"""The parts of an answer (reasoning, content, tool calls), and the whole message made of them. Plain values."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; `index` counts the calls of an answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which are JSON text."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A whole call; `arguments` is JSON text, cut short if the answer was."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part]) -> "Message":
        """The message that these pieces make."""
        message = cls()
        for part in parts:
            match part:
                case Content(text):
                    message.content += text
                case Reasoning(text):
                    message.reasoning += text
                case CallStart(_, call_id, name):
                    message.calls.append(ToolCall(call_id, name))
                case CallArguments(index, text):
                    message.calls[index].arguments += text
        return message


def split_at(text: str, tag: str) -> tuple[str, str | None]:
    """Split a growing text at the first `tag`.

    Returns:
        What stands before it and what stands behind it. Without the tag: what cannot be part of it, and None; the rest
        of the text, which may be the tag's beginning, is to be given again with more behind it.
    """
    before, found, after = text.partition(tag)
    if found:
        return before, after
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return text[: len(text) - length], None
    return text, None
