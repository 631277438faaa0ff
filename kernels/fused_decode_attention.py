"""Everything between the qkv product and the output product for a few decode rows, in one launch.

What kernels/qk_norm_rope_store.py and kernels/decode_attention.py do one after the other, for the one new token of each
row: norm and rotate q and k, store K and V, attend to the row's cached tokens and to the new one. With few rows the
time is not that of reading the cache but that of waiting for it, once for each load that needs the one before it. So
all that earlier steps have written is loaded while the kernels ahead still run: the row's slot, its length, its block
ids and the first tile of keys and values. When they are done only q, k and v of the new token are missing.

    q, k      = rotate(norm(q)), rotate(norm(k))          as kernels/qk_norm_rope_store.py; rounded as stored
    out       = softmax(scale * q K^T) V                  over the n - 1 cached tokens and the new one

The tiles of `tile` cached tokens of each (row, K/V head) are shared out between `splits` programs; each leaves a
maximum, a normaliser and a float32 accumulator, and the last to finish, by an atomic counter, merges them [1]. Split 0
takes the new token. One captured graph is right for every mix of lengths.

| tensor             | axes                | dtype        | notes                                             |
|--------------------|---------------------|--------------|---------------------------------------------------|
| qkv                | [R, (hq + 2 hkv) d] | as the cache | last axis 1; q heads, k, then v                   |
| output             | [R, hq, d]          | as the cache | rows of slot -1 or length 0 get zeros             |
| rope_table         | [max_position, d]   | float32      | cosines, then sines; as the other kernel's        |
| q_weight, k_weight | [d]                 | any float    | both or neither                                   |
| partials           | [workspace_floats]  | float32      | contents never matter                             |
| counters           | [R hkv]             | int32        | zero before the first call and after each         |

Caches, block_tables, row_slots and context_lengths: see kernels/paged_kv.py. These must have been written by kernels
that had completed before the kernel ahead of this one started (`kernels.launch` has the rules of early launches): in a
step, the embedding waits for them before it lets anything behind it start.

Limits: head_dim 64, 128, 256; group <= 16; R <= MAX_ROWS; no sliding window, no soft cap (`supports`).

Sources: [1] Flash-Decoding, PyTorch blog, 2023-10; Milakov and Gimelshein, arXiv:1805.02867.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import FLOATS, check_tensor
from kernels.launch import launch_options, let_next_start, wait_for_inputs
from kernels.paged_kv import LOG2_E, attend_row, gather_row
from kernels.qk_norm_rope_store import normed_rotated_heads, qk_norm_rope_store_reference

MAX_ROWS = 16
GROUP_ROWS = 16  # query rows of a tensor core's tile
PROGRAM_TARGET = 264  # two for each multiprocessor of the card that this was measured on
MAX_SPLITS = 32
MERGE_ELEMENTS = 8192  # numbers of the parts that a merge holds at a time


def fused_decode_attention_reference(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    rope_table: torch.Tensor,
    query_heads: int,
    *,
    scale: float,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Stores K and V in place and returns [R, hq, d] in float32; zeros for padding rows. Synchronises."""
    block_size = k_cache.shape[2]
    slots, lengths = row_slots.tolist(), context_lengths.tolist()
    real = [slot >= 0 and length > 0 for slot, length in zip(slots, lengths, strict=True)]
    places = [
        int(block_tables[slot, (n - 1) // block_size]) * block_size + (n - 1) % block_size if is_real else -1
        for slot, n, is_real in zip(slots, lengths, real, strict=True)
    ]
    query = qk_norm_rope_store_reference(
        qkv, k_cache, v_cache, torch.tensor(places, device=qkv.device), (context_lengths - 1).clamp(min=0), rope_table,
        query_heads, q_weight, k_weight, eps,
    )  # fmt: skip
    result = torch.zeros(query.shape, device=qkv.device)
    for row, (slot, n) in enumerate(zip(slots, lengths, strict=True)):
        if real[row]:
            key, value = (gather_row(cache, block_tables[slot], n, torch.float32) for cache in (k_cache, v_cache))
            result[row] = attend_row(query[row : row + 1], key, value, scale=scale)[0]
    return result


def supports(head_dim: int, group: int, rotary_dim: int, sliding_window: int) -> bool:
    """Whether this kernel computes the attention of a model."""
    return head_dim in (64, 128, 256) and group <= GROUP_ROWS and rotary_dim == head_dim and sliding_window == 0


@dataclass(frozen=True)
class FusedDecodePlan:
    """Everything a launch fixes; a pure function of the bucket and the head shape."""

    splits: int
    min_share: int
    tile: int
    num_warps: int
    workspace_floats: int


def launch_plan(row_count: int, kv_heads: int, head_dim: int) -> FusedDecodePlan:
    """As many splits, a power of two, as keep the number of programs near what the card holds at once."""
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * row_count * kv_heads <= PROGRAM_TARGET:
        splits *= 2
    floats = row_count * kv_heads * splits * GROUP_ROWS * (head_dim + 2)
    tile = 64 if head_dim <= 128 else 32
    return FusedDecodePlan(splits, min_share=1, tile=tile, num_warps=4, workspace_floats=floats)


@triton.jit
def _tile_places(table, position, cached, head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                 HEAD_DIM: tl.constexpr):  # fmt: skip
    """Offsets [tile, d] of cached positions in either cache, and which of them hold a token."""
    column = tl.arange(0, HEAD_DIM)
    inside = position < cached
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    start = ((block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    return start[:, None] + column[None, :], inside


@triton.jit
def _take(scores, values, maximum, normaliser, accumulator):
    """Take a tile's scores [G, tile] (in powers of two) and values [tile, d] into the running sums."""
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # nothing seen yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(maximum - base)
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator * shrink[:, None], input_precision="ieee")
    return new_maximum, normaliser * shrink + tl.sum(weights, axis=1), accumulator


@triton.jit
def _fused_decode_kernel(
    qkv, output, k_cache, v_cache, block_tables, row_slots, context_lengths, rope_table, q_weight, k_weight,
    partials, counters, qkv_stride, output_stride, table_stride, eps, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr, MIN_SHARE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # 1. Locate: one split of one K/V head of one row. Nothing read here is written by the kernels just ahead.
    let_next_start(PDL)
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    slot = tl.load(row_slots + row)
    length = tl.load(context_lengths + row)
    is_real = (slot >= 0) & (length > 0)
    cached = tl.where(is_real, length - 1, 0)
    tiles = tl.cdiv(cached, TILE)
    share = tl.maximum(tl.cdiv(tiles, SPLITS), MIN_SHARE)
    active = tl.maximum(tl.cdiv(tiles, share), 1)
    column = tl.arange(0, HEAD_DIM)
    query = tl.arange(0, ROWS)
    in_group = query[:, None] < GROUP
    place = output + row.to(tl.int64) * output_stride + (head * GROUP + query[:, None]) * HEAD_DIM + column[None, :]
    if is_real == 0:
        wait_for_inputs(PDL)
        if split == 0:
            tl.store(place, tl.zeros([ROWS, HEAD_DIM], dtype=output.dtype.element_ty), mask=in_group)
    elif split < active:
        table = block_tables + slot.to(tl.int64) * table_stride
        # 2. Load the first tile of keys and values, which earlier steps wrote.
        first = split * share
        last = tl.minimum(first + share, tiles)
        lane = tl.arange(0, TILE)
        places, inside = _tile_places(table, first * TILE + lane, cached, head, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        keys = tl.load(k_cache + places, mask=inside[:, None], other=0.0)
        values = tl.load(v_cache + places, mask=inside[:, None], other=0.0)
        new_block = tl.load(table + (length - 1) // BLOCK_SIZE).to(tl.int64)
        rope_row = rope_table + (length - 1).to(tl.int64) * HEAD_DIM
        wait_for_inputs(PDL)
        # 3. The group's queries, and the new token's key and value, which split 0 stores and attends to.
        source = qkv + row.to(tl.int64) * qkv_stride
        offset = (head * GROUP + query[:, None]) * HEAD_DIM + column[None, :]
        inside_group = in_group & (column[None, :] >= 0)
        at = (KV_HEADS * GROUP + head + tl.arange(0, 1)[:, None]) * HEAD_DIM + column[None, :]
        owns_new = (split == 0) & (at >= 0)
        v = tl.load(source + at + KV_HEADS * HEAD_DIM, mask=owns_new, other=0.0).to(v_cache.dtype.element_ty)
        k = normed_rotated_heads(
            source, k_weight, rope_row, eps, at, column, owns_new, HEAD_DIM, HEAD_DIM // 2, HAS_NORM
        )  # fmt: skip
        q = normed_rotated_heads(
            source, q_weight, rope_row, eps, offset, column, inside_group, HEAD_DIM, HEAD_DIM // 2, HAS_NORM
        )  # fmt: skip
        k = k.to(k_cache.dtype.element_ty)
        q = q.to(k_cache.dtype.element_ty)
        target = ((new_block * KV_HEADS + head) * BLOCK_SIZE + (length - 1) % BLOCK_SIZE) * HEAD_DIM + column[None, :]
        tl.store(k_cache + target, k, mask=owns_new)
        tl.store(v_cache + target, v, mask=owns_new)
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale_log2
        maximum = tl.where(split == 0, score, float("-inf"))
        normaliser = tl.where(split == 0, 1.0, 0.0) + tl.zeros([ROWS], dtype=tl.float32)
        accumulator = v.to(tl.float32) + tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
        # 4. The cached tokens of this split, the next tile loaded behind each.
        for tile in range(first, last):
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
            scores = tl.where(inside[None, :], scores, float("-inf"))
            maximum, normaliser, accumulator = _take(scores, values, maximum, normaliser, accumulator)
            position = (tile + 1) * TILE + lane
            places, inside = _tile_places(
                table, position, tl.where(tile + 1 < last, cached, 0), head, KV_HEADS, BLOCK_SIZE, HEAD_DIM
            )  # fmt: skip
            keys = tl.load(k_cache + places, mask=inside[:, None], other=0.0)
            values = tl.load(v_cache + places, mask=inside[:, None], other=0.0)
        # 5. Store the result, or this split's part of it.
        if active == 1:
            result = accumulator / normaliser[:, None]
            tl.store(place, result.to(output.dtype.element_ty), mask=in_group)
        else:
            pair = row * KV_HEADS + head
            part = pair * SPLITS + split
            statistics = partials + tl.num_programs(2) * (KV_HEADS * SPLITS * ROWS * HEAD_DIM)
            tl.store(partials + (part * ROWS + query[:, None]) * HEAD_DIM + column[None, :], accumulator, mask=in_group)
            tl.store(statistics + part * (2 * ROWS) + query, maximum)
            tl.store(statistics + part * (2 * ROWS) + ROWS + query, normaliser)
            tl.debug_barrier()  # all threads' parts are written before the counter says so
            if tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu") == active - 1:
                # 6. Merge: the last to arrive reads every part.
                tl.store(counters + pair, 0)
                _merge(output + row.to(tl.int64) * output_stride + head * (GROUP * HEAD_DIM), partials, statistics,
                       pair * SPLITS, active, GROUP, HEAD_DIM, SPLITS, ROWS, HEADS, PARTS)  # fmt: skip


@triton.jit
def _merge(output, partials, statistics, first_part, active, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
           SPLITS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Merge the splits of one (row, head), PARTS of them at a time, all loads of a time at once."""
    column = tl.arange(0, HEAD_DIM)
    query = tl.arange(0, HEADS)
    maximum = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    normaliser = tl.zeros([HEADS], dtype=tl.float32)
    accumulator = tl.zeros([HEADS, HEAD_DIM], dtype=tl.float32)
    for first in tl.static_range(0, SPLITS, PARTS):
        split = first + tl.arange(0, PARTS)
        is_part = (split < active)[:, None] & (query < GROUP)[None, :]
        part = (first_part + split)[:, None]
        statistic = statistics + part * (2 * ROWS) + query[None, :]
        place = partials + (part * ROWS + query[None, :])[:, :, None] * HEAD_DIM + column[None, None, :]
        part_maximum = tl.load(statistic, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        part_normaliser = tl.load(statistic + ROWS, mask=is_part, other=0.0, cache_modifier=".cg")
        part_accumulator = tl.load(place, mask=is_part[:, :, None], other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, axis=0))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # query rows that pad the group
        weight = tl.exp2(part_maximum - base[None, :])
        shrink = tl.exp2(maximum - base)
        normaliser = normaliser * shrink + tl.sum(part_normaliser * weight, axis=0)
        accumulator = accumulator * shrink[:, None] + tl.sum(part_accumulator * weight[:, :, None], axis=0)
        maximum = new_maximum
    result = accumulator / tl.where(query < GROUP, normaliser, 1.0)[:, None]
    place = output + query[:, None] * HEAD_DIM + column[None, :]
    tl.store(place, result.to(output.dtype.element_ty), mask=(query < GROUP)[:, None])


def _check(output, qkv, k_cache, v_cache, block_tables, row_slots, context_lengths, rope_table, weights) -> None:
    _, kv_heads, block_size, head_dim = k_cache.shape
    check_tensor("k_cache", k_cache, (None, None, None, None), FLOATS)
    check_tensor("v_cache", v_cache, k_cache.shape, k_cache.dtype, like=k_cache)
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()) or block_size & (block_size - 1):
        raise ValueError(f"k_cache, v_cache: wanted contiguous blocks of a power of two of positions, got {block_size}")
    check_tensor("output", output, (None, None, head_dim), k_cache.dtype, like=k_cache)
    rows, query_heads, _ = output.shape
    check_tensor("qkv", qkv, (rows, (query_heads + 2 * kv_heads) * head_dim), k_cache.dtype, like=k_cache)
    check_tensor("block_tables", block_tables, (None, None), torch.int32, like=k_cache)
    check_tensor("row_slots", row_slots, (rows,), torch.int32, like=k_cache)
    check_tensor("context_lengths", context_lengths, (rows,), torch.int32, like=k_cache)
    check_tensor("rope_table", rope_table, (None, head_dim), torch.float32, like=k_cache)
    for name, weight in weights.items():
        if weight is not None:
            check_tensor(name, weight, (head_dim,), FLOATS, like=k_cache)
    if (weights["q_weight"] is None) != (weights["k_weight"] is None):
        raise ValueError("q_weight and k_weight: wanted both or neither, got one")
    if rows > MAX_ROWS or query_heads % kv_heads or not supports(head_dim, query_heads // kv_heads, head_dim, 0):
        raise ValueError(f"output: wanted at most {MAX_ROWS} rows of heads that `supports` takes, got {output.shape}")


def fused_decode_attention(
    output: torch.Tensor,
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    rope_table: torch.Tensor,
    partials: torch.Tensor,
    counters: torch.Tensor,
    plan: FusedDecodePlan,
    *,
    scale: float,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Store the new tokens' K and V and write their attention to `output`. Shapes: the module's table.

    `plan` is `launch_plan` of the bucket. Raises ValueError for a shape, dtype, stride or device that differs from the
    table, or a workspace that is too small.
    """
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    _check(output, qkv, k_cache, v_cache, block_tables, row_slots, context_lengths, rope_table, weights)
    rows, query_heads, head_dim = output.shape
    kv_heads, block_size = k_cache.shape[1:3]
    if partials.numel() < plan.workspace_floats or counters.numel() < rows * kv_heads:
        raise ValueError(
            f"workspace: wanted {plan.workspace_floats} floats and {rows * kv_heads} counters, "
            f"got {partials.numel()} and {counters.numel()}"
        )
    if rows == 0:
        return
    has_norm = q_weight is not None
    heads = triton.next_power_of_2(query_heads // kv_heads)
    _fused_decode_kernel[(plan.splits, kv_heads, rows)](
        qkv, output, k_cache, v_cache, block_tables, row_slots, context_lengths, rope_table,
        q_weight if has_norm else qkv, k_weight if has_norm else qkv, partials, counters,
        qkv.stride(0), output.stride(0), block_tables.stride(0), eps, scale * LOG2_E,
        KV_HEADS=kv_heads, GROUP=query_heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, SPLITS=plan.splits,
        MIN_SHARE=plan.min_share, TILE=plan.tile, ROWS=GROUP_ROWS, HAS_NORM=has_norm, HEADS=heads,
        PARTS=min(plan.splits, max(1, MERGE_ELEMENTS // (heads * head_dim))), num_warps=plan.num_warps,
        **launch_options(qkv),
    )  # fmt: skip
