"""The CPU sampler: from the logits of the rows that sample to one token id each.

Each row is handled by itself, in the same way whatever is beside it, so a request's tokens do not depend on its
neighbours. It uses NumPy rather than torch, which is several times slower on one row of logits. A greedy row costs one
argmax.

Before the draw, tokens are left out in this order, each time by a threshold on the logits, so that ties stay together:
`min_p` (relative to the likeliest), `top_k`, `top_p` (of what the others left). Then the token with the largest logit /
temperature + Gumbel noise is taken, which is a draw from their softmax (Gumbel 1954; Maddison et al. 2014).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from common.messages import NOT_A_TOKEN, SlotInit, SlotSampling
from worker_proc.logit_rules import LogitRules
from worker_proc.logprobs import LogprobTable, logprob_table
from worker_proc.noise import gumbel_noise
from worker_proc.slots import IntArray, SlotMemory, SlotMirror, known_ids

TOP_P_FIRST_LOOK = 4096
"""top_p first sorts only so many of the likeliest tokens, which is usually enough, so that not all need be sorted."""


@dataclass(frozen=True)
class Sampled:
    """What a step sampled.

    Attributes:
        token_ids: int32 [S].
        logprob_rows, logprobs: of the rows that asked, as in `PendingStep`; None if none did.
    """

    token_ids: np.ndarray
    logprob_rows: list[tuple[int, int, int]] = field(default_factory=list)
    logprobs: LogprobTable | None = None


class Sampler:
    """Samples for slots of one worker.

    Args:
        tokenizer_vocab_size: ids from here on are padding of the model's vocabulary and never sampled.
    """

    def __init__(self, memory: SlotMemory, mirror: SlotMirror, tokenizer_vocab_size: int) -> None:
        self._memory, self._mirror = memory, mirror
        self._vocab_size = tokenizer_vocab_size
        self._rules: list[LogitRules | None] = [None] * memory.slot_count
        self._sampling = [SlotSampling()] * memory.slot_count
        self._plain = np.ones(memory.slot_count, dtype=bool)
        self._logprob_counts = np.full(memory.slot_count, -1, dtype=np.int32)

    def start(self, init: SlotInit) -> None:
        """Set up a slot for a new request."""
        sampling = known_ids(init.sampling, self._vocab_size)
        self._rules[init.slot], self._sampling[init.slot] = LogitRules.of(sampling), init.sampling
        self._plain[init.slot] = sampling.temperature == 0 and self._rules[init.slot] is None and not sampling.masked
        self._logprob_counts[init.slot] = sampling.logprobs

    def sample(
        self, logits: np.ndarray, slots: IntArray, positions: IntArray, masks: Mapping[int, bytes] | None = None
    ) -> Sampled:
        """Choose a token for each row, write it to the slot and count it as known.

        Args:
            logits: float32 [S, vocab]; changed in place.
            masks: slot -> the token ids that this step allows, a bit each, as in `StepPlan.masks`.
            slots: int32 [S].
            positions: int32 [S], the sampled tokens' places in their requests.
        """
        logits[:, self._vocab_size :] = -np.inf
        token_ids = logits.argmax(axis=1).astype(np.int32)
        token_ids[~np.isfinite(logits[np.arange(len(slots)), token_ids])] = NOT_A_TOKEN
        wanted = np.flatnonzero(self._logprob_counts[slots] >= 0)
        raw = logits[wanted]
        masks = masks or {}
        for index in np.flatnonzero(~self._plain[slots]).tolist():
            slot = int(slots[index])
            sampling = self._sampling[slot]
            assert self._mirror.sampling[slot] is not None, f"slot {slot} samples, but it is free"
            if token_ids[index] != NOT_A_TOKEN:
                if slot in masks:
                    logits[index, ~allowed_by(masks[slot], logits.shape[1])] = -np.inf
                token_ids[index] = self._sample_row(logits[index], slot, sampling, int(positions[index]))
        self._memory.token_ids.numpy()[slots, positions] = np.maximum(token_ids, 0)
        self._memory.known_lengths.numpy()[slots] = positions + 1
        if not len(wanted):
            return Sampled(token_ids)
        counts = self._logprob_counts[slots[wanted]]
        rows = list(zip(range(len(wanted)), wanted.tolist(), counts.tolist(), strict=True))
        return Sampled(token_ids, rows, logprob_table(raw, token_ids[wanted], int(counts.max())))

    def _sample_row(self, logits: np.ndarray, slot: int, sampling: SlotSampling, position: int) -> int:
        rules = self._rules[slot]
        if rules is not None:
            tokens = self._memory.token_ids[slot].numpy()[:position]
            rules.apply(logits, tokens, int(self._mirror.prompt_lengths[slot]))
        return choose(logits, sampling, position)


def allowed_by(mask: bytes, vocab_size: int) -> np.ndarray:
    """A step's mask as bool [vocab_size]."""
    return np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab_size, bitorder="little").astype(bool)


def choose(logits: np.ndarray, sampling: SlotSampling, position: int) -> int:
    """The token for one row of adjusted logits, float32 [vocab]; NOT_A_TOKEN if the greatest is not finite."""
    best = int(logits.argmax())  # a NaN counts as the greatest
    if not np.isfinite(logits[best]):
        return NOT_A_TOKEN
    if sampling.temperature == 0:
        return best
    threshold = keep_threshold(logits, float(logits[best]), sampling)
    if threshold == -np.inf:
        token_ids, scores = _all_ids(len(logits)), logits.copy()
    else:
        token_ids = np.flatnonzero(logits >= threshold).astype(np.uint32)
        scores = logits[token_ids]
    if sampling.temperature != 1.0:
        scores /= np.float32(sampling.temperature)
    scores += gumbel_noise(sampling.seed, position, token_ids)
    return int(token_ids[scores.argmax()])


def keep_threshold(logits: np.ndarray, greatest: float, sampling: SlotSampling) -> float:
    """Tokens whose logit is at least this are kept by min_p, top_k and top_p; -inf keeps all."""
    threshold = -np.inf
    if sampling.min_p > 0:
        threshold = greatest + sampling.temperature * float(np.log(sampling.min_p))
    if 0 < sampling.top_k < len(logits):
        place = len(logits) - sampling.top_k
        threshold = max(threshold, float(np.partition(logits, place)[place]))
    if sampling.top_p < 1:
        kept = logits if threshold == -np.inf else logits[logits >= threshold]
        threshold = max(threshold, _top_p_threshold(kept, greatest, sampling))
    return threshold


def _top_p_threshold(logits: np.ndarray, greatest: float, sampling: SlotSampling) -> float:
    """The logit of the last token of the smallest set whose share of the probability reaches top_p."""

    def weights(part: np.ndarray) -> np.ndarray:
        return np.exp((part - np.float32(greatest)) / np.float32(sampling.temperature))

    target = sampling.top_p * float(weights(logits).sum(dtype=np.float64))
    descending = _likeliest(logits, TOP_P_FIRST_LOOK)
    cumulative = np.cumsum(weights(descending), dtype=np.float64)
    if cumulative[-1] < target:
        descending = np.sort(logits)[::-1]
        cumulative = np.cumsum(weights(descending), dtype=np.float64)
    last = int(np.searchsorted(cumulative, target))
    return float(descending[min(last, len(descending) - 1)])


@functools.cache
def _all_ids(count: int) -> np.ndarray:
    """uint32 [count]; not to be changed."""
    return np.arange(count, dtype=np.uint32)


def _likeliest(logits: np.ndarray, count: int) -> np.ndarray:
    """The `count` greatest, or all if there are fewer, greatest first."""
    if len(logits) > count:
        logits = np.partition(logits, len(logits) - count)[len(logits) - count :]
    return np.sort(logits)[::-1]
