"""What several messages share: the parts of a step, log probabilities, checks of nested fields, empty arrays."""

from array import array
from dataclasses import dataclass
from typing import Any

from common.errors import WireError, shown
from common.wire import INT32_MAX, FieldReader, array_bytes

STEP_PARTS = ("plan", "wire", "input", "forward", "sampling", "report")
"""The parts of a step whose times are reported, in the order of `EngineStats.parts_us`."""

WORKER_PARTS = STEP_PARTS[2:]
"""Those that the worker reports, in the order of `StepResult.parts_us`."""

SHORT_IDS_LIMIT = 1024
"""Token ids in a short array at most, such as those of one of a request's bad words."""

POOLINGS = ("", "mean", "last", "cls")
"""What is wanted of a prompt's hidden states: nothing, or as an embedding their mean, the last one, or the first."""

EARLY_POOLINGS = ("mean", "cls")
"""Those that need more than the last state, so that no token of the prompt may come from a cache."""

EMBEDDING_LIMIT = 1 << 16
"""Numbers of an embedding at most."""

TOKEN_MASK_LIMIT_BYTES = 1 << 20
"""A bit for each of eight million token ids."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at one position: of the token that stands there, and of the likeliest ones.

    Attributes:
        row_index: which entry of the message this belongs to (its docstring says which list).
        logprob: of the token itself; never -inf on the wire (clamped to -9999).
        rank: 1 for the likeliest token.
        top_token_ids: int32, likeliest first.
        top_logprobs: float32, aligned.
    """

    row_index: int
    logprob: float
    rank: int
    top_token_ids: "array[int]"
    top_logprobs: "array[float]"

    def to_list(self) -> list[Any]:
        """The nested array that stands in a message."""
        return [
            self.row_index, self.logprob, self.rank, array_bytes(self.top_token_ids), array_bytes(self.top_logprobs)
        ]  # fmt: skip

    @classmethod
    def from_list(cls, fields: Any) -> "TokenLogprobs":
        """Build from a nested array; raises WireError."""
        with FieldReader("TokenLogprobs", fields) as read:
            return cls(
                row_index=read.integer("row_index"),
                logprob=read.number("logprob"),
                rank=read.integer("rank"),
                top_token_ids=read.numbers("top_token_ids", "i", 1024),
                top_logprobs=read.numbers("top_logprobs", "f", 1024),
            )


def logprobs_by_row(value: Any) -> tuple[int, tuple[TokenLogprobs, ...]]:
    """A pair of row index (or slot) and the entries that belong to it; raises WireError."""
    with FieldReader("prompt_logprobs", value) as read:
        return (read.integer("row_index"), read.entries("entries", TokenLogprobs.from_list, 1 << 20))


def logprobs_to_lists(entries: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]) -> list[Any]:
    """The way back of `logprobs_by_row`."""
    return [[row_index, [entry.to_list() for entry in row]] for row_index, row in entries]


def embedding_by_row(value: Any) -> "tuple[int, array[float]]":
    """A pair of row index (or slot) and an embedding; raises WireError."""
    with FieldReader("embeddings", value) as read:
        return (read.integer("row_index"), read.numbers("embedding", "f", EMBEDDING_LIMIT))


def embeddings_to_lists(entries: "tuple[tuple[int, array[float]], ...]") -> list[Any]:
    """The way back of `embedding_by_row`."""
    return [[row_index, array_bytes(numbers)] for row_index, numbers in entries]


def token_id(value: Any) -> int:
    """A token id; raises WireError."""
    if type(value) is not int or not 0 <= value <= INT32_MAX:
        raise WireError(f"wanted a token id, got {shown(value)}")
    return value


def token_ids(value: Any) -> tuple[int, ...]:
    """A short array of token ids; raises WireError."""
    if type(value) is not list or len(value) > SHORT_IDS_LIMIT:
        raise WireError(f"wanted an array of at most {SHORT_IDS_LIMIT} token ids")
    return tuple(token_id(entry) for entry in value)


def token_mask(value: Any) -> bytes:
    """A bit per token id, in whole words of 32; raises WireError."""
    if type(value) is not bytes or len(value) % 4 or not 0 < len(value) <= TOKEN_MASK_LIMIT_BYTES:
        raise WireError(f"wanted a mask of token ids in words of 4 bytes, got {shown(value)}")
    return value


def empty_u8() -> "array[int]":
    """An empty array of that type, as a field default."""
    return array("B")


def empty_i32() -> "array[int]":
    """An empty array of that type, as a field default."""
    return array("i")


def empty_u16() -> "array[int]":
    """An empty array of that type, as a field default."""
    return array("H")
