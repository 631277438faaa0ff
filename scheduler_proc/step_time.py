"""Predicts step times from the steps so far: how many prompt tokens fit under a target for time between tokens?

    step time = decode time + chunk tokens * token time

Both are running means. The decode time is measured on steps without chunks. The token time is what remains of the other
steps, divided by their chunk tokens; a step counts in proportion to its tokens, because a short chunk takes longer per
token. Knows no clock. Called by the core (what a step took) and by the planner (how much the next step may hold,
and whether recomputing a victim's tokens is faster than swapping them).
"""

WEIGHT = 0.2
"""Share of the newest step in the running means."""
LEAST_CHUNK = 16
"""Prompt tokens that a step may always hold, so that prompts go on however tight the target is."""


class StepTime:
    """A running model of step time.

    Args:
        target_s: time between tokens to aim for; 0 for none.
    """

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.decode_s: float | None = None
        self._chunk_s = self._chunk_tokens = 0.0

    @property
    def token_s(self) -> float | None:
        """Seconds that a prompt token takes; None while no prompt has been computed."""
        return self._chunk_s / self._chunk_tokens if self._chunk_tokens else None

    def note(self, step_s: float, chunk_tokens: int) -> None:
        """A step with so many prompt tokens took so long."""
        if chunk_tokens == 0:
            self.decode_s = _mean(self.decode_s, step_s)
        else:
            self._chunk_s = (1 - WEIGHT) * self._chunk_s + max(step_s - (self.decode_s or 0.0), 0.0)
            self._chunk_tokens = (1 - WEIGHT) * self._chunk_tokens + chunk_tokens

    def chunk_budget(self, most: int) -> int:
        """Prompt tokens, at most `most`, with which a step that also decodes meets the target."""
        if not self.target_s or not self.token_s:
            return most
        spare_s = self.target_s - (self.decode_s or 0.0)
        return max(min(most, int(spare_s / self.token_s)), min(most, LEAST_CHUNK))

    def admits(self) -> bool:
        """Whether another sequence may join those that decode: not once they alone miss the target."""
        return not self.target_s or self.decode_s is None or self.decode_s <= self.target_s


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (value - before)
