"""The CPU path of attention: decode rows batched over sequences, chunks in tiles. Called by `attention.attention` only.

The query heads that share a KV head are treated as query positions of one head, so that each key is read once for all
of them. In bfloat16, two batched matrix products with a float32 softmax between them are faster than PyTorch's fused
attention except on small inputs (measured: benchmarks/cpu_forward.py). Scores are then rounded to bfloat16, which adds
a tenth to the error that bfloat16 makes anyway. In float32 the fused attention is always used.
"""

import torch
import torch.nn.functional as F

from worker_proc.cpu_cache import read_blocks, store
from worker_proc.cpu_plan import AttentionPlanner, ChunkRow, DecodeGroup, GatherPlan
from worker_proc.forward_context import ForwardContext

MATMUL_SCORES = 12_000
"""Number of scores from which the batched matrix products are faster than the fused attention (bfloat16)."""


def cpu_attention(
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
    plan = context.plans.get(sliding_window)
    if plan is None:
        plan = context.plans[sliding_window] = AttentionPlanner(context, keys_at[0], query.dtype, sliding_window).plan()
    key = store(key, *keys_at, plan)
    value = store(value, *values_at, plan)
    padded = plan.stored_tokens is not None
    output = query.new_zeros(query.shape) if padded else query.new_empty(query.shape)
    for group in plan.decode_groups:
        keys, values = _gather(keys_at, values_at, group.gather)
        output[group.tokens] = _attend_decode(query[group.tokens], keys, values, group, scale)
    for row in plan.chunk_rows:
        if row.gather is None:
            keys, values = (tensor[row.tokens].transpose(0, 1).unsqueeze(0).contiguous() for tensor in (key, value))
        else:
            keys, values = _gather(keys_at, values_at, row.gather)
        _attend_chunk(query[row.tokens], keys, values, row, scale, out=output[row.tokens])
    return output.flatten(1)


def _gather(
    keys_at: tuple[torch.Tensor, torch.Tensor | None],
    values_at: tuple[torch.Tensor, torch.Tensor | None],
    plan: GatherPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the planned rows' K and V into the workspace: [rows, kv_head, keys, head_dim], 0 where unwritten."""
    _, kv_head_count, _, head_dim = keys_at[0].shape
    workspace = plan.workspace
    read_blocks(*keys_at, plan.indices, out=workspace[0])
    read_blocks(*values_at, plan.indices, out=workspace[1])
    if plan.unwritten is not None:
        workspace.view(-1, head_dim).index_fill_(0, plan.unwritten, 0)
    gathered = workspace.view(2, plan.row_count, kv_head_count, plan.key_count, head_dim)
    return gathered[0], gathered[1]


def _attend_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup, scale: float
) -> torch.Tensor:
    """Attention of decode rows; query: [rows, head, head_dim], and so is the result."""
    kv_head_count, head_dim = keys.shape[1], keys.shape[3]
    grouped = query.reshape(query.shape[0], kv_head_count, 1, -1, head_dim)
    return _attend(grouped, keys, values, group.mask, scale).view(query.shape)


def _attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, row: ChunkRow, scale: float, *, out: torch.Tensor
) -> None:
    """query and out: [query tokens of the row, head, head_dim]; keys and values: [1, kv_head, keys, head_dim]."""
    kv_head_count, head_dim = keys.shape[1], keys.shape[3]
    grouped_shape = (-1, kv_head_count, query.shape[1] // kv_head_count, head_dim)
    for tile in row.tiles:
        tokens = slice(tile.start, tile.end)
        grouped = query[tokens].reshape(grouped_shape).transpose(0, 1).unsqueeze(0)
        attended = _attend(grouped, keys[:, :, : tile.key_end], values[:, :, : tile.key_end], tile.mask, scale)
        out[tokens] = attended.squeeze(0).transpose(0, 1).reshape(out[tokens].shape)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of grouped heads.

    Args:
        query: [rows, kv_head, tokens, heads per kv_head, head_dim].
        keys, values: [rows, kv_head, keys, head_dim].
        mask: float32 [rows or 1, 1, tokens or 1, 1, keys], added to the scaled scores.

    Returns:
        As `query`, contiguous.
    """
    rows, kv_head_count, token_count, group_size, _ = query.shape
    key_count = keys.shape[2]
    flat_query = query.flatten(2, 3)
    score_count = flat_query.shape[:3].numel() * key_count
    if query.dtype == torch.float32 or score_count < MATMUL_SCORES:
        flat_mask = None
        if mask is not None:
            flat_mask = mask.expand(-1, 1, token_count, group_size, key_count).flatten(2, 3)
        return F.scaled_dot_product_attention(flat_query, keys, values, attn_mask=flat_mask, scale=scale).view(
            query.shape
        )
    scores = torch.bmm(flat_query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    scores = scores.view(rows, kv_head_count, token_count, group_size, key_count)
    wide = scores.float().mul_(scale) if mask is None else torch.add(mask, scores, alpha=scale)
    weights = wide.softmax(-1).to(query.dtype)
    return torch.bmm(weights.view(rows * kv_head_count, -1, key_count), values.flatten(0, 1)).view(query.shape)
