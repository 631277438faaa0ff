"""The events of a request: deltas on the way, one result at the end.

Plain values without behaviour. The core makes them; the HTTP API and the client socket turn them into their own forms.
The parts that clients get unchanged come from `common.client_messages`.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from common.client_messages import Delta, SampleResult, TokenLogprob, TopLogprob
from common.errors import RequestError
from frontend.pieces import Piece

__all__ = ["Delta", "Final", "SampleResult", "Sink", "Timings", "TokenLogprob", "TopLogprob", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: its prompt, its output over all samples, and how much of the prompt was cached."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Timings:
    """The times at which a request arrived, was submitted, got tokens and ended.

    Attributes:
        arrived_at_s: wall clock time of arrival.
        arrived_s, submitted_s, first_token_s, last_token_s, finished_s: monotonic clock, in seconds; None for what has
            not happened. Between arrival and submission the prompt is tokenized.
        prefill_s: seconds from the first step that computed some of the prompt to the first token; None before.
    """

    arrived_at_s: float
    arrived_s: float
    submitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    prefill_s: float | None = None

    @property
    def queue_s(self) -> float | None:
        """Seconds from submission to the first step that computed some of the prompt; None before the first token."""
        if self.first_token_s is None or self.submitted_s is None or self.prefill_s is None:
            return None
        return max(0.0, self.first_token_s - self.submitted_s - self.prefill_s)

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last; None before the first."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        return self.last_token_s - self.first_token_s

    @property
    def inference_s(self) -> float | None:
        """Seconds of prefill and decode together; None before the first token."""
        return None if self.prefill_s is None or self.decode_s is None else self.prefill_s + self.decode_s

    def after_arrival(self, time_s: float | None) -> float | None:
        """Seconds from arrival to one of the other times; None if it has not happened."""
        return None if time_s is None else time_s - self.arrived_s


@dataclass(frozen=True, slots=True)
class Final:
    """A request's end, all samples done.

    Attributes:
        samples: by index.
        prompt_token_ids: int32.
        prompt_logprobs: one entry per prompt token, the first None, made as they are taken; or None if not asked for.
        embedding: float32 [hidden size], of length 1, of a request that asked for one and was not aborted.
    """

    samples: tuple[SampleResult, ...]
    usage: Usage
    prompt_token_ids: "array[int]"
    prompt_logprobs: Iterable[TokenLogprob | None] | None
    timings: Timings
    embedding: "array[float] | None" = None


class Shortcut(Protocol):
    """May take a sample's new text past the request's sink. An object whose method is called costs a cold cache line
    less per token than a function that is bound to one."""

    def take(self, text: str) -> bool:
        """Take the text, or return False: then the sink gets it, and may offer it once more."""


class Sink(Protocol):
    """Takes a request's events. Called from the event loop; must neither block nor call back into the core.

    `on_token` and `on_delta` come only for requests that stream; `on_final` or `on_failed` comes exactly once, as the
    last call.
    """

    def on_token(self, sample_index: int, piece: Piece) -> None:
        """One more token and nothing else: the common case, without the cost of a Delta."""

    def on_delta(self, delta: Delta) -> None:
        """New output."""

    def on_final(self, final: Final) -> None:
        """The request ended, by itself or by an abort."""

    def on_failed(self, error: RequestError) -> None:
        """The request ended with an error."""
