"""Prefill attention for Hopper: the operation of kernels/prefill_attention.py with the warps of a program specialised.

Two warps move (kernels/prefill_attention_hopper_copy.py, which has the order of tiles): one draws tiles of queries,
posts each in a mailbox in shared memory and copies its queries and keys; the other copies its values, and in the end
writes the zeros of padding. They copy block by block with the tensor copy engine (a block of one K/V head is a
contiguous box of the cache). The first reads rows and block ids before it waits for the kernel ahead.

Tiles of keys that the step itself computed are copied from the rows of its q/k/v product, where the caller has them: in
a box for each 64 columns of a head, where the cache takes as many for each block. Over an 8-bit cache four warps more
convert what was copied from it (kernels/prefill_attention_hopper_convert.py), of prefixes of earlier steps alone then.
Both ways bring the same bits.

Two warp groups compute (kernels/prefill_attention_hopper_compute.py), each on 64 of the tile's 128 rows: while the
tensor cores multiply probabilities by values and the next keys by queries, the group's threads work out the next
softmax [1]. Key tiles are taken from the diagonal backwards, so that the masked ones come first.

    warps 0-3     rows 0-63     S = Q K^T | O += P V | softmax   wait for *_full, signal *_empty
    warps 4-7     rows 64-127   the same, on their own
    warp 8        mail and queries[n % 2], keys[i % stages]      waits for *_empty, fills, signals *_full
    warp 9        values[i % stages]                             reads the mail, waits for value_empty, fills; zeros

Layouts, padding and results are those of kernels/prefill_attention.py, its only caller. Limits beside those there:
compute capability 9, Triton 3.6, bf16 or (over a plain cache) f16, head_dim 64 or 128, block_size 8..128, no sliding
window, no soft cap (kernels/prefill_plans.py). Its start costs more than the plain kernel's: it pays from about a
thousand tokens on.

Tiles of keys are 64 long in four stages, with block ids read a tile ahead, or 128 in two: of the short ones fewer
products at the diagonal are masked, and the first is there sooner; of the long ones there are half as many waits. Over
an 8-bit cache they are 128 long.

The copies have a warp each because one alone, with 32 boxes for each pair of tiles of 128, was slower than the tensor
cores (docs/log.md).

Measured: one NVIDIA H200, bf16, 16 query and 8 K/V heads of 128, blocks of 16, commit 0a851a4, calls in turns with
torch's attention on contiguous tensors, in brackets, on a warm card (docs/log.md, 2026-12-01): 4x4096 594 TFLOP/s
(500), 1x16384 655 (525), 16x1024 464 (431), 8x256 160 (137); with 32 query heads 4x4096 588 (512). With 32
rows of 256 tokens torch is 4 % faster.

Sources: [1] Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.decode_warp import cache_descriptor
from kernels.kv_format import CACHE_PLAIN, cache_format
from kernels.launch_gluon import let_next_start
from kernels.paged_kv import HeadShape, compile_options
from kernels.prefill_attention_hopper_compute import consume
from kernels.prefill_attention_hopper_convert import convert
from kernels.prefill_attention_hopper_copy import MAIL_FIELDS, MAIL_SLOTS, produce_keys, produce_values
from kernels.prefill_plans import PrefillPlan

TILE_ROWS = 128

# Registers of a thread that computes and of one that copies, by the tile of keys (block ids that are read ahead have to
# be kept), and over an 8-bit cache, where converting warps have theirs. With long tiles both spill a little.
PLAIN_REGISTERS = {64: (224, 56), 128: (232, 40)}
QUANTISED_REGISTERS = (208, 32)
CONVERT_REGISTERS = 64


@gluon.jit(do_not_specialize=["max_rows", "token_count", "table_stride"])
def _hopper_kernel(
    output_ptr, query_ptr, query_desc, key_desc, value_desc, fresh_key_desc, fresh_value_desc, tables_ptr, slots_ptr,
    lengths_ptr, starts_ptr, decode_rows_ptr, counters_ptr, key_scales_ptr, value_scales_ptr, max_rows, token_count,
    output_stride, query_stride, table_stride, scale_log2,
    FORMAT: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HAS_DECODE_ROWS: gl.constexpr, QUERY_TILE: gl.constexpr, KEY_TILE: gl.constexpr, STAGES: gl.constexpr,
    ROWS_TILE: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr, CONVERT_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr, COPY_QUERY: gl.constexpr, OVERLAP: gl.constexpr, AHEAD: gl.constexpr,
    FRESH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    dtype: gl.constexpr = output_ptr.dtype.element_ty
    HALVES: gl.constexpr = HEAD_DIM // 64
    PAGE: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < KEY_TILE else KEY_TILE
    PAGES: gl.constexpr = KEY_TILE // PAGE
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
    query_full = gl.allocate_shared_memory(gl.int64, [MAIL_SLOTS, 1], bars)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=1)
        mbarrier.init(key_empty.index(stage), count=2)
        mbarrier.init(value_full.index(stage), count=1)
        mbarrier.init(value_empty.index(stage), count=2)
    for slot in gl.static_range(MAIL_SLOTS):
        mbarrier.init(mail_full.index(slot), count=1)
        mbarrier.init(mail_empty.index(slot), count=3 if FORMAT == 0 else 4)
        mbarrier.init(query_full.index(slot), count=1)
    # A stage of [KEY_TILE, HEAD_DIM] lies in memory as its halves of 64 columns, and each half block by block, or as
    # a part of a block.
    query_boxes = keys._reinterpret(dtype, [STAGES * HALVES * PAGES, PAGE, 64], shared)
    if COPY_QUERY:
        query_boxes = queries._reinterpret(dtype, [MAIL_SLOTS * 2 * HALVES, 64 // GROUP, GROUP, 64], cube)
    key_boxes = keys._reinterpret(dtype, [STAGES * HALVES, KEY_TILE, 1, 64], cube)
    value_boxes = values._reinterpret(dtype, [STAGES * HALVES, KEY_TILE, 1, 64], cube)
    if FORMAT == 0:
        key_pages = keys._reinterpret(dtype, [STAGES * HALVES * PAGES, PAGE, 64], shared)
        value_pages = values._reinterpret(dtype, [STAGES * HALVES * PAGES, PAGE, 64], shared)
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        output_ptr, query_ptr, output_stride, query_stride, scale_log2, queries, keys, values, key_full,
                        key_empty, value_full, value_empty, mail, mail_full, mail_empty, query_full,
                        gl.constexpr(0), GROUP, QUERY_TILE, STAGES, COPY_QUERY, OVERLAP, gl.constexpr(True), PDL,
                    ),
                ),
                (
                    consume,
                    (
                        output_ptr, query_ptr, output_stride, query_stride, scale_log2, queries, keys, values, key_full,
                        key_empty, value_full, value_empty, mail, mail_full, mail_empty, query_full,
                        gl.constexpr(1), GROUP, QUERY_TILE, STAGES, COPY_QUERY, OVERLAP, gl.constexpr(True), PDL,
                    ),
                ),
                (
                    produce_keys,
                    (
                        query_desc, key_desc, tables_ptr, slots_ptr, lengths_ptr, starts_ptr, counters_ptr, first_row,
                        max_rows, table_stride, query_boxes, query_full, key_pages, key_full, key_empty, fresh_key_desc,
                        key_boxes, key_full, key_empty, mail, mail_full, mail_empty, KV_HEADS, QUERY_TILE, KEY_TILE,
                        HALVES, BLOCK_SIZE, STAGES, STAGES, ROWS_TILE, GROUP, HEAD_DIM, COPY_QUERY, FRESH, AHEAD,
                        PDL,
                    ),
                ),
                (
                    produce_values,
                    (
                        output_ptr, output_stride, slots_ptr, lengths_ptr, starts_ptr, first_row, max_rows,
                        token_count, value_desc, tables_ptr, table_stride, value_pages, value_full, value_empty,
                        fresh_value_desc, value_boxes, value_full, value_empty, mail, mail_full, mail_empty, KV_HEADS,
                        KEY_TILE, HALVES, BLOCK_SIZE, STAGES, STAGES, KV_HEADS * GROUP * HEAD_DIM, FRESH, AHEAD, PDL,
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
        key_pages = raw_keys._reinterpret(gl.int8, [PAGES, PAGE, HEAD_DIM], raw)
        value_pages = raw_values._reinterpret(gl.int8, [PAGES, PAGE, HEAD_DIM], raw)
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        output_ptr, query_ptr, output_stride, query_stride, scale_log2, queries, keys, values, key_full,
                        key_empty, value_full, value_empty, mail, mail_full, mail_empty, query_full,
                        gl.constexpr(0), GROUP, QUERY_TILE, STAGES, COPY_QUERY, OVERLAP, FRESH, PDL,
                    ),
                ),
                (
                    consume,
                    (
                        output_ptr, query_ptr, output_stride, query_stride, scale_log2, queries, keys, values, key_full,
                        key_empty, value_full, value_empty, mail, mail_full, mail_empty, query_full,
                        gl.constexpr(1), GROUP, QUERY_TILE, STAGES, COPY_QUERY, OVERLAP, FRESH, PDL,
                    ),
                ),
                (
                    convert,
                    (
                        tables_ptr, table_stride, key_scales_ptr, value_scales_ptr, raw_keys, raw_values,
                        raw_key_full, raw_key_empty, raw_value_full, raw_value_empty, keys, values,
                        key_full, key_empty, value_full, value_empty, words, mail, mail_full, mail_empty,
                        KV_HEADS, BLOCK_SIZE, STAGES, FORMAT, FRESH, PDL,
                    ),
                ),
                (
                    produce_keys,
                    (
                        query_desc, key_desc, tables_ptr, slots_ptr, lengths_ptr, starts_ptr, counters_ptr, first_row,
                        max_rows, table_stride, query_boxes, query_full, key_pages, raw_key_full, raw_key_empty,
                        fresh_key_desc, key_boxes, key_full, key_empty, mail, mail_full, mail_empty, KV_HEADS,
                        QUERY_TILE, KEY_TILE, gl.constexpr(1), BLOCK_SIZE, gl.constexpr(1), STAGES, ROWS_TILE, GROUP,
                        HEAD_DIM, COPY_QUERY, FRESH, AHEAD, PDL,
                    ),
                ),
                (
                    produce_values,
                    (
                        output_ptr, output_stride, slots_ptr, lengths_ptr, starts_ptr, first_row, max_rows,
                        token_count, value_desc, tables_ptr, table_stride, value_pages, raw_value_full,
                        raw_value_empty, fresh_value_desc, value_boxes, value_full, value_empty, mail, mail_full,
                        mail_empty, KV_HEADS, KEY_TILE, gl.constexpr(1), BLOCK_SIZE, gl.constexpr(1), STAGES,
                        KV_HEADS * GROUP * HEAD_DIM, FRESH, AHEAD, PDL,
                    ),
                ),
            ],
            [4, 4, 1, 1],
            [COMPUTE_REGISTERS, CONVERT_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip


def _fresh_descriptor(vectors: torch.Tensor, key_tile: int) -> TensorDescriptor:
    """Boxes of a tile's tokens of [token, K/V head, head_dim], one head and 64 columns of it."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor.from_tensor(vectors, [key_tile, 1, 64], layout)


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
    key_tile = plan.key_tile
    registers = PLAIN_REGISTERS[key_tile] if cache_kind == CACHE_PLAIN else QUANTISED_REGISTERS
    _hopper_kernel[(plan.program_count,)](
        output,
        query,
        query_desc,
        cache_descriptor(key_cache, key_tile),
        cache_descriptor(value_cache, key_tile),
        *(None if fresh is None else _fresh_descriptor(fresh[part], key_tile) for part in range(2)),
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
        KEY_TILE=key_tile,
        STAGES=plan.num_stages,
        ROWS_TILE=plan.rows_tile,
        COMPUTE_REGISTERS=registers[0],
        CONVERT_REGISTERS=CONVERT_REGISTERS,
        COPY_REGISTERS=registers[1],
        COPY_QUERY=query_desc is not None,
        OVERLAP=plan.overlap,
        AHEAD=key_tile == 64 and cache_kind == CACHE_PLAIN,
        FRESH=fresh is not None,
        PDL=pdl,
        num_warps=4,
        **compile_options(None, pdl),
    )
