"""Attention of `--deterministic` on the CPU: a query's result depends on its position and its own context only.

Queries are taken in tiles of TILE positions, aligned to multiples of TILE within their request, and with each tile the
keys up to its end, padded with zeros. So the shapes of a query's products follow from its position, and it always has
the same place in its tile, however its prompt was cut into chunks. Called by `attention.attention` only.
"""

import torch

from worker_proc.cpu_cache import read_blocks, store
from worker_proc.cpu_plan import AttentionPlanner, Row
from worker_proc.forward_context import ForwardContext

TILE = 16
"""Positions of a tile."""


def fixed_order_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_index: int,
    context: ForwardContext,
    *,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """See `attention.attention`."""
    keys_at, values_at = context.layer_keys(layer_index), context.layer_values(layer_index)
    planner = context.plans.get(sliding_window)
    if planner is None:
        planner = context.plans[sliding_window] = AttentionPlanner(context, keys_at[0], query.dtype, sliding_window)
    plan = planner.store_plan()
    store(key, *keys_at, plan)
    store(value, *values_at, plan)
    output = torch.zeros_like(query)
    for row in planner.rows():
        first = row.context_length - row.query_count
        for tile in range(first // TILE, (row.context_length - 1) // TILE + 1):
            start, end = max(first, tile * TILE), min(row.context_length, (tile + 1) * TILE)
            tokens = slice(row.first_token + start - first, row.first_token + end - first)
            places = slice(start - tile * TILE, end - tile * TILE)
            key_start = first_key(tile, sliding_window)
            keys, values = (
                _read(*place, context.block_tables[row.slot], key_start, (tile + 1) * TILE, row, query.dtype)
                for place in (keys_at, values_at)
            )
            queries = query.new_zeros(TILE, *query.shape[1:])
            queries[places] = query[tokens]
            output[tokens] = _attend(queries, keys, values, _seen(tile, key_start, sliding_window), scale)[places]
    return output.flatten(1)


def first_key(tile: int, sliding_window: int | None) -> int:
    """The first position, a multiple of TILE, whose key some query of a tile may see."""
    return 0 if sliding_window is None else max(0, tile * TILE - sliding_window + 1) // TILE * TILE


def _seen(tile: int, key_start: int, sliding_window: int | None) -> torch.Tensor:
    """Which keys from `key_start` to the tile's end its queries may see, bool [TILE, keys]."""
    positions = torch.arange(tile * TILE, (tile + 1) * TILE)[:, None]
    keys = torch.arange(key_start, (tile + 1) * TILE)
    seen = keys <= positions
    return seen if sliding_window is None else seen & (keys > positions - sliding_window)


def _read(
    cache: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor, start: int, end: int, row: Row,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """A row's keys or values at positions `start` to `end`, [kv_head, positions, head_dim]; zeros past its context."""
    _, kv_head_count, block_size, head_dim = cache.shape
    stop = min(end, row.context_length)
    first_block, block_end = start // block_size, -(-stop // block_size)
    blocks = table[first_block:block_end].long() * kv_head_count + torch.arange(kv_head_count)[:, None]
    found = torch.empty(blocks.numel(), block_size * head_dim, dtype=dtype)
    read_blocks(cache, scales, blocks.flatten(), out=found)
    result = found.new_zeros(kv_head_count, end - start, head_dim)
    offset = start - first_block * block_size
    result[:, : stop - start] = found.view(kv_head_count, -1, head_dim)[:, offset : offset + stop - start]
    return result


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """query: [TILE, head, head_dim]; keys, values: [kv_head, keys, head_dim]; as `query`."""
    kv_head_count, key_count, head_dim = keys.shape
    grouped = query.view(TILE, kv_head_count, -1, head_dim).transpose(0, 1).reshape(kv_head_count, -1, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)).float().view(kv_head_count, TILE, -1, key_count) * scale
    weights = scores.masked_fill(~seen[:, None, :], float("-inf")).softmax(-1).to(query.dtype)
    attended = torch.bmm(weights.view(kv_head_count, -1, key_count), values)
    return attended.view(kv_head_count, TILE, -1, head_dim).transpose(0, 1).reshape(query.shape)
