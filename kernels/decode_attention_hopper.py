"""Decode attention for Hopper: the operation of kernels/decode_attention.py by programs of one warp each.

No warp waits for another. The tensor copy engine fetches keys and values block by block (a block of one K/V head is a
contiguous box of the cache), so that no instruction computes an element's address, and STAGES tiles are on their way
while one is worked on. The products are transposed, so that the queries of a group are columns, of which 8 suffice:

    S [tile, 8] = K Q^T            O [head_dim, 8] = V^T P [tile, 8]

As rows they would be padded to sixteen. Instructions for 64 tokens of 128 dims, counted in Triton 3.6's machine code
for sm_90 over all warps of a program, of both kernels as they were when this one was written (the plain kernel's in
brackets): about 690 with a bfloat16 cache (1,690), 1,130 with int8 (2,340), 1,590 with fp8 (2,530).

8-bit tiles are taken to registers as pairs (kernels/decode_tile.py has the conversions, and why pairs): values as even
and odd dims, which are rows of two products; fp8 keys as even and odd dims, which two products add up; int8 keys go to
the tensor cores as they are, times queries of 15-bit levels in two bytes.

Work is shared out, cut and merged as in kernels/decode_attention.py, the only caller, which also has the layouts. The
workspace is `launch_plan(..., specialised=True)`'s. Limits beside those there: compute capability 9, Triton 3.6, bf16
or (over a plain cache) f16, head_dim 64 or 128, groups of up to 8, blocks of 8 or more, no sliding window, no soft cap.

With PDL it starts while the kernel ahead, which stores the new tokens, still runs, and asks for all tiles but theirs:
block tables, lengths and all other tokens must have been written by kernels that had completed before that one let it
start.
It lets the next kernel start as soon as its own first tiles are on their way (rule 1 of kernels/launch.py): what this
one reads, writes and keeps in its workspace, kernels behind it write only after their wait, which returns when every
program here has ended. That holds too for the next layer's call, which shares the workspace: it may be placed while
this one still runs, and until its wait it reads what no kernel of the step writes.

Measured on an H200, 16 query and 8 K/V heads of 128, by `python -m benchmarks.kernels.tune_attention --only decode`, in
microseconds for bfloat16, int8, fp8: 256 x 1024 254, 142, 145; 32 x 1024 37.8, 26.3, 25.2; 64 x 256 21.0, 17.8, 16.9.
docs/log.md has those of the plain kernel beside them, and says where the rest goes.

Sources: those of kernels/decode_attention.py. NVIDIA, Parallel Thread Execution ISA: `mma.sync` m16n8k16 and m16n8k32,
`cp.async.bulk.tensor`, `griddepcontrol`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from kernels.decode_tile import FP8_SHIFT, FP8_UNSHIFT
from kernels.decode_warp import (
    QUERIES,
    allocate_tiles,
    box_rows_of,
    cache_descriptor,
    clean,
    copy_tile,
    key_products,
    left_operands,
    store_piece,
    zero_empty_rows,
)
from kernels.kv_quant import FP8, INT8
from kernels.launch_gluon import let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from kernels.decode_attention import DecodePlan

LEVELS = gl.constexpr(127.0 * 128.0)
"""Of a query over an int8 cache, either side of 0: 127 * 128, so that two bytes, the higher times 128, hold each."""


@gluon.jit
def add(left, right):
    """What a running sum is made with (`associative_scan`)."""
    return left + right


@gluon.jit
def _load_query(query_ptr, first_dim: gl.constexpr, step: gl.constexpr, dims: gl.constexpr, layout: gl.constexpr,
                GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):  # fmt: skip
    """Queries of a group as the columns [dims, 8] of a product's right operand; every `step`-th dim."""
    rows = first_dim + step * gl.arange(0, dims, layout=gl.SliceLayout(1, layout))
    queries = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, layout))
    places = queries[None, :] * HEAD_DIM + rows[:, None]
    return gl.load(query_ptr + places, mask=(queries < GROUP)[None, :], other=0.0)


@gluon.jit
def _query_operands(query_ptr, mma: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Two right operands of the keys' product, and a factor [8] of what it gives."""
    column: gl.constexpr = gl.SliceLayout(0, mma)
    unit = gl.full([QUERIES], 1.0, gl.float32, column)
    if FORMAT == INT8:
        bytes_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
        wide = _load_query(query_ptr, 0, 1, HEAD_DIM, bytes_layout, GROUP, HEAD_DIM).to(gl.float32)
        largest = gl.max(gl.abs(wide), axis=0) / LEVELS
        largest = gl.where(largest > 0.0, largest, 1.0)
        level = wide / largest[None, :]
        multiple = gl.floor(level / 128.0 + 0.5)
        first = multiple.to(gl.int8)
        second = gl.floor(level - multiple * 128.0 + 0.5).to(gl.int8)
        unit = gl.convert_layout(largest, column)
    elif FORMAT == FP8:
        layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
        first = _load_query(query_ptr, 0, 2, HEAD_DIM // 2, layout, GROUP, HEAD_DIM)
        second = _load_query(query_ptr, 1, 2, HEAD_DIM // 2, layout, GROUP, HEAD_DIM)
        first = (first.to(gl.float32) * FP8_SHIFT).to(first.dtype)
        second = (second.to(gl.float32) * FP8_SHIFT).to(second.dtype)
    else:
        first = _load_query(query_ptr, 0, 1, HEAD_DIM, gl.DotOperandLayout(1, mma, 2), GROUP, HEAD_DIM)
        second = first
    return first, second, unit


@gluon.jit
def _scores(keys, first, second, mma: gl.constexpr, FORMAT: gl.constexpr):
    """Products [tile, 8] of a tile of keys in shared memory with the queries, without the keys' scales."""
    TILE: gl.constexpr = keys.shape[0]
    if FORMAT == INT8:
        BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * keys.shape[1], element_bitwidth=8, rank=2)
        keys = keys._reinterpret(gl.int8, [TILE, 2 * keys.shape[1]], BYTES)
    return key_products(keys, first, second, [TILE, QUERIES], mma, FORMAT)


@gluon.jit
def _load_blocks(table_ptr, tile, tile_end, length, places, BLOCK_SIZE: gl.constexpr):
    """The block id of each token of a tile; 0 past the row's or the piece's end."""
    tokens = tile * places.shape[0] + places
    return gl.load(table_ptr + tokens // BLOCK_SIZE, mask=(tokens < length) & (tile < tile_end), other=0)


@gluon.jit
def _load_scales(key_scales_ptr, value_scales_ptr, blocks, head, tile, tile_end, length, places,
                 KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr):  # fmt: skip
    """The scales of a tile's tokens, float32; 0 past the row's or the piece's end."""
    tokens = tile * places.shape[0] + places
    is_token = (tokens < length) & (tile < tile_end)
    scale_places = (blocks * KV_HEADS + head) * BLOCK_SIZE + tokens % BLOCK_SIZE  # below 2^31, or a layer had 256 GB
    key_scale = gl.load(key_scales_ptr + scale_places, mask=is_token, other=0.0)
    value_scale = gl.load(value_scales_ptr + scale_places, mask=is_token, other=0.0)
    return key_scale.to(gl.float32), value_scale.to(gl.float32)


@gluon.jit
def share_of_work(
    slots_ptr, lengths_ptr, row_count, program, programs, KV_HEADS: gl.constexpr, TILE: gl.constexpr,
    START_TILES: gl.constexpr, MIN_TILES: gl.constexpr, ROWS_TILE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """All tiles of all rows on one line, in equal pieces: where each row ends [ROWS_TILE], the length of a piece, and
    from where to where this program's piece reaches."""
    line: gl.constexpr = gl.BlockedLayout([max(1, ROWS_TILE // 32)], [32], [WARPS], [0])
    rows = gl.arange(0, ROWS_TILE, layout=line)
    is_row = rows < row_count  # edge: rows past the bucket or past the decode rows
    slots = gl.load(slots_ptr + rows, mask=is_row, other=-1)
    lengths = gl.load(lengths_ptr + rows, mask=is_row, other=0)
    lengths = gl.where(slots >= 0, lengths, 0)  # edge: padding rows have no tiles
    tile_counts = (lengths + (TILE - 1)) // TILE
    ends = gl.associative_scan(gl.where(lengths > 0, tile_counts + START_TILES, 0), 0, add)
    total = gl.max(ends, axis=0) * KV_HEADS
    piece = gl.maximum((total + programs - 1) // programs, MIN_TILES)
    work = program * piece
    return ends, piece, work, gl.minimum(work + piece, total)


@gluon.jit
def segment(work, work_end, ends, lengths_ptr, slots_ptr, tables_ptr, table_stride,
             KV_HEADS: gl.constexpr, TILE: gl.constexpr, START_TILES: gl.constexpr):  # fmt: skip
    """What lies at a place of the line: row, head, the row's length and block table, the place of the head's
    first tile on the line, and which of its tiles are in this piece; none past the piece's end, of row and head 0."""
    is_work = work < work_end
    before = ends * KV_HEADS <= work
    row = gl.where(is_work, gl.sum(before.to(gl.int32), axis=0), 0)
    row_start = gl.max(gl.where(before, ends, 0), axis=0) * KV_HEADS
    length = gl.load(lengths_ptr + row)
    table_ptr = tables_ptr + gl.load(slots_ptr + row).to(gl.int64) * table_stride
    row_tiles = (length + (TILE - 1)) // TILE
    head = gl.where(is_work, (work - row_start) // gl.maximum(row_tiles + START_TILES, 1), 0)
    start = row_start + head * (row_tiles + START_TILES) + START_TILES
    first_tile = gl.maximum(work - start, 0)
    # not above 0 where this piece ends before the first tile
    tile_end = gl.where(is_work, gl.minimum(work_end, start + row_tiles) - start, 0)
    return row, head, length, table_ptr, start, first_tile, tile_end


@gluon.jit
def _ask(
    first_tile, tile_end, read, key_desc, value_desc, table_ptr, head, length, key_boxes, value_boxes, full,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    BOX_ROWS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Ask for a segment's first tiles, as many as there are stages; the first goes to stage `read`."""
    for ahead in gl.static_range(STAGES):
        if first_tile + ahead < tile_end:
            box_rows = box_rows_of(table_ptr, first_tile + ahead, head, length, KV_HEADS, BLOCK_SIZE, TILE, BOX_ROWS)
            copy_tile(
                key_desc, value_desc, box_rows, key_boxes, value_boxes, full, (read + ahead) % STAGES,
                TILE, BOX_ROWS, HALVES,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["row_count_ptr"])
def _hopper_decode_kernel(
    output_ptr, query_ptr, key_desc, value_desc, tables_ptr, slots_ptr, lengths_ptr, row_count_ptr, partials_ptr,
    counters_ptr, key_scales_ptr, value_scales_ptr, max_rows, output_stride, query_stride, table_stride, scale_log2,
    FORMAT: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, HAS_ROW_COUNT: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    ROWS_TILE: gl.constexpr, MIN_TILES: gl.constexpr, START_TILES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    DTYPE: gl.constexpr = query_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    token_layout: gl.constexpr = gl.SliceLayout(1, mma)
    column_layout: gl.constexpr = gl.SliceLayout(0, mma)
    weights_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)

    # 1. Shared memory: `STAGES` tiles of keys and of values, each seen as the copy engine's boxes and as a whole.
    BOX_ROWS: gl.constexpr = min(TILE, BLOCK_SIZE)
    HALVES: gl.constexpr = HEAD_DIM // 64 if FORMAT == 0 else 1
    key_boxes, key_tiles = allocate_tiles(DTYPE, FORMAT, STAGES, TILE, BOX_ROWS, HEAD_DIM)
    value_boxes, value_tiles = allocate_tiles(DTYPE, FORMAT, STAGES, TILE, BOX_ROWS, HEAD_DIM)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
    SUM_ROWS: gl.constexpr = HEAD_DIM if FORMAT == 0 else HEAD_DIM // 2

    # 2. Lay all tiles of all rows on one line and take an equal piece of it.
    row_count = max_rows
    if HAS_ROW_COUNT:
        row_count = gl.minimum(gl.load(row_count_ptr), max_rows)
    ends, piece, work, work_end = share_of_work(
        slots_ptr, lengths_ptr, row_count, program, programs, KV_HEADS, TILE, START_TILES, MIN_TILES, ROWS_TILE, 1
    )
    statistics_ptr = partials_ptr + programs * (2 * QUERIES * HEAD_DIM)

    read = 0
    row, head, length, table_ptr, start, first_tile, tile_end = segment(
        work, work_end, ends, lengths_ptr, slots_ptr, tables_ptr, table_stride, KV_HEADS, TILE, START_TILES
    )

    # 3. Ask for the first tiles; for that of the new token when the kernel ahead has stored it.
    early_end = tile_end
    if PDL:
        early_end = gl.minimum(tile_end, (length - 1) // TILE)
    _ask(
        first_tile, early_end, read, key_desc, value_desc, table_ptr, head, length, key_boxes, value_boxes, full,
        KV_HEADS, BLOCK_SIZE, TILE, STAGES, BOX_ROWS, HALVES,
    )  # fmt: skip
    let_next_start(PDL)
    if PDL:
        wait_for_inputs(PDL)  # also a program without work: who waits for this kernel waits for those before it
        late_tile = gl.maximum(early_end, first_tile)
        if (late_tile < tile_end) & (late_tile < first_tile + STAGES):
            box_rows = box_rows_of(table_ptr, late_tile, head, length, KV_HEADS, BLOCK_SIZE, TILE, BOX_ROWS)
            copy_tile(
                key_desc, value_desc, box_rows, key_boxes, value_boxes, full, late_tile - first_tile,
                TILE, BOX_ROWS, HALVES,
            )  # fmt: skip

    while work < work_end:
        # 4. The queries; for 8 bits the scales of the first tile.
        group_ptr = query_ptr + row.to(gl.int64) * query_stride + head * (GROUP * HEAD_DIM)
        first_query, second_query, unit = _query_operands(group_ptr, mma, FORMAT, GROUP, HEAD_DIM)
        factor = unit * scale_log2
        if FORMAT == FP8:
            factor *= FP8_UNSHIFT
        maximum = gl.full([QUERIES], float("-inf"), gl.float32, column_layout)
        normaliser = gl.zeros([QUERIES], gl.float32, column_layout)
        even_sums = gl.zeros([SUM_ROWS, QUERIES], gl.float32, mma)
        odd_sums = even_sums
        places = gl.arange(0, TILE, layout=token_layout)
        key_scale = gl.full([TILE], 1.0, gl.float32, token_layout)
        value_scale = key_scale
        next_blocks = gl.zeros([TILE], gl.int32, token_layout)
        if FORMAT > 0:
            blocks = _load_blocks(table_ptr, first_tile, tile_end, length, places, BLOCK_SIZE)
            key_scale, value_scale = _load_scales(
                key_scales_ptr, value_scales_ptr, blocks, head, first_tile, tile_end, length, places, KV_HEADS,
                BLOCK_SIZE,
            )  # fmt: skip
            next_blocks = _load_blocks(table_ptr, first_tile + 1, tile_end, length, places, BLOCK_SIZE)

        # 5. Accumulate. The blocks of a later tile are looked up before this one's work and asked for after it;
        # scales are loaded a tile ahead, the ids of their blocks two.
        for tile in range(first_tile, tile_end):
            stage = read % STAGES
            later = box_rows_of(table_ptr, tile + STAGES, head, length, KV_HEADS, BLOCK_SIZE, TILE, BOX_ROWS)
            this_key_scale = key_scale
            this_value_scale = value_scale
            if FORMAT > 0:
                key_scale, value_scale = _load_scales(
                    key_scales_ptr, value_scales_ptr, next_blocks, head, tile + 1, tile_end, length, places, KV_HEADS,
                    BLOCK_SIZE,
                )  # fmt: skip
                next_blocks = _load_blocks(table_ptr, tile + 2, tile_end, length, places, BLOCK_SIZE)
            mbarrier.wait(full.index(stage), (read // STAGES) & 1)
            is_cut = (tile + 1) * TILE > length
            if FORMAT == 0:
                clean(value_tiles.index(stage), length - tile * TILE)
            scores = _scores(key_tiles.index(stage), first_query, second_query, mma, FORMAT)
            if FORMAT > 0:
                scores = scores * this_key_scale[:, None]
            if is_cut:
                scores = gl.where((tile * TILE + places < length)[:, None], scores, float("-inf"))
            # Every tile holds a token, so the new maximum is finite.
            new_maximum = gl.maximum(maximum, gl.max(scores, axis=0) * factor)
            weights = gl.exp2(scores * factor[None, :] - new_maximum[None, :])
            shrink = gl.exp2(maximum - new_maximum)
            normaliser = normaliser * shrink + gl.sum(weights, axis=0)
            maximum = new_maximum
            even_sums = even_sums * shrink[None, :]
            first_values, second_values = left_operands(value_tiles.index(stage).permute((1, 0)), mma, FORMAT)
            if FORMAT == 0:
                even_sums = mma_v2(first_values, gl.convert_layout(weights.to(DTYPE), weights_layout), even_sums)
            else:
                odd_sums = odd_sums * shrink[None, :]
                if FORMAT == FP8:
                    this_value_scale = this_value_scale * FP8_SHIFT
                weights = (weights * this_value_scale[:, None]).to(gl.bfloat16)
                operand = gl.convert_layout(weights, weights_layout)
                even_sums = mma_v2(first_values, operand, even_sums)
                odd_sums = mma_v2(second_values, operand, odd_sums)
            if tile + STAGES < tile_end:
                copy_tile(
                    key_desc, value_desc, later, key_boxes, value_boxes, full, stage, TILE, BOX_ROWS, HALVES
                )  # fmt: skip
            read += 1
        if FORMAT == FP8:
            even_sums = even_sums * FP8_UNSHIFT
            odd_sums = odd_sums * FP8_UNSHIFT

        # 6. Ask for the next segment's first tiles: they come while this one's sums are stored.
        row_tiles = (length + (TILE - 1)) // TILE
        next_work = start + tile_end
        next_row, next_head, next_length, next_table_ptr, next_start, next_tile, next_end = segment(
            next_work, work_end, ends, lengths_ptr, slots_ptr, tables_ptr, table_stride, KV_HEADS, TILE, START_TILES
        )
        _ask(
            next_tile, next_end, read, key_desc, value_desc, next_table_ptr, next_head, next_length, key_boxes,
            value_boxes, full, KV_HEADS, BLOCK_SIZE, TILE, STAGES, BOX_ROWS, HALVES,
        )  # fmt: skip

        # 7. Store: a whole (row, head) at once, or this piece's part of it.
        group_output_ptr = output_ptr + row.to(gl.int64) * output_stride + head * (GROUP * HEAD_DIM)
        store_piece(
            group_output_ptr, partials_ptr, statistics_ptr, counters_ptr, even_sums, odd_sums, maximum, normaliser,
            row, head, start, first_tile, tile_end, row_tiles, piece, program, mma, column_layout,
            FORMAT, KV_HEADS, GROUP, HEADS, HEAD_DIM, 64,
        )  # fmt: skip
        work = next_work
        row, head, length, table_ptr = next_row, next_head, next_length, next_table_ptr
        start, first_tile, tile_end = next_start, next_tile, next_end

    # 8. Rows without tokens get zeros.
    zero_empty_rows(
        output_ptr, slots_ptr, lengths_ptr, program, programs, row_count, output_stride, KV_HEADS * GROUP * HEAD_DIM
    )


def launch(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *others: Any,
    plan: DecodePlan,
    **constants: Any,
) -> None:
    """Launch on what `decode_attention` has checked and gives to all its kernels; the copy engine wants descriptors."""
    caches = (cache_descriptor(cache, plan.tile_tokens) for cache in (key_cache, value_cache))
    _hopper_decode_kernel[(plan.program_count,)](output, query, *caches, *others, **constants)
