"""The parts of `kernels.sampling` that decide what a row keeps: adjusted logits, and thresholds found without a sort.

The ordered bits of a float32 are an integer, so the k-th largest value and the top-p threshold are found by search:
each round counts, or sums, what reaches 8 thresholds and leaves a ninth of the interval. The rounds look at candidates
gathered above a bound, or at the whole row; few candidates are compared each with each instead. Where top-p has more
candidates than fit, gathering also adds up their mass by intervals of value; the interval in which the threshold lies
then holds few enough to be searched, after one more pass over the row.

Called inside the kernels of `kernels.sampling`, whose docstring says what is computed. `settings` is
`SamplingState.arguments`, `work` is `SamplingWorkspace.tensors`, both in the order given there. `here` is the row that
a program works on: its number, its slot, the slot's known length, the logits and their stride, `settings` and `work`.

Sources: 1. M. Herf, "Radix Tricks", 2001 (floats as integers of the same order).
"""

import triton
import triton.language as tl

from kernels import sampling_state as columns
from kernels.noise import HAS_PTX, gumbel, noise_bits, noise_keys
from kernels.sampling_state import (
    BIN_MASSES,
    CANDIDATE_IDS,
    CANDIDATE_VALUES,
    CHOICES,
    COUNTS,
    COUNTS_STRIDE,
    INTERVAL_VALUES,
    NUMBERS,
    PIECE_MAXIMA,
    TICKETS,
)

# Columns of what a slot samples by, as constants that kernels can take from outside.
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = map(
    tl.constexpr,
    (columns.TEMPERATURE, columns.TOP_P, columns.MIN_P, columns.REPETITION, columns.PRESENCE, columns.FREQUENCY),
)
_TOP_K, _LOGPROB_COUNT, _COUNT_ROW, _BIAS_COUNT, _BANNED_COUNT = map(
    tl.constexpr,
    (columns.TOP_K, columns.LOGPROB_COUNT, columns.COUNT_ROW, columns.BIAS_COUNT, columns.BANNED_COUNT),
)
_BANNED_UNTIL, _SEED_LOW, _SEED_HIGH, _ALLOWED_ROW, _BAD_WORD_COUNT = map(
    tl.constexpr,
    (columns.BANNED_UNTIL, columns.SEED_LOW, columns.SEED_HIGH, columns.ALLOWED_ROW, columns.BAD_WORD_COUNT),
)
_NUMBER_COUNT, _CHOICE_COUNT = tl.constexpr(columns.NUMBER_COUNT), tl.constexpr(columns.CHOICE_COUNT)
_WORD_STRIDE = tl.constexpr(columns.BAD_WORD_TOKENS + 1)
NO_ID = tl.constexpr(0x7FFFFFFF)
"""Beside values that are no candidate's: above every id, so that the lowest id among equals is never this."""


@triton.jit
def _number(slot, settings, COLUMN: tl.constexpr):
    """One of the floats by which a slot samples."""
    return tl.load(settings[NUMBERS] + slot * _NUMBER_COUNT + COLUMN)


@triton.jit
def _choice(slot, settings, COLUMN: tl.constexpr):
    """One of the integers by which a slot samples."""
    return tl.load(settings[CHOICES] + slot * _CHOICE_COUNT + COLUMN)


@triton.jit
def logprob_count(slot, settings):
    """How many of the largest logprobs a slot asks for beside the chosen id's; -1: not even that."""
    return _choice(slot, settings, _LOGPROB_COUNT)


@triton.jit
def count_place(token_id, slot, settings):
    """(whether the slot counts what it has sampled, where the count of an id is)."""
    row = _choice(slot, settings, _COUNT_ROW)
    return row >= 0, settings[COUNTS] + row.to(tl.int64) * settings[COUNTS_STRIDE] + token_id


@triton.jit
def _top_k(slot, settings, VOCABULARY):
    """(k of a row's top-k, whether that leaves anything out)."""
    k = _choice(slot, settings, _TOP_K)
    return k, (k > 0) & (k < VOCABULARY)


@triton.jit
def _ends_with(words, tokens, known):
    """The id that a bad word bans now: its last, if its others are the last `known` tokens; -1 if they are not."""
    others = tl.load(words) - 1
    matches = others <= known
    for i in range(0, others):
        token_id = tl.load(tokens + known - others + i, mask=others <= known, other=-1)
        matches = matches & (token_id == tl.load(words + 1 + i))
    return tl.where(matches, tl.load(words + 1 + others), -1)


@triton.jit
def has_adjustments(slot, settings):
    """Whether `adjusted` would change any of the slot's logits."""
    masked = (_choice(slot, settings, _ALLOWED_ROW) >= 0) | (_choice(slot, settings, _BAD_WORD_COUNT) > 0)
    masked = masked | (_choice(slot, settings, _BANNED_COUNT) > 0)
    return masked | (_choice(slot, settings, _BIAS_COUNT) > 0) | (_choice(slot, settings, _COUNT_ROW) >= 0)


@triton.jit
def adjusted(x, token_id, inside, slot, known, settings):
    """Logits [n] after masks, bans, bias and penalties."""
    (numbers, choices, bias_ids, bias_values, banned_ids, counts, allowed, bad_words, slot_token_ids,
     bias_stride, banned_stride, counts_stride, allowed_stride, bad_words_stride, tokens_stride) = settings  # fmt: skip
    number = numbers + slot * _NUMBER_COUNT
    choice = choices + slot * _CHOICE_COUNT
    allowed_row = tl.load(choice + _ALLOWED_ROW)
    if allowed_row >= 0:
        words = tl.load(allowed + allowed_row * allowed_stride + token_id // 32, mask=inside, other=0)
        x = tl.where((words >> (token_id % 32)) & 1 != 0, x, float("-inf"))
    bad_word_count = tl.load(choice + _BAD_WORD_COUNT)
    for j in range(0, bad_word_count):
        banned = _ends_with(
            bad_words + slot * bad_words_stride + j * _WORD_STRIDE, slot_token_ids + slot * tokens_stride, known
        )
        x = tl.where(token_id == banned, float("-inf"), x)
    banned_count = tl.where(known < tl.load(choice + _BANNED_UNTIL), tl.load(choice + _BANNED_COUNT), 0)
    for j in range(0, banned_count):
        x = tl.where(token_id == tl.load(banned_ids + slot * banned_stride + j), float("-inf"), x)
    bias_count = tl.load(choice + _BIAS_COUNT)
    for j in range(0, bias_count):
        biased = token_id == tl.load(bias_ids + slot * bias_stride + j)
        x = tl.where(biased, x + tl.load(bias_values + slot * bias_stride + j), x)
    count_row = tl.load(choice + _COUNT_ROW)
    if count_row >= 0:
        repetition = tl.load(number + _REPETITION)
        count = tl.load(counts + count_row.to(tl.int64) * counts_stride + token_id, mask=inside, other=0).to(tl.int32)
        x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        x -= tl.load(number + _FREQUENCY) * (count >> 1).to(tl.float32)
        x -= tl.where(count > 1, tl.load(number + _PRESENCE), 0.0)
    return tl.where(inside, x, float("-inf"))


@triton.jit
def at_temperature(x, slot, settings):
    """Logits over the temperature; unchanged at 0."""
    temperature = _number(slot, settings, _TEMPERATURE)
    if temperature > 0:
        # A division for each logit would cost more than its noise. The product is rounded here, and never becomes part
        # of a fused multiply-add: a value must be the same number wherever it is looked at.
        inverse = 1.0 / temperature
        if HAS_PTX:
            x = tl.inline_asm_elementwise(
                "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, inverse], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            x = x * inverse
    return x


@triton.jit
def is_truncated(slot, settings, VOCABULARY):
    """Whether a row keeps only part of the vocabulary: then its choice needs thresholds."""
    _, has_k = _top_k(slot, settings, VOCABULARY)
    some = has_k | (_number(slot, settings, _TOP_P) < 1.0) | (_number(slot, settings, _MIN_P) > 0.0)
    return some & (_number(slot, settings, _TEMPERATURE) > 0)


@triton.jit
def noisy_scores(x, token_id, slot, known, settings):
    """What is maximised: logits with noise; the logits themselves at temperature 0."""
    if _number(slot, settings, _TEMPERATURE) > 0:
        first, second = noise_keys(_choice(slot, settings, _SEED_LOW), _choice(slot, settings, _SEED_HIGH), known)
        x += gumbel(noise_bits(first, second, token_id))
    return x


@triton.jit
def _order_key(x):
    """An int64 that orders as the float32 does."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _narrow(low, high, reached, PARTS: tl.constexpr):
    """The next interval of a search in PARTS, from how many of its PARTS - 1 inner thresholds are still reached."""
    span = high - low
    return low + span * reached // PARTS, tl.where(reached == PARTS - 1, high, low + span * (reached + 1) // PARTS)


@triton.jit
def _kth_largest_key(x, k, low, high):
    """The largest key that at least k of x's elements reach, in [low, high)."""
    inner = tl.arange(0, 16) + 1
    key = _order_key(x)
    while high - low > 1:
        threshold = low + (high - low) * inner // 17
        count = tl.sum((key[None, :] >= threshold[:, None]).to(tl.int32), axis=1)
        low, high = _narrow(low, high, tl.sum((count >= k).to(tl.int64), axis=0), 17)
    return low


@triton.jit
def _from_key(key):
    """The float32 whose order key this is."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _fixed(mass):
    """A mass, the largest logit's being 1, as an integer: in units of 2^-32."""
    return (mass * 4294967296.0).to(tl.int64)


@triton.jit
def _mass_of(x, top):
    """Unnormalised probability as an integer, 2^32 for the largest: sums are exact in any order."""
    return _fixed(tl.exp(x - top))


@triton.jit
def _logits_at(token_id, inside, here):
    """What is sampled from, at some ids of the row; -inf where not `inside`."""
    row, slot, known, logits, logits_stride, settings, _ = here
    x = tl.load(logits + row * logits_stride + token_id, mask=inside, other=float("-inf")).to(tl.float32)
    if has_adjustments(slot, settings):
        x = adjusted(x, token_id, inside, slot, known, settings)
    return at_temperature(x, slot, settings)


@triton.jit
def _candidates(tile, gathered, count, here, TILE: tl.constexpr, CANDIDATES: tl.constexpr):
    """`(values, ids)` of one tile: of the gathered candidates, or of the whole row; -inf beyond `count` of them."""
    row, _, _, _, _, _, work = here
    lane = tile * TILE + tl.arange(0, TILE)
    inside = lane < count
    if gathered:
        token_id = tl.load(work[CANDIDATE_IDS] + row * CANDIDATES + lane, mask=inside, other=NO_ID)
        x = tl.load(work[CANDIDATE_VALUES] + row * CANDIDATES + lane, mask=inside, other=float("-inf"))
    else:
        token_id = lane
        x = _logits_at(token_id, inside, here)
    return x, token_id


@triton.jit
def _kept_from(gathered, count, here, VOCABULARY, top, pivot, row_mass, TILE: tl.constexpr, CANDIDATES: tl.constexpr):
    """The order key of the smallest value that is kept, by top-k, then top-p; at least that of `pivot`.

    Counts and mass are kept lane by lane over the tiles and added up once a round.
    """
    _, slot, _, _, _, settings, _ = here
    inner = tl.arange(0, 8) + 1
    tiles = tl.cdiv(count, TILE)
    top_k, has_k = _top_k(slot, settings, VOCABULARY)
    top_p = _number(slot, settings, _TOP_P)
    high = _order_key(top) + 1
    low = _order_key(pivot)
    if has_k:
        k_high = high
        while k_high - low > 1:
            threshold = low + (k_high - low) * inner // 9
            reached = tl.zeros((8, TILE), tl.int32)
            for tile in range(0, tiles):
                x = _candidates(tile, gathered, count, here, TILE, CANDIDATES)[0]
                reached += (_order_key(x)[None, :] >= threshold[:, None]).to(tl.int32)
            found = tl.sum(reached, axis=1)
            low, k_high = _narrow(low, k_high, tl.sum((found >= top_k).to(tl.int64), axis=0), 9)
    if top_p < 1.0:
        total = _fixed(row_mass)
        if has_k | (_number(slot, settings, _MIN_P) > 0):
            # Only what top-k and min-p left counts, and all of that is among the candidates.
            kept = tl.zeros((TILE,), tl.int64)
            for tile in range(0, tiles):
                x = _candidates(tile, gathered, count, here, TILE, CANDIDATES)[0]
                kept += tl.where(_order_key(x) >= low, _mass_of(x, top), 0)
            total = tl.sum(kept, axis=0)
        target = (total.to(tl.float64) * top_p).to(tl.int64)
        while high - low > 1:
            threshold = low + (high - low) * inner // 9
            above = tl.zeros((8, TILE), tl.int64)
            for tile in range(0, tiles):
                x = _candidates(tile, gathered, count, here, TILE, CANDIDATES)[0]
                above += tl.where(_order_key(x)[None, :] >= threshold[:, None], _mass_of(x, top)[None, :], 0)
            mass = tl.sum(above, axis=1)
            low, high = _narrow(low, high, tl.sum((mass >= target).to(tl.int64), axis=0), 9)
    return low


@triton.jit
def is_binned(pivot, slot, settings, VOCABULARY):
    """Whether the mass of a row's candidates is added up by intervals: for top-p with a bound, but without top-k."""
    _, has_k = _top_k(slot, settings, VOCABULARY)
    return (_number(slot, settings, _TOP_P) < 1.0) & (has_k == 0) & (pivot > float("-inf"))


@triton.jit
def _bin_of(x, top, pivot, BINS: tl.constexpr):
    """The interval of values from `pivot` up: 0 holds the largest. Rounding keeps the order, so intervals are exact."""
    scale = BINS / tl.maximum(top - pivot, 1e-30)
    return tl.minimum((top - x) * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def _interval_values(wanted, gathered, count, here, top, pivot, PASS_TILE: tl.constexpr, CANDIDATES: tl.constexpr,
                     BINS: tl.constexpr, INTERVAL: tl.constexpr):  # fmt: skip
    """Store the values of one interval, if no more than INTERVAL; returns their number, the least and the largest."""
    row, _, _, _, _, _, work = here
    held_count = 0
    least = top
    largest = float("-inf")
    for tile in range(0, tl.cdiv(count, PASS_TILE)):
        x = _candidates(tile, gathered, count, here, PASS_TILE, CANDIDATES)[0]
        held = (x >= pivot) & (_bin_of(x, top, pivot, BINS) == wanted)
        held_here = tl.sum(held.to(tl.int32), axis=0)
        if held_here > 0:
            least = tl.minimum(least, tl.min(tl.where(held, x, top), axis=0))
            largest = tl.maximum(largest, tl.max(tl.where(held, x, float("-inf")), axis=0))
            place = held_count + tl.cumsum(held.to(tl.int32), axis=0) - 1
            tl.store(work[INTERVAL_VALUES] + row * INTERVAL + place, x, mask=held & (place < INTERVAL))
            held_count += held_here
    tl.debug_barrier()
    return held_count, least, largest


@triton.jit
def _kept_from_bins(gathered, count, here, top, pivot, row_mass, FEW: tl.constexpr, PASS_TILE: tl.constexpr,
                    CANDIDATES: tl.constexpr, BINS: tl.constexpr, INTERVAL: tl.constexpr):  # fmt: skip
    """`(order key, found)`: as `_kept_from` for top-p, from the intervals' mass; not found if one holds too many."""
    row, slot, _, _, _, settings, work = here
    place = tl.arange(0, BINS)
    masses = tl.load(work[BIN_MASSES] + row * BINS + place, cache_modifier=".cg")
    total = _fixed(row_mass)
    if _number(slot, settings, _MIN_P) > 0:
        total = tl.sum(masses, axis=0)  # what min-p left
    target = tl.maximum((total.to(tl.float64) * _number(slot, settings, _TOP_P)).to(tl.int64), 1)
    wanted = tl.sum((tl.cumsum(masses, axis=0) < target).to(tl.int32), axis=0)
    above = tl.sum(tl.where(place < wanted, masses, 0), axis=0)
    low = _order_key(pivot)  # where the target lies beyond the last interval, all candidates are kept
    found = wanted == BINS
    if wanted < BINS:
        held_count, least, largest = _interval_values(
            wanted, gathered, count, here, top, pivot, PASS_TILE, CANDIDATES, BINS, INTERVAL
        )
        low = _order_key(least)
        found = (held_count > 0) & ((held_count <= INTERVAL) | (least == largest))
        if found & (held_count <= FEW):
            few = tl.arange(0, FEW)
            x = tl.load(work[INTERVAL_VALUES] + row * INTERVAL + few, mask=few < held_count, other=float("-inf"))
            mass = tl.sum(tl.where(x[None, :] >= x[:, None], _mass_of(x, top)[None, :], 0), axis=1)
            reached = (above + mass >= target) & (few < held_count)
            low = tl.maximum(low, tl.max(tl.where(reached, _order_key(x), low), axis=0))
        elif found & (least < largest):
            high = _order_key(largest) + 1
            inner = tl.arange(0, 8) + 1
            lane = tl.arange(0, INTERVAL)
            x = tl.load(work[INTERVAL_VALUES] + row * INTERVAL + lane, mask=lane < held_count, other=float("-inf"))
            while high - low > 1:
                threshold = low + (high - low) * inner // 9
                sums = tl.where(_order_key(x)[None, :] >= threshold[:, None], _mass_of(x, top)[None, :], 0)
                mass = above + tl.sum(sums, axis=1)
                low, high = _narrow(low, high, tl.sum((mass >= target).to(tl.int64), axis=0), 9)
    return low, found


@triton.jit
def _choice_of_few(count, here, VOCABULARY, top, row_mass, FEW: tl.constexpr, CANDIDATES: tl.constexpr):
    """The chosen id among at most FEW candidates, each compared with each: no rounds."""
    row, slot, known, _, _, settings, work = here
    lane = tl.arange(0, FEW)
    inside = lane < count
    token_id = tl.load(work[CANDIDATE_IDS] + row * CANDIDATES + lane, mask=inside, other=NO_ID)
    x = tl.load(work[CANDIDATE_VALUES] + row * CANDIDATES + lane, mask=inside, other=float("-inf"))
    greater = x[None, :] > x[:, None]
    top_k, has_k = _top_k(slot, settings, VOCABULARY)
    kept = inside & ((tl.sum(greater.to(tl.int32), axis=1) < top_k) | (has_k == 0))
    top_p = _number(slot, settings, _TOP_P)
    if top_p < 1.0:
        mass = tl.where(kept, _mass_of(x, top), 0)
        total = tl.sum(mass, axis=0)
        if (has_k == 0) & (_number(slot, settings, _MIN_P) <= 0):
            total = _fixed(row_mass)
        target = tl.maximum((total.to(tl.float64) * top_p).to(tl.int64), 1)
        ahead = tl.sum(tl.where(greater, mass[None, :], 0), axis=1)
        kept = kept & (ahead < target)
    x = tl.where(kept, noisy_scores(x, token_id, slot, known, settings), float("-inf"))
    return tl.min(tl.where(x == tl.max(x, axis=0), token_id, NO_ID), axis=0)


@triton.jit
def truncated_choice(count, here, VOCABULARY, top, pivot, row_mass, FEW: tl.constexpr, TILE: tl.constexpr,
                     PASS_TILE: tl.constexpr, CANDIDATES: tl.constexpr, BINS: tl.constexpr,
                     INTERVAL: tl.constexpr):  # fmt: skip
    """The chosen id of a row that keeps only part of the vocabulary; `count` values reached `pivot`."""
    _, slot, _, _, _, settings, _ = here
    gathered = (pivot > float("-inf")) & (count <= CANDIDATES)
    best_id = NO_ID
    if gathered & (count <= FEW):
        best_id = _choice_of_few(count, here, VOCABULARY, top, row_mass, FEW, CANDIDATES)
    else:
        count = tl.where(gathered, count, VOCABULARY)
        low = _order_key(pivot)
        found = False
        if is_binned(pivot, slot, settings, VOCABULARY):
            low, found = _kept_from_bins(
                gathered, count, here, top, pivot, row_mass, FEW, PASS_TILE, CANDIDATES, BINS, INTERVAL
            )
        if found == 0:
            low = _kept_from(gathered, count, here, VOCABULARY, top, pivot, row_mass, TILE, CANDIDATES)
        best_id = _best_from(low, gathered, count, here, PASS_TILE, CANDIDATES)
    return best_id


@triton.jit
def _best_from(low, gathered, count, here, TILE: tl.constexpr, CANDIDATES: tl.constexpr):
    """The id with the best noisy score among the values whose order key is at least `low`."""
    _, slot, known, _, _, settings, _ = here
    best_id = NO_ID
    best = float("-inf")
    for tile in range(0, tl.cdiv(count, TILE)):
        x, token_id = _candidates(tile, gathered, count, here, TILE, CANDIDATES)
        x = tl.where(_order_key(x) >= low, noisy_scores(x, token_id, slot, known, settings), float("-inf"))
        tile_best = tl.max(x, axis=0)
        tile_id = tl.min(tl.where(x == tile_best, token_id, NO_ID), axis=0)
        better = (tile_best > best) | ((tile_best == best) & (tile_id < best_id))
        best_id = tl.where(better, tile_id, best_id)
        best = tl.maximum(best, tile_best)
    return best_id


@triton.jit
def gather(pivot, top, here, VOCABULARY, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
           CANDIDATES: tl.constexpr, BINS: tl.constexpr):  # fmt: skip
    """Copy this program's share of the values from `pivot` up into the row's candidates, in any order; count mass."""
    row, slot, _, _, _, settings, work = here
    PIECES: tl.constexpr = CHUNK // PIECE
    binned = is_binned(pivot, slot, settings, VOCABULARY)
    piece = tl.arange(0, PIECES)
    for chunk in range(tl.program_id(1), CHUNKS, tl.num_programs(1)):
        holds = tl.load(work[PIECE_MAXIMA] + (row * CHUNKS + chunk) * PIECES + piece) >= pivot
        if tl.max(holds.to(tl.int32), axis=0) > 0:
            token_id = chunk * CHUNK + piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
            inside = (token_id < VOCABULARY) & holds[:, None]  # pieces without a candidate are not read
            x = _logits_at(token_id, inside, here)
            kept = (inside & (x >= pivot)).to(tl.int32)
            in_piece = tl.sum(kept, axis=1)
            before = tl.cumsum(in_piece, axis=0) - in_piece
            base = tl.atomic_add(work[TICKETS] + row * 2, tl.sum(in_piece, axis=0), sem="relaxed")
            place = base + before[:, None] + tl.cumsum(kept, axis=1) - 1
            fits = (kept > 0) & (place < CANDIDATES)
            tl.store(work[CANDIDATE_VALUES] + row * CANDIDATES + place, x, mask=fits)
            tl.store(work[CANDIDATE_IDS] + row * CANDIDATES + place, token_id, mask=fits)
            if binned:
                bins = work[BIN_MASSES] + row * BINS + _bin_of(x, top, pivot, BINS)
                tl.atomic_add(bins, _mass_of(x, top), mask=kept > 0, sem="relaxed")


@triton.jit
def pivot_of(maxima, top, row_mass, slot, settings, VOCABULARY):
    """A value that no kept id lies below; -inf where none can be told.

    For top-k: at least k values reach the k-th largest piece maximum. For min-p: its own threshold. For top-p alone:
    all values below t weigh less than VOCABULARY * exp(t - top), which at this t is the share that top-p may leave out.
    """
    top_k, has_k = _top_k(slot, settings, VOCABULARY)
    top_p = _number(slot, settings, _TOP_P)
    min_p = _number(slot, settings, _MIN_P)
    pivot = float("-inf")
    if has_k:
        finite = maxima > float("-inf")
        if tl.sum(finite.to(tl.int32), axis=0) >= top_k:
            low = _order_key(tl.min(tl.where(finite, maxima, top), axis=0))
            pivot = _from_key(_kth_largest_key(maxima, top_k, low, _order_key(top) + 1))
    elif min_p <= 0:
        left_out = tl.maximum((1.0 - top_p) * row_mass, 1e-30)
        pivot = top + tl.log(left_out / VOCABULARY) - 0.001  # a margin for the rounding of the mass
    if min_p > 0:
        pivot = tl.maximum(pivot, top + tl.log(min_p))
    return pivot
