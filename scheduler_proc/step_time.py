"""Predicts step times from the steps so far: how many prompt tokens may a step hold?

    step time = decode time + chunk tokens * token time

Both are running means. The decode time is measured on steps without chunks, and lowered by steps with decode rows that
took less although they had chunks. A step may have stalled, so none raises the mean by much more than itself. The
token time is what remains of the steps with chunks, divided by their chunk tokens; a step counts in proportion to its
tokens, because a short chunk takes longer per token. Where nobody decodes, the decode time does not count.

A step that has been sent cannot be taken back, so an abort waits for it, and so does everybody else: where steps would
take a good part of a second, as on a CPU, they are kept short and are not planned ahead. Knows no clock. Called by the
core (what a step took, and whether the next one may be planned) and by the planner (how much the next step may hold,
and whether recomputing a victim's tokens is faster than swapping them).
"""

WEIGHT = 0.2
"""Share of the newest step in the running means."""
STEP_LIMIT_S = 0.4
"""What a step should take at most; where decoding alone takes longer than half of it, prompts get as long as that."""
AHEAD_LIMIT_S = 0.2
"""A step is planned ahead only while those in flight should take no longer: run-ahead hides tenths of a millisecond."""
LEAST_CHUNK = 16
"""Prompt tokens that a step may always hold, so that prompts go on however tight the target is."""


class StepTime:
    """A running model of step time.

    Args:
        target_s: time between tokens to aim for; 0 for none.
        token_s: what a prompt token is taken to need until one has been computed; 0 for unknown.

    Attributes:
        decode_s, token_s: seconds, as in the formula; None for unknown.
    """

    def __init__(self, target_s: float, token_s: float = 0.0) -> None:
        self.target_s = target_s
        self.decode_s: float | None = None
        self.token_s: float | None = token_s or None
        self._chunk_s, self._chunk_tokens = token_s, 1.0 if token_s else 0.0

    def note(self, step_s: float, chunk_tokens: int, *, decodes: bool = True) -> None:
        """A step with so many prompt tokens, and with decode rows or without, took so long."""
        decode_s = (self.decode_s or 0.0) if decodes else 0.0
        if chunk_tokens == 0 or step_s < decode_s:
            self.decode_s = _mean(self.decode_s, step_s)
        else:
            self._chunk_s = (1 - WEIGHT) * self._chunk_s + step_s - decode_s
            self._chunk_tokens = (1 - WEIGHT) * self._chunk_tokens + chunk_tokens
            self.token_s = self._chunk_s / self._chunk_tokens

    def chunk_budget(self, most: int, *, decodes: bool = True) -> int:
        """Prompt tokens, at most `most`, with which a step takes no longer than it should.

        Args:
            most: tokens.
            decodes: somebody waits for the next token, so that the target counts.
        """
        if not self.token_s:
            return most
        decode_s = (self.decode_s or 0.0) if decodes else 0.0
        spare_s = max(STEP_LIMIT_S - decode_s, decode_s)
        if self.target_s and decodes:
            spare_s = min(spare_s, self.target_s - decode_s)
        return max(int(min(most, spare_s / self.token_s)), min(most, LEAST_CHUNK))

    def step_s(self, chunk_tokens: int, *, decodes: bool) -> float:
        """What a step should take that has so many prompt tokens, and decode rows or none; 0 while nothing is known."""
        return ((self.decode_s or 0.0) if decodes else 0.0) + chunk_tokens * (self.token_s or 0.0)

    def may_run_ahead(self, step_count: int, chunk_tokens: int) -> bool:
        """Whether one more step may be planned behind so many in flight, which hold so many prompt tokens together."""
        return step_count * (self.decode_s or 0.0) + chunk_tokens * (self.token_s or 0.0) <= AHEAD_LIMIT_S

    def admits(self) -> bool:
        """Whether another sequence may join those that decode: not once they alone miss the target."""
        return not self.target_s or self.decode_s is None or self.decode_s <= self.target_s


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (min(value, max(2 * before, AHEAD_LIMIT_S)) - before)
