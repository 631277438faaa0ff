"""A step that has been issued: everything its result is made of, still on its way to the host.

On the CPU everything is there already. On a GPU the copies are in flight, and `result` waits for them, so the thread
that issues steps should not be the one that calls it. Made by both runners, read by the worker's reporter.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.messages import StepResult, TokenLogprobs
from worker_proc.logprobs import LogprobTable
from worker_proc.pooling import Embeddings
from worker_proc.step_inputs import PromptRows

PROMPT_LOGPROB_ROWS = 64
"""Positions whose logits are computed at once for prompt log probabilities; bounds their memory."""


@dataclass(frozen=True)
class PromptPiece:
    """Log probabilities of consecutive prompt positions; the first row of the table is `first_position`."""

    slot: int
    first_position: int
    top_count: int
    table: LogprobTable

    def entries(self) -> list[TokenLogprobs]:
        """As message entries."""
        count = len(self.table.logprobs)
        return [self.table.entry(index, self.first_position + index, self.top_count) for index in range(count)]


def prompt_parts(rows: PromptRows) -> Iterator[tuple[int, int, int]]:
    """A chunk's rows in parts of PROMPT_LOGPROB_ROWS: first token in the step, count, first predicted position."""
    for start in range(0, rows.count, PROMPT_LOGPROB_ROWS):
        count = min(PROMPT_LOGPROB_ROWS, rows.count - start)
        yield rows.first_token + start, count, rows.first_position + 1 + start


def entries_by_slot(pieces: Sequence[PromptPiece]) -> tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]:
    """Pairs of slot and entries as a StepResult carries them."""
    prompts: dict[int, list[TokenLogprobs]] = {}
    for piece in pieces:
        prompts.setdefault(piece.slot, []).extend(piece.entries())
    return tuple((slot, tuple(entries)) for slot, entries in prompts.items())


def vectors_by_slot(embeddings: Embeddings | None) -> "tuple[tuple[int, array[float]], ...]":
    """Pairs of slot and embedding as a StepResult carries them."""
    if embeddings is None:
        return ()
    pairs = zip(embeddings.slots, embeddings.vectors, strict=True)
    return tuple((slot, array("f", vector.tobytes())) for slot, vector in pairs)


def sampled_entries(table: LogprobTable | None, rows: Sequence[tuple[int, int, int]]) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of sampled tokens as message entries; the arguments are as in `PendingStep`."""
    return () if table is None else tuple(table.entry(row, index, top_count) for row, index, top_count in rows)


class Arrived(NamedTuple):
    """The outcome of a finished step: the sampled ids, and the microseconds that three of its parts took."""

    token_ids: "array[int]"
    input_us: int
    forward_us: int
    sampling_us: int


class PendingStep(NamedTuple):
    """One issued step.

    Attributes:
        arrive: waits for the step; called once, before anything below is read.
        logprob_rows: for each sampled row that asked: its row of `logprobs`, its index in the result, how many of the
            likeliest tokens it wants.
        logprobs: of the step's rows, if one asked.
        prompt_pieces: in the order of positions, slot by slot.
        embeddings: of prompts that end with this step, if one asked.
    """

    step_id: int
    arrive: Callable[[], Arrived]
    logprob_rows: Sequence[tuple[int, int, int]] = ()
    logprobs: LogprobTable | None = None
    prompt_pieces: Sequence[PromptPiece] = ()
    embeddings: Embeddings | None = None

    def result(self, report_us: int = 0) -> StepResult:
        """Wait for the step and make its result; `report_us` is how long the report before this one took."""
        arrived = self.arrive()
        return StepResult(
            step_id=self.step_id,
            token_ids=arrived.token_ids,
            logprobs=sampled_entries(self.logprobs, self.logprob_rows),
            prompt_logprobs=entries_by_slot(self.prompt_pieces),
            embeddings=vectors_by_slot(self.embeddings),
            parts_us=array("i", [arrived.input_us, arrived.forward_us, arrived.sampling_us, report_us]),
        )
