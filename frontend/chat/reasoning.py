"""Separates reasoning from the answer: the text between `<think>` and `</think>` at the start of an output.

White space around either is left out. A block that is never closed is reasoning to the end.
"""

from enum import Enum, auto

from frontend.chat.parts import Content, Part, Reasoning, split_at

OPEN, CLOSE = "<think>", "</think>"


class _Place(Enum):
    START = auto()  # nothing but white space so far, or the beginning of the tag
    THINKING = auto()
    GAP = auto()  # white space behind the block
    ANSWER = auto()


class ReasoningSplitter:
    """Reads one output.

    Args:
        opened: the prompt ends with `<think>`, so the output starts in the block.
    """

    def __init__(self, *, opened: bool) -> None:
        self._place = _Place.THINKING if opened else _Place.START
        self._held = ""
        self._begun = False  # the reasoning has text

    def feed(self, text: str) -> list[Part]:
        """Take more of the output; returns the pieces that are certain."""
        if self._place is _Place.ANSWER:
            return [Content(text)] if text else []
        self._held += text
        parts: list[Part] = []
        if self._place is _Place.START:
            self._start()
        if self._place is _Place.THINKING:
            self._think(parts)
        if self._place is _Place.GAP:
            self._held = self._held.lstrip()
            if self._held:
                self._place = _Place.ANSWER
        if self._place is _Place.ANSWER and self._held:
            parts.append(Content(self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        """The output has ended; returns what was held back."""
        held, self._held = self._held, ""
        if self._place is _Place.THINKING:
            held = (held if self._begun else held.lstrip()).rstrip()
            return [Reasoning(held)] if held else []
        return [Content(held)] if held and self._place is _Place.START else []

    def _start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._place, self._held = _Place.THINKING, text[len(OPEN) :]
        elif not OPEN.startswith(text):
            self._place = _Place.ANSWER

    def _think(self, parts: list[Part]) -> None:
        before, after = split_at(self._held, CLOSE)
        shown = before.rstrip()
        self._held = self._held[len(shown) :] if after is None else after
        if not self._begun:
            shown = shown.lstrip()
        if shown:
            self._begun = True
            parts.append(Reasoning(shown))
        if after is not None:
            self._place = _Place.GAP
