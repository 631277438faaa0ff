"""Splits one request's answer into reasoning, content and tool calls, as its chat format says."""

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.chat.parts import CallArguments, CallStart, Content, Message, Part, Reasoning
from frontend.chat.reasoning import OPEN, ReasoningSplitter
from frontend.chat.tool_formats import ToolFormat
from frontend.chat.tool_parser import ToolParser


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """What an answer may contain besides content.

    Attributes:
        reasons: a `<think>` block at its start is reasoning.
        opened: the prompt opens that block.
        shows_reasoning: the client gets the reasoning too.
        tool_format: how calls are written; None if there are none.
        tool_names: the functions on offer.
        parallel: more calls than the first count.
    """

    reasons: bool = False
    opened: bool = False
    shows_reasoning: bool = True
    tool_format: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    parallel: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether all of it is content."""
        return not self.reasons and self.tool_format is None

    def parser(self) -> "AnswerParser":
        """A parser for one sample."""
        return AnswerParser(self)

    def message(self, text: str) -> Message:
        """The message that a whole text contains."""
        parser = self.parser()
        return Message.of([*parser.feed(text), *parser.finish()])


class AnswerParser:
    """Reads one sample's text.

    Attributes:
        has_calls: a tool call has begun.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._reasoning = ReasoningSplitter(opened=form.opened) if form.reasons else None
        self._tools = ToolParser(form.tool_format, form.tool_names) if form.tool_format else None
        self.has_calls = False

    def feed(self, text: str) -> list[Part]:
        """Take more text; returns the pieces that are certain."""
        parts: list[Part] = [Content(text)] if text else []
        if self._reasoning is not None:
            parts = self._reasoning.feed(text)
        return self._read_calls(parts)

    def finish(self) -> list[Part]:
        """The text has ended; returns the last pieces."""
        parts = self._read_calls(self._reasoning.finish() if self._reasoning is not None else [])
        return parts + self._kept(self._tools.finish()) if self._tools is not None else parts

    def _read_calls(self, parts: Sequence[Part]) -> list[Part]:
        tools = self._tools
        if tools is None:
            return self._kept(list(parts))
        read: list[Part] = []
        for part in parts:
            read += tools.feed(part.text) if isinstance(part, Content) else [part]
        return self._kept(read)

    def _kept(self, parts: list[Part]) -> list[Part]:
        self.has_calls = self.has_calls or any(isinstance(part, CallStart) for part in parts)
        if not self._form.shows_reasoning:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        if self._form.parallel:
            return parts
        return [part for part in parts if not isinstance(part, CallStart | CallArguments) or part.index == 0]


def opens_reasoning(prompt_tail: str) -> bool:
    """Whether a prompt with this end leaves the model in its reasoning."""
    return prompt_tail.rstrip().endswith(OPEN)
