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
takes the new token. One captured graph is right for every mix of lengths. One row's parts may also be left for the
product that reads them (`leave`, kernels/attention_parts.py).

| tensor             | axes                | dtype        | notes                                             |
|--------------------|---------------------|--------------|---------------------------------------------------|
| qkv                | [R, (hq + 2 hkv) d] | any float    | last axis 1; q heads, k, then v                   |
| output             | [R, hq, d]          | as qkv       | rows of slot -1 or length 0 get zeros             |
| rope_table         | [max_position, d]   | float32      | cosines, then sines; as the other kernel's        |
| q_weight, k_weight | [d]                 | any float    | both or neither                                   |
| key_scales,        | [block, hkv, pos]   | float16      | beside 8-bit caches; else None                    |
| value_scales       |                     |              |                                                   |
| partials           | [workspace_floats]  | float32      | contents never matter                             |
| counters           | [R hkv]             | int32        | zero before the first call and after each         |

Caches, block_tables, row_slots and context_lengths: see kernels/paged_kv.py. These must have been written by kernels
that had completed before the kernel ahead of this one started (`kernels.launch` has the rules of early launches): in a
step, the embedding waits for them before it lets anything behind it start.

In a plan with `is_apart` the kernel is that of kernels/fused_decode_parts.py, in one with `single_warps` that of
kernels/fused_decode_warps.py, which has its own figures.

Measured on an H200 at commit a0cc4ce between the products of 28 layers, 16 query and 8 K/V heads of 128, bfloat16: 6.2
us a layer for one row of 512 tokens, 7.9 for 8 of 200, 10.8 for 16 of 256 (two launches: 16.2); int8 8.0 for the first.

Limits: head_dim 64, 128, 256; group <= 16; R <= MAX_ROWS; no sliding window, no soft cap (`supports`).

Sources: [1] Flash-Decoding, PyTorch blog, 2023-10; Milakov and Gimelshein, arXiv:1805.02867.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import FLOATS, check_tensor
from kernels.decode_tile import (
    attend_tile,
    is_native,
    load_tile,
    merge_parts,
    merge_sizes,
    prefetch_tile,
    query_parts,
    split_sums,
    whole_sums,
)
from kernels.fused_decode_parts import fused_decode_parts_kernel
from kernels.kv_format import TOPS, cache_format
from kernels.kv_quant import check_scales
from kernels.launch import launch_options, let_next_start, wait_for_inputs
from kernels.new_token import NewTokens, new_queries, norm_gains, rotation, stored_new_token
from kernels.paged_kv import LOG2_E, HeadShape, gluon_attends, paged_attention_reference
from kernels.qk_norm_rope_store import qk_norm_rope_store_reference

MAX_ROWS = 16
GROUP_ROWS = 16  # query rows of a tensor core's tile
PROGRAM_TARGET = 264  # two for each multiprocessor of the card that this was measured on; of single warps four times it
APART_ROWS = 2
"""Up to here the new token is a part of its own: 577 us a step of one row, not 640; of 16 rows 1,222, not 1,127."""

MAX_SPLITS = 32
WARPS_GROUP = 8  # query heads of a K/V head that kernels/fused_decode_warps.py takes
WARPS_TILE = 16
"""Cached tokens that a single warp takes at a time. Tiles of 32 leave the products beside less room: in a chain of the
Qwen3-0.6B shape's layers 8 rows of 200 tokens take 18.4 us a layer so and 19.6 with 32, 8 of 4,000 50.1 and 54.2."""

WARPS_ROWS = 2
WARPS_ROWS_8_BIT = 4
"""Rows from which on kernels/fused_decode_warps.py computes plain and 8-bit caches; below, the others are faster. A
step of the Qwen3-0.6B shape on an H200, int8: 2 rows of 512 tokens 752 us by single warps and 723 without, 8 of 200
tokens 782 and 876, 16 of 300 tokens 914 and 1,024."""


def fused_decode_attention_reference(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
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
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stores K and V in place and returns [R, hq, d] in float32; zeros for padding rows. Synchronises."""
    block_size = key_cache.shape[2]
    slots, lengths = row_slots.tolist(), context_lengths.tolist()
    real = [slot >= 0 and length > 0 for slot, length in zip(slots, lengths, strict=True)]
    places = [
        int(block_tables[slot, (n - 1) // block_size]) * block_size + (n - 1) % block_size if is_real else -1
        for slot, n, is_real in zip(slots, lengths, real, strict=True)
    ]
    query = qk_norm_rope_store_reference(
        qkv, key_cache, value_cache, torch.tensor(places, device=qkv.device),
        (context_lengths - 1).clamp(min=0), rope_table, query_heads, q_weight, k_weight, eps, key_scales, value_scales,
    )  # fmt: skip
    cache = (key_cache, value_cache, block_tables, row_slots, context_lengths)
    return paged_attention_reference(
        query, *cache, torch.arange(len(slots) + 1), scale=scale, key_scales=key_scales, value_scales=value_scales
    )


def supports(head_dim: int, group: int, rotary_dim: int, sliding_window: int) -> bool:
    """Whether this kernel computes the attention of a model."""
    return head_dim in (64, 128, 256) and group <= GROUP_ROWS and rotary_dim == head_dim and sliding_window == 0


def can_take_warps(
    shape: HeadShape, dtype: torch.dtype, *, quantised: bool, capability_major: int,
    triton_version: str = triton.__version__,
) -> bool:  # fmt: skip
    """Whether kernels/fused_decode_warps.py computes such calls on a card of that compute capability.

    `dtype` is the query's; `quantised`: the cache holds 8-bit elements.
    """
    card = {"capability_major": capability_major, "triton_version": triton_version}
    return gluon_attends(shape, dtype, WARPS_GROUP, quantised=quantised, **card)


def takes_warps(
    row_count: int, shape: HeadShape, dtype: torch.dtype, *, quantised: bool, capability_major: int
) -> bool:
    """Whether the plan that ships is one of single warps: where these can, and were measured to be faster."""
    is_faster = row_count >= (WARPS_ROWS_8_BIT if quantised else WARPS_ROWS)
    return is_faster and can_take_warps(shape, dtype, quantised=quantised, capability_major=capability_major)


@dataclass(frozen=True)
class FusedDecodePlan:
    """Everything a launch fixes; a pure function of the bucket and the head shape.

    Attributes:
        splits: programs of a (row, K/V head), between which its cached tokens are shared out.
        tile: cached tokens that a program takes at a time.
        is_apart: the new token is a part of its own.
        workspace_floats: elements of `partials`.
        single_warps: the plan is one of kernels/fused_decode_warps.py, which has a program more for the new value.
    """

    splits: int
    tile: int
    num_warps: int
    is_apart: bool
    workspace_floats: int
    single_warps: bool = False

    @property
    def leaves_parts(self) -> bool:
        """Whether attention by this plan can be left in parts."""
        return self.is_apart and not self.single_warps and self.splits > 1


def launch_plan(
    row_count: int, kv_heads: int, head_dim: int, *, is_apart: bool | None = None, single_warps: bool = False
) -> FusedDecodePlan:
    """As many splits, a power of two, as keep the number of programs near what the card holds at once.

    `is_apart`, whether the new token is a part of its own, overrides the measured choice. `single_warps` takes
    kernels/fused_decode_warps.py: pass what `takes_warps` says, or what is to be measured where `can_take_warps`.
    """
    splits = 2 if single_warps else 1
    while splits < MAX_SPLITS and 2 * splits * row_count * kv_heads <= PROGRAM_TARGET * (4 if single_warps else 1):
        splits *= 2
    if single_warps:
        floats = row_count * kv_heads * splits * WARPS_GROUP * (head_dim + 2)
        return FusedDecodePlan(splits, WARPS_TILE, 1, is_apart=True, workspace_floats=floats, single_warps=True)
    floats = row_count * kv_heads * splits * GROUP_ROWS * (head_dim + 2)
    is_apart = row_count <= APART_ROWS if is_apart is None else is_apart
    return FusedDecodePlan(splits, 64 if head_dim <= 128 else 32, 4, is_apart, floats)


@dataclass(frozen=True)
class AttentionParts:
    """Attention of one row that was left in parts: where they lie, and what says how many there are.

    Attributes:
        parts, statistics: the workspace, as kernels/attention_parts.py describes it, in qkv's dtype and in float32.
        row_slots, context_lengths: int32 [1], as `fused_decode_attention` had them.
        splits, tile: of its plan; tile in tokens.
        head_rows: query rows that a part has room for.
        query_heads, kv_heads, head_dim: the heads' shape.
    """

    parts: torch.Tensor
    statistics: torch.Tensor
    row_slots: torch.Tensor
    context_lengths: torch.Tensor
    splits: int
    tile: int
    head_rows: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def can_merge(query_heads: int, head_dim: int, warps: int) -> bool:
        """Whether a reader's program of so many warps merges such heads: each thread some dims of one head."""
        dims = query_heads * head_dim // (32 * warps)
        is_power = query_heads & (query_heads - 1) == 0
        return is_power and 4 <= dims <= 16 and 1 <= head_dim // dims <= 32


@triton.jit
def _fused_decode_kernel(
    qkv, output, key_cache, value_cache, key_scales, value_scales, next_key_cache, next_value_cache,
    block_tables, row_slots, context_lengths, rope_table, q_weight, k_weight, partials, counters,
    qkv_stride, output_stride, table_stride, eps, scale_log2,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_NEXT: tl.constexpr, MERGE_HEADS: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
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
    share = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    active = tl.maximum(tl.cdiv(tiles, share), 1)
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, HEAD_DIM)
    query = tl.arange(0, ROWS)
    in_group = (query[:, None] < GROUP) & (column[None, :] >= 0)
    place = output + row.to(tl.int64) * output_stride + (head * GROUP + query[:, None]) * HEAD_DIM + column[None, :]
    if is_real == 0:
        wait_for_inputs(PDL)
        if split == 0:
            tl.store(place, tl.zeros([ROWS, HEAD_DIM], dtype=output.dtype.element_ty), mask=in_group)
    elif split < active:
        table = block_tables + slot.to(tl.int64) * table_stride
        DTYPE: tl.constexpr = qkv.dtype.element_ty
        # 2. Load the first tile of keys and values, which earlier steps wrote, and what turns the new token's heads.
        first = split * share
        last = tl.minimum(first + share, tiles)
        lane = tl.arange(0, TILE)
        inside = first * TILE + lane < cached
        keys, key_scale, values, value_scale, tile_place = load_tile(
            key_cache, value_cache, key_scales, value_scales, table, first * TILE, inside, head,
            KV_HEADS, BLOCK_SIZE, TILE, HEAD_DIM, FORMAT,
        )  # fmt: skip
        new_block = tl.load(table + (length - 1) // BLOCK_SIZE).to(tl.int64)
        rope_row = rope_table + (length - 1).to(tl.int64) * HEAD_DIM
        cos, sin = rotation(rope_row, column, HALF)
        q_gain, q_partner_gain = norm_gains(q_weight, column, HEAD_DIM, HALF, HAS_NORM)
        k_gain, k_partner_gain = norm_gains(k_weight, column, HEAD_DIM, HALF, HAS_NORM)
        if HAS_NEXT:
            prefetch_tile(next_key_cache, tile_place, inside, HEAD_DIM, FORMAT, PDL)
            prefetch_tile(next_value_cache, tile_place, inside, HEAD_DIM, FORMAT, PDL)
        wait_for_inputs(PDL)
        # 3. The group's queries, and the new token's key and value, which split 0 stores and attends to.
        source = qkv + row.to(tl.int64) * qkv_stride
        owns_new = (split == 0) & (column[None, :] >= 0)
        new_place = (new_block * KV_HEADS + head) * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
        q = new_queries(source, head, column, column >= 0, q_gain, q_partner_gain, cos, sin, eps,
                        GROUP, HEAD_DIM, HALF, HAS_NORM, ROWS)  # fmt: skip
        k, v = stored_new_token(
            source, key_cache, value_cache, key_scales, value_scales, head, new_place, column, owns_new,
            k_gain, k_partner_gain, cos, sin, eps, KV_HEADS, GROUP, HEAD_DIM, HALF, HAS_NORM, FORMAT,
        )  # fmt: skip
        score = tl.sum(q.to(tl.float32) * k, axis=1) * scale_log2
        maximum = tl.where(split == 0, score, float("-inf"))
        normaliser = tl.where(split == 0, 1.0, 0.0) + tl.zeros([ROWS], dtype=tl.float32)
        even_q, odd_q, unit = query_parts(q, FORMAT, NATIVE, False)
        even_sums, odd_sums = split_sums(v + tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32), FORMAT, NATIVE)
        # 4. The cached tokens of this split, the next tile loaded behind each.
        for tile in range(first, last):
            maximum, normaliser, even_sums, odd_sums = attend_tile(
                even_q, odd_q, unit, keys, key_scale, values, value_scale, inside, scale_log2, maximum, normaliser,
                even_sums, odd_sums, DTYPE, FORMAT, NATIVE,
            )  # fmt: skip
            inside = ((tile + 1) * TILE + lane < cached) & (tile + 1 < last)
            keys, key_scale, values, value_scale, _ = load_tile(
                key_cache, value_cache, key_scales, value_scales, table, (tile + 1) * TILE, inside, head,
                KV_HEADS, BLOCK_SIZE, TILE, HEAD_DIM, FORMAT,
            )  # fmt: skip
        accumulator = whole_sums(even_sums, odd_sums, FORMAT, NATIVE)
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
                merge_parts(
                    output + row.to(tl.int64) * output_stride + head * (GROUP * HEAD_DIM), partials, statistics,
                    pair * SPLITS, 1, 0, active, GROUP, HEAD_DIM, ROWS, HEAD_DIM, PARTS, MERGE_HEADS,
                )  # fmt: skip


def _check(
    output: torch.Tensor, qkv: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    block_tables: torch.Tensor, row_slots: torch.Tensor, context_lengths: torch.Tensor, partials: torch.Tensor,
    counters: torch.Tensor, plan: FusedDecodePlan, leave: bool,
) -> None:  # fmt: skip
    check_tensor("qkv", qkv, (None, None), FLOATS)
    check_tensor("key_cache", key_cache, (None, None, None, None), (qkv.dtype, *TOPS), like=qkv)
    _, kv_heads, block_size, head_dim = key_cache.shape
    check_tensor("value_cache", value_cache, key_cache.shape, key_cache.dtype, like=key_cache)
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()) or block_size & (block_size - 1):
        raise ValueError(
            f"key_cache, value_cache: wanted contiguous blocks of a power of two of positions, got {block_size}"
        )
    check_tensor("output", output, (None, None, head_dim), qkv.dtype, like=key_cache)
    rows, query_heads, _ = output.shape
    check_tensor("block_tables", block_tables, (None, None), torch.int32, like=key_cache)
    check_tensor("row_slots", row_slots, (rows,), torch.int32, like=key_cache)
    check_tensor("context_lengths", context_lengths, (rows,), torch.int32, like=key_cache)
    if rows > MAX_ROWS or query_heads % kv_heads or not supports(head_dim, query_heads // kv_heads, head_dim, 0):
        raise ValueError(f"output: wanted at most {MAX_ROWS} rows of heads that `supports` takes, got {output.shape}")
    if partials.numel() < plan.workspace_floats or counters.numel() < rows * kv_heads:
        raise ValueError(
            f"workspace: wanted {plan.workspace_floats} floats and {rows * kv_heads} counters, "
            f"got {partials.numel()} and {counters.numel()}"
        )
    if leave and (rows != 1 or not plan.leaves_parts):
        raise ValueError(f"leave: wanted one row and a plan that leaves parts, got {rows} rows and {plan}")


def fused_decode_attention(
    output: torch.Tensor,
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    partials: torch.Tensor,
    counters: torch.Tensor,
    plan: FusedDecodePlan,
    new: NewTokens,
    *,
    scale: float,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    next_caches: tuple[torch.Tensor, torch.Tensor] | None = None,
    leave: bool = False,
) -> AttentionParts | None:
    """Store the new tokens' K and V and write their attention to `output`. Shapes: the module's table.

    `plan` is `launch_plan` of the bucket. `next_caches`: K and V of the layer that follows, of which what its first
    tiles will be is brought into the level-2 cache meanwhile. `leave`, for a plan that `leaves_parts`: one row's
    attention stays in the parts that come back, until the workspace is used again, and `output` is only a shape.

    Raises ValueError for a shape, dtype, stride or device that differs from the table, for a workspace that is too
    small, and for parts that the plan does not leave.
    """
    tensors = (output, qkv, key_cache, value_cache, block_tables, row_slots, context_lengths, partials, counters)
    _check(*tensors, plan, leave)
    check_scales(key_cache, key_scales=key_scales, value_scales=value_scales)
    rows, query_heads, head_dim = output.shape
    kv_heads, block_size = key_cache.shape[1:3]
    new.check(qkv, output, kv_heads)
    if rows == 0:
        return None
    group = query_heads // kv_heads
    if plan.single_warps:
        from kernels import fused_decode_warps

        early = launch_options(qkv)["PDL"]
        fused_decode_warps.launch(
            *tensors, (key_scales, value_scales), next_caches, plan.splits, plan.tile, new, scale * LOG2_E, early
        )
        return None
    options = {
        "FORMAT": cache_format(key_cache.dtype), "NATIVE": is_native(qkv, key_cache), "KV_HEADS": kv_heads,
        "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "SPLITS": plan.splits, "TILE": plan.tile,
        "ROWS": GROUP_ROWS, "HAS_NORM": new.q_weight is not None, "HAS_NEXT": next_caches is not None,
    }  # fmt: skip
    parts, merge_heads = merge_sizes(group, head_dim, 8 * plan.num_warps if plan.is_apart else 64)
    if plan.is_apart:
        options |= {"HEADS": triton.next_power_of_2(group), "LEAVE": leave}
    else:
        parts = min(plan.splits, parts)
    kernel = fused_decode_parts_kernel if plan.is_apart else _fused_decode_kernel
    kernel[(plan.splits, kv_heads, rows)](
        qkv, output, key_cache, value_cache, key_scales, value_scales, *(next_caches or (key_cache, value_cache)),
        block_tables, row_slots, context_lengths, new.rope_table, new.q_weight, new.k_weight, partials,
        *((partials.view(qkv.dtype),) if plan.is_apart else ()), counters,
        qkv.stride(0), output.stride(0), block_tables.stride(0), new.eps, scale * LOG2_E,
        MERGE_HEADS=merge_heads, PARTS=parts, num_warps=plan.num_warps, **options, **launch_options(qkv),
    )  # fmt: skip
    if not leave:
        return None
    sizes = (plan.splits, plan.tile, GROUP_ROWS, query_heads, kv_heads, head_dim)
    return AttentionParts(partials.view(qkv.dtype), partials, row_slots, context_lengths, *sizes)
