"""Prefill attention for Hopper: the operation of kernels/prefill_attention.py with the warps of a program specialised.

Two warps move: one draws tiles of queries, posts each in a mailbox in shared memory and copies its queries and keys,
the other copies its values, block by block with the tensor copy engine (a block of one K/V head is a contiguous box of
the cache). Over an 8-bit cache four warps more convert what was copied (kernels/prefill_attention_hopper_convert.py),
but for tiles of keys that the step itself computed, where the caller has them: these are copied as they are from the
rows of its q/k/v product, and the four warps see to prefixes of earlier steps alone. Both ways bring the same bits.
Two warp groups compute, each on 64 of the tile's 128 rows: while the tensor cores multiply probabilities by values and
the next keys by queries, the group's threads work out the next softmax [1]. Key tiles are taken from the diagonal
backwards, so that the masked ones come first.

    warps 0-3     rows 0-63     S = Q K^T | O += P V | softmax   wait for *_full, signal *_empty
    warps 4-7     rows 64-127   the same, on their own
    warp 8        mail and queries[n % 2], keys[i % stages]      waits for *_empty, fills, signals *_full
    warp 9        values[i % stages]                             reads the mail, waits for value_empty, fills

Layouts, padding and results are those of kernels/prefill_attention.py, its only caller. Limits beside those there:
compute capability 9, Triton 3.6, bf16 or (over a plain cache) f16, head_dim 64 or 128, block_size 8..128, no sliding
window, no soft cap (kernels/prefill_plans.py). Its start costs more than the plain kernel's: it pays from about a
thousand tokens on.

The scalars of a tile are read from shared memory one by one, not summed out of a vector: only so does the compiler keep
them in uniform registers, and addresses and descriptors leave the loop. And the copies have a warp each because one
alone, with 32 boxes for each pair of tiles, was slower than the tensor cores (docs/log.md).

Measured: one NVIDIA H200, bf16, 16 query and 8 K/V heads of 128, blocks of 16, commit be3c73e, by
`python -m benchmarks.kernels.bench_prefill_attention`, where torch's attention on contiguous tensors is measured too:
16x1024 439 TFLOP/s (torch 446), 4x4096 550 (512), 1x16384 605 (553), 4x512 new of 8192 542.

Sources: [1] Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.kv_format import CACHE_PLAIN, cache_format
from kernels.launch_gluon import let_next_start, wait_for_inputs
from kernels.paged_kv import HeadShape, compile_options
from kernels.prefill_attention_hopper_convert import convert
from kernels.prefill_attention_hopper_copy import (
    MAIL_FIELDS,
    MAIL_SLOTS,
    produce_keys,
    produce_values,
    read_mail,
    zero_unowned,
)
from kernels.prefill_plans import PrefillPlan

TILE_ROWS = 128
KEY_TILE = 128
STAGE_COUNT = 2


@gluon.jit
def _softmax(scores, maximum, normaliser, positions, first_key, scale_log2, MASKED: gl.constexpr, layout: gl.constexpr):
    """Probabilities of a tile's scores under the new running maximum; also that, the shrink and the normaliser."""
    KEY_TILE: gl.constexpr = scores.shape[1]
    if MASKED:
        places = gl.arange(0, KEY_TILE, layout=gl.SliceLayout(0, layout))
        scores = gl.where((positions - first_key)[:, None] >= places[None, :], scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, axis=1) * scale_log2)
    base = new_maximum
    if MASKED:
        base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a query may see none of a diagonal tile
    probabilities = gl.exp2(scores * scale_log2 - base[:, None])
    shrink = gl.exp2(maximum - base)
    normaliser = normaliser * shrink + gl.sum(probabilities, axis=1)
    return probabilities, new_maximum, normaliser, shrink


@gluon.jit
def _held(values):
    """The values, unchanged, behind an instruction that is never executed and across which the assembler moves nothing.

    Left to itself ptxas hoists the wait for the products above the exponentials, and the overlap is gone.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p pmevent 1; mov.b32 $0, $1; }",
        "=f,f", [values], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _narrow(values, dtype: gl.constexpr):
    """The values in `dtype`, converted here: left to itself the compiler does it later and holds registers."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [values], dtype=gl.bfloat16, is_pure=False, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [values], dtype=gl.float16, is_pure=False, pack=2
        )


@gluon.jit
def _steps(
    begin, end, read, probabilities, accumulator, maximum, normaliser, query, positions, keys, values, key_full,
    key_empty, value_full, value_empty, scale_log2,
    MASKED: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, score_layout: gl.constexpr,
    value_layout: gl.constexpr,
):  # fmt: skip
    """Tiles `begin` - 1 down to `end`: scores of each beside the values of the one before it."""
    TILE: gl.constexpr = keys.shape[1]
    ROWS: gl.constexpr = query.shape[0]
    operand: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    empty = gl.zeros([ROWS, TILE], gl.float32, score_layout)
    for step in range(begin - end):
        tile = begin - 1 - step
        stage = read % STAGES
        next_stage = (read + 1) % STAGES
        if OVERLAP:
            operand_tile = gl.convert_layout(_narrow(probabilities, keys.dtype), operand)
        mbarrier.wait(key_full.index(next_stage), ((read + 1) // STAGES) & 1)
        scores = warpgroup_mma(query, keys.index(next_stage).permute((1, 0)), empty, use_acc=False, is_async=True)
        mbarrier.wait(value_full.index(stage), (read // STAGES) & 1)
        if not OVERLAP:
            operand_tile = gl.convert_layout(probabilities.to(keys.dtype), operand)
        accumulator = warpgroup_mma(operand_tile, values.index(stage), accumulator, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        mbarrier.arrive(key_empty.index(next_stage), count=1)
        probabilities, maximum, normaliser, shrink = _softmax(
            scores, maximum, normaliser, positions, tile * TILE, scale_log2, MASKED, score_layout
        )
        if OVERLAP:
            normaliser = _held(normaliser)
        accumulator, operand_tile = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator, operand_tile))
        mbarrier.arrive(value_empty.index(stage), count=1)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, value_layout))
        accumulator = accumulator * shrink[:, None]
        read += 1
    return read, probabilities, accumulator, maximum, normaliser


@gluon.jit
def _consume(
    output_ptr, query_ptr, output_stride, query_stride, scale_log2, queries, keys, values, key_full, key_empty,
    value_full, value_empty, mail, mail_full, mail_empty,
    WARP_GROUP: gl.constexpr, GROUP: gl.constexpr, QUERY_TILE: gl.constexpr, STAGES: gl.constexpr,
    COPY_QUERY: gl.constexpr, OVERLAP: gl.constexpr, CLEAN_VALUES: gl.constexpr,
):  # fmt: skip
    """Take letters until the last; compute 64 of a tile's rows each time, those of WARP_GROUP.

    COPY_QUERY: queries come with the letter; CLEAN_VALUES: copied values may hold anything past a row's end.
    """
    dtype: gl.constexpr = keys.dtype
    TILE: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    ROWS: gl.constexpr = queries.shape[1]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])

    tile_rows = WARP_GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copy_layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, copy_layout))
    token_in_tile = tile_rows // GROUP
    head_places = (tile_rows % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    score_tokens = (WARP_GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, score_layout))) // GROUP
    key_places = gl.arange(0, TILE, layout=gl.SliceLayout(1, copy_layout))
    empty = gl.zeros([ROWS, TILE], gl.float32, score_layout)

    read = 0
    letter = 0
    is_work, query_start, query_count, first_token, length, head, key_end, _ = read_mail(mail, mail_full, letter)
    while is_work != 0:
        query = queries.index((letter % MAIL_SLOTS) * 2 + WARP_GROUP)
        if not COPY_QUERY:
            tokens = first_token + token_in_tile
            is_query = (token_in_tile < QUERY_TILE) & (tokens < query_count)
            places = (query_start + tokens).to(gl.int64)[:, None] * query_stride + head * (GROUP * HEAD_DIM)
            query.store(gl.load(query_ptr + (places + head_places), mask=is_query[:, None], other=0.0))
            fence_async_shared()

        positions = length - query_count + first_token + score_tokens
        first_position = length - query_count + first_token + (WARP_GROUP * ROWS) // GROUP
        tile_count = (key_end + (TILE - 1)) // TILE
        last_tile = tile_count - 1
        full_count = gl.minimum((first_position + 1) // TILE, last_tile)

        # The tile on the diagonal has no values of an earlier one to go with.
        stage = read % STAGES
        mbarrier.wait(key_full.index(stage), (read // STAGES) & 1)
        scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        mbarrier.arrive(key_empty.index(stage), count=1)
        if CLEAN_VALUES and tile_count * TILE > length:
            # Past the row's end the copied blocks may hold anything; both groups write the same zeros there.
            mbarrier.wait(value_full.index(stage), (read // STAGES) & 1)
            value = values.index(stage).load(copy_layout)
            is_token = last_tile * TILE + key_places < length
            values.index(stage).store(gl.where(is_token[:, None], value, gl.zeros_like(value)))
            fence_async_shared()
        maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
        normaliser = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, score_layout))
        accumulator = gl.zeros([ROWS, HEAD_DIM], gl.float32, value_layout)
        probabilities, maximum, normaliser, _ = _softmax(
            scores, maximum, normaliser, positions, last_tile * TILE, scale_log2, True, score_layout
        )

        read, probabilities, accumulator, maximum, normaliser = _steps(
            last_tile, full_count, read, probabilities, accumulator, maximum, normaliser, query, positions,
            keys, values, key_full, key_empty, value_full, value_empty, scale_log2,
            True, STAGES, OVERLAP, score_layout, value_layout,
        )  # fmt: skip
        read, probabilities, accumulator, maximum, normaliser = _steps(
            full_count, 0, read, probabilities, accumulator, maximum, normaliser, query, positions,
            keys, values, key_full, key_empty, value_full, value_empty, scale_log2,
            False, STAGES, OVERLAP, score_layout, value_layout,
        )  # fmt: skip

        stage = read % STAGES
        mbarrier.wait(value_full.index(stage), (read // STAGES) & 1)
        operand_tile = gl.convert_layout(probabilities.to(dtype), operand)
        accumulator = warpgroup_mma(operand_tile, values.index(stage), accumulator, is_async=True)
        accumulator, operand_tile = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator, operand_tile))
        mbarrier.arrive(value_empty.index(stage), count=1)
        read += 1

        reciprocal = gl.convert_layout(1.0 / normaliser, gl.SliceLayout(1, value_layout))
        result = accumulator * reciprocal[:, None]
        query.store(result.to(dtype))
        tokens = first_token + token_in_tile
        is_query = (token_in_tile < QUERY_TILE) & (tokens < query_count)
        places = (query_start + tokens).to(gl.int64)[:, None] * output_stride + head * (GROUP * HEAD_DIM)
        gl.store(output_ptr + (places + head_places), query.load(copy_layout), mask=is_query[:, None])
        fence_async_shared()
        mbarrier.arrive(mail_empty.index(letter % MAIL_SLOTS), count=1)

        letter += 1
        is_work, query_start, query_count, first_token, length, head, key_end, _ = read_mail(mail, mail_full, letter)


@gluon.jit
def _hopper_kernel(
    output_ptr, query_ptr, query_desc, key_desc, value_desc, fresh_key_desc, fresh_value_desc, tables_ptr, slots_ptr,
    lengths_ptr, starts_ptr, decode_rows_ptr, counters_ptr, key_scales_ptr, value_scales_ptr, max_rows, token_count,
    output_stride, query_stride, table_stride, scale_log2,
    FORMAT: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HAS_DECODE_ROWS: gl.constexpr, QUERY_TILE: gl.constexpr, KEY_TILE: gl.constexpr, STAGES: gl.constexpr,
    ROWS_TILE: gl.constexpr, TOKEN_TILE: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr,
    CONVERT_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, COPY_QUERY: gl.constexpr, OVERLAP: gl.constexpr,
    FRESH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    dtype: gl.constexpr = output_ptr.dtype.element_ty
    HALVES: gl.constexpr = HEAD_DIM // 64
    PAGES: gl.constexpr = KEY_TILE // BLOCK_SIZE
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    cube: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    first_row = 0
    if HAS_DECODE_ROWS:
        first_row = gl.load(decode_rows_ptr)

    queries = gl.allocate_shared_memory(dtype, [MAIL_SLOTS * 2, 64, HEAD_DIM], shared)
    keys = gl.allocate_shared_memory(dtype, [STAGES, KEY_TILE, HEAD_DIM], shared)
    values = gl.allocate_shared_memory(dtype, [STAGES, KEY_TILE, HEAD_DIM], shared)
    mail = gl.allocate_shared_memory(gl.int32, [MAIL_SLOTS, MAIL_FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    mail_full = gl.allocate_shared_memory(gl.int64, [MAIL_SLOTS, 1], bars)
    mail_empty = gl.allocate_shared_memory(gl.int64, [MAIL_SLOTS, 1], bars)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=1)
        mbarrier.init(key_empty.index(stage), count=2)
        mbarrier.init(value_full.index(stage), count=1)
        mbarrier.init(value_empty.index(stage), count=2)
    for slot in gl.static_range(MAIL_SLOTS):
        mbarrier.init(mail_full.index(slot), count=2 if COPY_QUERY else 1)
        mbarrier.init(mail_empty.index(slot), count=3 if FORMAT == 0 else 4)
    # A stage of [KEY_TILE, HEAD_DIM] lies in memory as its halves of 64 columns, and each half block by block.
    query_boxes = keys._reinterpret(dtype, [STAGES * HALVES * PAGES, BLOCK_SIZE, 64], shared)
    if COPY_QUERY:
        query_boxes = queries._reinterpret(dtype, [MAIL_SLOTS * 2 * HALVES, 64 // GROUP, GROUP, 64], cube)
    wait_for_inputs(PDL)
    if FORMAT == 0:
        key_pages = keys._reinterpret(dtype, [STAGES * HALVES * PAGES, BLOCK_SIZE, 64], shared)
        value_pages = values._reinterpret(dtype, [STAGES * HALVES * PAGES, BLOCK_SIZE, 64], shared)
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        output_ptr, query_ptr, output_stride, query_stride, scale_log2, queries, keys, values,
                        key_full, key_empty, value_full, value_empty, mail, mail_full, mail_empty,
                        gl.constexpr(0), GROUP, QUERY_TILE, STAGES, COPY_QUERY, OVERLAP, gl.constexpr(True),
                    ),
                ),
                (
                    _consume,
                    (
                        output_ptr, query_ptr, output_stride, query_stride, scale_log2, queries, keys, values,
                        key_full, key_empty, value_full, value_empty, mail, mail_full, mail_empty,
                        gl.constexpr(1), GROUP, QUERY_TILE, STAGES, COPY_QUERY, OVERLAP, gl.constexpr(True),
                    ),
                ),
                (
                    produce_keys,
                    (
                        query_desc, key_desc, tables_ptr, slots_ptr, lengths_ptr, starts_ptr, counters_ptr, first_row,
                        max_rows, table_stride, query_boxes, key_pages, key_full, key_empty, None, None, key_full,
                        key_empty, mail, mail_full, mail_empty, KV_HEADS, QUERY_TILE, KEY_TILE, HALVES, BLOCK_SIZE,
                        STAGES, STAGES, ROWS_TILE, GROUP, HEAD_DIM, COPY_QUERY, gl.constexpr(False),
                    ),
                ),
                (
                    produce_values,
                    (
                        value_desc, tables_ptr, table_stride, value_pages, value_full, value_empty, None, None,
                        value_full, value_empty, mail, mail_full, mail_empty, KV_HEADS, KEY_TILE, HALVES, BLOCK_SIZE,
                        STAGES, STAGES, gl.constexpr(False),
                    ),
                ),
            ],
            [4, 1, 1],
            [COMPUTE_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        raw: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=HEAD_DIM, element_bitwidth=8, rank=2)
        raw_keys = gl.allocate_shared_memory(gl.int8, [1, KEY_TILE, HEAD_DIM], raw)
        raw_values = gl.allocate_shared_memory(gl.int8, [1, KEY_TILE, HEAD_DIM], raw)
        words = gl.allocate_shared_memory(gl.int32, [4, KEY_TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        raw_key_full = gl.allocate_shared_memory(gl.int64, [1, 1], bars)
        raw_key_empty = gl.allocate_shared_memory(gl.int64, [1, 1], bars)
        raw_value_full = gl.allocate_shared_memory(gl.int64, [1, 1], bars)
        raw_value_empty = gl.allocate_shared_memory(gl.int64, [1, 1], bars)
        mbarrier.init(raw_key_full.index(0), count=1)
        mbarrier.init(raw_key_empty.index(0), count=1)
        mbarrier.init(raw_value_full.index(0), count=1)
        mbarrier.init(raw_value_empty.index(0), count=1)
        key_pages = raw_keys._reinterpret(gl.int8, [PAGES, BLOCK_SIZE, HEAD_DIM], raw)
        value_pages = raw_values._reinterpret(gl.int8, [PAGES, BLOCK_SIZE, HEAD_DIM], raw)
        key_boxes = keys._reinterpret(dtype, [STAGES * HALVES, KEY_TILE, 1, 64], cube)
        value_boxes = values._reinterpret(dtype, [STAGES * HALVES, KEY_TILE, 1, 64], cube)
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        output_ptr, query_ptr, output_stride, query_stride, scale_log2, queries, keys, values,
                        key_full, key_empty, value_full, value_empty, mail, mail_full, mail_empty,
                        gl.constexpr(0), GROUP, QUERY_TILE, STAGES, COPY_QUERY, OVERLAP, FRESH,
                    ),
                ),
                (
                    _consume,
                    (
                        output_ptr, query_ptr, output_stride, query_stride, scale_log2, queries, keys, values,
                        key_full, key_empty, value_full, value_empty, mail, mail_full, mail_empty,
                        gl.constexpr(1), GROUP, QUERY_TILE, STAGES, COPY_QUERY, OVERLAP, FRESH,
                    ),
                ),
                (
                    convert,
                    (
                        tables_ptr, table_stride, key_scales_ptr, value_scales_ptr, raw_keys, raw_values,
                        raw_key_full, raw_key_empty, raw_value_full, raw_value_empty, keys, values,
                        key_full, key_empty, value_full, value_empty, words, mail, mail_full, mail_empty,
                        KV_HEADS, BLOCK_SIZE, STAGES, FORMAT, FRESH,
                    ),
                ),
                (
                    produce_keys,
                    (
                        query_desc, key_desc, tables_ptr, slots_ptr, lengths_ptr, starts_ptr, counters_ptr, first_row,
                        max_rows, table_stride, query_boxes, key_pages, raw_key_full, raw_key_empty, fresh_key_desc,
                        key_boxes, key_full, key_empty, mail, mail_full, mail_empty, KV_HEADS, QUERY_TILE, KEY_TILE,
                        gl.constexpr(1), BLOCK_SIZE, gl.constexpr(1), STAGES, ROWS_TILE, GROUP, HEAD_DIM, COPY_QUERY,
                        FRESH,
                    ),
                ),
                (
                    produce_values,
                    (
                        value_desc, tables_ptr, table_stride, value_pages, raw_value_full, raw_value_empty,
                        fresh_value_desc, value_boxes, value_full, value_empty, mail, mail_full, mail_empty,
                        KV_HEADS, KEY_TILE, gl.constexpr(1), BLOCK_SIZE, gl.constexpr(1), STAGES, FRESH,
                    ),
                ),
            ],
            [4, 4, 1, 1],
            [COMPUTE_REGISTERS, CONVERT_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    zero_unowned(
        output_ptr, output_stride, slots_ptr, lengths_ptr, starts_ptr, first_row, max_rows, token_count,
        KV_HEADS * GROUP * HEAD_DIM, TOKEN_TILE,
    )  # fmt: skip


@cache
def _shared_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _descriptor(cache_tensor: torch.Tensor) -> TensorDescriptor:
    """Boxes of one block of one K/V head, 64 columns of it or all that are bytes; travels by value with the launch."""
    block_size, head_dim = cache_tensor.shape[2:]
    lines = cache_tensor.view(-1, head_dim)
    if cache_tensor.element_size() == 1:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=head_dim, element_bitwidth=8, rank=2)
        return TensorDescriptor.from_tensor(lines.view(torch.int8), [block_size, head_dim], layout)
    return TensorDescriptor.from_tensor(lines, [block_size, 64], _shared_layout())


def _fresh_descriptor(vectors: torch.Tensor) -> TensorDescriptor:
    """Boxes of a tile's tokens of [token, K/V head, head_dim], one head and 64 columns of it."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor.from_tensor(vectors, [KEY_TILE, 1, 64], layout)


def _query_descriptor(query: torch.Tensor, group: int) -> TensorDescriptor | None:
    """Boxes of 64 tile rows and 64 columns; None where a group does not divide 64 rows."""
    if 64 % group or query.stride(0) * query.element_size() % 16:
        return None
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor.from_tensor(query, [64 // group, group, 64], layout)


def launch(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    query_starts: torch.Tensor,
    counters: torch.Tensor,
    decode_row_count: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    fresh: tuple[torch.Tensor, torch.Tensor] | None,
    shape: HeadShape,
    plan: PrefillPlan,
    scale_log2: float,
    pdl: bool,
) -> None:
    """Launch on arguments that `prefill_attention` has checked."""
    query_desc = _query_descriptor(query, shape.group)
    cache_kind = cache_format(key_cache.dtype)
    _hopper_kernel[(plan.program_count,)](
        output,
        query,
        query_desc,
        _descriptor(key_cache),
        _descriptor(value_cache),
        *((None, None) if fresh is None else map(_fresh_descriptor, fresh)),
        block_tables,
        row_slots,
        context_lengths,
        query_starts,
        decode_row_count,
        counters,
        key_scales,
        value_scales,
        row_slots.shape[0],
        query.shape[0],
        output.stride(0),
        query.stride(0),
        block_tables.stride(0),
        scale_log2,
        FORMAT=cache_kind,
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        BLOCK_SIZE=shape.block_size,
        HAS_DECODE_ROWS=decode_row_count is not None,
        QUERY_TILE=TILE_ROWS // shape.group,
        KEY_TILE=KEY_TILE,
        STAGES=STAGE_COUNT,
        ROWS_TILE=plan.rows_tile,
        TOKEN_TILE=max(1024, triton.next_power_of_2(shape.query_heads * shape.head_dim)),
        COMPUTE_REGISTERS=240 if cache_kind == CACHE_PLAIN else 208,
        CONVERT_REGISTERS=72,
        COPY_REGISTERS=24,
        COPY_QUERY=query_desc is not None,
        OVERLAP=plan.overlap,
        FRESH=fresh is not None,
        PDL=pdl,
        num_warps=4,
        **compile_options(None, pdl),
    )
