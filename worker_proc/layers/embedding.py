"""The token embedding and the output projection (lm_head), which may share one table."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from worker_proc.layers.linear import Linear, can_pack, pack_weight


class Embedding(nn.Module):
    """Token id -> row of a table [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int32 [T] -> [T, hidden_size]."""
        return F.embedding(token_ids, self.weight)

    def checkpoint_targets(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Linear.checkpoint_targets`."""
        yield f"{name}.weight", self.weight


class LmHead(Linear):
    """Hidden states of selected tokens -> float32 logits. With `tied`, the weight is the embedding's own table."""

    def __init__(self, hidden_size: int, vocab_size: int, *, tied: Embedding | None = None) -> None:
        if tied is None:
            super().__init__(hidden_size, vocab_size)
        else:
            nn.Module.__init__(self)
            self.input_size, self.output_size = hidden_size, vocab_size
            self.weight, self.bias, self.packed_weight = tied.weight, None, None
        self.is_tied = tied is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> float32 [S, vocab_size]."""
        return super().forward(x).float()

    def checkpoint_targets(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing when tied: the embedding's entry fills the table, and the loader accepts either name."""
        if not self.is_tied:
            yield from super().checkpoint_targets(name)

    def pack(self) -> None:
        """As `Linear.pack`; a tied table stays with the embedding, which reads rows of it."""
        if can_pack(self.weight):
            self.packed_weight = pack_weight(self.weight)
            self.weight = None
