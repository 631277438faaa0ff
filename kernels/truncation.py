"""The parts of `kernels.sampling` that decide what a row keeps: thresholds found without a sort.

The ordered bits of a float32 are an integer, so the k-th largest value and the top-p threshold are found by search:
each round counts, or sums, what reaches 4 thresholds and leaves a fifth of the interval. The rounds look at candidates
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

from kernels.row_scores import (
    NO_ID,
    from_order_bits,
    logits_at,
    min_p_of,
    noisy_scores,
    order_bits,
    top_k_of,
    top_p_of,
)
from kernels.sampling_state import BIN_MASSES, CANDIDATE_IDS, CANDIDATE_VALUES, INTERVAL_VALUES, PIECE_MAXIMA, TICKETS

PARTS = tl.constexpr(5)
"""Into which a round of a search divides what is left; PARTS - 1 must be a power of two."""


@triton.jit
def _order_key(x):
    """`order_bits` as an int64, in which differences of two have room."""
    return order_bits(x).to(tl.int64)


@triton.jit
def _narrow(low, high, reached, INTO: tl.constexpr):
    """The next interval of a search that divides it so, from how many of its inner thresholds are still reached."""
    span = high - low
    return low + span * reached // INTO, tl.where(reached == INTO - 1, high, low + span * (reached + 1) // INTO)


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
def _fixed(mass):
    """A mass, the largest logit's being 1, as an integer: in units of 2^-32."""
    return (mass * 4294967296.0).to(tl.int64)


@triton.jit
def _mass_of(x, top):
    """Unnormalised probability as an integer, 2^32 for the largest: sums are exact in any order."""
    return _fixed(tl.exp(x - top))


@triton.jit
def _candidates(tile, gathered, values, count, here, TILE: tl.constexpr, CANDIDATES: tl.constexpr):
    """`(values, ids)` of one tile: of what was gathered at `values`, or of the whole row; -inf beyond `count`."""
    row, _, _, _, _, _, work = here
    lane = tile * TILE + tl.arange(0, TILE)
    inside = lane < count
    if gathered:
        token_id = tl.load(work[CANDIDATE_IDS] + row * CANDIDATES + lane, mask=inside, other=NO_ID)
        x = tl.load(values + lane, mask=inside, other=float("-inf"))
    else:
        token_id = lane
        x = logits_at(token_id, inside, here)
    return x, token_id


@triton.jit
def _share(total, top_p):
    """The mass that top-p keeps at least, of a total in the same units."""
    return tl.maximum((total.to(tl.float64) * top_p).to(tl.int64), 1)


@triton.jit
def is_binned(pivot, slot, settings, VOCABULARY):
    """Whether the mass of a row's candidates is added up by intervals: for top-p with a bound, but without top-k."""
    _, has_k = top_k_of(slot, settings, VOCABULARY)
    return (top_p_of(slot, settings) < 1.0) & (has_k == 0) & (pivot > float("-inf"))


@triton.jit
def _bin_of(x, top, pivot, BINS: tl.constexpr):
    """The interval of values from `pivot` up: 0 holds the largest. Rounding keeps the order, so intervals are exact."""
    scale = BINS / tl.maximum(top - pivot, 1e-30)
    return tl.minimum((top - x) * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def _wanted_bin(here, total, top_p, BINS: tl.constexpr):
    """`(interval, mass above it, target)`: where the threshold of top-p lies; interval BINS: below all."""
    row, _, _, _, _, _, work = here
    place = tl.arange(0, BINS)
    masses = tl.load(work[BIN_MASSES] + row * BINS + place, cache_modifier=".cg")
    if min_p_of(here[1], here[5]) > 0:
        total = tl.sum(masses, axis=0)  # what min-p left
    target = _share(total, top_p)
    wanted = tl.sum((tl.cumsum(masses, axis=0) < target).to(tl.int32), axis=0)
    return wanted, tl.sum(tl.where(place < wanted, masses, 0), axis=0), target


_COUNT_DOWN, _ADD_UP, _MASS_DOWN, _FILL_INTERVAL, _COMPARE_FEW, _CHOOSE, _DONE = map(tl.constexpr, range(7))
"""What a round of `truncated_choice` does."""


@triton.jit
def truncated_choice(count, here, VOCABULARY, top, pivot, row_mass, FEW: tl.constexpr, TILE: tl.constexpr,
                     CANDIDATES: tl.constexpr, BINS: tl.constexpr, INTERVAL: tl.constexpr):  # fmt: skip
    """The chosen id of a row that keeps only part of the vocabulary; `count` values reached `pivot`.

    One loop whose rounds differ, instead of a loop for each: what looks at a value is then compiled once. With five
    such places this function took three quarters of the time that the longest kernel of a first start took.

        few candidates    _COMPARE_FEW
        top-k             _COUNT_DOWN until one key is left; with top-p also _ADD_UP, _MASS_DOWN likewise; _CHOOSE
        top-p             _FILL_INTERVAL; _COMPARE_FEW or _MASS_DOWN, of the interval if it holds no more; _CHOOSE
        min-p             _CHOOSE
    """
    row, slot, known, _, _, settings, work = here
    top_k, has_k = top_k_of(slot, settings, VOCABULARY)
    top_p = top_p_of(slot, settings)
    counter = work[TICKETS] + row * 2
    in_counter = count
    is_gathered = (pivot > float("-inf")) & (count <= CANDIDATES)
    count = tl.where(is_gathered, count, VOCABULARY)
    low = _order_key(pivot)
    high = _order_key(top) + 1
    target = _share(_fixed(row_mass), top_p)
    above = target * 0
    wanted = 0
    do = tl.where(has_k, _COUNT_DOWN, _CHOOSE)
    if is_gathered & (count <= FEW):
        do = _COMPARE_FEW
    elif is_binned(pivot, slot, settings, VOCABULARY):
        wanted, above, target = _wanted_bin(here, _fixed(row_mass), top_p, BINS)
        do = tl.where(wanted < BINS, _FILL_INTERVAL, _CHOOSE)  # beyond the last one, all candidates are kept
    held_count = 0
    in_interval = False
    best_id = NO_ID
    while do != _DONE:
        values = work[CANDIDATE_VALUES] + row * CANDIDATES
        if in_interval:
            values = work[INTERVAL_VALUES] + row * INTERVAL
        here_count = tl.where(in_interval, held_count, count)
        if do == _COMPARE_FEW:
            x, kept, token_id = _kept_of_few(values, here_count, in_interval, here, VOCABULARY, top, above, target,
                                             FEW, CANDIDATES)  # fmt: skip
            if in_interval:
                low = tl.min(tl.where(kept, _order_key(x), high), axis=0)
            else:
                x = tl.where(kept, noisy_scores(x, token_id, slot, known, settings), float("-inf"))
                best_id = tl.min(tl.where(x == tl.max(x, axis=0), token_id, NO_ID), axis=0)
            do = tl.where(in_interval, _CHOOSE, _DONE)
            in_interval = False
        else:
            reached, least, largest, largest_id = _pass(
                do, is_gathered | in_interval, values, here_count, here, low, high, top, pivot, wanted, in_counter,
                TILE, CANDIDATES, BINS, INTERVAL
            )  # fmt: skip
            if do == _CHOOSE:
                best_id = tl.min(tl.where(largest == tl.max(largest, axis=0), largest_id, NO_ID), axis=0)
                do = _DONE
            elif do == _FILL_INTERVAL:
                tl.debug_barrier()
                held_count = tl.atomic_add(counter, 0, sem="acquire") - in_counter
                smallest = tl.min(least, axis=0)
                greatest = tl.max(largest, axis=0)
                in_interval = (held_count > 0) & (held_count <= INTERVAL) & (smallest < greatest)
                if in_interval | (smallest == greatest):
                    low = _order_key(smallest)
                    high = _order_key(greatest) + 1
                    do = tl.where(held_count <= FEW, _COMPARE_FEW, _MASS_DOWN)
                    do = tl.where(in_interval, do, _CHOOSE)
                else:  # more than can be searched by themselves
                    above = above * 0
                    do = _MASS_DOWN
            else:
                sums = above + tl.sum(reached, axis=1)
                if do == _ADD_UP:
                    target = _share(tl.max(sums, axis=0), top_p)
                    do = _MASS_DOWN
                else:
                    least_sum = tl.where(do == _COUNT_DOWN, top_k.to(tl.int64), target)
                    low, high = _narrow(low, high, tl.sum((sums >= least_sum).to(tl.int64), axis=0), PARTS)
                    if high - low <= 1:
                        do = tl.where((do == _COUNT_DOWN) & (top_p < 1.0), _ADD_UP, _CHOOSE)
                        high = _order_key(top) + 1
                        in_interval = False
    return best_id


@triton.jit
def _kept_of_few(values, count, in_interval, here, VOCABULARY, top, above, target, FEW: tl.constexpr,
                 CANDIDATES: tl.constexpr):  # fmt: skip
    """`(values, whether kept, ids)` of at most FEW, each compared with each: no rounds."""
    row, slot, _, _, _, settings, work = here
    lane = tl.arange(0, FEW)
    inside = lane < count
    token_id = tl.load(work[CANDIDATE_IDS] + row * CANDIDATES + lane, mask=inside, other=NO_ID)
    x = tl.load(values + lane, mask=inside, other=float("-inf"))
    greater = x[:, None] > x[None, :]  # along the axis that lies in one thread
    top_k, has_k = top_k_of(slot, settings, VOCABULARY)
    kept = inside & ((tl.sum(greater.to(tl.int32), axis=0) < top_k) | (has_k == 0))
    top_p = top_p_of(slot, settings)
    if top_p < 1.0:
        mass = tl.where(kept, _mass_of(x, top), 0)
        if (in_interval == 0) & (has_k | (min_p_of(slot, settings) > 0)):
            target = _share(tl.sum(mass, axis=0), top_p)
        kept = kept & (above + tl.sum(tl.where(greater, mass[:, None], 0), axis=0) < target)
    return x, kept, token_id


@triton.jit
def _pass(do, gathered, values, count, here, low, high, top, pivot, wanted, in_counter, TILE: tl.constexpr,
          CANDIDATES: tl.constexpr, BINS: tl.constexpr, INTERVAL: tl.constexpr):  # fmt: skip
    """One pass over the values: for a search what reaches its thresholds, else the least, the largest and its id.

    All lane by lane, to be put together behind the pass, so that no tile waits for the one before.
    """
    row, slot, known, _, _, settings, work = here
    threshold = tl.where(do == _ADD_UP, low, low + (high - low) * (tl.arange(0, PARTS - 1) + 1) // PARTS)
    reached = tl.zeros((PARTS - 1, TILE), tl.int64)
    least = tl.full((TILE,), float("inf"), tl.float32)
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    largest_id = tl.full((TILE,), NO_ID, tl.int32)
    for tile in range(0, tl.cdiv(count, TILE)):
        x, token_id = _candidates(tile, gathered, values, count, here, TILE, CANDIDATES)
        if do == _CHOOSE:
            x = tl.where(_order_key(x) >= low, noisy_scores(x, token_id, slot, known, settings), float("-inf"))
            better = (x > largest) | ((x == largest) & (token_id < largest_id))
            largest_id = tl.where(better, token_id, largest_id)
            largest = tl.maximum(largest, x)
        elif do == _FILL_INTERVAL:
            held = (x >= pivot) & (_bin_of(x, top, pivot, BINS) == wanted)
            least = tl.minimum(least, tl.where(held, x, float("inf")))
            largest = tl.maximum(largest, tl.where(held, x, float("-inf")))
            counter = work[TICKETS] + row * 2 + token_id * 0  # counts on from the candidates
            place = tl.atomic_add(counter, 1, mask=held, sem="relaxed") - in_counter
            tl.store(work[INTERVAL_VALUES] + row * INTERVAL + place, x, mask=held & (place < INTERVAL))
        else:
            weight = tl.where(do == _COUNT_DOWN, 1, _mass_of(x, top))
            reached += tl.where(_order_key(x)[None, :] >= threshold[:, None], weight[None, :], 0)
    return reached, least, largest, largest_id


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
            x = logits_at(token_id, inside, here)
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
    top_k, has_k = top_k_of(slot, settings, VOCABULARY)
    top_p = top_p_of(slot, settings)
    min_p = min_p_of(slot, settings)
    pivot = float("-inf")
    if has_k:
        finite = maxima > float("-inf")
        if tl.sum(finite.to(tl.int32), axis=0) >= top_k:
            low = _order_key(tl.min(tl.where(finite, maxima, top), axis=0))
            pivot = from_order_bits(_kth_largest_key(maxima, top_k, low, _order_key(top) + 1).to(tl.int32))
    elif min_p <= 0:
        left_out = tl.maximum((1.0 - top_p) * row_mass, 1e-30)
        pivot = top + tl.log(left_out / VOCABULARY) - 0.001  # a margin for the rounding of the mass
    if min_p > 0:
        pivot = tl.maximum(pivot, top + tl.log(min_p))
    return pivot
