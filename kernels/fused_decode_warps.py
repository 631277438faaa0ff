"""The kernel of kernels/fused_decode_attention.py by programs of one warp each, for Hopper.

With few rows a program executes each of its instructions once, so the time is that of the longest chain of them. Here
it is short: a warp takes `tile` cached tokens, which the tensor copy engine has brought, and the warp to its registers,
while the product ahead still ran; when that is done, it norms and rotates the group's queries, a few elements a thread,
hands them to the tensor cores through shared memory, and leaves its part. The new token is the last part, its key and
its value each of a program of its own. No warp waits for another but for the counter that says which comes last and
merges.

Arguments and tensors are those of the other kernels; the products are those of kernels/decode_attention_hopper.py, but
for int8 keys. An 8-bit tile is taken apart to even and odd dims in bfloat16 (kernels/decode_tile.py), which for the
first tile costs nothing, since the product ahead is not done. Limits beside those there: `can_take_warps` in
kernels/fused_decode_attention.py.

Measured on an H200 at commit a82871e by `python -m benchmarks.kernels.tune_attention --only few_rows`, microseconds a
layer of 16 query and 8 K/V heads of 128, bfloat16 (the kernel of several warps in brackets): 2 rows of 512 tokens 5.15
(6.67), 8 of 200 5.48 (7.81), 16 of 256 7.2 (13.3); but one row of 512 4.8 to 5.3 (3.5 to 4.4).

Called by kernels/fused_decode_attention.py alone.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from kernels.decode_tile import FP8_SHIFT, FP8_UNSHIFT
from kernels.decode_warp import (
    QUERIES,
    allocate_tiles,
    block_barrier,
    box_rows_of,
    cache_descriptor,
    clean,
    copy_tile,
    left_operands,
    merge,
    store_columns,
)
from kernels.kv_format import cache_format
from kernels.kv_quant import FP8
from kernels.launch_gluon import let_next_start, wait_for_inputs
from kernels.new_token import NewTokens
from kernels.new_token_warp import new_key, new_queries, new_value, query_factors
from kernels.paged_kv import compile_options

STAGE_COUNT = 2
MERGED_NUMBERS = 64


@gluon.jit
def _in_shared(matrix):
    """A matrix of two bytes an element, put in shared memory."""
    layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, 2 * matrix.shape[1]), element_bitwidth=16, rank=2
    )
    shared = gl.allocate_shared_memory(matrix.dtype, matrix.shape, layout)
    shared.store(matrix)
    return shared


@gluon.jit
def _right_operands(rows, mma: gl.constexpr, FORMAT: gl.constexpr):
    """Queries [8, HEAD_DIM] as right operands of the keys' product: even and odd dims, over a plain cache twice all."""
    layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    if FORMAT > 0:
        even, odd = gl.split(gl.reshape(rows, [QUERIES, rows.shape[1] // 2, 2]))
        first_shared, second_shared = _in_shared(even), _in_shared(odd)  # both, before one is waited for
        first = first_shared.permute((1, 0)).load(layout)
        second = second_shared.permute((1, 0)).load(layout)
    else:
        first = _in_shared(rows).permute((1, 0)).load(layout)
        second = first
    return first, second


@gluon.jit
def _load_scales(key_scales_ptr, value_scales_ptr, box_rows, token_count, places, BOX_ROWS: gl.constexpr,
                 FORMAT: gl.constexpr):  # fmt: skip
    """The scales of a tile's tokens, float32; 0 from `token_count` on. Stand-ins beside a plain cache."""
    key_scale = places
    value_scale = places
    if FORMAT > 0:
        scale_places = box_rows[0] + places  # below 2^31, or a layer's cache had 256 GB
        for box in gl.static_range(1, len(box_rows)):
            scale_places = gl.where(places >= box * BOX_ROWS, box_rows[box] - box * BOX_ROWS + places, scale_places)
        is_token = places < token_count
        key_scale = gl.load(key_scales_ptr + scale_places, mask=is_token, other=0.0).to(gl.float32)
        value_scale = gl.load(value_scales_ptr + scale_places, mask=is_token, other=0.0).to(gl.float32)
    return key_scale, value_scale


@gluon.jit
def _operands(keys, values, full, stage, phase, token_count, mma: gl.constexpr, FORMAT: gl.constexpr):
    """Wait for a tile, and take it to registers: `left_operands` of the keys and of the values."""
    mbarrier.wait(full.index(stage), phase)
    if FORMAT == 0:
        clean(values.index(stage), token_count)
    first_keys, second_keys = left_operands(keys.index(stage), mma, FORMAT)
    first_values, second_values = left_operands(values.index(stage).permute((1, 0)), mma, FORMAT)
    return first_keys, second_keys, first_values, second_values


@gluon.jit
def _attended(
    operands, scales, query, factor, token_count, places, maximum, normaliser, even_sums, odd_sums,
    mma: gl.constexpr, DTYPE: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """(maximum, normaliser, even_sums, odd_sums) with a tile in: a running softmax. It holds at least one token."""
    first_keys, second_keys, first_values, second_values = operands
    zeros = gl.zeros([places.shape[0], QUERIES], gl.float32, mma)
    scores = mma_v2(first_keys, query[0], zeros)
    if FORMAT > 0:  # two products that do not wait for one another
        scores = (scores + mma_v2(second_keys, query[1], zeros)) * scales[0][:, None]
    scores = gl.where((places < token_count)[:, None], scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, axis=0) * factor)
    weights = gl.exp2(scores * factor - new_maximum[None, :])
    shrink = gl.exp2(maximum - new_maximum)
    normaliser = normaliser * shrink + gl.sum(weights, axis=0)
    if FORMAT > 0:
        weights = weights * scales[1][:, None]
    if FORMAT == FP8:
        weights = weights * FP8_SHIFT
    weights = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(1, mma, 2))
    even_sums = mma_v2(first_values, weights, even_sums * shrink[None, :])
    if FORMAT > 0:
        odd_sums = mma_v2(second_values, weights, odd_sums * shrink[None, :])
    return new_maximum, normaliser, even_sums, odd_sums


@gluon.jit
def _store_sums(base_ptr, even, odd, repeats: gl.constexpr, mma: gl.constexpr, FORMAT: gl.constexpr,
                GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):  # fmt: skip
    """Store the sums, those over an 8-bit cache of even and of odd dims, as rows [8, head_dim] as `store_columns`."""
    if FORMAT == 0:
        store_columns(base_ptr, even, 0, 1, repeats, mma, GROUP, HEAD_DIM)
    else:
        UNSHIFT: gl.constexpr = FP8_UNSHIFT if FORMAT == FP8 else 1.0
        store_columns(base_ptr, even * UNSHIFT, 0, 2, repeats, mma, GROUP, HEAD_DIM)
        store_columns(base_ptr, odd * UNSHIFT, 1, 2, repeats, mma, GROUP, HEAD_DIM)


@gluon.jit
def _prefetch(cache_ptr, box_rows, BOX_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr, FORMAT: gl.constexpr):
    """Ask for the lines of some boxes of a cache to be brought into the level-2 cache; waits for nothing."""
    LINE: gl.constexpr = 64 if FORMAT == 0 else 128  # elements
    LINES: gl.constexpr = BOX_ROWS * HEAD_DIM // LINE
    lane_layout: gl.constexpr = gl.BlockedLayout([max(1, LINES // 32)], [32], [1], [0])
    places = LINE * gl.arange(0, LINES, layout=lane_layout)
    for box in gl.static_range(len(box_rows)):
        address = cache_ptr + box_rows[box].to(gl.int64) * HEAD_DIM + places
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address.to(gl.int64)], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@gluon.jit
def fused_decode_warps_kernel(
    qkv_ptr, output_ptr, key_desc, value_desc, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, next_key_ptr,
    next_value_ptr, tables_ptr, slots_ptr, lengths_ptr, rope_ptr, query_gain_ptr, key_gain_ptr, partials_ptr,
    counters_ptr, qkv_stride, output_stride, table_stride, eps, scale_log2,
    FORMAT: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SPLITS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, HAS_NORM: gl.constexpr,
    HAS_NEXT: gl.constexpr, NUMBERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # 1. Locate: one part of one K/V head of one row. Nothing read here is written by the kernels just ahead.
    let_next_start(PDL)
    split = gl.program_id(0)
    head = gl.program_id(1)
    row = gl.program_id(2)
    slot = gl.load(slots_ptr + row)
    length = gl.load(lengths_ptr + row)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    column_layout: gl.constexpr = gl.SliceLayout(0, mma)
    token_layout: gl.constexpr = gl.SliceLayout(1, mma)
    DTYPE: gl.constexpr = qkv_ptr.dtype.element_ty
    BOX_ROWS: gl.constexpr = min(TILE, BLOCK_SIZE)
    HALVES: gl.constexpr = HEAD_DIM // 64 if FORMAT == 0 else 1
    REPEATS: gl.constexpr = QUERIES // HEADS
    qkv_ptr += row.to(gl.int64) * qkv_stride
    output_ptr += row.to(gl.int64) * output_stride + head * (GROUP * HEAD_DIM)
    is_real = (slot >= 0) & (length > 0)
    cached = gl.where(is_real, length - 1, 0)
    tiles = (cached + (TILE - 1)) // TILE
    share = gl.maximum((tiles + (SPLITS - 2)) // (SPLITS - 1), 1)
    parts = (tiles + share - 1) // share + 1  # the last is the new token, whose key and value two programs take
    part = gl.minimum(split, parts - 1)
    pair = row * KV_HEADS + head
    sums_ptr = partials_ptr + (pair * SPLITS + part) * (QUERIES * HEAD_DIM)
    statistics_ptr = partials_ptr + gl.num_programs(2) * (KV_HEADS * SPLITS * QUERIES * HEAD_DIM)
    statistic_ptr = statistics_ptr + (pair * SPLITS + part) * (2 * QUERIES)
    if is_real:
        if split <= parts:
            table_ptr = tables_ptr + slot.to(gl.int64) * table_stride
            if part == parts - 1:
                block = gl.load(table_ptr + (length - 1) // BLOCK_SIZE)
                place = (block * KV_HEADS + head) * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
                if split == part:
                    new_key(
                        qkv_ptr, key_ptr, key_scales_ptr, rope_ptr, query_gain_ptr, key_gain_ptr, statistic_ptr, head,
                        length - 1, place, eps, scale_log2, FORMAT, KV_HEADS, GROUP, HEAD_DIM, HAS_NORM, PDL,
                    )  # fmt: skip
                else:
                    source = qkv_ptr + (KV_HEADS * (GROUP + 1) + head) * HEAD_DIM
                    new_value(
                        source, value_ptr, value_scales_ptr, sums_ptr, output_ptr, place, parts == 1,
                        FORMAT, GROUP, HEAD_DIM, PDL,
                    )  # fmt: skip
            else:
                # 2. Ask for the first tiles of keys and values, which earlier steps wrote.
                full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
                for stage in gl.static_range(STAGES):
                    mbarrier.init(full.index(stage), count=1)
                key_boxes, keys = allocate_tiles(DTYPE, FORMAT, STAGES, TILE, BOX_ROWS, HEAD_DIM)
                value_boxes, values = allocate_tiles(DTYPE, FORMAT, STAGES, TILE, BOX_ROWS, HEAD_DIM)
                first = split * share
                last = gl.minimum(first + share, tiles)
                places = gl.arange(0, TILE, layout=token_layout)
                boxes = ()
                scales = ()  # for the keys and for the values
                for ahead in gl.static_range(STAGES):
                    box_rows = box_rows_of(table_ptr, first + ahead, head, cached, KV_HEADS, BLOCK_SIZE, TILE, BOX_ROWS)
                    boxes += (box_rows,)
                    if first + ahead < last:
                        copy_tile(
                            key_desc, value_desc, box_rows, key_boxes, value_boxes, full, ahead, TILE, BOX_ROWS, HALVES
                        )
                    token_count = cached - (first + ahead) * TILE
                    scales += (_load_scales(key_scales_ptr, value_scales_ptr, box_rows, token_count, places, BOX_ROWS,
                                            FORMAT),)  # fmt: skip
                for ahead in gl.static_range(STAGES):
                    if HAS_NEXT and first + ahead < last:
                        _prefetch(next_key_ptr, boxes[ahead], BOX_ROWS, HEAD_DIM, FORMAT)
                        _prefetch(next_value_ptr, boxes[ahead], BOX_ROWS, HEAD_DIM, FORMAT)
                operands = _operands(keys, values, full, 0, 0, cached - first * TILE, mma, FORMAT)
                if FORMAT > 0:  # what is only kept in registers is converted late, when nothing is left to wait for
                    kept = ()
                    for index in gl.static_range(4):
                        kept += (_in_shared(operands[index]),)
                # 3. The group's queries, as soon as the kernel ahead has made them.
                cos, sin = query_factors(rope_ptr, query_gain_ptr, length - 1, HEADS, HEAD_DIM, HAS_NORM)
                wait_for_inputs(PDL)
                if FORMAT > 0:
                    operands = ()
                    for index in gl.static_range(4):
                        operands += (kept[index].load(gl.DotOperandLayout(0, mma, 2)),)
                query = new_queries(qkv_ptr, cos, sin, head, eps, GROUP, HEADS, HEAD_DIM, HAS_NORM)
                factor = scale_log2
                if FORMAT == FP8:
                    query = (query.to(gl.float32) * FP8_SHIFT).to(DTYPE)
                    factor = scale_log2 * FP8_UNSHIFT
                query = _right_operands(query, mma, FORMAT)
                # 4. The cached tokens of this part. The first tile is in registers by now; few parts have others.
                maximum = gl.full([QUERIES], float("-inf"), gl.float32, column_layout)
                normaliser = gl.zeros([QUERIES], gl.float32, column_layout)
                SUM_ROWS: gl.constexpr = HEAD_DIM if FORMAT == 0 else HEAD_DIM // 2
                zeros = gl.zeros([SUM_ROWS, QUERIES], gl.float32, mma)
                maximum, normaliser, even_sums, odd_sums = _attended(
                    operands, scales[0], query, factor, cached - first * TILE, places, maximum, normaliser,
                    zeros, zeros, mma, DTYPE, FORMAT,
                )  # fmt: skip
                key_scale, value_scale = scales[1]
                for tile in range(first + 1, last):
                    done = tile - first
                    later = box_rows_of(
                        table_ptr, tile + STAGES - 1, head, cached, KV_HEADS, BLOCK_SIZE, TILE, BOX_ROWS
                    )
                    if tile + STAGES - 1 < last:
                        copy_tile(
                            key_desc, value_desc, later, key_boxes, value_boxes, full, (done - 1) % STAGES,
                            TILE, BOX_ROWS, HALVES,
                        )  # fmt: skip
                    operands = _operands(
                        keys, values, full, done % STAGES, (done // STAGES) & 1, cached - tile * TILE, mma, FORMAT
                    )
                    maximum, normaliser, even_sums, odd_sums = _attended(
                        operands, (key_scale, value_scale), query, factor, cached - tile * TILE, places,
                        maximum, normaliser, even_sums, odd_sums, mma, DTYPE, FORMAT,
                    )  # fmt: skip
                    key_scale, value_scale = _load_scales(
                        key_scales_ptr, value_scales_ptr, later, cached - (tile + STAGES - 1) * TILE, places, BOX_ROWS,
                        FORMAT,
                    )  # fmt: skip
                _store_sums(sums_ptr, even_sums, odd_sums, REPEATS, mma, FORMAT, GROUP, HEAD_DIM)
                columns = gl.arange(0, QUERIES, layout=column_layout)
                is_query = (columns % REPEATS == 0) & (columns // REPEATS < GROUP)
                gl.store(statistic_ptr + columns // REPEATS, maximum, mask=is_query)
                gl.store(statistic_ptr + QUERIES + columns // REPEATS, normaliser, mask=is_query)
            # 5. Let the last to finish merge the parts.
            if parts > 1:
                block_barrier()  # all threads' parts are written before the counter says so
                if gl.atomic_add(counters_ptr + pair, 1, sem="acq_rel", scope="gpu") == parts:
                    gl.store(counters_ptr + pair, 0)
                    merge(output_ptr, partials_ptr, statistics_ptr, pair * SPLITS, 1, 0, parts,
                          GROUP, HEADS, HEAD_DIM, NUMBERS, AHEAD=True)  # fmt: skip
    else:
        wait_for_inputs(PDL)
        if split == 0:
            line: gl.constexpr = gl.BlockedLayout([HEAD_DIM // 32], [32], [1], [0])
            dims = gl.arange(0, HEAD_DIM, layout=line)
            for index in gl.static_range(GROUP):
                zeros = gl.zeros([HEAD_DIM], output_ptr.dtype.element_ty, line)
                gl.store(output_ptr + index * HEAD_DIM + dims, zeros)


def launch(
    output: torch.Tensor, qkv: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    block_tables: torch.Tensor, row_slots: torch.Tensor, context_lengths: torch.Tensor, partials: torch.Tensor,
    counters: torch.Tensor, scales: tuple[torch.Tensor | None, torch.Tensor | None],
    next_caches: tuple[torch.Tensor, torch.Tensor] | None, splits: int, tile: int, new: NewTokens,
    scale_log2: float, pdl: bool,
) -> None:  # fmt: skip
    """Launch on arguments that `fused_decode_attention` has checked."""
    rows, query_heads, head_dim = output.shape
    kv_heads, block_size = key_cache.shape[1:3]
    group = query_heads // kv_heads
    fused_decode_warps_kernel[(splits + 1, kv_heads, rows)](
        qkv, output, cache_descriptor(key_cache, tile), cache_descriptor(value_cache, tile), key_cache, value_cache,
        *scales, *(next_caches or (key_cache, value_cache)), block_tables, row_slots, context_lengths, new.rope_table,
        new.q_weight, new.k_weight, partials, counters, qkv.stride(0), output.stride(0), block_tables.stride(0),
        new.eps, scale_log2,
        FORMAT=cache_format(key_cache.dtype), KV_HEADS=kv_heads, GROUP=group, HEADS=triton.next_power_of_2(group),
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, SPLITS=splits, TILE=tile, STAGES=STAGE_COUNT,
        HAS_NORM=new.q_weight is not None, HAS_NEXT=next_caches is not None and pdl, NUMBERS=MERGED_NUMBERS,
        PDL=pdl, num_warps=1, **compile_options(None, pdl),
    )  # fmt: skip
