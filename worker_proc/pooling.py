"""Embeddings of prompts: their tokens' mean hidden state, the last one or the first, after the model's last norm.

A prompt may come in several chunks. The sum over the earlier ones, or the first state, stays on the device, per slot,
until the chunk that samples. Sums and lengths are float32 whatever the model's type. Exact sums are float64 over whole
numbers, which give the same result in any order and in any chunks (up to 2^53, which is 16,384 times 32,768 tokens).
All of it is torch operations in stream order, none of which reads the device, so a GPU's runner issues them behind its
step like any others. Called by both runners.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from common.messages import EARLY_POOLINGS, NewSlots
from worker_proc.step_inputs import PooledRows
from worker_proc.transfer import to_host

SUM_TOKENS = 1024
"""Tokens whose hidden states are normed and added up at once; bounds the memory that this takes."""
EXACT_UNIT = 2.0**-24
"""What an exact sum counts; hidden states after the norm are about 1, and float32 tells no more there."""


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of one step; `vectors` is float32 [slots, hidden_size], each of length 1.

    On a GPU it is filled once the stream has come this far.
    """

    slots: tuple[int, ...]
    vectors: np.ndarray


class Pooler:
    """The unfinished sums (or first states) of one worker's slots.

    Args:
        hidden_of: first token and count -> hidden states [count, hidden_size] of the last step, after the last norm.
        exact: a mean may not depend on the chunks that its prompt came in (`--deterministic`).
    """

    def __init__(self, hidden_of: Callable[[int, int], torch.Tensor], *, exact: bool = False) -> None:
        self._hidden_of = hidden_of
        self._exact = exact
        self._sums: dict[int, torch.Tensor] = {}
        self._pools = {"mean": self._mean_so_far, "last": self._last, "cls": self._first}

    def start(self, new: NewSlots) -> None:
        """Slots get requests; what those before them have left is gone."""
        if not self._sums and all(sampling.is_plain for sampling in new.samplings):
            return
        for init in new:
            self._sums.pop(init.slot, None)
            needs_all = init.sampling.pooling in EARLY_POOLINGS
            assert not (needs_all and init.computed_count), f"slot {init.slot}: its first tokens are cached"

    def pool(self, chunks: Sequence[PooledRows]) -> Embeddings | None:
        """Take in a step's chunks of slots that asked; the embeddings of those that end with it, None for none."""
        ended, vectors = [], []
        for chunk in chunks:
            vector = self._pools[chunk.pooling](chunk)
            if chunk.is_last:
                ended.append(chunk.slot)
                vectors.append(F.normalize(vector, dim=0))  # by itself: a GPU's order of sums depends on how many
        return Embeddings(tuple(ended), to_host(torch.stack(vectors))) if ended else None

    def _last(self, chunk: PooledRows) -> torch.Tensor:
        return self._hidden_of(chunk.first_token + chunk.count - 1, 1)[0].float()

    def _first(self, chunk: PooledRows) -> torch.Tensor:
        first = self._sums.pop(chunk.slot, None)
        if first is None:  # a copy, which outlives the step
            first = self._hidden_of(chunk.first_token, 1)[0].to(torch.float32, copy=True)
        if not chunk.is_last:
            self._sums[chunk.slot] = first
        return first

    def _mean_so_far(self, chunk: PooledRows) -> torch.Tensor:
        """The sum, that is: it points the same way, and only the direction is wanted."""
        total = self._sums.pop(chunk.slot, None)
        for start in range(0, chunk.count, SUM_TOKENS):
            hidden = self._hidden_of(chunk.first_token + start, min(SUM_TOKENS, chunk.count - start))
            part = exact_sum(hidden) if self._exact else hidden.sum(dim=0, dtype=torch.float32)
            total = part if total is None else total + part
        assert total is not None, f"slot {chunk.slot}: an empty chunk"
        if not chunk.is_last:
            self._sums[chunk.slot] = total
        return total.float()


def exact_sum(hidden: torch.Tensor) -> torch.Tensor:
    """[count, size] -> float64 [size], in units of EXACT_UNIT."""
    return hidden.double().div_(EXACT_UNIT).round_().sum(dim=0)
