"""Decode attention for Hopper by teams: the operation of kernels/decode_attention.py by programs of several warps.

A tile is as many tokens of one K/V head for each warp; a warp computes with its own alone. It has a maximum, a
normaliser and sums of its own, which are the first dimension of all tensors, and so nothing is exchanged between warps
before a (row, head) or its part ends. Warps meet once a tile, at the copies:

    S [warp, tokens, 8] = K [warp] Q^T            O [warp, head_dim, 8] = V^T [warp] P [warp, tokens, 8]

A program's tiles, of all its rows and heads, are one list, of which STAGES - 1 are on their way at any time: what is
asked for next has a place of its own in that list, ahead of what is computed, and no gap lies between one (row, head)
and the next. So one program has a longer piece of the work than one of a single warp
(kernels/decode_attention_hopper.py): few pairs of row and head are cut, and fewer parts of them go through the
workspace, to be merged. Tiles come by asynchronous copies of 16 bytes a thread, since those of the tensor copy engine,
a box for each block, would put a barrier between each two.

8-bit elements are made float16, by fewer instructions than bfloat16 takes (kernels/decode_tile.py); int8 keys go to the
tensor cores as they are, times queries of 15-bit levels in two bytes. What goes with float16 must be within its range:
queries over fp8 are divided by a power of two; and the maximum that is kept is of a weight times its value's scale, so
that this product is 1 at most, a weight itself 2^24 at most, and the normaliser counts in the same unit.

Work is shared out, cut and merged as in kernels/decode_attention.py, the only caller, which also has the layouts. The
workspace is `launch_plan(..., specialised=True, num_warps=...)`'s. Limits: those of kernels/decode_attention_hopper.py.

With PDL it starts while the kernel ahead, which stores the new tokens, still runs, and asks for all tiles but theirs:
block tables, lengths and all other tokens must have been written by kernels that had completed before that one let it
start.
When its own first tiles are on their way it lets the next kernel start, as kernels/decode_attention_hopper.py does.

Measured figures: kernels/decode_attention.py and docs/log.md. Sources: those of kernels/decode_attention_hopper.py, and
there `cp.async`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from kernels.decode_attention_hopper import LEVELS, segment, share_of_work
from kernels.decode_tile import FP8_NEIGHBOURS, FP8_PARTS, INT8_PARTS
from kernels.decode_warp import QUERIES, block_barrier, key_products, store_piece, zero_empty_rows
from kernels.kv_quant import FP8, INT8
from kernels.launch_gluon import let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from kernels.decode_attention import DecodePlan

LOWEST = gl.constexpr(-3.0e38)
"""The maximum of a warp that has seen no token: below every score, and finite, so that two have a difference."""

ROUND = gl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2^22 it rounds it to an integer, which the lowest bits of the sum are: no conversions."""

EXPONENT = gl.constexpr(0x7F800000)
"""Where a float32 has its exponent."""

LEAST_SCALE = gl.constexpr(2.0**-24)
"""The smallest scale above 0 that is stored, in float16."""


@gluon.jit
def _load_query(query_ptr, first_dim: gl.constexpr, dims: gl.constexpr, layout: gl.constexpr, WARPS: gl.constexpr,
                GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):  # fmt: skip
    """Queries of a group as the columns [WARPS, dims, 8] of a product's right operand, the same for each warp: all
    dims, or of each four the two from `first_dim` on."""
    rows_layout: gl.constexpr = gl.SliceLayout(2, layout)
    warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, rows_layout))
    rows = gl.arange(0, dims, layout=gl.SliceLayout(0, rows_layout))
    if dims < HEAD_DIM:
        rows = rows // 2 * 4 + rows % 2 + first_dim
    queries = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    rows = (warps * 0)[:, None] + rows[None, :]
    queries = gl.expand_dims(queries[None, :], 1)
    places = queries * HEAD_DIM + gl.expand_dims(rows, 2)
    return gl.load(query_ptr + places, mask=queries < GROUP, other=0.0)


@gluon.jit
def _load_queries(query_ptr, mma: gl.constexpr, FORMAT: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr,
                  HEAD_DIM: gl.constexpr):  # fmt: skip
    """The queries as `_query_operands` takes them: over fp8 two dims of each four and the other two, else twice all."""
    if FORMAT == FP8:
        layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
        first = _load_query(query_ptr, 0, HEAD_DIM // 2, layout, WARPS, GROUP, HEAD_DIM)
        second = _load_query(query_ptr, 2, HEAD_DIM // 2, layout, WARPS, GROUP, HEAD_DIM)
    else:
        whole: gl.constexpr = gl.DotOperandLayout(1, mma, 4 if FORMAT == INT8 else 2)
        first = _load_query(query_ptr, 0, HEAD_DIM, whole, WARPS, GROUP, HEAD_DIM)
        second = first
    return first, second


@gluon.jit
def _query_operands(first, second, mma: gl.constexpr, FORMAT: gl.constexpr, WARPS: gl.constexpr):
    """Two right operands of the keys' product, made of the queries, and a factor [WARPS, 8] of what it gives."""
    column: gl.constexpr = gl.SliceLayout(1, mma)
    unit = gl.full([WARPS, QUERIES], 1.0, gl.float32, column)
    if FORMAT == INT8:
        wide = first.to(gl.float32)
        largest = gl.max(gl.abs(wide), axis=1) / LEVELS
        largest = gl.where(largest > 0.0, largest, 1.0)
        level = wide * gl.expand_dims(1.0 / largest, 1)  # once a column: a division takes some ten instructions
        multiple = level * (1.0 / 128.0) + ROUND
        first = multiple.to(gl.int32, bitcast=True).to(gl.int8)
        second = (level - (multiple - ROUND) * 128.0 + ROUND).to(gl.int32, bitcast=True).to(gl.int8)
        unit = gl.convert_layout(largest, column)
    elif FORMAT == FP8:
        # A power of two brings all of a query below 2: into float16's range, with no bit less.
        first, second = first.to(gl.float32), second.to(gl.float32)
        largest = gl.maximum(gl.max(gl.abs(first), axis=1), gl.max(gl.abs(second), axis=1))
        power = (largest.to(gl.int32, bitcast=True) & EXPONENT).to(gl.float32, bitcast=True)
        power = gl.where(power > 0.0, power, 1.0)
        per_power = gl.expand_dims(1.0 / power, 1)
        first, second = (first * per_power).to(gl.float16), (second * per_power).to(gl.float16)
        unit = gl.convert_layout(power, column)
    return first, second, unit


@gluon.jit
def _as_halves(pairs, ASSEMBLY: gl.constexpr):
    """Elements of int16 pairs in float16, two tensors, as `ASSEMBLY` takes them apart."""
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=&r,=&r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def _nearly_log2(x):
    """Up to 0.09 less than the logarithm: what a positive float32's bits are as a number."""
    return x.to(gl.int32, bitcast=True).to(gl.float32) * (1.0 / 2.0**23) - 127.0


@gluon.jit
def _by_warps(tile, FORMAT: gl.constexpr, WARPS: gl.constexpr):
    """A tile in shared memory as [WARPS, tokens of a warp, width]; `FORMAT` INT8: as bytes."""
    TOKENS: gl.constexpr = tile.shape[0] // WARPS
    SWIZZLE: gl.constexpr = min(128, 2 * tile.shape[1])
    if FORMAT == INT8:
        BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SWIZZLE, element_bitwidth=8, rank=3)
        view = tile._reinterpret(gl.int8, [WARPS, TOKENS, 2 * tile.shape[1]], BYTES)
    else:
        UNITS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SWIZZLE, element_bitwidth=16, rank=3)
        view = tile._reinterpret(tile.dtype, [WARPS, TOKENS, tile.shape[1]], UNITS)
    return view


@gluon.jit
def _tile_scores(keys, first, second, mma: gl.constexpr, FORMAT: gl.constexpr, WARPS: gl.constexpr):
    """Products [WARPS, tokens, 8] of a tile of keys in shared memory with the queries, without the keys' scales."""
    TOKENS: gl.constexpr = keys.shape[0] // WARPS
    view = _by_warps(keys, FORMAT, WARPS)
    if FORMAT == FP8:
        low, high = _as_halves(view.load(gl.DotOperandLayout(0, mma, 2)), FP8_NEIGHBOURS)
        none = gl.zeros([WARPS, TOKENS, QUERIES], gl.float32, mma)
        scores = mma_v2(high, second, mma_v2(low, first, none))
    else:
        scores = key_products(view, first, second, [WARPS, TOKENS, QUERIES], mma, FORMAT)
    return scores


@gluon.jit
def _blocks_of_tile(table_ptr, tile, tile_end, length, tokens, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr):
    """The block id of each of some `tokens` of a tile; 0 past the row's or the piece's end."""
    blocks = (tile * TILE) // BLOCK_SIZE + tokens // BLOCK_SIZE  # one of TILE and BLOCK_SIZE divides the other
    return gl.load(table_ptr + blocks, mask=(blocks * BLOCK_SIZE < length) & (tile < tile_end), other=0)


@gluon.jit
def _scales_of_tile(scales, blocks, head, tile, tile_end, length, tokens,
                 KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """The scales of a tile's tokens, float32; 0 past the row's or the piece's end."""
    key_scales_ptr, value_scales_ptr = scales
    is_token = (tile * TILE + tokens < length) & (tile < tile_end)
    in_block = (tile * TILE) % BLOCK_SIZE + tokens % BLOCK_SIZE
    places = (blocks * KV_HEADS + head) * BLOCK_SIZE + in_block  # below 2^31, or a layer had 256 GB
    key_scale = gl.load(key_scales_ptr + places, mask=is_token, other=0.0)
    value_scale = gl.load(value_scales_ptr + places, mask=is_token, other=0.0)
    return key_scale.to(gl.float32), value_scale.to(gl.float32)


@gluon.jit
def _ask(caches, blocks, head, tile, length, tiles, stage, tokens, units,
         KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr):  # fmt: skip
    """Ask for a tile of keys and of values, whose blocks are known; zeros for tokens past the row's end. Places within
    a block stay as they are from tile to tile."""
    key_ptr, value_ptr = caches
    key_tiles, value_tiles = tiles
    TILE: gl.constexpr = key_tiles.shape[1]
    WIDTH: gl.constexpr = key_tiles.shape[2]
    places = ((tokens % BLOCK_SIZE) * WIDTH)[:, None] + units[None, :]
    begins = blocks.to(gl.int64) * (KV_HEADS * BLOCK_SIZE * WIDTH) + head * (BLOCK_SIZE * WIDTH)
    if TILE % BLOCK_SIZE != 0:
        begins += (tile * TILE) % BLOCK_SIZE * WIDTH
    is_token = (tile * TILE + tokens < length)[:, None]
    keys = key_ptr + begins[:, None] + places
    values = value_ptr + begins[:, None] + places
    async_copy.async_copy_global_to_shared(key_tiles.index(stage), keys, mask=is_token)
    async_copy.async_copy_global_to_shared(value_tiles.index(stage), values, mask=is_token)


@gluon.jit
def _segment_queries(query_ptr, query_stride, row, head, mma: gl.constexpr, FORMAT: gl.constexpr, WARPS: gl.constexpr,
                     GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):  # fmt: skip
    """A segment's queries. The row and the head are there even where the segment has no tiles."""
    group_ptr = query_ptr + row.to(gl.int64) * query_stride + head * (GROUP * HEAD_DIM)
    return _load_queries(group_ptr, mma, FORMAT, WARPS, GROUP, HEAD_DIM)


@gluon.jit
def _segment_scales(
    scales, head, first_tile, tile_end, length, table_ptr, tokens, mma: gl.constexpr, FORMAT: gl.constexpr,
    WARPS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """For 8 bits the scales of a segment's first tile and the block ids of the second."""
    token_layout: gl.constexpr = gl.SliceLayout(2, mma)
    key_scale = gl.full([WARPS, TILE // WARPS], 1.0, gl.float32, token_layout)
    value_scale = key_scale
    next_blocks = gl.zeros([WARPS, TILE // WARPS], gl.int32, token_layout)
    if FORMAT > 0:
        blocks = _blocks_of_tile(table_ptr, first_tile, tile_end, length, tokens, BLOCK_SIZE, TILE)
        next_blocks = _blocks_of_tile(table_ptr, first_tile + 1, tile_end, length, tokens, BLOCK_SIZE, TILE)
        key_scale, value_scale = _scales_of_tile(
            scales, blocks, head, first_tile, tile_end, length, tokens, KV_HEADS, BLOCK_SIZE, TILE
        )
    return key_scale, value_scale, next_blocks


@gluon.jit
def _nothing(tensors):
    """Zeros in the place of tensors: so that their registers are free while tiles are computed."""
    none = ()
    for place in gl.static_range(len(tensors)):
        none += (gl.zeros_like(tensors[place]),)
    return none


@gluon.jit
def _exchanged(even_sums, odd_sums, maximum, normaliser, tiles, statistics, stage, across: gl.constexpr,
               FORMAT: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """All warps' sums, [dims, 8] of even and of odd dims, maxima and normalisers [8]: by one way through shared memory,
    for the sums that of a tile which has been computed, and arithmetic within each thread."""
    key_tiles, value_tiles = tiles
    TILE: gl.constexpr = key_tiles.shape[1]
    WIDTH: gl.constexpr = key_tiles.shape[2]
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    column: gl.constexpr = gl.SliceLayout(1, across)
    whole_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, across))
    even_memory = key_tiles.index(stage)._reinterpret(gl.float32, [TILE // 16, WIDTH, QUERIES], sums_layout)
    even_memory = even_memory.slice(0, WARPS)
    even_memory.store(even_sums)
    if FORMAT > 0:
        odd_memory = value_tiles.index(stage)._reinterpret(gl.float32, [TILE // 16, WIDTH, QUERIES], sums_layout)
        odd_memory = odd_memory.slice(0, WARPS)
        odd_memory.store(odd_sums)
    statistics.index(0).store(maximum)
    statistics.index(1).store(normaliser)
    block_barrier()
    maxima = statistics.index(0).load(column)
    highest = gl.max(maxima, axis=0)
    shares = gl.exp2(maxima - highest[None, :])
    normaliser = gl.sum(statistics.index(1).load(column) * shares, axis=0)
    even = gl.sum(even_memory.load(across) * gl.expand_dims(shares, 1), axis=0)
    odd = even
    if FORMAT > 0:
        odd = gl.sum(odd_memory.load(across) * gl.expand_dims(shares, 1), axis=0)
    return even, odd, gl.convert_layout(highest, whole_column), gl.convert_layout(normaliser, whole_column)


@gluon.jit
def _next_place(place, work_end, ends, lengths_ptr, slots_ptr, tables_ptr, table_stride,
                KV_HEADS: gl.constexpr, TILE: gl.constexpr, START_TILES: gl.constexpr):  # fmt: skip
    """The place after one in a program's list of tiles: head, length, block table, start, tile, and the end of tiles,
    at which the tile is when nothing follows."""
    head, length, table_ptr, start, tile, tile_end = place
    tile = tile + 1
    if (tile >= tile_end) & (start + tile_end < work_end):
        _, head, length, table_ptr, start, tile, tile_end = segment(
            start + tile_end, work_end, ends, lengths_ptr, slots_ptr, tables_ptr, table_stride, KV_HEADS, TILE,
            START_TILES,
        )  # fmt: skip
    return head, length, table_ptr, start, tile, tile_end


@gluon.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["row_count_ptr"])
def _team_decode_kernel(
    output_ptr, query_ptr, key_ptr, value_ptr, tables_ptr, slots_ptr, lengths_ptr, row_count_ptr, partials_ptr,
    counters_ptr, key_scales_ptr, value_scales_ptr, max_rows, output_stride, query_stride, table_stride, scale_log2,
    FORMAT: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, HAS_ROW_COUNT: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    ROWS_TILE: gl.constexpr, MIN_TILES: gl.constexpr, START_TILES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = query_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    token_layout: gl.constexpr = gl.SliceLayout(2, mma)
    column_layout: gl.constexpr = gl.SliceLayout(1, mma)
    weights_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    # A thread has all warps' sums of some dims and queries.
    across: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 4, 8], [1, WARPS, 1], [0, 1, 2])
    whole: gl.constexpr = gl.SliceLayout(0, across)
    whole_column: gl.constexpr = gl.SliceLayout(0, whole)

    # 1. Shared memory: `STAGES` tiles of keys and of values; 8-bit elements as pairs.
    WIDTH: gl.constexpr = HEAD_DIM if FORMAT == 0 else HEAD_DIM // 2
    STORED: gl.constexpr = DTYPE if FORMAT == 0 else gl.int16
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * WIDTH), element_bitwidth=16, rank=2)
    key_tiles = gl.allocate_shared_memory(STORED, [STAGES, TILE, WIDTH], shared)
    value_tiles = gl.allocate_shared_memory(STORED, [STAGES, TILE, WIDTH], shared)
    tiles = (key_tiles, value_tiles)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    statistics = gl.allocate_shared_memory(gl.float32, [2, WARPS, QUERIES], plain)
    caches = (key_ptr, value_ptr)
    scales = (key_scales_ptr, value_scales_ptr)
    # A thread copies 16 bytes of neighbouring tokens.
    ROW_LANES: gl.constexpr = WIDTH // 8
    ROWS: gl.constexpr = TILE * ROW_LANES // (32 * WARPS)
    copied: gl.constexpr = gl.BlockedLayout([ROWS, 8], [32 // ROW_LANES, ROW_LANES], [WARPS, 1], [1, 0])
    copy_tokens = gl.arange(0, TILE, layout=gl.SliceLayout(1, copied))
    units = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, copied))
    TOKENS: gl.constexpr = TILE // WARPS
    warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, token_layout))
    tokens = (warps * TOKENS)[:, None] + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, token_layout))[None, :]

    # 2. Lay all tiles of all rows on one line and take an equal piece of it.
    row_count = max_rows
    if HAS_ROW_COUNT:
        row_count = gl.minimum(gl.load(row_count_ptr), max_rows)
    ends, piece, work, work_end = share_of_work(
        slots_ptr, lengths_ptr, row_count, program, programs, KV_HEADS, TILE, START_TILES, MIN_TILES, ROWS_TILE, WARPS
    )
    statistics_ptr = partials_ptr + programs * (2 * QUERIES * HEAD_DIM)

    read = 0
    row, head, length, table_ptr, start, first_tile, tile_end = segment(
        work, work_end, ends, lengths_ptr, slots_ptr, tables_ptr, table_stride, KV_HEADS, TILE, START_TILES
    )
    place = (head, length, table_ptr, start, first_tile, tile_end)
    blocks = _blocks_of_tile(table_ptr, first_tile, tile_end, length, copy_tokens, BLOCK_SIZE, TILE)

    # 3. The first scales, then the first tiles, behind which they would queue; what belongs to a new token when the
    # kernel ahead has stored it, and then the queries, which it gives.
    if not PDL:
        queries = _segment_queries(query_ptr, query_stride, row, head, mma, FORMAT, WARPS, GROUP, HEAD_DIM)
    elif (first_tile + 1) * TILE >= length:
        wait_for_inputs(PDL)
    begun = _segment_scales(
        scales, head, first_tile, tile_end, length, table_ptr, tokens, mma, FORMAT, WARPS, KV_HEADS, BLOCK_SIZE, TILE
    )
    for ahead in gl.static_range(STAGES - 1):
        asked, asked_blocks = place, blocks
        place = _next_place(
            asked, work_end, ends, lengths_ptr, slots_ptr, tables_ptr, table_stride, KV_HEADS, TILE, START_TILES
        )
        blocks = _blocks_of_tile(place[2], place[4], place[5], place[1], copy_tokens, BLOCK_SIZE, TILE)
        if PDL and (asked[4] + 1) * TILE >= asked[1]:
            wait_for_inputs(PDL)
        if asked[4] < asked[5]:
            _ask(
                caches, asked_blocks, asked[0], asked[4], asked[1], tiles, ahead, copy_tokens, units, KV_HEADS,
                BLOCK_SIZE,
            )  # fmt: skip
        async_copy.commit_group()
    let_next_start(PDL)
    if PDL:
        wait_for_inputs(PDL)
        queries = _segment_queries(query_ptr, query_stride, row, head, mma, FORMAT, WARPS, GROUP, HEAD_DIM)

    # 4. Rows without tokens get zeros.
    zero_empty_rows(
        output_ptr, slots_ptr, lengths_ptr, program, programs, row_count, output_stride, KV_HEADS * GROUP * HEAD_DIM,
        WARPS,
    )  # fmt: skip

    while work < work_end:
        # 5. The queries.
        key_scale, value_scale, next_blocks = begun
        first_query, second_query, unit = _query_operands(queries[0], queries[1], mma, FORMAT, WARPS)
        factor = unit * scale_log2
        maximum = gl.full([WARPS, QUERIES], LOWEST, gl.float32, column_layout)
        normaliser = gl.zeros([WARPS, QUERIES], gl.float32, column_layout)
        even_sums = gl.zeros([WARPS, WIDTH, QUERIES], gl.float32, mma)
        odd_sums = even_sums

        # 6. Accumulate. When a tile is there, and all warps have done the one before, a later one is asked for in its
        # place; its blocks have been looked up a tile ahead, scales are loaded a tile ahead, the ids of theirs two.
        for tile in range(first_tile, tile_end):
            stage = read % STAGES
            async_copy.wait_group(STAGES - 2)
            block_barrier()
            this_key_scale = key_scale
            this_value_scale = value_scale
            if FORMAT > 0:
                key_scale, value_scale = _scales_of_tile(
                    scales, next_blocks, head, tile + 1, tile_end, length, tokens, KV_HEADS, BLOCK_SIZE, TILE
                )
                next_blocks = _blocks_of_tile(table_ptr, tile + 2, tile_end, length, tokens, BLOCK_SIZE, TILE)
            asked, asked_blocks = place, blocks
            place = _next_place(
                asked, work_end, ends, lengths_ptr, slots_ptr, tables_ptr, table_stride, KV_HEADS, TILE, START_TILES
            )
            blocks = _blocks_of_tile(place[2], place[4], place[5], place[1], copy_tokens, BLOCK_SIZE, TILE)
            if asked[4] < asked[5]:
                _ask(
                    caches, asked_blocks, asked[0], asked[4], asked[1], tiles, (read + STAGES - 1) % STAGES,
                    copy_tokens, units, KV_HEADS, BLOCK_SIZE,
                )  # fmt: skip
            async_copy.commit_group()
            scores = _tile_scores(key_tiles.index(stage), first_query, second_query, mma, FORMAT, WARPS)
            if FORMAT > 0:
                scores = scores * gl.expand_dims(this_key_scale, 2)
            if (tile + 1) * TILE > length:
                is_token = gl.expand_dims(tile * TILE + tokens < length, 2)
                scores = gl.where(is_token, scores, float("-inf"))
            scores = scores * gl.expand_dims(factor, 1)
            highest = scores
            if FORMAT > 0:
                # Over 8 bits the maximum is that of weights times values' scales, which so are 1 at most in float16.
                highest = scores + gl.expand_dims(_nearly_log2(gl.maximum(this_value_scale, LEAST_SCALE)), 2)
            new_maximum = gl.maximum(maximum, gl.max(highest, axis=1))
            weights = gl.exp2(scores - gl.expand_dims(new_maximum, 1))
            shrink = gl.exp2(maximum - new_maximum)
            normaliser = normaliser * shrink + gl.sum(weights, axis=1)
            maximum = new_maximum
            even_sums = even_sums * gl.expand_dims(shrink, 1)
            values = _by_warps(value_tiles.index(stage), FP8, WARPS).permute((0, 2, 1))
            values = values.load(gl.DotOperandLayout(0, mma, 2))
            if FORMAT == 0:
                even_sums = mma_v2(values, gl.convert_layout(weights.to(DTYPE), weights_layout), even_sums)
            else:
                odd_sums = odd_sums * gl.expand_dims(shrink, 1)
                even, odd = _as_halves(values, INT8_PARTS if FORMAT == INT8 else FP8_PARTS)
                weights = (weights * gl.expand_dims(this_value_scale, 2)).to(gl.float16)
                operand = gl.convert_layout(weights, weights_layout)
                even_sums = mma_v2(even, operand, even_sums)
                odd_sums = mma_v2(odd, operand, odd_sums)
            read += 1

        # 7. The next segment's queries; its first tiles are on their way.
        row_tiles = (length + (TILE - 1)) // TILE
        next_work = start + tile_end
        next_row, next_head, next_length, next_table_ptr = row, head, length, table_ptr
        next_start, next_tile, next_end = start, first_tile, tile_end
        queries, begun = _nothing(queries), _nothing(begun)
        if next_work < work_end:
            next_row, next_head, next_length, next_table_ptr, next_start, next_tile, next_end = segment(
                next_work, work_end, ends, lengths_ptr, slots_ptr, tables_ptr, table_stride, KV_HEADS, TILE, START_TILES
            )
            queries = _segment_queries(
                query_ptr, query_stride, next_row, next_head, mma, FORMAT, WARPS, GROUP, HEAD_DIM
            )
            begun = _segment_scales(
                scales, next_head, next_tile, next_end, next_length, next_table_ptr, tokens, mma, FORMAT, WARPS,
                KV_HEADS, BLOCK_SIZE, TILE,
            )  # fmt: skip

        # 8. Add up over the warps, in the memory of the last tile. One that has seen no token has LOWEST, and a share
        # of 0.
        even, odd, highest, normaliser = _exchanged(
            even_sums, odd_sums, maximum, normaliser, tiles, statistics, (read + STAGES - 1) % STAGES, across, FORMAT,
            WARPS,
        )  # fmt: skip

        # 9. Store: a whole (row, head) at once, or this piece's part of it.
        group_output_ptr = output_ptr + row.to(gl.int64) * output_stride + head * (GROUP * HEAD_DIM)
        store_piece(
            group_output_ptr, partials_ptr, statistics_ptr, counters_ptr, even, odd, highest, normaliser,
            row, head, start, first_tile, tile_end, row_tiles, piece, program, whole, whole_column,
            FORMAT, KV_HEADS, GROUP, HEADS, HEAD_DIM, 32, WARPS,
        )  # fmt: skip
        work = next_work
        row, head, length, table_ptr = next_row, next_head, next_length, next_table_ptr
        start, first_tile, tile_end = next_start, next_tile, next_end


def launch(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *others: Any,
    plan: DecodePlan,
    **constants: Any,
) -> None:
    """Launch on what `decode_attention` has checked and gives to all its kernels; 8-bit elements are seen as pairs."""
    is_8_bit = key_cache.element_size() == 1
    caches = (cache.view(torch.int16) if is_8_bit else cache for cache in (key_cache, value_cache))
    _team_decode_kernel[(plan.program_count,)](output, query, *caches, *others, **constants)
