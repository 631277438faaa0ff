"""What sampling keeps on the device: how each slot samples, and what one launch leaves for the next.

Knows the layout of these tensors and nothing of the arithmetic. Called by `kernels.sampling` and by whoever fills
slots.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHUNK = 4096  # logits that a program scans at once
CANDIDATES = 16_384  # the most that are gathered for a row
FEW = 128  # candidates that are compared each with each
TILE = 2048  # candidates, or logits, that the search looks at together
PIECE = 256  # logits that share a maximum
BINS = 2048  # intervals of value in which the candidates' mass is counted
INTERVAL = 2048  # values of one interval that are searched
SCAN_PROGRAMS = 512  # programs over which a launch spreads the scan: about as many as a large card runs at once
GATHER_PROGRAMS = 128  # programs over which a launch spreads the gathering; each finds the row's bound by itself

FAILED_ID = -1
NO_SAMPLE_ID = -2

# Columns of SamplingState.numbers and SamplingState.choices.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, NUMBER_COUNT = 0, 1, 2, 3, 4, 5, 8
(TOP_K, LOGPROB_COUNT, COUNT_ROW, BIAS_COUNT, BANNED_COUNT, BANNED_UNTIL, SEED_LOW, SEED_HIGH, ALLOWED_ROW,
 BAD_WORD_COUNT) = range(10)  # fmt: skip
CHOICE_COUNT = 16
BAD_WORD_TOKENS = 7  # the longest bad word


NUMBERS, CHOICES, COUNTS, COUNTS_STRIDE = map(tl.constexpr, (0, 1, 5, 11))
"""Places in `SamplingState.arguments`, for the kernels."""


@dataclass(frozen=True)
class SamplingState:
    """How each slot samples, on the device.

    numbers     [slots, 8] float32        columns TEMPERATURE .. FREQUENCY
    choices     [slots, 16] int32         columns TOP_K (0: all) .. BAD_WORD_COUNT; LOGPROB_COUNT -1: none, 0: the
                                          chosen id's; COUNT_ROW, ALLOWED_ROW: its row of `counts`, `allowed`; -1: none
    bias_ids    [slots, b] int32, bias_values [slots, b] float32        the first BIAS_COUNT hold
    banned_ids  [slots, c] int32          the first BANNED_COUNT hold, while known length < BANNED_UNTIL
    counts      [rows, V] int16           2 x occurrences in the output + (1 if in the prompt)
    allowed     [rows, ceil(V / 32)] int32        bit i % 32 of word i // 32: id i may be chosen
    bad_words   [slots, w, 8] int32       token count, then the tokens: the last is banned where the others are what
                                          the slot's tokens end with; the first BAD_WORD_COUNT hold
    """

    numbers: torch.Tensor
    choices: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    banned_ids: torch.Tensor
    counts: torch.Tensor
    allowed: torch.Tensor
    bad_words: torch.Tensor

    @classmethod
    def allocate(
        cls, slot_count: int, vocabulary: int, device: torch.device | str, max_bias: int = 320, max_banned: int = 64,
        max_bad_words: int = 32, count_rows: int | None = None, allowed_rows: int | None = None,
    ) -> "SamplingState":  # fmt: skip
        """Greedy slots; `count_rows` of them at a time can have penalties, `allowed_rows` a mask (all by default)."""
        masks = slot_count if allowed_rows is None else allowed_rows
        rows = slot_count if count_rows is None else count_rows
        numbers = torch.zeros(slot_count, NUMBER_COUNT, device=device)
        numbers[:, TOP_P] = 1.0
        numbers[:, REPETITION] = 1.0
        choices = torch.zeros(slot_count, CHOICE_COUNT, dtype=torch.int32, device=device)
        choices[:, LOGPROB_COUNT] = choices[:, COUNT_ROW] = choices[:, ALLOWED_ROW] = -1
        return cls(
            numbers,
            choices,
            torch.zeros(slot_count, max_bias, dtype=torch.int32, device=device),
            torch.zeros(slot_count, max_bias, device=device),
            torch.zeros(slot_count, max_banned, dtype=torch.int32, device=device),
            torch.zeros(max(rows, 1), vocabulary, dtype=torch.int16, device=device),
            torch.zeros(max(masks, 1), triton.cdiv(vocabulary, 32), dtype=torch.int32, device=device),
            torch.zeros(slot_count, max_bad_words, BAD_WORD_TOKENS + 1, dtype=torch.int32, device=device),
        )

    def arguments(self, slot_token_ids: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
        """As the kernels take them: the tensors, the slots' tokens, and the strides of their rows."""
        tables = (self.bias_ids, self.banned_ids, self.counts, self.allowed, self.bad_words, slot_token_ids)
        strides = (table.stride(0) for table in tables)
        return (self.numbers, self.choices, self.bias_ids, self.bias_values, self.banned_ids, self.counts, self.allowed,
                self.bad_words, slot_token_ids, *strides)  # fmt: skip


def fill_counts(counts_row: torch.Tensor, token_ids: torch.Tensor, prompt_length: int) -> None:
    """Set a slot's row of `counts` from the tokens it starts with, `prompt_length` of them its prompt. No sync."""
    counts_row.zero_()
    ids = token_ids.long()
    counts_row.scatter_add_(0, ids[prompt_length:], torch.full_like(ids[prompt_length:], 2, dtype=torch.int16))
    in_prompt = torch.zeros_like(counts_row).index_fill_(0, ids[:prompt_length], 1)
    counts_row.bitwise_or_(in_prompt)


(PIECE_MAXIMA, CHUNK_SUMS, RAW_PIECE_MAXIMA, RAW_CHUNK_SUMS, CANDIDATE_VALUES, CANDIDATE_IDS, TICKETS, BIN_MASSES,
 INTERVAL_VALUES) = map(tl.constexpr, range(9))  # fmt: skip
"""Places in `SamplingWorkspace.tensors`, for the kernels."""


@dataclass(frozen=True)
class SamplingWorkspace:
    """What the first launch leaves for the second, and the second's programs for one another.

    piece_maxima  [R, pieces] float32     the largest of what is sampled from in each piece; of a row that is sampled
                                          but not truncated, what its scores are at most
    chunk_sums    [R, chunks] float32     sum of exp(x - the chunk's largest x) of the same, for rows that are truncated
    raw_piece_maxima, raw_chunk_sums      the same of the raw logits, for logprobs
    candidates    [R, CANDIDATES] float32, candidate_ids int32        what reached the row's bound, in any order
    tickets       [R, 2] int32            candidates so far, and programs that have finished; zero between steps
    bins          [R, BINS] int64         the candidates' mass by intervals of value; zero between steps
    interval      [R, INTERVAL] float32   the values of the interval that holds the threshold of top-p
    """

    piece_maxima: torch.Tensor
    chunk_sums: torch.Tensor
    raw_piece_maxima: torch.Tensor
    raw_chunk_sums: torch.Tensor
    candidates: torch.Tensor
    candidate_ids: torch.Tensor
    tickets: torch.Tensor
    bins: torch.Tensor
    interval: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, vocabulary: int, device: torch.device | str) -> "SamplingWorkspace":
        """Buffers for steps of up to `max_rows` rows."""
        chunks = triton.cdiv(vocabulary, CHUNK)
        pieces = chunks * (CHUNK // PIECE)
        integers = {"dtype": torch.int32, "device": device}
        return cls(
            piece_maxima=torch.empty(max_rows, pieces, device=device),
            chunk_sums=torch.empty(max_rows, chunks, device=device),
            raw_piece_maxima=torch.empty(max_rows, pieces, device=device),
            raw_chunk_sums=torch.empty(max_rows, chunks, device=device),
            candidates=torch.empty(max_rows, CANDIDATES, device=device),
            candidate_ids=torch.empty(max_rows, CANDIDATES, **integers),
            tickets=torch.zeros(max_rows, 2, **integers),
            bins=torch.zeros(max_rows, BINS, dtype=torch.int64, device=device),
            interval=torch.empty(max_rows, INTERVAL, device=device),
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order that the kernels take them."""
        return (self.piece_maxima, self.chunk_sums, self.raw_piece_maxima, self.raw_chunk_sums, self.candidates,
                self.candidate_ids, self.tickets, self.bins, self.interval)  # fmt: skip
