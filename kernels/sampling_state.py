"""What sampling keeps on the device: how each slot samples, and what one launch leaves for the next.

Knows the layout of these tensors and nothing of the arithmetic. Called by `kernels.sampling` and by whoever fills slots.
"""

from dataclasses import dataclass

import torch
import triton

CHUNK = 4096  # logits a program scans; also the most candidates that are gathered
PIECE = 256  # logits that share a maximum
GATHER_PROGRAMS = 512  # programs over which a launch spreads the gathering

FAILED_ID = -1
NO_SAMPLE_ID = -2

# Columns of SamplingState.numbers and SamplingState.choices.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, NUMBER_COUNT = 0, 1, 2, 3, 4, 5, 8
TOP_K, LOGPROB_COUNT, COUNT_ROW, BIAS_COUNT, BANNED_COUNT, BANNED_UNTIL, SEED_LOW, SEED_HIGH = range(8)
CHOICE_COUNT = 8


@dataclass(frozen=True)
class SamplingState:
    """How each slot samples, on the device.

    numbers     [slots, 8] float32        columns TEMPERATURE .. FREQUENCY
    choices     [slots, 8] int32          columns TOP_K (0: all) .. SEED_HIGH; LOGPROB_COUNT -1: none, 0: the chosen id's;
                                          COUNT_ROW is the slot's row of `counts`, -1 without penalties
    bias_ids    [slots, b] int32, bias_values [slots, b] float32        the first BIAS_COUNT hold
    banned_ids  [slots, c] int32          the first BANNED_COUNT hold, while known length < BANNED_UNTIL
    counts      [rows, V] int16           2 x occurrences in the output + (1 if in the prompt)
    """

    numbers: torch.Tensor
    choices: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    banned_ids: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def allocate(
        cls, slot_count: int, vocabulary: int, device: torch.device | str, max_bias: int = 320, max_banned: int = 64,
        count_rows: int | None = None,
    ) -> "SamplingState":  # fmt: skip
        """Greedy slots; penalties can be on in `count_rows` slots at a time (all by default)."""
        rows = slot_count if count_rows is None else count_rows
        numbers = torch.zeros(slot_count, NUMBER_COUNT, device=device)
        numbers[:, TOP_P] = 1.0
        numbers[:, REPETITION] = 1.0
        choices = torch.zeros(slot_count, CHOICE_COUNT, dtype=torch.int32, device=device)
        choices[:, LOGPROB_COUNT] = choices[:, COUNT_ROW] = -1
        return cls(
            numbers,
            choices,
            torch.zeros(slot_count, max_bias, dtype=torch.int32, device=device),
            torch.zeros(slot_count, max_bias, device=device),
            torch.zeros(slot_count, max_banned, dtype=torch.int32, device=device),
            torch.zeros(max(rows, 1), vocabulary, dtype=torch.int16, device=device),
        )


def fill_counts(counts_row: torch.Tensor, token_ids: torch.Tensor, prompt_length: int) -> None:
    """Set a slot's row of `counts` from the tokens it starts with, `prompt_length` of them its prompt. No sync."""
    counts_row.zero_()
    ids = token_ids.long()
    counts_row.scatter_add_(0, ids[prompt_length:], torch.full_like(ids[prompt_length:], 2, dtype=torch.int16))
    in_prompt = torch.zeros_like(counts_row).index_fill_(0, ids[:prompt_length], 1)
    counts_row.bitwise_or_(in_prompt)


@dataclass(frozen=True)
class SamplingWorkspace:
    """What the first launch leaves for the second; `tickets` is zero between steps."""

    best_scores: torch.Tensor
    best_ids: torch.Tensor
    piece_maxima: torch.Tensor
    chunk_sums: torch.Tensor
    raw_piece_maxima: torch.Tensor
    raw_chunk_sums: torch.Tensor
    candidates: torch.Tensor
    candidate_ids: torch.Tensor
    tickets: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, vocabulary: int, device: torch.device | str) -> "SamplingWorkspace":
        """Buffers for steps of up to `max_rows` rows."""
        chunks = triton.cdiv(vocabulary, CHUNK)
        pieces = chunks * (CHUNK // PIECE)
        integers = {"dtype": torch.int32, "device": device}
        return cls(
            best_scores=torch.empty(max_rows, chunks, device=device),
            best_ids=torch.empty(max_rows, chunks, **integers),
            piece_maxima=torch.empty(max_rows, pieces, device=device),
            chunk_sums=torch.empty(max_rows, chunks, device=device),
            raw_piece_maxima=torch.empty(max_rows, pieces, device=device),
            raw_chunk_sums=torch.empty(max_rows, chunks, device=device),
            candidates=torch.empty(max_rows, CHUNK, device=device),
            candidate_ids=torch.empty(max_rows, CHUNK, **integers),
            tickets=torch.zeros(max_rows, 2, **integers),
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order that the kernels take them."""
        return (self.best_scores, self.best_ids, self.piece_maxima, self.chunk_sums, self.raw_piece_maxima,
                self.raw_chunk_sums, self.candidates, self.candidate_ids, self.tickets)  # fmt: skip
