"""What a request gives back: pieces of text on the way, one result at the end.

Plain values without behaviour. The core makes them, the HTTP API and the client socket turn them into their own forms.
"""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import RequestError


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the likeliest tokens at a position."""

    token_id: int
    text: str
    raw: bytes
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of the token at a position, and of the likeliest ones there.

    Attributes:
        text: what the token added to the text, so that the texts of all tokens join to the whole text: a character
            that several tokens make up stands with the last of them.
        raw: the token's bytes.
        logprob: natural logarithm, at least -9999.
        rank: 1 for the likeliest.
        top: the likeliest tokens, likeliest first; their text is that of the token alone.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...] = ()


@dataclass(slots=True)
class Delta:
    """New output of one sample since the last delta.

    Attributes:
        text: may be empty while a character or a possible stop string is incomplete.
        token_ids: int32.
        logprobs: aligned with token_ids, if asked for.
        finish_reason, stop_reason: set on a sample's last delta, as in SampleResult.
    """

    sample_index: int
    text: str
    token_ids: "array[int]"
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The whole of one sample.

    Attributes:
        token_ids: int32, with the end token if there was one.
        finish_reason: `stop`, `length` or `abort`.
        stop_reason: the stop string or the stop token id that ended it; None for the model's own end and for others.
        logprobs: aligned with token_ids, or None if not asked for.
    """

    index: int
    text: str
    token_ids: "array[int]"
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: "tuple[TokenLogprob, ...] | None" = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: its prompt, its output over all samples, and how much of the prompt was cached."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Timings:
    """When things happened to a request.

    Attributes:
        arrived_at_s: wall clock time of arrival.
        arrived_s, submitted_s, first_token_s, last_token_s, finished_s: monotonic clock, in seconds; None for what has
            not happened. Between arrival and submission the prompt is tokenized.
    """

    arrived_at_s: float
    arrived_s: float
    submitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, slots=True)
class Final:
    """A request's end, all samples done.

    Attributes:
        samples: by index.
        prompt_token_ids: int32.
        prompt_logprobs: one entry per prompt token, the first None; or None if not asked for.
    """

    samples: tuple[SampleResult, ...]
    usage: Usage
    prompt_token_ids: "array[int]"
    prompt_logprobs: "tuple[TokenLogprob | None, ...] | None"
    timings: Timings


class Sink(Protocol):
    """Who takes a request's events. Called from the event loop; must neither block nor call back into the core.

    `on_delta` comes only for requests that stream; `on_final` or `on_failed` comes exactly once, as the last call.
    """

    def on_delta(self, delta: Delta) -> None:
        """New output."""

    def on_final(self, final: Final) -> None:
        """The request ended, by itself or by an abort."""

    def on_failed(self, error: RequestError) -> None:
        """The request ended with an error."""
