"""The frontend's statistics: histograms of times and sizes, and how requests ended.

Plain integers, fed by the core: once for each request's first token and end, and once per step for the times between
tokens, however many tokens the step brought. `/metrics` and the dashboard read them; nothing here knows either.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from common.messages import STEP_PARTS, EngineStats
from frontend.request import Request

DECADE = (1.0, 1.1, 1.25, 1.35, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.75, 7.5, 8.5)
"""The bounds of a histogram of times in each decade: no bucket is wider than 17 per cent of its value."""
SHOWN = frozenset({1.0, 1.5, 2.0, 3.0, 5.0, 7.5})
"""Those of them that are exported: finer ones would only make the export long."""


GOOD_ENDS = frozenset({"stop", "length", "abort"})
"""How a request ends that does not end with an error."""
FAILURES = frozenset({"engine_dead", "engine_restarted", "internal_error", "sample_failed"})
"""Errors that are the engine's own. Others are its load's (a full queue, a deadline) or the client's."""


class Histogram:
    """Counts of values by bucket.

    Args:
        bounds: upper bounds of the buckets, ascending; one more bucket takes what is larger.
        shown: indices of the bounds that are exported; None for all.

    Attributes:
        counts: values per bucket, the last one beyond all bounds.
        total: the sum of the values.
    """

    __slots__ = ("bounds", "counts", "shown", "total")

    def __init__(self, bounds: Sequence[float], shown: Sequence[int] | None = None) -> None:
        self.bounds = tuple(bounds)
        self.shown = range(len(self.bounds)) if shown is None else shown
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Take a value, as often as `count` says."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def cumulated(self) -> list[tuple[float, int]]:
        """Each exported bound with the count of values up to it."""
        sums, so_far = [], 0
        for count in self.counts[:-1]:
            so_far += count
            sums.append(so_far)
        return [(self.bounds[index], sums[index]) for index in self.shown]


def times(first_decade: int, decade_count: int) -> Histogram:
    """A histogram of seconds, from 10^first_decade on."""
    bounds: list[float] = []
    shown: list[int] = []
    for decade in range(first_decade, first_decade + decade_count):
        for step in DECADE:
            if step in SHOWN:
                shown.append(len(bounds))
            bounds.append(round(step * 10.0**decade, 9))
    return Histogram(bounds, shown)


def sizes(largest: int) -> Histogram:
    """A histogram of token counts: 1, 2, 5, 10, ... up to `largest`."""
    bounds = [step * 10**decade for decade in range(8) for step in (1, 2, 5)]
    return Histogram([bound for bound in bounds if bound <= largest])


def percentile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which a share of the values lies, interpolated within its bucket; None without values.

    Args:
        bounds: a histogram's.
        counts: per bucket, as `Histogram.counts`; values beyond the last bound count as that bound.
        share: 0 to 1.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    low, so_far = 0.0, 0
    for bound, count in zip(bounds, counts, strict=False):
        if so_far + count >= wanted:
            return low + (bound - low) * (wanted - so_far) / count
        so_far += count
        low = bound
    return low


class Figures:
    """The statistics of one frontend.

    Attributes:
        first_token_s: arrival to first token, one value per request; none for one that began before this frontend.
        gap_s: between two steps of a sample that brought tokens.
        mean_gap_s: a request's mean time between tokens.
        latency_s: arrival to end, of the same requests. Here and below without those that were refused.
        queue_s: submission to the first step that computes some of the prompt; prefill_s: from there to the first
            token; decode_s: from there to the last; inference_s: both.
        prompt_tokens, output_tokens, max_tokens, sample_counts: per request, how many of each.
        ended: requests by outcome: `stop`, `length`, `abort` or an error's code.
        step_sizes: steps by tokens computed: up to 1, 2, 4, ...
        previous_s: for each sample that gets tokens in this step, when it got the ones before; None for its first.
    """

    def __init__(self) -> None:
        self.first_token_s = times(-3, 6)
        self.gap_s = times(-4, 6)
        self.mean_gap_s = times(-4, 6)
        self.latency_s = times(-3, 7)
        self.queue_s = times(-4, 7)
        self.prefill_s = times(-3, 6)
        self.decode_s = times(-3, 7)
        self.inference_s = times(-3, 7)
        self.prompt_tokens = sizes(1_000_000)
        self.output_tokens = sizes(1_000_000)
        self.max_tokens = sizes(1_000_000)
        self.sample_counts = sizes(200)
        self.ended: Counter[str] = Counter()
        self.step_sizes: list[int] = []
        self.previous_s: list[float | None] = []
        self._part_totals_us = [0] * len(STEP_PARTS)

    # -- fed by the core -----------------------------------------------------------------------------------------------

    def note_first_token(self, request: Request) -> None:
        """A request has its first token."""
        timings = request.timings
        if timings.first_token_s is not None and not request.began_before:
            self.first_token_s.add(timings.first_token_s - timings.arrived_s)

    def note_gaps(self, now_s: float) -> None:
        """Count the gaps before the tokens of a step from `previous_s`, and empty it."""
        for then_s, count in Counter(self.previous_s).items():  # most had theirs in the same step: one value for all
            if then_s is not None:
                self.gap_s.add(now_s - then_s, count)
        self.previous_s.clear()

    def note_end(self, request: Request, outcome: str) -> None:
        """A request has ended. One that was refused is counted and no more: it would make latencies look short."""
        self.ended[outcome] += 1
        timings, usage = request.timings, request.usage()
        if outcome not in GOOD_ENDS and timings.first_token_s is None:
            return
        if timings.finished_s is not None and not request.began_before:
            self.latency_s.add(timings.finished_s - timings.arrived_s)
        self.prompt_tokens.add(usage.prompt_tokens)
        self.output_tokens.add(usage.completion_tokens)
        self.max_tokens.add(request.params.max_tokens or 0)
        self.sample_counts.add(request.params.n)
        for histogram, seconds in (
            (self.queue_s, timings.queue_s),
            (self.prefill_s, timings.prefill_s),
            (self.decode_s, timings.decode_s),
            (self.inference_s, timings.inference_s),
            (self.mean_gap_s, request.mean_gap_s()),
        ):
            if seconds is not None:
                histogram.add(seconds)

    def note_stats(self, stats: EngineStats) -> None:
        """The scheduler's figures of the steps since the last time."""
        step_count = sum(stats.step_sizes)
        for index, mean_us in enumerate(stats.parts_us):
            self._part_totals_us[index] += mean_us * step_count
        missing = len(stats.step_sizes) - len(self.step_sizes)
        self.step_sizes += [0] * missing
        for index, count in enumerate(stats.step_sizes):
            self.step_sizes[index] += count

    # -- read ----------------------------------------------------------------------------------------------------------

    def step_totals_us(self) -> dict[str, int]:
        """Microseconds that each part of the steps took since start, as `step_<part>_us`."""
        return {f"step_{part}_us": total for part, total in zip(STEP_PARTS, self._part_totals_us, strict=True)}
