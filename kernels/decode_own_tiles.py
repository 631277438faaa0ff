"""The kernel of kernels/decode_attention.py in which each warp keeps to its own keys.

There the warps of a program share every tile: scores by columns of keys, sums by columns of values. Maximum and sum of
a row, and its weights as an operand, then go through shared memory, seven barriers a tile, and each warp's products are
chains of eight. Here a tile is `WARPS` tiles of as many keys, one for each warp, with a maximum, a normaliser and an
accumulator of its own; products are batched by warp, which Triton keeps within the warp. The one barrier left is that
of the copies, for K and for V. The price is an accumulator of the whole head in each warp: 64 registers, and as many
multiplications a tile. The warps' parts are merged once for each (row, head).

Arguments and tensors are those of the other kernel. Called by kernels/decode_attention.py.
"""

import triton
import triton.language as tl

from kernels.decode_tile import FP8_SHIFT, FP8_UNSHIFT, merge_parts, query_parts, unpacked, whole_sums
from kernels.launch import let_next_start, wait_for_inputs
from kernels.paged_kv import row_of_work, soft_capped


@triton.jit
def _for_each_warp(rows, WARPS: tl.constexpr):
    """Rows [G, d] -> [WARPS, G, d]."""
    return tl.broadcast_to(rows[None, :, :], [WARPS, rows.shape[0], rows.shape[1]])


@triton.jit
def _scores_of(first, second, unit, keys, FORMAT: tl.constexpr, NATIVE: tl.constexpr, SINGLE: tl.constexpr):
    """As `scores_of` of kernels/decode_tile.py, for each warp: [WARPS, G, keys]."""
    if FORMAT == 0:
        scores = tl.dot(first, tl.permute(keys, (0, 2, 1)), input_precision="ieee")
    elif SINGLE:
        if FORMAT == 1:
            # Two chains of products, not one: both are exact in float32, so their sum is rounded once, as an integer's.
            turned = tl.permute(keys, (0, 2, 1))
            scores = tl.dot(first, turned).to(tl.float32) * 128.0 + tl.dot(second, turned).to(tl.float32)
        else:
            scores = tl.dot(first, tl.permute(keys.to(tl.float16), (0, 2, 1)))
        scores *= unit[None, :, None]
    else:
        even_keys, odd_keys = unpacked(keys, first.dtype, FORMAT, NATIVE)
        scores = tl.dot(first, tl.permute(even_keys, (0, 2, 1)), input_precision="ieee")
        scores = tl.dot(second, tl.permute(odd_keys, (0, 2, 1)), scores, input_precision="ieee")
        if NATIVE and FORMAT == 2:
            scores *= FP8_UNSHIFT
    return scores


@triton.jit
def _add_weighted(even, odd, shrink, weights, values, value_scale, DTYPE: tl.constexpr, FORMAT: tl.constexpr,
                  NATIVE: tl.constexpr):  # fmt: skip
    """As `add_weighted` of kernels/decode_tile.py, for each warp."""
    if FORMAT == 0:
        even = tl.dot(weights.to(DTYPE), values, even * shrink[:, :, None], input_precision="ieee")
    else:
        scale = value_scale.to(tl.float32)
        if NATIVE and FORMAT == 2:
            scale *= FP8_SHIFT
        weights = (weights * scale[:, None, :]).to(DTYPE)
        even_values, odd_values = unpacked(values, DTYPE, FORMAT, NATIVE)
        even = tl.dot(weights, even_values, even * shrink[:, :, None], input_precision="ieee")
        odd = tl.dot(weights, odd_values, odd * shrink[:, :, None], input_precision="ieee")
    return even, odd


@triton.jit
def decode_own_tiles_kernel(
    output_ptr, query_ptr, key_ptr, value_ptr, tables_ptr, slots_ptr, lengths_ptr, row_count_ptr, partials_ptr,
    counters_ptr, key_scales_ptr, value_scales_ptr, max_rows, output_stride, query_stride, table_stride, scale_log2,
    soft_cap,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, SINGLE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    HAS_ROW_COUNT: tl.constexpr, TILE: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM_TILE: tl.constexpr,
    ROWS_TILE: tl.constexpr, MIN_TILES: tl.constexpr, START_TILES: tl.constexpr, WARPS: tl.constexpr,
    MERGE_PARTS: tl.constexpr, MERGE_GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)

    # 1. Lay all tiles of all rows on one line and take an equal piece of it.
    rows = tl.arange(0, ROWS_TILE)
    row_count = max_rows
    if HAS_ROW_COUNT:
        row_count = tl.minimum(tl.load(row_count_ptr), max_rows)
    is_row = rows < row_count  # edge: rows past the bucket or past the decode rows
    slots = tl.load(slots_ptr + rows, mask=is_row, other=-1)
    lengths = tl.load(lengths_ptr + rows, mask=is_row, other=0)
    lengths = tl.where(slots >= 0, lengths, 0)  # edge: padding rows have no tiles
    tile_counts = tl.cdiv(lengths, TILE)
    if WINDOW > 0:
        tile_counts -= tl.maximum(lengths - WINDOW, 0) // TILE
    ends = tl.cumsum(tl.where(tile_counts > 0, tile_counts + START_TILES, 0), axis=0)
    total = tl.max(ends) * KV_HEADS
    piece = tl.maximum(tl.cdiv(total, programs), MIN_TILES)
    work = program * piece
    work_end = tl.minimum(work + piece, total)

    dims = tl.arange(0, DIM_TILE)
    is_dim = dims < HEAD_DIM  # edge: head dims that are no power of two
    group_rows = tl.arange(0, GROUP_ROWS)
    is_query = (group_rows < GROUP)[:, None] & is_dim[None, :]  # edge: groups smaller than a tensor core's tile
    head_places = group_rows[:, None] * HEAD_DIM + dims[None, :]
    tile_places = tl.reshape(tl.arange(0, TILE), [WARPS, TILE // WARPS])  # a line of it is a warp's
    # A tile is loaded as elements, or as pairs of 8-bit elements; keys that are multiplied singly, as elements.
    WIDTH: tl.constexpr = HEAD_DIM if FORMAT == 0 else HEAD_DIM // 2
    units = tl.arange(0, DIM_TILE if FORMAT == 0 else DIM_TILE // 2)
    is_unit = (units < WIDTH)[None, None, :]  # edge: head dims that are no power of two
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    key_tiles_ptr, value_tiles_ptr = key_ptr, value_ptr
    if FORMAT > 0:
        if not SINGLE:
            key_tiles_ptr = key_ptr.to(tl.pointer_type(tl.int16))
        value_tiles_ptr = value_ptr.to(tl.pointer_type(tl.int16))

    while work < work_end:
        # 2. Locate: which row and head, and which of its tiles are in this piece.
        row, row_start = row_of_work(work, ends, KV_HEADS)
        length = tl.load(lengths_ptr + row)
        table_ptr = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
        first_position = 0
        if WINDOW > 0:
            first_position = (tl.maximum(length - WINDOW, 0) // TILE) * TILE
        row_tiles = tl.cdiv(length - first_position, TILE)
        head = (work - row_start) // (row_tiles + START_TILES)
        segment_start = row_start + head * (row_tiles + START_TILES) + START_TILES
        segment_end = tl.minimum(work_end, segment_start + row_tiles)
        first_tile = tl.maximum(work - segment_start, 0)
        tile_end = segment_end - segment_start  # not above 0 where this piece ends before the first tile
        positions = first_position + first_tile * TILE + tile_places

        maximum = tl.full([WARPS, GROUP_ROWS], float("-inf"), dtype=tl.float32)
        normaliser = tl.zeros([WARPS, GROUP_ROWS], dtype=tl.float32)
        query_places = query_ptr + row.to(tl.int64) * query_stride + head * (GROUP * HEAD_DIM) + head_places
        query = tl.load(query_places, mask=is_query, other=0.0)
        even_sums = tl.zeros([WARPS, GROUP_ROWS, units.shape[0]], dtype=tl.float32)
        odd_sums = even_sums
        first_query, second_query, query_unit = query_parts(query, FORMAT, NATIVE, SINGLE)
        first_query = _for_each_warp(first_query, WARPS)
        second_query = _for_each_warp(second_query, WARPS)

        # 3. Load and accumulate. The block ids of a tile are read one tile ahead of its keys and values, and so are its
        # scales, which are too short for the compiler to do it.
        in_block = positions % BLOCK_SIZE
        if TILE % BLOCK_SIZE == 0:  # tiles are aligned to blocks
            in_block = tile_places % BLOCK_SIZE
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < length, other=0)
        key_scale, value_scale = blocks, blocks
        if FORMAT > 0:
            scale_places = (blocks.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE + in_block
            key_scale = tl.load(key_scales_ptr + scale_places, mask=positions < length, other=0.0)
            value_scale = tl.load(value_scales_ptr + scale_places, mask=positions < length, other=0.0)
        for tile in range(first_tile, tile_end):
            is_token = positions < length  # edge: the row's last tile
            offsets = blocks.to(tl.int64) * (KV_HEADS * BLOCK_SIZE * WIDTH) + (head * BLOCK_SIZE + in_block) * WIDTH
            places = offsets[:, :, None] + units[None, None, :]
            next_positions = positions + TILE
            is_next = (next_positions < length) & (tile + 1 < tile_end)  # edge: no tile follows
            if TILE % BLOCK_SIZE != 0:
                in_block = next_positions % BLOCK_SIZE
            blocks = tl.load(table_ptr + next_positions // BLOCK_SIZE, mask=is_next, other=0)
            if SINGLE:
                key_places = (offsets * 2)[:, :, None] + dims[None, None, :]
                keys = tl.load(key_tiles_ptr + key_places, mask=is_token[:, :, None] & is_dim[None, None, :], other=0.0)
            else:
                keys = tl.load(key_tiles_ptr + places, mask=is_token[:, :, None] & is_unit, other=0)
            values = tl.load(value_tiles_ptr + places, mask=is_token[:, :, None] & is_unit, other=0)
            scores = _scores_of(first_query, second_query, query_unit, keys, FORMAT, NATIVE, SINGLE)
            if FORMAT > 0:
                scores = scores * (key_scale.to(tl.float32) * scale_log2)[:, None, :]
                scale_places = (blocks.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE + in_block
                key_scale = tl.load(key_scales_ptr + scale_places, mask=is_next, other=0.0)
            else:
                scores = scores * scale_log2
            if HAS_SOFT_CAP:
                scores = soft_capped(scores * (1.0 / 1.4426950408889634), soft_cap) * 1.4426950408889634
            is_seen = is_token
            if WINDOW > 0:
                is_seen = is_seen & (positions >= length - WINDOW)  # edge: the window's first tile
            scores = tl.where(is_seen[:, None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=2))
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a warp may have seen no position yet
            weights = tl.exp2(scores - base[:, :, None])
            shrink = tl.exp2(maximum - base)
            normaliser = normaliser * shrink + tl.sum(weights, axis=2)
            maximum = new_maximum
            even_sums, odd_sums = _add_weighted(
                even_sums, odd_sums, shrink, weights, values, value_scale, DTYPE, FORMAT, NATIVE
            )
            if FORMAT > 0:
                value_scale = tl.load(value_scales_ptr + scale_places, mask=is_next, other=0.0)
            positions = next_positions
        # The warps' parts together. Edge: a piece may end before the first tile, and then no warp has seen anything.
        whole = tl.max(maximum, axis=0)
        share = tl.exp2(maximum - tl.where(whole == float("-inf"), 0.0, whole)[None, :])
        maximum, normaliser = whole, tl.sum(normaliser * share, axis=0)
        even_whole = tl.sum(even_sums * share[:, :, None], axis=0)
        odd_whole = tl.sum(odd_sums * share[:, :, None], axis=0)
        accumulator = whole_sums(even_whole, odd_whole, FORMAT, NATIVE)

        # 4. Store: a whole (row, head) at once, or this piece's part of it.
        output_places = output_ptr + row.to(tl.int64) * output_stride + head * (GROUP * HEAD_DIM)
        if (first_tile == 0) & (tile_end == row_tiles):
            result = accumulator * (1.0 / normaliser)[:, None]
            tl.store(output_places + head_places, result.to(output_ptr.dtype.element_ty), mask=is_query)
        elif tile_end > 0:
            part = program * 2 + (first_tile == 0).to(tl.int32)
            statistics_ptr = partials_ptr + programs * (2 * GROUP_ROWS * DIM_TILE)
            tl.store(
                partials_ptr + (part * GROUP_ROWS + group_rows)[:, None] * DIM_TILE + dims[None, :],
                accumulator,
                mask=(group_rows < GROUP)[:, None],
            )
            tl.store(statistics_ptr + part * (2 * GROUP_ROWS) + group_rows, maximum)
            tl.store(statistics_ptr + part * (2 * GROUP_ROWS) + GROUP_ROWS + group_rows, normaliser)
            first_program = segment_start // piece
            part_count = (segment_start + row_tiles - 1) // piece - first_program + 1
            counter_ptr = counters_ptr + row * KV_HEADS + head
            tl.debug_barrier()  # all threads' parts are written before the counter says so
            arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
            if arrived == part_count - 1:
                # 5. Merge: the last to arrive reads every part.
                tl.store(counter_ptr, 0)
                # A (row, head) starts inside its first program's piece and at the start of every later one's.
                merge_parts(output_places, partials_ptr, statistics_ptr, 2 * first_program, 2, 1, part_count,
                            GROUP, HEAD_DIM, GROUP_ROWS, DIM_TILE, MERGE_PARTS, MERGE_GROUP)  # fmt: skip
        work = segment_end

    # 6. Rows without tokens get zeros.
    for empty in range(program, row_count, programs):
        if (tl.load(slots_ptr + empty) < 0) | (tl.load(lengths_ptr + empty) <= 0):
            for head in range(KV_HEADS):
                empty_places = output_ptr + tl.cast(empty, tl.int64) * output_stride + head * (GROUP * HEAD_DIM)
                zeros = tl.zeros([GROUP_ROWS, DIM_TILE], dtype=output_ptr.dtype.element_ty)
                tl.store(empty_places + head_places, zeros, mask=is_query)
