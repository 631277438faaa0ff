"""The kernel of kernels/fused_decode_attention.py by programs of one warp each, for Hopper and plain caches.

With few rows a program executes each of its instructions once, so the time is that of the longest chain of them. Here
it is short: a warp takes `tile` cached tokens, which the tensor copy engine has brought while the product ahead still
ran; when that is done, it norms and rotates the group's queries, a few elements a thread, hands them to the tensor
cores through shared memory, and leaves its part. The new token is the last part, of a program of its own. No warp waits
for another but for the counter that says which comes last and merges.

Arguments and tensors are those of the other kernels; the products are those of kernels/decode_attention_hopper.py.
Limits beside those there: `can_take_warps` in kernels/fused_decode_attention.py.

State: right in the tests' emulator; no card has run it yet, so `launch_plan` does not choose it.

Called by kernels/fused_decode_attention.py alone.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from kernels.decode_warp import (
    QUERIES,
    block_barrier,
    box_rows_of,
    cache_descriptor,
    clean,
    copy_tile,
    merge,
    store_columns,
)
from kernels.new_token import NewTokens
from kernels.paged_kv import compile_options

STAGE_COUNT = 2
MERGED_NUMBERS = 128


@gluon.jit
def _rotated(x, partner, gain, partner_gain, cos, sin, eps, axis: gl.constexpr, HEAD_DIM: gl.constexpr,
             HAS_NORM: gl.constexpr):  # fmt: skip
    """Heads, their elements along `axis`, normed and rotated in float32; arguments of the same number of dimensions."""
    x = x.to(gl.float32)
    partner = partner.to(gl.float32)
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(x * x, axis=axis) / HEAD_DIM + eps)
        if axis == 1:
            scale = gl.expand_dims(scale, 1)
        x = x * scale * gain
        partner = partner * scale * partner_gain
    return x * cos + partner * sin


@gluon.jit
def _angles(rope_ptr, position, dims, HALF: gl.constexpr):
    """Cosines and signed sines of a head's elements."""
    row_ptr = rope_ptr + position.to(gl.int64) * (2 * HALF)
    sin = gl.load(row_ptr + HALF + dims % HALF)
    return gl.load(row_ptr + dims % HALF), gl.where(dims < HALF, -sin, sin)


@gluon.jit
def _gains(gain_ptr, dims, HALF: gl.constexpr, HAS_NORM: gl.constexpr):
    """The norm's weight of a head's elements and of their partners in the rotation."""
    gain = gl.zeros_like(dims).to(gl.float32) + 1.0
    partner_gain = gain
    if HAS_NORM:
        gain = gl.load(gain_ptr + dims).to(gl.float32)
        partner_gain = gl.load(gain_ptr + (dims + HALF) % (2 * HALF)).to(gl.float32)
    return gain, partner_gain


@gluon.jit
def _new_token(
    qkv_ptr, key_ptr, value_ptr, rope_ptr, query_gain_ptr, key_gain_ptr, sums_ptr, statistic_ptr, output_ptr, head,
    position, place, eps, scale_log2, is_alone,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Store the new key and value, and leave the part that attends to them; alone, it is the output."""
    HALF: gl.constexpr = HEAD_DIM // 2
    line: gl.constexpr = gl.BlockedLayout([HEAD_DIM // 32], [32], [1], [0])
    dims = gl.arange(0, HEAD_DIM, layout=line)
    partners = (dims + HALF) % HEAD_DIM
    cos, sin = _angles(rope_ptr, position, dims, HALF)
    query_gain, query_partner_gain = _gains(query_gain_ptr, dims, HALF, HAS_NORM)
    key_gain, key_partner_gain = _gains(key_gain_ptr, dims, HALF, HAS_NORM)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    key_source = qkv_ptr + (KV_HEADS * GROUP + head) * HEAD_DIM
    key = _rotated(
        gl.load(key_source + dims), gl.load(key_source + partners), key_gain, key_partner_gain, cos, sin, eps,
        0, HEAD_DIM, HAS_NORM,
    ).to(key_ptr.dtype.element_ty)  # fmt: skip
    value = gl.load(key_source + KV_HEADS * HEAD_DIM + dims).to(value_ptr.dtype.element_ty)
    gl.store(key_ptr + place.to(gl.int64) * HEAD_DIM + dims, key)
    gl.store(value_ptr + place.to(gl.int64) * HEAD_DIM + dims, value)
    for index in gl.static_range(GROUP):
        source = qkv_ptr + (head * GROUP + index) * HEAD_DIM
        query = _rotated(
            gl.load(source + dims), gl.load(source + partners), query_gain, query_partner_gain, cos, sin, eps,
            0, HEAD_DIM, HAS_NORM,
        ).to(qkv_ptr.dtype.element_ty)  # fmt: skip
        score = gl.sum(query.to(gl.float32) * key.to(gl.float32), axis=0) * scale_log2
        if is_alone:
            gl.store(output_ptr + index * HEAD_DIM + dims, value.to(output_ptr.dtype.element_ty))
        else:
            gl.store(sums_ptr + index * HEAD_DIM + dims, value.to(gl.float32))
            gl.store(statistic_ptr + index, score)
            gl.store(statistic_ptr + QUERIES + index, 1.0)


@gluon.jit
def _load_queries(qkv_ptr, query_gain_ptr, rope_ptr, position, head, eps, shared,
                  GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr,
                  PDL: gl.constexpr):  # fmt: skip
    """Wait for the product; its queries, normed and rotated, into `shared` [8, head_dim], each 8 / HEADS times."""
    HALF: gl.constexpr = HEAD_DIM // 2
    LANES: gl.constexpr = 32 // HEADS
    cube: gl.constexpr = gl.BlockedLayout([1, QUERIES // HEADS, HEAD_DIM // LANES], [HEADS, 1, LANES], [1, 1, 1],
                                          [2, 1, 0])  # fmt: skip
    rows: gl.constexpr = gl.SliceLayout(1, cube)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, rows))
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, rows))
    cos, sin = _angles(rope_ptr, position, dims, HALF)
    gain, partner_gain = _gains(query_gain_ptr, dims, HALF, HAS_NORM)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    source = qkv_ptr + (head * GROUP + heads)[:, None] * HEAD_DIM
    is_head = (heads < GROUP)[:, None]
    query = gl.load(source + dims[None, :], mask=is_head, other=0.0)
    partner = gl.load(source + ((dims + HALF) % HEAD_DIM)[None, :], mask=is_head, other=0.0)
    query = _rotated(
        query, partner, gain[None, :], partner_gain[None, :], cos[None, :], sin[None, :], eps, 1, HEAD_DIM, HAS_NORM
    ).to(qkv_ptr.dtype.element_ty)
    zeros = gl.zeros([HEADS, QUERIES // HEADS, HEAD_DIM], query.dtype, cube)
    repeated, _ = gl.broadcast(gl.expand_dims(query, 1), zeros)
    shared.store(gl.reshape(repeated, [QUERIES, HEAD_DIM]))


@gluon.jit
def _prefetch(cache_ptr, box_rows, BOX_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Ask for the lines of some boxes of a cache to be brought into the level-2 cache; waits for nothing."""
    LINES: gl.constexpr = BOX_ROWS * HEAD_DIM // 64
    lane_layout: gl.constexpr = gl.BlockedLayout([max(1, LINES // 32)], [32], [1], [0])
    places = 64 * gl.arange(0, LINES, layout=lane_layout)
    for box in gl.static_range(len(box_rows)):
        address = cache_ptr + box_rows[box].to(gl.int64) * HEAD_DIM + places
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address.to(gl.int64)], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@gluon.jit
def fused_decode_warps_kernel(
    qkv_ptr, output_ptr, key_desc, value_desc, key_ptr, value_ptr, next_key_ptr, next_value_ptr, tables_ptr, slots_ptr,
    lengths_ptr, rope_ptr, query_gain_ptr, key_gain_ptr, partials_ptr, counters_ptr, qkv_stride, output_stride,
    table_stride, eps, scale_log2,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SPLITS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, HAS_NORM: gl.constexpr,
    HAS_NEXT: gl.constexpr, NUMBERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # 1. Locate: one part of one K/V head of one row. Nothing read here is written by the kernels just ahead.
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    split = gl.program_id(0)
    head = gl.program_id(1)
    row = gl.program_id(2)
    slot = gl.load(slots_ptr + row)
    length = gl.load(lengths_ptr + row)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    column_layout: gl.constexpr = gl.SliceLayout(0, mma)
    token_layout: gl.constexpr = gl.SliceLayout(1, mma)
    DTYPE: gl.constexpr = key_ptr.dtype.element_ty
    BOX_ROWS: gl.constexpr = min(TILE, BLOCK_SIZE)
    BOXES: gl.constexpr = TILE // BOX_ROWS
    HALVES: gl.constexpr = HEAD_DIM // 64
    REPEATS: gl.constexpr = QUERIES // HEADS
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    qkv_ptr += row.to(gl.int64) * qkv_stride
    output_ptr += row.to(gl.int64) * output_stride + head * (GROUP * HEAD_DIM)
    is_real = (slot >= 0) & (length > 0)
    cached = gl.where(is_real, length - 1, 0)
    tiles = (cached + (TILE - 1)) // TILE
    share = gl.maximum((tiles + (SPLITS - 2)) // (SPLITS - 1), 1)
    parts = (tiles + share - 1) // share + 1  # the last is the new token
    pair = row * KV_HEADS + head
    sums_ptr = partials_ptr + (pair * SPLITS + split) * (QUERIES * HEAD_DIM)
    statistics_ptr = partials_ptr + gl.num_programs(2) * (KV_HEADS * SPLITS * QUERIES * HEAD_DIM)
    statistic_ptr = statistics_ptr + (pair * SPLITS + split) * (2 * QUERIES)
    if is_real:
        if split < parts:
            table_ptr = tables_ptr + slot.to(gl.int64) * table_stride
            if split == parts - 1:
                block = gl.load(table_ptr + (length - 1) // BLOCK_SIZE)
                place = (block * KV_HEADS + head) * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
                _new_token(
                    qkv_ptr, key_ptr, value_ptr, rope_ptr, query_gain_ptr, key_gain_ptr, sums_ptr, statistic_ptr,
                    output_ptr, head, length - 1, place, eps, scale_log2, parts == 1,
                    KV_HEADS, GROUP, HEAD_DIM, HAS_NORM, PDL,
                )  # fmt: skip
            else:
                # 2. Ask for the first tiles of keys and values, which earlier steps wrote.
                keys = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, HEAD_DIM], shared)
                values = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, HEAD_DIM], shared)
                queries = gl.allocate_shared_memory(DTYPE, [QUERIES, HEAD_DIM], shared)
                full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
                for stage in gl.static_range(STAGES):
                    mbarrier.init(full.index(stage), count=1)
                key_boxes = keys._reinterpret(DTYPE, [STAGES * HALVES * BOXES, BOX_ROWS, 64], shared)
                value_boxes = values._reinterpret(DTYPE, [STAGES * HALVES * BOXES, BOX_ROWS, 64], shared)
                first = split * share
                last = gl.minimum(first + share, tiles)
                for ahead in gl.static_range(STAGES):
                    if first + ahead < last:
                        box_rows = box_rows_of(
                            table_ptr, first + ahead, head, cached, KV_HEADS, BLOCK_SIZE, TILE, BOX_ROWS
                        )
                        copy_tile(
                            key_desc, value_desc, box_rows, key_boxes, value_boxes, full, ahead, TILE, BOX_ROWS, HALVES
                        )
                if HAS_NEXT:
                    box_rows = box_rows_of(table_ptr, first, head, cached, KV_HEADS, BLOCK_SIZE, TILE, BOX_ROWS)
                    _prefetch(next_key_ptr, box_rows, BOX_ROWS, HEAD_DIM)
                    _prefetch(next_value_ptr, box_rows, BOX_ROWS, HEAD_DIM)
                # 3. The group's queries, as soon as the kernel ahead has made them.
                _load_queries(
                    qkv_ptr, query_gain_ptr, rope_ptr, length - 1, head, eps, queries,
                    GROUP, HEADS, HEAD_DIM, HAS_NORM, PDL,
                )  # fmt: skip
                query = queries.permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2))
                # 4. The cached tokens of this part.
                places = gl.arange(0, TILE, layout=token_layout)
                maximum = gl.full([QUERIES], float("-inf"), gl.float32, column_layout)
                normaliser = gl.zeros([QUERIES], gl.float32, column_layout)
                sums = gl.zeros([HEAD_DIM, QUERIES], gl.float32, mma)
                for tile in range(first, last):
                    read = (tile - first) % STAGES
                    later = box_rows_of(table_ptr, tile + STAGES, head, cached, KV_HEADS, BLOCK_SIZE, TILE, BOX_ROWS)
                    mbarrier.wait(full.index(read), ((tile - first) // STAGES) & 1)
                    clean(values.index(read), cached - tile * TILE)
                    operand = keys.index(read).load(gl.DotOperandLayout(0, mma, 2))
                    scores = mma_v2(operand, query, gl.zeros([TILE, QUERIES], gl.float32, mma))
                    if (tile + 1) * TILE > cached:
                        scores = gl.where((tile * TILE + places < cached)[:, None], scores, float("-inf"))
                    new_maximum = gl.maximum(maximum, gl.max(scores, axis=0) * scale_log2)
                    weights = gl.exp2(scores * scale_log2 - new_maximum[None, :])
                    shrink = gl.exp2(maximum - new_maximum)
                    normaliser = normaliser * shrink + gl.sum(weights, axis=0)
                    maximum = new_maximum
                    operand = values.index(read).permute((1, 0)).load(gl.DotOperandLayout(0, mma, 2))
                    weights = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(1, mma, 2))
                    sums = mma_v2(operand, weights, sums * shrink[None, :])
                    if tile + STAGES < last:
                        copy_tile(
                            key_desc, value_desc, later, key_boxes, value_boxes, full, read, TILE, BOX_ROWS, HALVES
                        )
                store_columns(sums_ptr, sums, 0, 1, REPEATS, mma, GROUP, HEAD_DIM)
                columns = gl.arange(0, QUERIES, layout=column_layout)
                is_query = (columns % REPEATS == 0) & (columns // REPEATS < GROUP)
                gl.store(statistic_ptr + columns // REPEATS, maximum, mask=is_query)
                gl.store(statistic_ptr + QUERIES + columns // REPEATS, normaliser, mask=is_query)
            # 5. Let the last to finish merge the parts.
            if parts > 1:
                block_barrier()  # all threads' parts are written before the counter says so
                if gl.atomic_add(counters_ptr + pair, 1, sem="acq_rel", scope="gpu") == parts - 1:
                    gl.store(counters_ptr + pair, 0)
                    merge(output_ptr, partials_ptr, statistics_ptr, pair * SPLITS, 1, 0, parts,
                          GROUP, HEADS, HEAD_DIM, NUMBERS)  # fmt: skip
    else:
        if PDL:
            gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        if split == 0:
            line: gl.constexpr = gl.BlockedLayout([HEAD_DIM // 32], [32], [1], [0])
            dims = gl.arange(0, HEAD_DIM, layout=line)
            for index in gl.static_range(GROUP):
                zeros = gl.zeros([HEAD_DIM], output_ptr.dtype.element_ty, line)
                gl.store(output_ptr + index * HEAD_DIM + dims, zeros)


def launch(
    output: torch.Tensor, qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    row_slots: torch.Tensor, context_lengths: torch.Tensor, partials: torch.Tensor, counters: torch.Tensor,
    next_caches: tuple[torch.Tensor, torch.Tensor] | None, splits: int, tile: int, new: NewTokens, scale_log2: float,
    pdl: bool,
) -> None:  # fmt: skip
    """Launch on arguments that `fused_decode_attention` has checked."""
    rows, query_heads, head_dim = output.shape
    kv_heads, block_size = k_cache.shape[1:3]
    group = query_heads // kv_heads
    fused_decode_warps_kernel[(splits, kv_heads, rows)](
        qkv, output, cache_descriptor(k_cache, tile), cache_descriptor(v_cache, tile), k_cache, v_cache,
        *(next_caches or (k_cache, v_cache)), block_tables, row_slots, context_lengths, new.rope_table, new.q_weight,
        new.k_weight, partials, counters, qkv.stride(0), output.stride(0), block_tables.stride(0), new.eps, scale_log2,
        KV_HEADS=kv_heads, GROUP=group, HEADS=triton.next_power_of_2(group), HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        SPLITS=splits, TILE=tile, STAGES=STAGE_COUNT, HAS_NORM=new.q_weight is not None,
        HAS_NEXT=next_caches is not None and pdl, NUMBERS=MERGED_NUMBERS,
        PDL=pdl, num_warps=1, **compile_options(None, pdl),
    )  # fmt: skip
