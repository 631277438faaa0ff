"""Decode attention for Hopper by teams: the operation of kernels/decode_attention.py by programs of several warps.

A tile is as many tokens of one K/V head for each warp; a warp computes with its own alone. It has a maximum, a
normaliser and sums of its own, which are the first dimension of all tensors, and so nothing is exchanged between warps
before a (row, head) or its part ends. Warps meet once a tile, at the copies:

    S [warp, tokens, 8] = K [warp] Q^T            O [warp, head_dim, 8] = V^T [warp] P [warp, tokens, 8]

So one program has a longer piece of the work than one of a single warp (kernels/decode_attention_hopper.py): few pairs
of row and head are cut, and fewer parts of them go through the workspace, to be merged. The products and the 8-bit
conversions are that kernel's. Tiles come by asynchronous copies of 16 bytes a thread, since those of the tensor copy
engine, a box for each block, would put a barrier between each two.

Work is shared out, cut and merged as in kernels/decode_attention.py, the only caller, which also has the layouts. The
workspace is `launch_plan(..., specialised=True, num_warps=...)`'s. Limits: those of kernels/decode_attention_hopper.py.

With PDL it starts while the kernel ahead, which stores the new tokens, still runs, and asks for all tiles but theirs:
block tables, lengths and all other tokens must have been written by kernels that had completed before that one started.

Measured figures: kernels/decode_attention.py and docs/log.md. Sources: those of kernels/decode_attention_hopper.py, and
there `cp.async`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from kernels.decode_attention_hopper import segment, share_of_work
from kernels.decode_team_parts import (
    LOWEST,
    across_warps,
    ask_for_tiles,
    beginning,
    blocks_of_tile,
    blocks_of_tiles,
    by_warps,
    copy_tile_in_pieces,
    exchanged,
    guessed_blocks,
    no_beginning,
    query_operands,
    scales_of_tile,
    tile_scores,
)
from kernels.decode_tile import FP8_SHIFT, FP8_UNSHIFT
from kernels.decode_warp import QUERIES, block_barrier, left_operands, store_piece, zero_empty_rows
from kernels.kv_quant import FP8
from kernels.launch_gluon import let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from kernels.decode_attention import DecodePlan


@gluon.jit
def _team_decode_kernel(
    output_ptr, query_ptr, key_ptr, value_ptr, tables_ptr, slots_ptr, lengths_ptr, row_count_ptr, partials_ptr,
    counters_ptr, key_scales_ptr, value_scales_ptr, max_rows, output_stride, query_stride, table_stride, scale_log2,
    FORMAT: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, HAS_ROW_COUNT: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    ROWS_TILE: gl.constexpr, MIN_TILES: gl.constexpr, START_TILES: gl.constexpr, PDL: gl.constexpr,
    QUERIES_FIRST: gl.constexpr, GUESS: gl.constexpr, ONE_EXCHANGE: gl.constexpr,
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
    statistics = tiles
    if ONE_EXCHANGE:
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
    guessed_ids = ()
    guessed_scale_ids = ()
    if GUESS:
        guessed_ids = guessed_blocks(
            tables_ptr, table_stride, max_rows, program, copy_tokens, KV_HEADS, BLOCK_SIZE, TILE, STAGES - 1
        )
        guessed_scale_ids = guessed_blocks(
            tables_ptr, table_stride, max_rows, program, tokens, KV_HEADS, BLOCK_SIZE, TILE, 2
        )
    row, head, length, table_ptr, start, first_tile, tile_end = segment(
        work, work_end, ends, lengths_ptr, slots_ptr, tables_ptr, table_stride, KV_HEADS, TILE, START_TILES
    )
    is_right = False
    if GUESS:
        is_right = (row == program // KV_HEADS) & (gl.load(slots_ptr + row) == row) & (first_tile == 0)
    blocks = blocks_of_tiles(
        first_tile, tile_end, table_ptr, length, copy_tokens, BLOCK_SIZE, TILE, STAGES - 1, guessed_ids, is_right, GUESS
    )

    # 3. Ask for the first tiles; for that of the new token when the kernel ahead has stored it.
    never = first_tile + STAGES
    early_end = first_tile
    if PDL:
        early_end = (length - 1) // TILE
        ask_for_tiles(
            first_tile, first_tile, early_end, tile_end, read, caches, blocks, head, length, tiles, copy_tokens,
            units, KV_HEADS, BLOCK_SIZE, STAGES,
        )  # fmt: skip
        wait_for_inputs(PDL)
    if QUERIES_FIRST:
        begun = beginning(
            query_ptr, row, head, query_stride, first_tile, tile_end, length, table_ptr, scales, copy_tokens, tokens,
            (guessed_scale_ids, is_right), mma, FORMAT, WARPS, KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, TILE, STAGES,
            GUESS,
        )  # fmt: skip
    ask_for_tiles(
        first_tile, early_end, never, tile_end, read, caches, blocks, head, length, tiles, copy_tokens,
        units, KV_HEADS, BLOCK_SIZE, STAGES,
    )  # fmt: skip

    # 4. Rows without tokens get zeros.
    zero_empty_rows(
        output_ptr, slots_ptr, lengths_ptr, program, programs, row_count, output_stride, KV_HEADS * GROUP * HEAD_DIM,
        WARPS,
    )  # fmt: skip

    while work < work_end:
        # 5. The queries; for 8 bits the scales of the first tile.
        if not QUERIES_FIRST:
            begun = beginning(
                query_ptr, row, head, query_stride, first_tile, tile_end, length, table_ptr, scales, copy_tokens,
                tokens, ((), False), mma, FORMAT, WARPS, KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, TILE, STAGES, False,
            )  # fmt: skip
        later_blocks, first_query, second_query, key_scale, value_scale, next_blocks = begun
        first_query, second_query, unit = query_operands(first_query, second_query, mma, FORMAT, WARPS)
        factor = unit * scale_log2
        if FORMAT == FP8:
            factor *= FP8_UNSHIFT
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
            if tile + STAGES - 1 < tile_end:
                copy_tile_in_pieces(
                    caches, later_blocks, head, tile + STAGES - 1, length, tiles, (read + STAGES - 1) % STAGES,
                    copy_tokens, units, KV_HEADS, BLOCK_SIZE,
                )  # fmt: skip
            async_copy.commit_group()
            later_blocks = blocks_of_tile(table_ptr, tile + STAGES, tile_end, length, copy_tokens, BLOCK_SIZE, TILE)
            this_key_scale = key_scale
            this_value_scale = value_scale
            if FORMAT > 0:
                key_scale, value_scale = scales_of_tile(
                    key_scales_ptr, value_scales_ptr, next_blocks, head, tile + 1, tile_end, length, tokens, KV_HEADS,
                    BLOCK_SIZE, TILE,
                )  # fmt: skip
                next_blocks = blocks_of_tile(table_ptr, tile + 2, tile_end, length, tokens, BLOCK_SIZE, TILE)
            scores = tile_scores(key_tiles.index(stage), first_query, second_query, mma, FORMAT, WARPS)
            if FORMAT > 0:
                scores = scores * gl.expand_dims(this_key_scale, 2)
            if (tile + 1) * TILE > length:
                is_token = gl.expand_dims(tile * TILE + tokens < length, 2)
                scores = gl.where(is_token, scores, float("-inf"))
            new_maximum = gl.maximum(maximum, gl.max(scores, axis=1) * factor)
            weights = gl.exp2(scores * gl.expand_dims(factor, 1) - gl.expand_dims(new_maximum, 1))
            shrink = gl.exp2(maximum - new_maximum)
            normaliser = normaliser * shrink + gl.sum(weights, axis=1)
            maximum = new_maximum
            even_sums = even_sums * gl.expand_dims(shrink, 1)
            values = by_warps(value_tiles.index(stage), FP8, WARPS)
            first_values, second_values = left_operands(values.permute((0, 2, 1)), mma, FORMAT)
            if FORMAT == 0:
                even_sums = mma_v2(first_values, gl.convert_layout(weights.to(DTYPE), weights_layout), even_sums)
            else:
                odd_sums = odd_sums * gl.expand_dims(shrink, 1)
                if FORMAT == FP8:
                    this_value_scale = this_value_scale * FP8_SHIFT
                weights = (weights * gl.expand_dims(this_value_scale, 2)).to(gl.bfloat16)
                operand = gl.convert_layout(weights, weights_layout)
                even_sums = mma_v2(first_values, operand, even_sums)
                odd_sums = mma_v2(second_values, operand, odd_sums)
            read += 1

        # 7. Ask for the next segment's first tiles: they come while this one's sums are stored.
        row_tiles = (length + (TILE - 1)) // TILE
        next_work = start + tile_end
        next_row, next_head, next_length, next_table_ptr = row, head, length, table_ptr
        next_start, next_tile, next_end = start, first_tile, tile_end
        if QUERIES_FIRST:
            begun = no_beginning(begun)
        if next_work < work_end:
            next_row, next_head, next_length, next_table_ptr, next_start, next_tile, next_end = segment(
                next_work, work_end, ends, lengths_ptr, slots_ptr, tables_ptr, table_stride, KV_HEADS, TILE, START_TILES
            )
            first_blocks = blocks_of_tiles(
                next_tile, next_end, next_table_ptr, next_length, copy_tokens, BLOCK_SIZE, TILE, STAGES - 1, (), False,
                False,
            )  # fmt: skip
            if QUERIES_FIRST:
                begun = beginning(
                    query_ptr, next_row, next_head, query_stride, next_tile, next_end, next_length, next_table_ptr,
                    scales, copy_tokens, tokens, ((), False), mma, FORMAT, WARPS, KV_HEADS, GROUP, HEAD_DIM,
                    BLOCK_SIZE, TILE, STAGES, False,
                )  # fmt: skip
            block_barrier()  # all warps have done the last tile
            ask_for_tiles(
                next_tile, next_tile, next_tile + STAGES, next_end, read, caches, first_blocks, next_head,
                next_length, tiles, copy_tokens, units, KV_HEADS, BLOCK_SIZE, STAGES,
            )  # fmt: skip

        # 8. Add up over the warps. One that has seen no token has LOWEST, and a share of 0.
        if ONE_EXCHANGE:
            even, odd, highest, normaliser = exchanged(
                even_sums, odd_sums, maximum, normaliser, tiles, statistics, (read + STAGES - 1) % STAGES, across,
                FORMAT, WARPS,
            )  # fmt: skip
        else:
            highest = gl.max(maximum, axis=0)
            shares = gl.exp2(maximum - highest[None, :])
            normaliser = gl.convert_layout(gl.sum(normaliser * shares, axis=0), whole_column)
            highest = gl.convert_layout(highest, whole_column)
            if FORMAT == FP8:
                shares = shares * FP8_UNSHIFT
            even = across_warps(even_sums, shares, across)
            odd = even
            if FORMAT > 0:
                odd = across_warps(odd_sums, shares, across)

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
    let_next_start(PDL)


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
