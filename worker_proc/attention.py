"""Attention over the paged KV cache: the one function that every attention layer calls.

`attention` stores this step's K and V, then attends. Here are the dispatch and the plain torch reference, which is
right on every device, reads no device scalar and has static shapes, so that it can be captured in a CUDA Graph. The
fast CPU path is in `cpu_attention.py`.
"""

import torch

from worker_proc.cpu_attention import cpu_attention
from worker_proc.forward_context import ForwardContext

KERNEL_HEAD_DIMS = (64, 80, 96, 128, 256)
"""Those that the GPU's kernels take; a test holds this to `kernels.paged_kv.HEAD_DIMS`."""

REFERENCE_TILE_TOKENS = 16
"""Query tokens that the reference handles at once; bounds its memory at this many whole block tables."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_index: int,
    context: ForwardContext,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention of every query token to its row's cached tokens and to this step's tokens before it.

    Args:
        query: [T, head_count, head_dim]; head h reads KV head h // (head_count // kv_head_count).
        key, value: [T, kv_head_count, head_dim], stored to the layer's cache before anything is read.
        scale: factor of the scores, usually head_dim ** -0.5.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None: all.

    Returns:
        [T, head_count * head_dim]; rows of padding tokens hold zeros.
    """
    if query.device.type == "cpu":
        return cpu_attention(query, key, value, layer_index, context, scale=scale, sliding_window=sliding_window)
    if context.device_decode_row_count is not None and query.shape[-1] in KERNEL_HEAD_DIMS:
        from worker_proc.cuda.attention import cuda_attention  # brings Triton, which a CPU worker does without

        return cuda_attention(query, key, value, layer_index, context, scale=scale, sliding_window=sliding_window)
    return reference_attention(query, key, value, layer_index, context, scale=scale, sliding_window=sliding_window)


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_index: int,
    context: ForwardContext,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """As `attention`, in plain torch, float32 inside. Reads whole block tables: slow, for tests and as a fallback."""
    key_cache, value_cache = context.key_caches[layer_index], context.value_caches[layer_index]
    store_reference(key, key_cache, context.slot_mapping)
    store_reference(value, value_cache, context.slot_mapping)
    token_rows, key_limits = _rows_and_limits(query.shape[0], context)
    output = torch.empty_like(query)
    for start in range(0, query.shape[0], REFERENCE_TILE_TOKENS):
        tile = slice(start, start + REFERENCE_TILE_TOKENS)
        slots = context.row_slots[token_rows[tile]].long()
        blocks = context.block_tables[slots.clamp(min=0)]
        output[tile] = _attend_tile(
            query[tile], key_cache, value_cache, blocks.long(), key_limits[tile], scale, sliding_window
        )
    return output.flatten(1)


def store_reference(source: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write source [T, kv_head, head_dim] into cache [block, kv_head, position, head_dim] at the slots that are not -1.

    A masked store without a data-dependent shape: padding tokens repeat the first real token's write, and if there is
    no real token, they write back what slot 0 holds.
    """
    valid = slot_mapping >= 0
    first = valid.to(torch.int32).argmax().view(1)
    slots = torch.where(valid, slot_mapping, slot_mapping[first]).clamp(min=0)
    block_size = cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    replacement = torch.where(valid[first].view(1, 1, 1), source[first], cache[blocks[:1], :, offsets[:1]])
    cache[blocks, :, offsets] = torch.where(valid.view(-1, 1, 1), source, replacement).to(cache.dtype)


def _rows_and_limits(token_count: int, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token its row, and how many cached tokens it may see (0 for padding); no host read."""
    tokens = torch.arange(token_count, device=context.query_starts.device, dtype=torch.int32)
    rows = context.token_rows(token_count)
    tokens_after = context.query_starts[rows + 1] - 1 - tokens
    limits = context.context_lengths[rows] - tokens_after
    real = (context.slot_mapping >= 0) & (context.row_slots[rows] >= 0)
    return rows, torch.where(real, limits, 0)


def _attend_tile(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    blocks: torch.Tensor,
    key_limits: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attention of n tokens, each with its own block list [n, max_blocks] and key limit [n]."""
    token_count, head_count, head_dim = query.shape
    kv_head_count = key_cache.shape[1]
    positions = torch.arange(blocks.shape[1] * key_cache.shape[2], device=query.device)
    seen = positions < key_limits[:, None]
    if sliding_window is not None:
        seen &= positions >= key_limits[:, None] - sliding_window
    mask = seen[:, None, :, None]
    keys = key_cache[blocks].transpose(1, 2).flatten(2, 3).float().masked_fill(~mask, 0)
    values = value_cache[blocks].transpose(1, 2).flatten(2, 3).float().masked_fill(~mask, 0)
    grouped = query.float().view(token_count, kv_head_count, head_count // kv_head_count, head_dim)
    scores = (grouped @ keys.transpose(-1, -2) * scale).masked_fill(~seen[:, None, None, :], float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)  # a token that sees nothing gets zeros
    return (weights @ values).view(token_count, head_count, head_dim).to(query.dtype)
