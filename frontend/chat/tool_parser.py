"""Separates tool calls from the text around them, as the text grows.

Text that may become a call is held back until this is certain; if it turns out not to be one, it comes out as content,
tags included. White space between calls, and between a call and the text beside it, is left out.
"""

import secrets
import string
from collections.abc import Container
from enum import Enum, auto

from frontend.chat.call_reader import CallReader, Outcome
from frontend.chat.parts import CallArguments, CallStart, Content, Part, split_at
from frontend.chat.tool_formats import MISTRAL, ToolFormat

_SPACE = " \t\r\n"


class _Place(Enum):
    START = auto()  # nothing but white space so far
    TEXT = auto()
    LEAD = auto()  # behind the opening, before the call's object
    CALL = auto()
    BEHIND = auto()  # behind a call's object
    GAP = auto()  # behind a finished call: white space counts for nothing


class ToolParser:
    """Reads one output.

    Args:
        form: how the model writes calls.
        names: the functions on offer; calls without the format's opening must name one of them.
    """

    def __init__(self, form: ToolFormat, names: Container[str]) -> None:
        self._form, self._names = form, names
        self._place = _Place.START
        self._buffer = ""  # not looked at yet, or not certain
        self._raw = ""  # of a call under way: what comes out if it is none
        self._reader = CallReader()
        self._is_announced = self._in_array = False
        self._call_count = 0

    def feed(self, text: str) -> list[Part]:
        """Take more of the output; returns the pieces that are certain."""
        self._buffer += text
        parts: list[Part] = []
        steps = {
            _Place.START: self._start, _Place.TEXT: self._text, _Place.LEAD: self._lead, _Place.CALL: self._call,
            _Place.BEHIND: self._behind, _Place.GAP: self._gap,
        }  # fmt: skip
        while self._buffer and steps[self._place](parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The output has ended; returns what was held back."""
        held, self._buffer = self._buffer, ""
        if self._place in (_Place.LEAD, _Place.CALL):
            held = "" if self._place is _Place.CALL and self._reader.started else self._raw + held
        elif self._place in (_Place.BEHIND, _Place.GAP):
            held = held.lstrip()
            if self._place is _Place.BEHIND and self._form.closing.startswith(held):
                held = ""
        return [Content(held)] if held else []

    # Each step takes what it can from the buffer; False if it needs more text.

    def _start(self, parts: list[Part]) -> bool:
        return self._text_behind_space(parts, keep_space=True)

    def _gap(self, parts: list[Part]) -> bool:
        return self._text_behind_space(parts, keep_space=False)

    def _text_behind_space(self, parts: list[Part], *, keep_space: bool) -> bool:
        stripped = self._buffer.lstrip(_SPACE)
        if not stripped or (self._form.opening.startswith(stripped) and stripped != self._form.opening):
            return False
        space = self._buffer[: len(self._buffer) - len(stripped)] if keep_space else ""
        if self._form.is_bare and stripped[0] == "{":
            self._begin(stripped, space, is_announced=False)
        elif stripped.startswith(self._form.opening):
            self._begin(stripped[len(self._form.opening) :], space + self._form.opening, is_announced=True)
        else:
            self._buffer = self._buffer if keep_space else stripped
            self._place = _Place.TEXT
        return True

    def _text(self, parts: list[Part]) -> bool:
        before, after = split_at(self._buffer, self._form.opening)
        if before:
            parts.append(Content(before))
        if after is None:
            self._buffer = self._buffer[len(before) :]
            return False
        self._begin(after, self._form.opening, is_announced=True)
        return True

    def _begin(self, rest: str, raw: str, *, is_announced: bool) -> None:
        self._buffer, self._raw, self._is_announced = rest, raw, is_announced
        self._place, self._in_array = _Place.LEAD, False

    def _lead(self, parts: list[Part]) -> bool:
        stripped = self._buffer.lstrip(_SPACE)
        if not stripped:
            return False
        if self._form.is_array and not self._in_array and stripped[0] == "[":
            self._in_array = True
            self._raw += self._buffer[: len(self._buffer) - len(stripped) + 1]
            self._buffer = stripped[1:]
        elif stripped[0] == "{":
            self._reader = CallReader(None if self._is_announced else self._names)
            self._place = _Place.CALL
        else:
            self._give_up(parts)
        return True

    def _call(self, parts: list[Part]) -> bool:
        was_started, outcome, count = self._reader.started, Outcome.OPEN, 0
        for count, character in enumerate(self._buffer, 1):  # noqa: B007
            outcome = self._reader.add(character)
            if outcome is not Outcome.OPEN:
                break
        is_call = self._reader.started
        if outcome is Outcome.MALFORMED and not is_call:
            count -= 1  # the character that does not fit may open another call
        self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]
        if outcome is Outcome.MALFORMED and not is_call:
            self._give_up(parts)
            return True
        if self._reader.started:
            self._pass_on(parts, is_new=not was_started)
        if outcome is Outcome.OPEN:
            return False
        self._place = _Place.BEHIND if outcome is Outcome.DONE else _Place.TEXT
        return True

    def _pass_on(self, parts: list[Part], *, is_new: bool) -> None:
        if is_new:
            parts.append(CallStart(self._call_count, _call_id(self._form), self._reader.name))
            self._call_count += 1
        if arguments := self._reader.take_arguments():
            parts.append(CallArguments(self._call_count - 1, arguments))

    def _behind(self, parts: list[Part]) -> bool:
        stripped, closing = self._buffer.lstrip(_SPACE), self._form.closing
        if not stripped or (closing.startswith(stripped) and stripped != closing):
            return False
        if closing and stripped.startswith(closing):
            self._buffer, self._place = stripped[len(closing) :], _Place.GAP
        elif self._in_array and stripped[0] in ",]":
            self._buffer, self._raw = stripped[1:], stripped[0]
            self._place = _Place.LEAD if stripped[0] == "," else _Place.GAP
        elif self._form.is_bare and stripped[0] == ";":
            self._buffer, self._place = stripped[1:], _Place.GAP
        else:
            self._buffer, self._place = stripped, _Place.GAP
        return True

    def _give_up(self, parts: list[Part]) -> None:
        """It is no call: everything since the opening is text."""
        self._place = _Place.TEXT
        if self._raw:
            parts.append(Content(self._raw))
        self._raw = ""


def _call_id(form: ToolFormat) -> str:
    """Mistral's templates insist on nine letters and digits."""
    if form is MISTRAL:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
