"""Reads one tool call as a JSON object, character by character: `{"name": "f", "arguments": {...}}`.

Once the name is known, the arguments are passed on as they come, so that they can be streamed. From then on the call
counts, even if the model never finishes it; until then it may turn out not to be a call. Other keys are skipped.
"""

import json
from collections.abc import Container
from enum import Enum, auto
from typing import Any

ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("name", "type", "id")
_CLOSER = {"{": "}", "[": "]"}
_SPACE = " \t\r\n"


class Outcome(Enum):
    """The state of a reader."""

    OPEN = auto()
    DONE = auto()
    MALFORMED = auto()


class _Expect(Enum):
    OBJECT = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class _Value:
    """An incomplete JSON value: a string, a container or a scalar. Brackets must match; the rest is not checked."""

    def __init__(self, first: str) -> None:
        self.text = first
        self._closers = [_CLOSER[first]] if first in _CLOSER else []
        self._in_string, self._escaped = first == '"', False
        self.is_scalar = first not in '"{['

    def add(self, character: str) -> Outcome:
        """Take one more character. A scalar ends at the character after it, which is not part of it."""
        if self.is_scalar:
            if character in ",}]" or character in _SPACE:
                return Outcome.DONE
            self.text += character
            return Outcome.OPEN
        self.text += character
        if self._in_string:
            self._add_to_string(character)
        elif character == '"':
            self._in_string = True
        elif character in _CLOSER:
            self._closers.append(_CLOSER[character])
        elif character in "}]" and (not self._closers or self._closers.pop() != character):
            return Outcome.MALFORMED
        return Outcome.OPEN if self._in_string or self._closers else Outcome.DONE

    def _add_to_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


class CallReader:
    """Reads one call.

    Args:
        names: functions that may be called; None for any. With names, an object with other keys than those of a call
            is no call.

    Attributes:
        name: the function's, once known.
        started: it is a call; `take_arguments` gives its arguments.
    """

    def __init__(self, names: Container[str] | None = None) -> None:
        self.name = ""
        self.started = False
        self._names = names
        self._expect = _Expect.OBJECT
        self._key = ""
        self._value: _Value | None = None
        self._arguments: str | None = None  # not yet passed on; None before there are any
        self._is_live = False  # the value under way are the arguments, an object

    def add(self, character: str) -> Outcome:
        """One more character."""
        if self._value is not None:
            return self._add_to_value(self._value, character)
        if character in _SPACE:
            return Outcome.OPEN
        match self._expect, character:
            case _Expect.OBJECT, "{":
                self._expect = _Expect.KEY_OR_END
            case ((_Expect.KEY | _Expect.KEY_OR_END), '"'):
                self._value, self._key = _Value(character), ""
            case _Expect.COLON, ":":
                self._expect = _Expect.VALUE
            case _Expect.VALUE, _ if character not in ",:}]":
                return self._start_value(character)
            case _Expect.COMMA_OR_END, ",":
                self._expect = _Expect.KEY
            case ((_Expect.COMMA_OR_END | _Expect.KEY_OR_END), "}"):
                return self._end()
            case _:
                return Outcome.MALFORMED
        return Outcome.OPEN

    def take_arguments(self) -> str:
        """The arguments that came since the last call."""
        if not self.started or not self._arguments:
            return ""
        taken, self._arguments = self._arguments, ""
        return taken

    def _start_value(self, character: str) -> Outcome:
        self._value = _Value(character)
        self._is_live = self._key in ARGUMENT_KEYS and character == "{"
        if self._is_live:
            if self._arguments is not None:
                return Outcome.MALFORMED
            self._arguments = character
            return self._start_call()
        return Outcome.OPEN

    def _add_to_value(self, value: _Value, character: str) -> Outcome:
        outcome = value.add(character)
        if self._is_live:
            assert self._arguments is not None, "arguments under way without a start"
            self._arguments += character
        if outcome is not Outcome.DONE:
            return outcome
        self._value = None
        if self._expect is not _Expect.VALUE:
            self._key, self._expect = _decoded(value.text), _Expect.COLON
            is_known = self._names is None or self._key in ARGUMENT_KEYS or self._key in _OTHER_KEYS
            return Outcome.OPEN if is_known else Outcome.MALFORMED
        self._expect = _Expect.COMMA_OR_END
        live, self._is_live = self._is_live, False
        if not live and not self._take_value(_decoded(value.text)):
            return Outcome.MALFORMED
        return self.add(character) if value.is_scalar else Outcome.OPEN

    def _take_value(self, value: Any) -> bool:
        """A whole value that is no object of arguments; False if it cannot stand there."""
        if self._key == "name":
            if not isinstance(value, str) or not value or self.name:
                return False
            self.name = value
            return self._arguments is None or self._start_call() is Outcome.OPEN
        if self._key in ARGUMENT_KEYS:  # some models write null, or the object as a string
            self._arguments = "{}" if value is None else value if isinstance(value, str) else ""
            if not isinstance(_decoded(self._arguments), dict):
                return False
            return self._start_call() is Outcome.OPEN
        return True

    def _start_call(self) -> Outcome:
        if self.name:
            if self._names is not None and self.name not in self._names:
                return Outcome.MALFORMED
            self.started = True
        return Outcome.OPEN

    def _end(self) -> Outcome:
        if self._arguments is None:
            self._arguments = "{}"
            self._start_call()
        return Outcome.DONE if self.started else Outcome.MALFORMED


def _decoded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return ""
