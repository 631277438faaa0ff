"""A step that has been issued: everything that its result is made of, on its way to the host.

On the CPU it is there already. On a GPU the copies are in flight, and `result` waits for them: whoever calls it then
should not be the thread that issues steps.
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from common.messages import StepResult, TokenLogprobs
from worker_proc.logprobs import LogprobTable


@dataclass(frozen=True)
class StepTimes:
    """Nanosecond clock readings between the parts of a step, as the host sees them."""

    start: int
    prepared: int
    computed: int
    sampled: int

    def parts_us(self, report_us: int) -> "array[int]":
        """The worker's parts, in the order of STEP_PARTS: input, forward, sampling, report."""
        marks = (self.start, self.prepared, self.computed, self.sampled)
        spans = [(end - start) // 1000 for start, end in itertools.pairwise(marks)]
        return array("i", [*spans, report_us])


@dataclass(frozen=True)
class PromptPiece:
    """Log probabilities of consecutive prompt positions; the first row of the table is `first_position`."""

    slot: int
    first_position: int
    top_count: int
    table: LogprobTable

    def entries(self) -> list[TokenLogprobs]:
        """As they travel."""
        count = len(self.table.logprobs)
        return [self.table.entry(index, self.first_position + index, self.top_count) for index in range(count)]


def entries_by_slot(pieces: Sequence[PromptPiece]) -> tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]:
    """Pairs of slot and entries as a StepResult carries them."""
    prompts: dict[int, list[TokenLogprobs]] = {}
    for piece in pieces:
        prompts.setdefault(piece.slot, []).extend(piece.entries())
    return tuple((slot, tuple(entries)) for slot, entries in prompts.items())


@dataclass(frozen=True)
class Sampled:
    """What a step sampled, in host memory that is filled once the step is done.

    Attributes:
        token_ids: int32 [S].
        logprob_rows: for rows that asked: the row of `logprobs`, the index along token_ids, how many likeliest tokens.
        logprobs: of the rows that asked; None if none did.
    """

    token_ids: np.ndarray
    logprob_rows: list[tuple[int, int, int]] = field(default_factory=list)
    logprobs: LogprobTable | None = None

    def entries(self) -> tuple[TokenLogprobs, ...]:
        """The log probabilities as they travel."""
        if self.logprobs is None:
            return ()
        return tuple(self.logprobs.entry(row, index, top_count) for row, index, top_count in self.logprob_rows)


@dataclass(frozen=True)
class PendingStep:
    """One issued step.

    Attributes:
        prompt_pieces: in the order of positions, slot by slot.
        done: the event to wait for before any value is read; None if there is nothing to wait for.
    """

    step_id: int
    times: StepTimes
    sampled: Sampled
    prompt_pieces: list[PromptPiece]
    done: torch.cuda.Event | None

    def result(self, report_us: int = 0) -> StepResult:
        """Wait for the step and make its result; `report_us` is how long the report before this one took."""
        if self.done is not None:
            self.done.synchronize()
        return StepResult(
            step_id=self.step_id,
            token_ids=array("i", self.sampled.token_ids.tobytes()),
            logprobs=self.sampled.entries(),
            prompt_logprobs=entries_by_slot(self.prompt_pieces),
            parts_us=self.times.parts_us(report_us),
        )
