"""Log probabilities of the model's own distribution: of a chosen token, its rank, and the likeliest ones.

"Own" means before temperature, penalties, biases and filters, as vLLM reports by default. One row at a time, in NumPy.
"""

from array import array
from dataclasses import dataclass

import numpy as np

from common.messages import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Stands for -inf (and for what is not a number) on the wire."""


@dataclass(frozen=True)
class LogprobRow:
    """One position: the token's log probability and rank (1: the likeliest), and the likeliest tokens with theirs."""

    logprob: float
    rank: int
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray

    def entry(self, row_index: int) -> TokenLogprobs:
        """As it travels."""
        ids = array("i", self.top_token_ids.astype(np.int32).tobytes())
        return TokenLogprobs(row_index, self.logprob, self.rank, ids, array("f", self.top_logprobs.tobytes()))


def logprob_row(logits: np.ndarray, token_id: int, top_count: int) -> LogprobRow:
    """For one row of raw logits, float32 [vocab]; ties among the likeliest go to the lowest id.

    A token id outside the vocabulary (NOT_A_TOKEN) gets LEAST_LOGPROB.
    """
    finite = np.where(np.isfinite(logits), logits, -np.inf)
    greatest = finite.max()
    if greatest == -np.inf:
        return LogprobRow(LEAST_LOGPROB, 1, np.empty(0, np.int32), np.empty(0, np.float32))
    normaliser = float(greatest) + float(np.log(np.exp(finite - greatest).sum(dtype=np.float64)))
    known = 0 <= token_id < len(finite)
    chosen = finite[token_id] if known else np.float32(-np.inf)
    top_ids = _top(finite, top_count)
    return LogprobRow(
        logprob=max(float(chosen) - normaliser, LEAST_LOGPROB),
        rank=1 + int(np.count_nonzero(finite > chosen)),
        top_token_ids=top_ids,
        top_logprobs=np.maximum(finite[top_ids] - normaliser, LEAST_LOGPROB).astype(np.float32),
    )


def _top(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the greatest values, greatest first, ties by index."""
    if count <= 0:
        return np.empty(0, dtype=np.int32)
    count = min(count, len(values))
    place = len(values) - count
    candidates = np.flatnonzero(values >= np.partition(values, place)[place])
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]].astype(np.int32)
