"""The CPU path of attention: decode rows batched over sequences, chunk rows one by one, PyTorch's fused attention inside.

On a CPU reading a tensor's value costs nothing, so what all layers share (gather indices, masks) is worked out once per
step from the context's own tensors and kept in `context.plans`. Called by `attention.attention` only.

Decode rows of similar length form a group. Their blocks are gathered right-aligned: every row's last block comes last, so
unwritten positions are in one known place (the last block) and are zeroed there; padding on the left repeats a row's own
last block and is masked. The query heads that share a KV head become the query positions of one head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from worker_proc.forward_context import ForwardContext


@dataclass
class GatherPlan:
    """How the cached tokens of some rows become one tensor [rows, kv_head, keys, head_dim].

    indices: int64 [rows * kv_head * blocks], into a cache seen as [block * kv_head, position * head_dim].
    tail: bool [rows, 1, block_size, 1], positions of the last block beyond the context; None if there are none.
    """

    row_count: int
    indices: torch.Tensor
    tail: torch.Tensor | None


@dataclass
class DecodeGroup:
    """Decode rows that are attended together: their tokens, their gather, the additive mask [rows, 1, 1, keys] or None."""

    tokens: torch.Tensor | slice
    gather: GatherPlan
    mask: torch.Tensor | None


@dataclass
class ChunkRow:
    """One row with several query tokens; `gather` is None if the whole context is in this step."""

    tokens: slice
    gather: GatherPlan | None
    mask: torch.Tensor | None


@dataclass
class StepPlan:
    """What the layers of one step share. `stored_tokens` is None when every token is stored (no padding)."""

    store_indices: torch.Tensor
    stored_tokens: torch.Tensor | None
    decode_groups: list[DecodeGroup]
    chunk_rows: list[ChunkRow]


@dataclass(frozen=True)
class RowShape:
    """One row on the host: first query token, query tokens, context length, slot."""

    start: int
    query_count: int
    context_length: int
    slot: int


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
    key_cache, value_cache = context.key_caches[layer_index], context.value_caches[layer_index]
    plan = context.plans.get(sliding_window)
    if plan is None:
        plan = context.plans[sliding_window] = plan_step(context, key_cache, sliding_window)
    _store(key, key_cache, plan)
    _store(value, value_cache, plan)
    token_count, head_count, head_dim = query.shape
    kv_head_count = key.shape[1]
    group_shape = (-1, kv_head_count, head_count // kv_head_count, head_dim)
    if not plan.chunk_rows and len(plan.decode_groups) == 1 and isinstance(plan.decode_groups[0].tokens, slice):
        group = plan.decode_groups[0]
        if group.tokens == slice(0, token_count):
            output = _attend_decode(query.view(group_shape), key_cache, value_cache, group, scale)
            return output.reshape(token_count, head_count * head_dim)
    output = query.new_zeros(query.shape)
    for group in plan.decode_groups:
        grouped = query[group.tokens].view(group_shape)
        output[group.tokens] = _attend_decode(grouped, key_cache, value_cache, group, scale).view(
            -1, head_count, head_dim
        )
    for row in plan.chunk_rows:
        output[row.tokens] = _attend_chunk(query, key, value, key_cache, value_cache, row, scale)
    return output.view(token_count, head_count * head_dim)


def plan_step(context: ForwardContext, cache: torch.Tensor, sliding_window: int | None) -> StepPlan:
    """Work out what all layers with this window and this cache shape share."""
    starts = context.query_starts.tolist()
    lengths = context.context_lengths.tolist()
    slots = context.row_slots.tolist()
    rows = [
        RowShape(start, end - start, length, slot)
        for start, end, length, slot in zip(starts[:-1], starts[1:], lengths, slots, strict=True)
        if slot >= 0 and end > start
    ]
    store_indices, stored_tokens = _plan_store(context.slot_mapping, cache)
    decode_rows = [row for row in rows if row.query_count == 1]
    groups = [_plan_decode_group(group, context, cache, sliding_window) for group in _by_length(decode_rows, context)]
    chunks = [_plan_chunk(row, context, cache, sliding_window) for row in rows if row.query_count > 1]
    return StepPlan(store_indices, stored_tokens, groups, chunks)


def _plan_store(slot_mapping: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Indices [stored * kv_head] into a cache seen as [block * kv_head * position, head_dim], and which tokens go there."""
    _, kv_head_count, block_size, _ = cache.shape
    stored = slot_mapping >= 0
    stored_tokens = None if bool(stored.all()) else stored.nonzero().squeeze(1)
    slots = slot_mapping if stored_tokens is None else slot_mapping[stored_tokens]
    heads = torch.arange(kv_head_count)
    indices = ((slots // block_size)[:, None] * kv_head_count + heads) * block_size + (slots % block_size)[:, None]
    return indices.flatten(), stored_tokens


def _store(source: torch.Tensor, cache: torch.Tensor, plan: StepPlan) -> None:
    if plan.stored_tokens is not None:
        source = source[plan.stored_tokens]
    head_dim = cache.shape[-1]
    cache.view(-1, head_dim).index_copy_(0, plan.store_indices, source.reshape(-1, head_dim))


def _by_length(rows: list[RowShape], context: ForwardContext) -> list[list[RowShape]]:
    """Split decode rows so that within a group no row is padded to more than about twice its length."""
    groups: dict[int, list[RowShape]] = {}
    for row in rows:
        block_count = -(-row.context_length // context.block_size)
        groups.setdefault(block_count.bit_length(), []).append(row)
    return list(groups.values())


def _plan_decode_group(
    rows: list[RowShape], context: ForwardContext, cache: torch.Tensor, sliding_window: int | None
) -> DecodeGroup:
    first_token = rows[0].start
    consecutive = all(row.start == first_token + index for index, row in enumerate(rows))
    tokens = slice(first_token, first_token + len(rows)) if consecutive else torch.tensor([row.start for row in rows])
    gather, first_keys = _plan_gather(rows, context, cache, sliding_window)
    key_positions = first_keys[:, None] + torch.arange(
        gather.indices.shape[0] // (len(rows) * cache.shape[1]) * cache.shape[2]
    )
    lengths = torch.tensor([row.context_length for row in rows])[:, None]
    seen = (key_positions >= 0) & (key_positions < lengths)
    if sliding_window is not None:
        seen &= key_positions >= lengths - sliding_window
    mask = None if bool(seen.all()) else _additive(seen[:, None, None, :], cache.dtype)
    return DecodeGroup(tokens, gather, mask)


def _plan_gather(
    rows: list[RowShape], context: ForwardContext, cache: torch.Tensor, sliding_window: int | None
) -> tuple[GatherPlan, torch.Tensor]:
    """The right-aligned gather of the rows' blocks, and the position of the first gathered key of each row [rows].

    That position is negative where a shorter row is padded on the left.
    """
    block_size, kv_head_count = context.block_size, cache.shape[1]
    tables, used_counts = [], []
    for row in rows:
        end = -(-row.context_length // block_size)
        oldest = 0 if sliding_window is None else max(0, row.context_length - row.query_count + 1 - sliding_window)
        used_counts.append(end - oldest // block_size)
        tables.append(context.block_tables[row.slot, oldest // block_size : end].long())
    width = max(used_counts)
    blocks = torch.stack([torch.cat((t[-1:].expand(width - t.shape[0]), t)) for t in tables])
    indices = (blocks[:, None, :] * kv_head_count + torch.arange(kv_head_count)[None, :, None]).flatten()
    lengths = torch.tensor([row.context_length for row in rows])
    ends = (lengths + block_size - 1) // block_size * block_size
    tail = torch.arange(block_size) >= (lengths - ends + block_size)[:, None]
    tail_mask = tail[:, None, :, None] if bool(tail.any()) else None
    return GatherPlan(len(rows), indices, tail_mask), ends - width * block_size


def _plan_chunk(row: RowShape, context: ForwardContext, cache: torch.Tensor, sliding_window: int | None) -> ChunkRow:
    tokens = slice(row.start, row.start + row.query_count)
    fresh = row.context_length == row.query_count
    if fresh and (sliding_window is None or sliding_window >= row.context_length):
        return ChunkRow(tokens, None, None)
    gather, first_key = (None, 0) if fresh else _plan_gather([row], context, cache, sliding_window)
    key_count = row.query_count if gather is None else gather.indices.shape[0] // cache.shape[1] * cache.shape[2]
    key_positions = int(first_key) + torch.arange(key_count)
    query_positions = torch.arange(row.context_length - row.query_count, row.context_length)[:, None]
    seen = key_positions <= query_positions
    if sliding_window is not None:
        seen &= key_positions > query_positions - sliding_window
    return ChunkRow(tokens, gather, _additive(seen, cache.dtype))


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _gather(key_cache: torch.Tensor, value_cache: torch.Tensor, plan: GatherPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the planned rows, contiguous [rows, kv_head, keys, head_dim], unwritten positions zeroed."""
    _, kv_head_count, block_size, head_dim = key_cache.shape
    gathered = key_cache.new_empty(2, plan.indices.shape[0], block_size * head_dim)
    torch.index_select(key_cache.view(-1, block_size * head_dim), 0, plan.indices, out=gathered[0])
    torch.index_select(value_cache.view(-1, block_size * head_dim), 0, plan.indices, out=gathered[1])
    gathered = gathered.view(2, plan.row_count, kv_head_count, -1, head_dim)
    if plan.tail is not None:
        gathered[:, :, :, -block_size:].masked_fill_(plan.tail, 0)
    return gathered[0], gathered[1]


def _attend_decode(
    grouped: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, group: DecodeGroup, scale: float
) -> torch.Tensor:
    """grouped: [rows, kv_head, heads per kv_head, head_dim]; the same shape comes back."""
    keys, values = _gather(key_cache, value_cache, group.gather)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask, scale=scale)


def _attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    row: ChunkRow,
    scale: float,
) -> torch.Tensor:
    """[query tokens of the row, head_count, head_dim]."""
    queries = query[row.tokens].transpose(0, 1).unsqueeze(0)
    if row.gather is None:
        keys, values = (tensor[row.tokens].transpose(0, 1).unsqueeze(0) for tensor in (key, value))
    else:
        keys, values = _gather(key_cache, value_cache, row.gather)
    output = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=row.mask, is_causal=row.mask is None, scale=scale, enable_gqa=True
    )
    return output.squeeze(0).transpose(0, 1)
