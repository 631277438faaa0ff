"""What a forward pass needs besides token ids and positions: where K and V are, and which tokens belong to which row.

The worker's step preparation builds a `ForwardContext`, the model passes it through, `attention` reads it. It is passed
explicitly: no module keeps the current one. It knows nothing of requests, sampling or messages.

A step packs the query tokens of R rows into T tokens. Rows with one query token (decode) come first, chunk rows after.
For a CUDA Graph, T and R are the sizes of the bucket: padding tokens have slot -1, padding rows have row slot -1.
"""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class ForwardContext:
    """Tensors of one step, all on the model's device.

    | field | dtype, shape | holds |
    |---|---|---|
    | slot_mapping | int64 [T] | where each token's K/V goes: block * block_size + offset; -1: padding, not stored |
    | row_slots | int32 [R] | the worker's slot of each row, an index into block_tables; -1: padding row |
    | query_starts | int32 [R + 1] | the first query token of each row; a padding row is empty or holds padding tokens |
    | context_lengths | int32 [R] | tokens of each row in the cache, this step's query tokens included |
    | block_tables | int32 [slots, max_blocks] | block ids of every slot; entries past the context are never read |
    | key_caches, value_caches | one per layer, [block, kv_head, position in block, head_dim] | the paged cache |
    | key_scales, value_scales | one per layer, float16 [block, kv_head, position in block], or None | of 8-bit caches |
    | prompt_lengths | int32 [R] or None | prompt tokens of each row; only `rotary.length_dependent` models use it |

    decode_row_count: how many of the first rows hold exactly one query token, padding rows of a decode bucket included.
    fixed_order: a query's bits may depend on its own request alone (`--deterministic` on the CPU).
    device_decode_row_count: the same as int32 [1] on a GPU, where kernels read it; the host's number is not used there.
    """

    slot_mapping: torch.Tensor
    row_slots: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    block_tables: torch.Tensor
    key_caches: list[torch.Tensor]
    value_caches: list[torch.Tensor]
    block_size: int
    decode_row_count: int
    prompt_lengths: torch.Tensor | None = None
    key_scales: list[torch.Tensor | None] | None = None
    value_scales: list[torch.Tensor | None] | None = None
    device_decode_row_count: torch.Tensor | None = None
    fixed_order: bool = False
    plans: dict[Any, Any] = field(default_factory=dict)
    """What an attention backend works out once per step and shares between layers. A context is used for one step."""

    @property
    def row_count(self) -> int:
        """Rows of the step, padding included."""
        return self.row_slots.shape[0]

    def layer_keys(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A layer's K cache, and its scales if its elements are quantised."""
        return self.key_caches[layer_index], self.key_scales[layer_index] if self.key_scales else None

    def layer_values(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A layer's V cache, and its scales if its elements are quantised."""
        return self.value_caches[layer_index], self.value_scales[layer_index] if self.value_scales else None

    def token_rows(self, token_count: int) -> torch.Tensor:
        """The row of each of the step's tokens, int64 [T], worked out on the device; padding gets some row."""
        tokens = torch.arange(token_count, device=self.query_starts.device, dtype=torch.int32)
        return torch.bucketize(tokens, self.query_starts[1:], right=True).clamp(max=self.row_count - 1)
