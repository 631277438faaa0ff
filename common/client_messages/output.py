"""The parts of an output that the frontend's core and the client socket have in common: samples, deltas, logprobs."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import WireError, shown
from common.wire import FieldReader, array_bytes

LOGPROB_LIMIT = 1 << 20
"""Positions that one sample or prompt may have log probabilities for, at most."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the likeliest tokens at a position: its text alone, its bytes, natural log probability, rank from 1."""

    token_id: int
    text: str
    raw: bytes
    logprob: float
    rank: int

    def to_list(self) -> list[Any]:
        """The nested array that stands in a message."""
        return [self.token_id, self.text, self.raw, self.logprob, self.rank]

    @classmethod
    def from_list(cls, fields: Any) -> "TopLogprob":
        """Build from a nested array; raises WireError."""
        with FieldReader("TopLogprob", fields) as read:
            return cls(
                read.integer("token_id"),
                read.text("text"),
                read.blob("raw"),
                read.number("logprob"),
                read.integer("rank"),
            )


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

    def to_list(self) -> list[Any]:
        """The nested array that stands in a message."""
        return [
            self.token_id, self.text, self.raw, self.logprob, self.rank, [entry.to_list() for entry in self.top]
        ]  # fmt: skip

    @classmethod
    def from_list(cls, fields: Any) -> "TokenLogprob":
        """Build from a nested array; raises WireError."""
        with FieldReader("TokenLogprob", fields) as read:
            return cls(
                token_id=read.integer("token_id"),
                text=read.text("text"),
                raw=read.blob("raw"),
                logprob=read.number("logprob"),
                rank=read.integer("rank"),
                top=read.entries("top", TopLogprob.from_list, 1024),
            )


@dataclass(slots=True)
class Delta:
    """New output of one sample since the last delta.

    Attributes:
        text: may be empty while a character or a possible stop string is incomplete.
        token_ids: int32.
        logprobs: aligned with token_ids if asked for, else empty.
        finish_reason, stop_reason: set on a sample's last delta, as in SampleResult.
    """

    sample_index: int
    text: str
    token_ids: "array[int]"
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def extend(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add what came after it."""
        self.text += text
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)

    def to_list(self) -> list[Any]:
        """The nested array that stands in a message."""
        return [
            self.sample_index,
            self.text,
            array_bytes(self.token_ids),
            [entry.to_list() for entry in self.logprobs],
            self.finish_reason,
            self.stop_reason,
        ]

    @classmethod
    def from_list(cls, fields: Any) -> "Delta":
        """Build from a nested array; raises WireError."""
        with FieldReader("Delta", fields) as read:
            return cls(
                sample_index=read.integer("sample_index"),
                text=read.text("text"),
                token_ids=read.numbers("token_ids", "i"),
                logprobs=list(read.entries("logprobs", TokenLogprob.from_list)),
                finish_reason=read.optional_text("finish_reason", 64),
                stop_reason=_stop_reason(read.anything("stop_reason")),
            )


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The whole of one sample.

    Attributes:
        token_ids: int32, with the end token if there was one.
        finish_reason: `stop`, `length` or `abort`.
        stop_reason: the stop string or stop token id that ended it; None for the model's own end and for others.
        logprobs: aligned with token_ids, or None if not asked for.
    """

    index: int
    text: str
    token_ids: "array[int]"
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    def to_list(self) -> list[Any]:
        """The nested array that stands in a message."""
        return [
            self.index,
            self.text,
            array_bytes(self.token_ids),
            self.finish_reason,
            self.stop_reason,
            None if self.logprobs is None else [entry.to_list() for entry in self.logprobs],
        ]

    @classmethod
    def from_list(cls, fields: Any) -> "SampleResult":
        """Build from a nested array; raises WireError."""
        with FieldReader("SampleResult", fields) as read:
            return cls(
                index=read.integer("index"),
                text=read.text("text"),
                token_ids=read.numbers("token_ids", "i"),
                finish_reason=read.text("finish_reason", 64),
                stop_reason=_stop_reason(read.anything("stop_reason")),
                logprobs=_logprobs(read.anything("logprobs")),
            )


@dataclass(frozen=True, slots=True)
class SampleSoFar:
    """What a client has of one sample of a request that it asks for again.

    Attributes:
        index: which of the request's n samples.
        token_ids: int32, those of all its deltas.
        finish_reason, stop_reason: as in its last delta; nil if it goes on.
    """

    index: int
    token_ids: "array[int]"
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def to_list(self) -> list[Any]:
        """The nested array that stands in a message."""
        return [self.index, array_bytes(self.token_ids), self.finish_reason, self.stop_reason]

    @classmethod
    def from_list(cls, fields: Any) -> "SampleSoFar":
        """Build from a nested array; raises WireError."""
        with FieldReader("SampleSoFar", fields) as read:
            return cls(
                read.integer("index"),
                read.numbers("token_ids", "i"),
                read.optional_text("finish_reason", 64),
                _stop_reason(read.anything("stop_reason")),
            )


def optional_entries(value: Any) -> "tuple[TokenLogprob | None, ...] | None":
    """Log probabilities by position, single ones of which may be nil, or nil for all; raises WireError."""

    def entry(item: Any) -> TokenLogprob | None:
        return None if item is None else TokenLogprob.from_list(item)

    return None if value is None else FieldReader("logprobs", [value]).entries("entries", entry, LOGPROB_LIMIT)


def _logprobs(value: Any) -> "tuple[TokenLogprob, ...] | None":
    read = FieldReader("SampleResult", [value])
    return None if value is None else read.entries("logprobs", TokenLogprob.from_list, LOGPROB_LIMIT)


def _stop_reason(value: Any) -> str | int | None:
    if value is not None and type(value) not in (str, int):
        raise WireError(f"stop_reason: wanted a string, an integer or nil, got {shown(value)}")
    return value  # type: ignore[no-any-return]
