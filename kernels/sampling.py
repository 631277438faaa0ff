"""One token for every row of a step, greedy and sampled rows together, in two launches and without sorting.

For a row with slot s, raw logits l and known length p (the position that its token will take), in this order:

    bans          -inf where an id is not in the allowed mask, would end a bad word, or is banned while p < banned_until
                  (stop ids before min_tokens)
    bias          l + bias[id]
    penalties     l > 0 ? l / repetition : l * repetition        ids in prompt or output; then
                  l - frequency * count - presence * (count > 0) count of the id in the output
    temperature   v = l / temperature;  0: the largest l is taken, no further step
    min-p         keep v >= max(v) + log(min_p)
    top-k         keep v >= the k-th largest v                   equal values are kept together
    top-p         keep v >= the largest t whose kept v >= t hold at least top_p of the kept mass
    choice        argmax of v + gumbel(seed, p, id) over what is kept (`kernels.noise`); lowest id among equals

Logprobs are those of the raw logits. A row whose largest v is not finite (a NaN anywhere, or nothing left to choose)
yields -1, so that its request can be failed; a row without a sample (padding, or a chunk that is not a prompt's last)
yields -2. The chosen id goes to `out_ids` for the host, and on the device to slot_token_ids[s, p], whose known length
grows by one.

How: `_scan_kernel` reads the logits once, in chunks of 4,096 that are spread over the card, and leaves the maximum of
each piece of 256. Without truncation that is the maximum of what scores can be at most: `gumbel_bound` costs one
logarithm and little beside the hash. `_choose_kernel` computes scores in the piece with the largest bound and, seldom,
in others whose bounds that piece's best score does not exceed. The choice is as if all scores had been computed.

With truncation the piece maxima are those of v, and each chunk also leaves its mass; from these
`_choose_kernel` finds a bound below which no kept id can lie, gathers the candidates above it, and finds the exact
thresholds among them by comparing each with each or, if they are many, by a search over the ordered bits of the
floats. Mass is summed in 64-bit integers, so the result does not depend on the order of the candidates. For top-p it is
also counted by intervals of value while gathering, and only the values of one interval are searched. When there are too
many candidates, the row takes their place; when there is no bound either, or the interval holds too many values, the
search runs over all: slower, and as exact. The last program of a row to finish makes the choice.

| tensor        | axes   | dtype          | notes                                                              |
|---------------|--------|----------------|--------------------------------------------------------------------|
| logits        | [R, V] | any float      | last axis 1; only the first `vocabulary` ids can be chosen         |
| row_slots     | [R]    | int32          | -1: padding                                                        |
| sample_rows   | [R]    | int32          | -1: the row yields no token                                        |
| out_ids       | [R]    | int32          |                                                                    |
| out_logprobs  | [R]    | float32        | of the chosen id; NaN where not asked for                          |
| out_ranks     | [R]    | int32          | of the chosen id among the raw logits, 1: the largest; where asked |
| top_ids, top_logprobs | [R, n] | int32, float32 | the n largest where asked for, else untouched              |

Measured on an H200 at commit 407d9ce by `python -m benchmarks.kernels.bench_sampling`, 151,936 float32 logits a row,
for 1 / 64 / 256 rows: plain temperature 6.1 / 20 / 59 us, greedy 5.3 / 16 / 48 (3.2 TB/s at 256 rows; torch's argmax
alone 9.9 / 26 / 54), with 5 logprobs 13 / 27 / 74. Before the scan left bounds, at commit 0fa2b3e: 5.2 / 27 / 89,
4.1 / 18 / 53 and 13 / 29 / 85.

Sources: 1. N. Keskar et al., CTRL, arXiv:1909.05858 (repetition penalty). 2. A. Fan et al., arXiv:1805.04833 (top-k).
3. A. Holtzman et al., arXiv:1904.09751 (top-p). 4. M. Nguyen et al., arXiv:2407.01082 (min-p). Those of the choice are
in `kernels.noise`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import FLOATS, check_tensor
from kernels.launch import launch_options, let_next_start, wait_for_inputs
from kernels.noise import (
    HAS_PTX,
    MASK,
    gumbel_bound,
    gumbel_reference,
    noise_bits_of_run,
    noise_bits_reference,
)
from kernels.row_scores import (
    NO_ID,
    adjusted,
    at_temperature,
    best_by_bounds,
    count_place,
    from_order_bits,
    has_adjustments,
    is_sampled,
    is_truncated,
    logprob_count,
    order_bits,
    row_keys,
    temperature_factor,
)
from kernels.sampling_state import (
    ALLOWED_ROW,
    BAD_WORD_COUNT,
    BANNED_COUNT,
    BANNED_UNTIL,
    BIAS_COUNT,
    BIN_MASSES,
    BINS,
    CHUNK,
    CHUNK_SUMS,
    COUNT_ROW,
    FAILED_ID,
    FEW,
    FREQUENCY,
    GATHER_PROGRAMS,
    MIN_P,
    NO_SAMPLE_ID,
    PIECE,
    PIECE_MAXIMA,
    PRESENCE,
    RAW_CHUNK_SUMS,
    RAW_PIECE_MAXIMA,
    REPETITION,
    SCAN_PROGRAMS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TICKETS,
    TILE,
    TOP_K,
    TOP_P,
    SamplingState,
    SamplingWorkspace,
)
from kernels.truncation import gather, is_binned, pivot_of, truncated_choice

_NO_SAMPLE, _FAILED = tl.constexpr(NO_SAMPLE_ID), tl.constexpr(FAILED_ID)
SCAN_WARPS = 8
SCAN_REGISTERS = 64  # a thread's: four programs then fit on a multiprocessor, which keeps memory busy


def adjusted_reference(logits: torch.Tensor, slot: int, tokens: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """One row of logits [V] after everything that does not depend on the other ids, in float32.

    tokens: int32 [n], what the slot holds so far.
    """
    x = logits.float().clone()
    numbers, choices = state.numbers[slot], state.choices[slot].tolist()
    if choices[ALLOWED_ROW] >= 0:
        words = state.allowed[choices[ALLOWED_ROW]]
        ids = torch.arange(len(x), device=x.device)
        x[(words[ids // 32] >> (ids % 32)) & 1 == 0] = float("-inf")
    for word in state.bad_words[slot, : choices[BAD_WORD_COUNT]].tolist():
        *others, last = word[1 : 1 + word[0]]
        if tokens[len(tokens) - len(others) :].tolist() == others:
            x[last] = float("-inf")
    if len(tokens) < choices[BANNED_UNTIL]:
        x[state.banned_ids[slot, : choices[BANNED_COUNT]].long()] = float("-inf")
    for j in range(choices[BIAS_COUNT]):
        x[state.bias_ids[slot, j]] += state.bias_values[slot, j]
    if choices[COUNT_ROW] >= 0:
        count = state.counts[choices[COUNT_ROW], : len(x)].to(torch.int32)
        repetition = numbers[REPETITION]
        x = torch.where(count > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - numbers[FREQUENCY] * (count >> 1) - numbers[PRESENCE] * (count > 1)
    return x / numbers[TEMPERATURE] if numbers[TEMPERATURE] > 0 else x


def kept_reference(x: torch.Tensor, slot: int, state: SamplingState) -> torch.Tensor:
    """Which of a row's adjusted logits [V] can be chosen at a positive temperature, by sorting."""
    numbers, top_k = state.numbers[slot], int(state.choices[slot, TOP_K])
    kept = torch.ones_like(x, dtype=torch.bool)
    if numbers[MIN_P] > 0:
        kept &= x >= x.max() + numbers[MIN_P].log()
    if 0 < top_k < len(x):
        kept &= x >= x.masked_fill(~kept, float("-inf")).topk(top_k).values[-1]
    if numbers[TOP_P] < 1:
        largest = x.masked_fill(~kept, float("-inf")).double().sort(descending=True).values
        mass = (largest - largest[0]).exp().cumsum(0)
        last = int((mass < mass[-1] * numbers[TOP_P].double()).sum())
        kept &= x >= largest[min(last, len(x) - 1)].float()
    return kept


def sample_reference(logits: torch.Tensor, slot: int, tokens: torch.Tensor, state: SamplingState) -> int:
    """The token of one row of logits [vocabulary], or FAILED_ID; updates nothing. `tokens`: what the slot holds."""
    x = adjusted_reference(logits, slot, tokens, state)
    if not torch.isfinite(x.max()) or x.isnan().any():
        return FAILED_ID
    if state.numbers[slot, TEMPERATURE] > 0:
        kept = kept_reference(x, slot, state)
        low, high = state.choices[slot, SEED_LOW].long(), state.choices[slot, SEED_HIGH].long()
        ids = torch.arange(len(x), device=x.device)
        bits = noise_bits_reference((low & MASK) | (high << 32), torch.tensor(len(tokens), device=x.device), ids)
        x = torch.where(kept, x + gumbel_reference(bits), float("-inf"))
    return int((x == x.max()).nonzero()[0])


def logprobs_reference(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the raw logits [R, vocabulary] in float32."""
    return logits.float().log_softmax(-1)


@dataclass(frozen=True)
class SamplingPlan:
    """Grids of the two launches, and how a row is divided: into `chunk_count` chunks, and into pieces, for which
    `piece_tile` is a power of two that holds them all."""

    scan_grid: tuple[int, int]
    choose_grid: tuple[int, int]
    chunk_count: int
    piece_tile: int


def launch_plan(row_count: int, vocabulary: int) -> SamplingPlan:
    """As many programs a row as keep the card busy; to scan, at most one a chunk."""
    chunks = triton.cdiv(vocabulary, CHUNK)
    scanners = min(chunks, max(1, SCAN_PROGRAMS // max(row_count, 1)))
    gatherers = min(chunks, max(1, GATHER_PROGRAMS // max(row_count, 1)))
    piece_tile = triton.next_power_of_2(chunks * (CHUNK // PIECE))
    return SamplingPlan((row_count, scanners), (row_count, gatherers), chunks, piece_tile)


def bytes_moved(row_count: int, vocabulary: int, element_bytes: int) -> int:
    """The fewest bytes that the operation reads: every logit once."""
    return row_count * vocabulary * element_bytes


@triton.jit
def _scan_kernel(
    logits, logits_stride, row_slots, sample_rows, known_lengths, settings, work, VOCABULARY,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # 1. Locate the row and this program's share of its chunks; read how it samples.
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    lane = tl.arange(0, CHUNK)
    wait_for_inputs(PDL)
    slot = tl.load(row_slots + row).to(tl.int64)
    if (slot >= 0) & (tl.load(sample_rows + row) >= 0):
        known = tl.load(known_lengths + slot)
        truncated = is_truncated(slot, settings, VOCABULARY)
        noisy = is_sampled(slot, settings) & (truncated == 0)
        wants_logprobs = logprob_count(slot, settings) >= 0
        changed = has_adjustments(slot, settings)
        factor = temperature_factor(slot, settings)
        first, second = row_keys(slot, known, settings)
        for chunk in range(share * CHUNKS // shares, (share + 1) * CHUNKS // shares):
            # 2. Load a chunk.
            start = chunk * CHUNK
            token_id = start + lane
            inside = token_id < VOCABULARY  # the vocabulary's end, or ids that the tokenizer lacks
            place = logits + row * logits_stride + start + lane
            if start + CHUNK <= VOCABULARY:
                x = tl.load(place).to(tl.float32)  # without a mask these are wide loads, whatever the vocabulary is
            else:
                x = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
            at = tl.program_id(0) * CHUNKS + chunk
            # 3. For logprobs: piece maxima and mass of the raw logits.
            if wants_logprobs:
                maxima = _store_maxima(x, work[RAW_PIECE_MAXIMA], at, CHUNK, PIECE)
                tl.store(work[RAW_CHUNK_SUMS] + at, _mass(x, maxima))
            # 4. For the choice: piece maxima of what is sampled from, or of bounds of its scores; mass for thresholds.
            if changed:
                x = adjusted(x, token_id, inside, slot, known, settings)
            x = at_temperature(x, factor)
            if noisy:
                x += gumbel_bound(noise_bits_of_run(first, second, start, lane))
            maxima = _store_maxima(x, work[PIECE_MAXIMA], at, CHUNK, PIECE)
            if truncated:
                tl.store(work[CHUNK_SUMS] + at, _mass(x, maxima))


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_maxima(x, piece_maxima, at, CHUNK: tl.constexpr, PIECE: tl.constexpr):
    """Store the pieces' maxima and return them. A NaN counts as infinity: both fail the row."""
    PIECES: tl.constexpr = CHUNK // PIECE
    if HAS_PTX:
        maxima = tl.reduce(tl.reshape(x, (PIECES, PIECE)), 1, _larger_or_nan)
        maxima = tl.where(maxima != maxima, float("inf"), maxima)  # noqa: PLR0124
    else:
        x = tl.where(x != x, float("inf"), x)  # noqa: PLR0124
        maxima = tl.max(tl.reshape(x, (PIECES, PIECE)), axis=1)
    tl.store(piece_maxima + at * PIECES + tl.arange(0, PIECES), maxima)
    return maxima


@triton.jit
def _mass(x, maxima):
    """The sum of a chunk's unnormalised probabilities, 1 for its largest."""
    top = tl.max(maxima, axis=0)
    return tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), axis=0)


@triton.jit
def _write_logprobs(row, chosen, top_count, logits, logits_stride, work, out_logprobs, out_ranks, top_ids,
                    top_logprobs, top_stride, VOCABULARY, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
                    PIECE: tl.constexpr, CHUNK_TILE: tl.constexpr, PIECE_TILE: tl.constexpr):  # fmt: skip
    """The chosen id's logprob and the largest `top_count`, found piece by piece from the pieces' maxima."""
    PIECES: tl.constexpr = CHUNK // PIECE
    piece = tl.arange(0, PIECE_TILE)
    maxima = tl.load(
        work[RAW_PIECE_MAXIMA] + row * CHUNKS * PIECES + piece, mask=piece < CHUNKS * PIECES, other=float("-inf")
    )
    top = tl.max(maxima, axis=0)
    chunk_maxima = tl.max(tl.reshape(maxima, (CHUNK_TILE, PIECES)), axis=1)
    chunk = tl.arange(0, CHUNK_TILE)
    mass = tl.load(work[RAW_CHUNK_SUMS] + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    log_mass = top + tl.log(tl.sum(mass * tl.exp(chunk_maxima - top), axis=0))
    raw = tl.load(logits + row * logits_stride + chosen).to(tl.float32)
    tl.store(out_logprobs + row, raw - log_mass)
    rank = 1
    if raw < top:
        lane = tl.arange(0, CHUNK)
        for tile in range(0, CHUNKS):
            inside = tile * CHUNK + lane < VOCABULARY
            x = tl.load(logits + row * logits_stride + tile * CHUNK + lane, mask=inside, other=float("-inf"))
            rank += tl.sum((x.to(tl.float32) > raw).to(tl.int32), axis=0)
    tl.store(out_ranks + row, rank)
    last = float("inf")
    last_id = -1
    for place in range(0, top_count):
        value = tl.max(maxima, axis=0)
        where = tl.min(tl.where(maxima == value, piece, PIECE_TILE), axis=0)
        token_id = where * PIECE + tl.arange(0, PIECE)
        x = tl.load(logits + row * logits_stride + token_id, mask=token_id < VOCABULARY, other=float("-inf"))
        x = x.to(tl.float32)
        # Larger values, and equal ones with lower ids, have been written already.
        left = (x < last) | ((x == last) & (token_id > last_id))
        last_id = tl.min(tl.where(left & (x == value), token_id, NO_ID), axis=0)
        last = value
        left = (x < last) | ((x == last) & (token_id > last_id))
        maxima = tl.where(piece == where, tl.max(tl.where(left, x, float("-inf")), axis=0), maxima)
        tl.store(top_ids + row * top_stride + place, last_id)
        tl.store(top_logprobs + row * top_stride + place, value - log_mass)


@triton.jit
def _choose_kernel(
    logits, logits_stride, row_slots, sample_rows, known_lengths, slot_token_ids, slot_stride, settings, work,
    out_ids, out_logprobs, out_ranks, top_ids, top_logprobs, top_stride, top_columns, VOCABULARY, MAX_LENGTH,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, CHUNK_TILE: tl.constexpr,
    PIECE_TILE: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr,
    CANDIDATES: tl.constexpr, BINS: tl.constexpr, INTERVAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # 1. Locate the row; one without a sample is done.
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    gatherer = tl.program_id(1)
    PIECES: tl.constexpr = CHUNK // PIECE
    wait_for_inputs(PDL)
    slot = tl.load(row_slots + row).to(tl.int64)
    piece = tl.arange(0, PIECE_TILE)
    in_row = piece < CHUNKS * PIECES
    maxima = tl.load(work[PIECE_MAXIMA] + row * CHUNKS * PIECES + piece, mask=in_row, other=float("-inf"))
    if (slot < 0) | (tl.load(sample_rows + row) < 0):
        if gatherer == 0:
            tl.store(out_ids + row, _NO_SAMPLE)
    else:
        known = tl.load(known_lengths + slot)
        truncated = is_truncated(slot, settings, VOCABULARY)  # read before the threads wait for one another
        bounds = order_bits(maxima)
        top_bits = tl.max(bounds, axis=0)
        top = from_order_bits(top_bits)
        valid = (top > float("-inf")) & (top < float("inf"))
        mine = gatherer == 0
        chosen = 0
        here = (row, slot, known, logits, logits_stride, settings, work)
        # 2. Without truncation: look where the best can be. Otherwise gather; the last program to finish chooses.
        if valid:
            if truncated:
                chunk = tl.arange(0, CHUNK_TILE)
                chunk_maxima = tl.max(tl.reshape(maxima, (CHUNK_TILE, PIECES)), axis=1)
                sums = tl.load(work[CHUNK_SUMS] + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
                row_mass = tl.sum(sums * tl.exp(chunk_maxima - top), axis=0)
                pivot = pivot_of(maxima, top, row_mass, slot, settings, VOCABULARY)
                if pivot > float("-inf"):
                    gather(pivot, top, here, VOCABULARY, CHUNKS, CHUNK, PIECE, CANDIDATES, BINS)
                tl.debug_barrier()
                mine = tl.atomic_add(work[TICKETS] + row * 2 + 1, 1, sem="acq_rel") == tl.num_programs(1) - 1
                if mine:
                    count = tl.atomic_add(work[TICKETS] + row * 2, 0, sem="acquire")
                    chosen = truncated_choice(count, here, VOCABULARY, top, pivot, row_mass, FEW, TILE, CANDIDATES,
                                              BINS, INTERVAL)  # fmt: skip
                    tl.debug_barrier()
                    if is_binned(pivot, slot, settings, VOCABULARY):
                        empty = tl.zeros((BINS,), tl.int64)
                        tl.store(work[BIN_MASSES] + row * BINS + tl.arange(0, BINS), empty)
                    tl.store(work[TICKETS] + row * 2, 0)
                    tl.store(work[TICKETS] + row * 2 + 1, 0)
            elif mine:
                chosen = best_by_bounds(bounds, top_bits, here, VOCABULARY, PIECE, PIECE_TILE)
        # 3. Report, and feed the next step.
        if mine:
            tl.store(out_ids + row, tl.where(valid, chosen, _FAILED))
            top_count = tl.minimum(logprob_count(slot, settings), top_columns)
            if valid & (top_count >= 0):
                _write_logprobs(row, chosen, top_count, logits, logits_stride, work, out_logprobs, out_ranks, top_ids,
                                top_logprobs, top_stride, VOCABULARY, CHUNKS, CHUNK, PIECE, CHUNK_TILE,
                                PIECE_TILE)  # fmt: skip
            else:
                tl.store(out_logprobs + row, float("nan"))
            is_counted, place = count_place(chosen, slot, settings)
            if valid & is_counted:
                tl.store(place, tl.minimum(tl.load(place).to(tl.int32) + 2, 32767).to(tl.int16))
            tl.store(slot_token_ids + slot * slot_stride + known, chosen, mask=known < MAX_LENGTH)
            tl.debug_barrier()  # every thread has read the old value
            tl.store(known_lengths + slot, known + 1)


def _check(
    logits: torch.Tensor, row_slots: torch.Tensor, sample_rows: torch.Tensor, known_lengths: torch.Tensor,
    slot_token_ids: torch.Tensor, state: SamplingState, workspace: SamplingWorkspace,
    outputs: tuple[torch.Tensor, ...], vocabulary: int,
) -> None:  # fmt: skip
    out_ids, out_logprobs, out_ranks, top_ids, top_logprobs = outputs
    check_tensor("logits", logits, (None, None), FLOATS)
    rows = logits.shape[0]
    slots = state.numbers.shape[0]
    if not 0 < vocabulary <= min(logits.shape[1], state.counts.shape[1]):
        raise ValueError(
            f"vocabulary: wanted 1 to {logits.shape[1]} columns of logits and {state.counts.shape[1]} of counts, "
            f"got {vocabulary}"
        )
    for name, tensor, shape, dtype in (
        ("row_slots", row_slots, (rows,), torch.int32),
        ("sample_rows", sample_rows, (rows,), torch.int32),
        ("known_lengths", known_lengths, (slots,), torch.int32),
        ("slot_token_ids", slot_token_ids, (slots, None), torch.int32),
        ("out_ids", out_ids, (rows,), torch.int32),
        ("out_logprobs", out_logprobs, (rows,), torch.float32),
        ("out_ranks", out_ranks, (rows,), torch.int32),
        ("top_ids", top_ids, (rows, None), torch.int32),
        ("top_logprobs", top_logprobs, tuple(top_ids.shape), torch.float32),
    ):
        check_tensor(name, tensor, shape, dtype, like=logits)
    chunks = triton.cdiv(vocabulary, CHUNK)
    if workspace.chunk_sums.shape[0] < rows or workspace.chunk_sums.shape[1] != chunks:
        raise ValueError(f"workspace: wanted {rows} rows of {chunks} chunks, got {list(workspace.chunk_sums.shape)}")


@dataclass(frozen=True)
class SampledTokens:
    """What a step's sampling leaves for the host: the last table of the module's docstring."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @classmethod
    def allocate(cls, row_count: int, top_count: int, device: torch.device | str) -> "SampledTokens":
        """Buffers for `row_count` rows with up to `top_count` alternatives each."""
        return cls(
            torch.full((row_count,), NO_SAMPLE_ID, dtype=torch.int32, device=device),
            torch.full((row_count,), float("nan"), device=device),
            torch.zeros(row_count, dtype=torch.int32, device=device),
            torch.zeros(row_count, top_count, dtype=torch.int32, device=device),
            torch.zeros(row_count, top_count, device=device),
        )


def sample(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    sample_rows: torch.Tensor,
    known_lengths: torch.Tensor,
    slot_token_ids: torch.Tensor,
    state: SamplingState,
    workspace: SamplingWorkspace,
    out: SampledTokens,
    vocabulary: int,
) -> None:
    """Choose a token for every row that yields one, write it to `out` and to its slot. Shapes: the module's table.

    `vocabulary` is the number of ids that can be chosen, the first of the logits' columns.
    Raises ValueError for a shape, dtype, stride or device that differs from the table, or a workspace of another size.
    """
    outputs = (out.ids, out.logprobs, out.ranks, out.top_ids, out.top_logprobs)
    _check(logits, row_slots, sample_rows, known_lengths, slot_token_ids, state, workspace, outputs, vocabulary)
    rows = logits.shape[0]
    if rows == 0:
        return
    plan = launch_plan(rows, vocabulary)
    settings = state.arguments(slot_token_ids)
    common = dict(CHUNKS=plan.chunk_count, CHUNK=CHUNK, PIECE=PIECE, **launch_options(logits))
    _scan_kernel[plan.scan_grid](
        logits, logits.stride(0), row_slots, sample_rows, known_lengths, settings, workspace.tensors(), vocabulary,
        num_warps=SCAN_WARPS, maxnreg=SCAN_REGISTERS, **common,
    )  # fmt: skip
    _choose_kernel[plan.choose_grid](
        logits, logits.stride(0), row_slots, sample_rows, known_lengths, slot_token_ids, slot_token_ids.stride(0),
        settings, workspace.tensors(), *outputs, out.top_ids.stride(0), out.top_ids.shape[1], vocabulary,
        slot_token_ids.shape[1], CHUNK_TILE=plan.piece_tile * PIECE // CHUNK, PIECE_TILE=plan.piece_tile,
        FEW=FEW, TILE=TILE, BINS=BINS, INTERVAL=workspace.interval.shape[1],
        CANDIDATES=workspace.candidates.shape[1], num_warps=16, **common,
    )  # fmt: skip
