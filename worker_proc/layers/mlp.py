"""The gated feed-forward layer of the Llama family: down(silu(gate(x)) * up(x))."""

import torch
import torch.nn.functional as F
from torch import nn

from worker_proc.layers.linear import Linear, MergedLinear


class GatedMlp(nn.Module):
    """gate and up are one matrix product."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(
            hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias=bias
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))
