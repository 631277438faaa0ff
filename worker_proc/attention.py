"""Attention over the paged KV cache: the one function that every attention layer calls.

`attention` stores this step's K and V, then attends. This file has the dispatch and the plain torch reference, which is
correct on every device, reads nothing back from the device and has static shapes, so that a CUDA Graph can capture it.
The fast CPU path is in `cpu_attention.py`.
"""

import torch

from kernels.kv_format import dequantise, quantise
from worker_proc.cpu_attention import cpu_attention
from worker_proc.fixed_order_attention import fixed_order_attention
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
        if context.fixed_order:
            return fixed_order_attention(
                query, key, value, layer_index, context, scale=scale, sliding_window=sliding_window
            )
        return cpu_attention(query, key, value, layer_index, context, scale=scale, sliding_window=sliding_window)
    if context.device_decode_row_count is not None and query.shape[-1] in KERNEL_HEAD_DIMS:
        from worker_proc.cuda.attention import cuda_attention  # brings Triton, which a CPU worker does without

        return cuda_attention(query, key, value, layer_index, context, scale=scale, sliding_window=sliding_window)
    return attention_reference(query, key, value, layer_index, context, scale=scale, sliding_window=sliding_window)


def attention_reference(
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
    keys_at, values_at = context.layer_keys(layer_index), context.layer_values(layer_index)
    store_reference(key, keys_at[0], context.slot_mapping, keys_at[1])
    store_reference(value, values_at[0], context.slot_mapping, values_at[1])
    token_rows, key_limits = _rows_and_limits(query.shape[0], context)
    output = torch.empty_like(query)
    for start in range(0, query.shape[0], REFERENCE_TILE_TOKENS):
        tile = slice(start, start + REFERENCE_TILE_TOKENS)
        slots = context.row_slots[token_rows[tile]].long()
        blocks = context.block_tables[slots.clamp(min=0)]
        keys, values = (_read_blocks(*place, blocks.long()) for place in (keys_at, values_at))
        output[tile] = _attend_tile(query[tile], keys, values, key_limits[tile], scale, sliding_window)
    return output.flatten(1)


def store_reference(
    source: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """Write source [T, kv_head, head_dim] into cache [block, kv_head, position, head_dim] at the slots that are not -1.

    With `scales` [block, kv_head, position] it is quantised to the cache's type.
    """
    if scales is None:
        _store_masked(source, cache, slot_mapping)
        return
    stored, vector_scales = quantise(source, cache.dtype)
    _store_masked(stored.view(torch.int8), cache.view(torch.int8), slot_mapping)
    _store_masked(vector_scales, scales, slot_mapping)


def _store_masked(source: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write source [T, kv_head, ...] into cache [block, kv_head, position, ...] at the slots that are not -1.

    A masked store without a data-dependent shape: padding tokens repeat the first real token's write, and if there is
    no real token, they write back what slot 0 holds.
    """
    valid = slot_mapping >= 0
    first = valid.to(torch.int32).argmax().view(1)
    slots = torch.where(valid, slot_mapping, slot_mapping[first]).clamp(min=0)
    block_size = cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    one_each = (-1,) + (1,) * (source.dim() - 1)
    replacement = torch.where(valid[first].view(one_each), source[first], cache[blocks[:1], :, offsets[:1]])
    cache[blocks, :, offsets] = torch.where(valid.view(one_each), source, replacement).to(cache.dtype)


def _read_blocks(cache: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor) -> torch.Tensor:
    """The blocks [n, max_blocks] of each of n tokens as float32 [n, kv_head, keys, head_dim]."""
    if scales is None:
        found = cache[blocks].float()
    else:
        found = dequantise(cache.view(torch.int8)[blocks].view(cache.dtype), scales[blocks])
    return found.transpose(1, 2).flatten(2, 3)


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
    keys: torch.Tensor,
    values: torch.Tensor,
    key_limits: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attention of n tokens, each with its own keys and values [n, kv_head, keys, head_dim] and key limit [n]."""
    token_count, head_count, head_dim = query.shape
    kv_head_count, key_count = keys.shape[1:3]
    positions = torch.arange(key_count, device=query.device)
    seen = positions < key_limits[:, None]
    if sliding_window is not None:
        seen &= positions >= key_limits[:, None] - sliding_window
    mask = seen[:, None, :, None]
    keys, values = keys.masked_fill(~mask, 0), values.masked_fill(~mask, 0)
    grouped = query.float().view(token_count, kv_head_count, head_count // kv_head_count, head_dim)
    scores = (grouped @ keys.transpose(-1, -2) * scale).masked_fill(~seen[:, None, None, :], float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)  # a token that sees nothing gets zeros
    return (weights @ values).view(token_count, head_count, head_dim).to(query.dtype)
