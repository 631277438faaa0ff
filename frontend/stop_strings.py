"""Finds stop strings in a growing text: the first one that completes, holding back no more text than might become one.

Knows nothing of tokens. One matcher per sample; `request.Sample` feeds it what the detokenizer emits.

The text is read character by character with one Knuth-Morris-Pratt automaton per stop string, so the result does not
depend on how the text was cut into pieces: the stop string that completes first wins, and of those that complete at the
same character, the longest.
"""

import re


class StopStrings:
    """The stop strings of one request, compiled once and shared by its samples.

    Args:
        strings: none of them empty.
    """

    __slots__ = ("failure_tables", "first_character", "strings")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = tuple(sorted(set(strings), key=len, reverse=True))
        self.failure_tables = tuple(_failure_table(text) for text in self.strings)
        self.first_character = re.compile("[" + re.escape("".join(text[0] for text in self.strings)) + "]")


class StopMatcher:
    """Reads one sample's text and says what may be emitted.

    Args:
        stops: the request's stop strings.
    """

    __slots__ = ("_held", "_states", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._states = [0] * len(stops.strings)
        self._held = ""

    def feed(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Read more text.

        Args:
            text: what follows the text so far.
            may_end: False passes over stop strings that complete in this text; one that only begins in it still counts.

        Returns:
            What may be emitted now, and the stop string that completed, if one did. In that case the emitted text ends
            where the stop string begins, and the matcher is not to be fed any more.
        """
        if not self._held and not self._stops.first_character.search(text):
            return text, None
        pending = self._held + text
        for index in range(len(self._held), len(pending)):
            found = self._step(pending[index])
            if found is not None and may_end:
                self._held = ""
                return pending[: index + 1 - len(found)], found
        held_count = max(self._states)
        emitted_count = len(pending) - held_count
        self._held = pending[emitted_count:]
        return pending[:emitted_count], None

    @property
    def holds_back(self) -> bool:
        """Whether the end of the text may be the start of a stop string."""
        return bool(self._held)

    def flush(self) -> str:
        """What is still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        found = None
        for number, stop in enumerate(self._stops.strings):
            table = self._stops.failure_tables[number]
            state = self._states[number]
            while state and stop[state] != character:
                state = table[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                found = found or stop  # sorted by length: the first found is the longest
                state = table[state - 1]
            self._states[number] = state
        return found


def _failure_table(text: str) -> list[int]:
    """For each prefix of the text, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    state = 0
    for index in range(1, len(text)):
        while state and text[index] != text[state]:
            state = table[state - 1]
        if text[index] == text[state]:
            state += 1
        table[index] = state
    return table
