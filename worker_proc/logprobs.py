"""Log probabilities of the model's own distribution: of a given token, its rank, and the likeliest tokens.

"Own" means before temperature, penalties, biases and filters, as vLLM reports by default. On the CPU they are computed
in NumPy, row by row; on a GPU in torch, for many rows, without reading anything back: they are copied to the host with
the sampled tokens.
"""

from array import array
from dataclasses import dataclass

import numpy as np
import torch

from common.messages import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Stands for -inf (and for what is not a number) on the wire."""


@dataclass(frozen=True)
class LogprobTable:
    """Log probabilities of n positions.

    Attributes:
        logprobs: float32 [n], of the given tokens; ranks: int32 [n], 1 for the likeliest token.
        top_ids, top_logprobs: int32 and float32 [n, k], likeliest first, ties by id.

    Values that are not finite are sent as LEAST_LOGPROB.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def entry(self, index: int, row_index: int, top_count: int) -> TokenLogprobs:
        """One position as a message entry, with the first `top_count` of the likeliest tokens."""
        return TokenLogprobs(
            row_index,
            float(_finite(self.logprobs[index])),
            max(1, int(self.ranks[index])),
            array("i", self.top_ids[index, :top_count].tobytes()),
            array("f", _finite(self.top_logprobs[index, :top_count]).tobytes()),
        )


def _finite(logprobs: np.ndarray) -> np.ndarray:
    return np.fmax(logprobs, np.float32(LEAST_LOGPROB))


def logprob_table(logits: np.ndarray, token_ids: np.ndarray, top_count: int) -> LogprobTable:
    """For rows of raw logits, float32 [n, vocab], and a token each, int32 [n].

    A token outside the vocabulary (NOT_A_TOKEN) gets LEAST_LOGPROB; logits that are not numbers count as impossible.
    """
    count, width = len(logits), min(top_count, logits.shape[1])
    table = LogprobTable(
        np.full(count, LEAST_LOGPROB, np.float32),
        np.ones(count, np.int32),
        np.zeros((count, width), np.int32),
        np.full((count, width), LEAST_LOGPROB, np.float32),
    )
    for index, (row, token_id) in enumerate(zip(logits, token_ids.tolist(), strict=True)):
        _fill_row(table, index, np.where(np.isfinite(row), row, -np.inf), token_id)
    return table


def _fill_row(table: LogprobTable, index: int, logits: np.ndarray, token_id: int) -> None:
    greatest = logits.max()
    if greatest == -np.inf:
        return
    normaliser = float(greatest) + float(np.log(np.exp(logits - greatest).sum(dtype=np.float64)))
    chosen = logits[token_id] if 0 <= token_id < len(logits) else np.float32(-np.inf)
    table.logprobs[index] = float(chosen) - normaliser
    table.ranks[index] = 1 + np.count_nonzero(logits > chosen)
    width = table.top_ids.shape[1]
    if width:
        table.top_ids[index] = _top(logits, width)
        table.top_logprobs[index] = logits[table.top_ids[index]].astype(np.float64) - normaliser


def _top(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the greatest values, greatest first, ties by index."""
    place = len(values) - count
    candidates = np.flatnonzero(values >= np.partition(values, place)[place])
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]]


def logprob_tensors(
    logits: torch.Tensor, token_ids: torch.Tensor, top_count: int, *, row_by_row: bool = False
) -> tuple[torch.Tensor, ...]:
    """The four columns of a LogprobTable as tensors on the device of `logits` [n, vocab]; token_ids: int32 [n].

    `row_by_row`: the sums of a row are taken by themselves, since their order depends on the number of rows. So does
    the order in which a library finds equal values, which come by id then.
    """
    finite = torch.where(torch.isfinite(logits), logits, -torch.inf)
    parts = finite.split(1) if row_by_row else (finite,)
    normaliser = torch.cat([part.logsumexp(-1, keepdim=True) for part in parts])
    chosen = finite.gather(1, token_ids.clamp(min=0).long()[:, None])
    chosen = torch.where(token_ids[:, None] < 0, -torch.inf, chosen)
    ranks = 1 + (finite > chosen).sum(-1, dtype=torch.int32)
    width = min(top_count, finite.shape[1])
    ordered = (_by_value_and_id(part) if row_by_row else part for part in parts)
    top_ids = torch.cat([part.topk(width, dim=-1).indices for part in ordered])
    top_logprobs = finite.gather(1, top_ids) - normaliser
    return (chosen - normaliser)[:, 0], ranks, top_ids.to(torch.int32), top_logprobs


def _by_value_and_id(values: torch.Tensor) -> torch.Tensor:
    """Float32 [n, vocab] -> int64 keys in the same order, of equal values the one of the lower id first; no two equal.

    As integers the bits of numbers are ordered like them, but for those below zero, of which all but the sign turns.
    """
    bits = (values + 0.0).view(torch.int32)  # which makes 0 of -0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return order * 2**32 - torch.arange(values.shape[1], device=values.device)
