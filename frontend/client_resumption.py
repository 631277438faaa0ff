"""What a client keeps of its requests under way, so that an engine whose frontend was lost can go on with them.

No sockets and no clock; `client_state.ClientState` has one `Kept` for each message that waits for its answer.
"""

import dataclasses
from array import array
from dataclasses import dataclass, field

from common import client_messages as wire

FRUITLESS_LIMIT = 2
"""A request that was lost so often, soon after it was sent and without a token in between, is not sent again: it may be
what ends the frontend."""
SOON_S = 10.0
"""A frontend that has had a request for so long, and no tokens for it, has done all that it does for one that waits."""


@dataclass(slots=True)
class KeptSample:
    """What has come of one sample.

    Attributes:
        token_ids: int32.
        logprobs: one for each token, if asked for.
        finish_reason, stop_reason: as in its last delta.
    """

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: list[wire.TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Kept:
    """A message that was sent, and what has come of it.

    Args:
        message: as it was sent.
        now_s: when; monotonic seconds, as everywhere here.

    Attributes:
        is_aborted: its caller wants no more of it.
    """

    __slots__ = ("_began_at_s", "_fruitless_count", "_message", "_sent_at_s", "_sent_count", "is_aborted", "samples")

    def __init__(self, message: wire.FromClient, now_s: float) -> None:
        self.is_aborted = False
        self.samples: dict[int, KeptSample] = {}
        self._message = message
        self._began_at_s = self._sent_at_s = now_s
        self._sent_count = 0
        self._fruitless_count = 0

    def add(self, delta: wire.Delta) -> None:
        """Take new output."""
        sample = self.samples.get(delta.sample_index)
        if sample is None:
            sample = self.samples[delta.sample_index] = KeptSample()
        sample.token_ids.extend(delta.token_ids)
        sample.logprobs.extend(delta.logprobs)
        sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason

    def note_loss(self, now_s: float) -> bool:
        """The engine has lost it; returns whether it may be sent again."""
        if self._sent_count >= 0:
            is_fruitless = self._token_count == self._sent_count and now_s < self._sent_at_s + SOON_S
            self._fruitless_count = self._fruitless_count + 1 if is_fruitless else 0
        self._sent_count = -1
        return self._fruitless_count < FRUITLESS_LIMIT

    def messages(self, now_s: float) -> list[wire.FromClient]:
        """What to send so that it goes on."""
        self._sent_count, self._sent_at_s = self._token_count, now_s
        request = self._message
        if not isinstance(request, wire.Generate | wire.Embed):
            return [request]
        if request.timeout_ms is not None:
            left_ms = request.timeout_ms - round((now_s - self._began_at_s) * 1000)
            request = dataclasses.replace(request, timeout_ms=max(1, left_ms))
        samples = [
            wire.SampleSoFar(index, sample.token_ids, sample.finish_reason, sample.stop_reason)
            for index, sample in sorted(self.samples.items())
        ]
        resume = wire.Resume(request, tuple(samples))
        return [resume, wire.Abort(request.request_id)] if self.is_aborted else [resume]

    def completed(self, final: wire.Final) -> wire.Final:
        """A request's end, with the log probabilities that came before a loss: the engine has only those after it."""
        if not self.samples:
            return final
        samples = [self._completed(sample) for sample in final.samples]
        return dataclasses.replace(final, samples=tuple(samples))

    def _completed(self, sample: wire.SampleResult) -> wire.SampleResult:
        known = self.samples.get(sample.index)
        missing_count = 0 if sample.logprobs is None else len(sample.token_ids) - len(sample.logprobs)
        if known is None or sample.logprobs is None or not missing_count:
            return sample
        return dataclasses.replace(sample, logprobs=(*known.logprobs[:missing_count], *sample.logprobs))

    @property
    def _token_count(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples.values())
