"""The parts of `kernels.sampling` that look at each id by itself: adjusted logits, scores with noise, the best score.

Called inside the kernels of `kernels.sampling`, whose docstring says what is computed, and by `kernels.truncation`.
`settings` is `SamplingState.arguments`, in the order given there. `here` is the row that a program works on: its
number, its slot, the slot's known length, the logits and their stride, `settings`, and `SamplingWorkspace.tensors`.
"""

import triton
import triton.language as tl

from kernels import sampling_state as columns
from kernels.noise import HAS_PTX, gumbel, noise_bits, noise_keys
from kernels.sampling_state import CHOICES, COUNTS, COUNTS_STRIDE, NUMBERS

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
LOWEST = tl.constexpr(-0x7F800001)
"""`order_bits` of -inf."""


@triton.jit
def order_bits(x):
    """An int32 that orders as the float32 does; both zeros have one. A warp finds the largest in one instruction."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order_bits(bits):
    """The float32 whose order bits these are."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


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
def top_k_of(slot, settings, VOCABULARY):
    """(k of a row's top-k, whether that leaves anything out)."""
    k = _choice(slot, settings, _TOP_K)
    return k, (k > 0) & (k < VOCABULARY)


@triton.jit
def top_p_of(slot, settings):
    """The share of the mass that a row keeps; 1: all."""
    return _number(slot, settings, _TOP_P)


@triton.jit
def min_p_of(slot, settings):
    """The share of the largest probability that a row's ids must have; 0: none."""
    return _number(slot, settings, _MIN_P)


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
def is_sampled(slot, settings):
    """Whether a row's choice is by chance."""
    return _number(slot, settings, _TEMPERATURE) > 0


@triton.jit
def temperature_factor(slot, settings):
    """What logits are multiplied with, since a division for each would cost more than its noise; 1 at temperature 0."""
    temperature = _number(slot, settings, _TEMPERATURE)
    return 1.0 / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def at_temperature(x, factor):
    """Logits over the temperature. The product is rounded here, and never becomes part of a fused multiply-add: a value
    must be the same number wherever it is looked at."""
    if HAS_PTX:
        x = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, factor], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = x * factor
    return x


@triton.jit
def is_truncated(slot, settings, VOCABULARY):
    """Whether a row keeps only part of the vocabulary: then its choice needs thresholds."""
    _, has_k = top_k_of(slot, settings, VOCABULARY)
    some = has_k | (top_p_of(slot, settings) < 1.0) | (min_p_of(slot, settings) > 0.0)
    return some & is_sampled(slot, settings)


@triton.jit
def row_keys(slot, known, settings):
    """The keys of a row's noise."""
    return noise_keys(_choice(slot, settings, _SEED_LOW), _choice(slot, settings, _SEED_HIGH), known)


@triton.jit
def noisy_scores(x, token_id, slot, known, settings):
    """What is maximised: logits with noise; the logits themselves at temperature 0."""
    if is_sampled(slot, settings):
        first, second = row_keys(slot, known, settings)
        x += gumbel(noise_bits(first, second, token_id))
    return x


@triton.jit
def logits_at(token_id, inside, here):
    """What is sampled from, at some ids of the row; -inf where not `inside`."""
    return _from_raw(_raw_at(token_id, inside, here), token_id, inside, here)


@triton.jit
def _raw_at(token_id, inside, here):
    row, _, _, logits, logits_stride, _, _ = here
    return tl.load(logits + row * logits_stride + token_id, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _from_raw(x, token_id, inside, here):
    _, slot, known, _, _, settings, _ = here
    if has_adjustments(slot, settings):
        x = adjusted(x, token_id, inside, slot, known, settings)
    return at_temperature(x, temperature_factor(slot, settings))


@triton.jit
def best_by_bounds(bounds, bound, here, VOCABULARY, PIECE: tl.constexpr, PIECE_TILE: tl.constexpr):
    """The id with the best score of a row that keeps the whole vocabulary, the lowest among equals.

    bounds: [PIECE_TILE], order bits of what no score of each piece exceeds; `bound` is their maximum. Pieces are looked
    at in the order of their bounds until none that is left can win, which is nearly always so after the first.
    """
    _, slot, known, _, _, settings, _ = here
    piece = tl.arange(0, PIECE_TILE)
    best_id = NO_ID
    best = LOWEST
    while (bound >= best) & (bound > LOWEST):
        place = tl.min(tl.where(bounds == bound, piece, PIECE_TILE), axis=0)
        token_id = place * PIECE + tl.arange(0, PIECE)
        inside = token_id < VOCABULARY
        x = _raw_at(token_id, inside, here)
        bounds = tl.where(piece == place, LOWEST, bounds)
        next_bound = tl.max(bounds, axis=0)  # while the logits are on their way
        scores = order_bits(noisy_scores(_from_raw(x, token_id, inside, here), token_id, slot, known, settings))
        score = tl.max(scores, axis=0)
        score_id = tl.min(tl.where(scores == score, token_id, NO_ID), axis=0)
        better = (score > best) | ((score == best) & (score_id < best_id))
        best_id = tl.where(better, score_id, best_id)
        best = tl.maximum(best, score)
        # A score that reaches its bound can only be equalled, and by higher ids.
        bound = tl.where(score == bound, LOWEST, next_bound)
    return best_id
