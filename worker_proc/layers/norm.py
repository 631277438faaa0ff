"""Root mean square normalisation."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis, computed in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.shape, self.eps = (size,), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def checkpoint_targets(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Linear.checkpoint_targets`."""
        yield f"{name}.weight", self.weight
