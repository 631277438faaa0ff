"""What decode kernels by teams of warps have in common: tiles by asynchronous copies, queries, adding up over warps.

A tile is as many tokens of one K/V head for each warp; the first dimension of tensors is the warp. Called by
kernels/decode_attention_team.py and kernels/decode_attention_stream.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from kernels.decode_attention_hopper import LEVELS
from kernels.decode_tile import FP8_SHIFT, FP8_UNSHIFT
from kernels.decode_warp import QUERIES, block_barrier, key_products
from kernels.kv_quant import FP8, INT8

LOWEST = gl.constexpr(-3.0e38)
"""The maximum of a warp that has seen no token: below every score, and finite, so that two have a difference."""

ROUND = gl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2^22 it rounds it to an integer, which the lowest bits of the sum are: no conversions."""


@gluon.jit
def _load_query(query_ptr, first_dim: gl.constexpr, step: gl.constexpr, dims: gl.constexpr, layout: gl.constexpr,
                WARPS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):  # fmt: skip
    """Queries of a group as the columns [WARPS, dims, 8] of a product's right operand, the same for each warp; every
    `step`-th dim."""
    rows_layout: gl.constexpr = gl.SliceLayout(2, layout)
    warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, rows_layout))
    rows = first_dim + step * gl.arange(0, dims, layout=gl.SliceLayout(0, rows_layout))
    queries = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    rows = (warps * 0)[:, None] + rows[None, :]
    queries = gl.expand_dims(queries[None, :], 1)
    places = queries * HEAD_DIM + gl.expand_dims(rows, 2)
    return gl.load(query_ptr + places, mask=queries < GROUP, other=0.0)


@gluon.jit
def _load_queries(query_ptr, mma: gl.constexpr, FORMAT: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr,
                  HEAD_DIM: gl.constexpr):  # fmt: skip
    """The queries as `_query_operands` takes them: over fp8 even and odd dims, else twice the same."""
    if FORMAT == FP8:
        layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
        first = _load_query(query_ptr, 0, 2, HEAD_DIM // 2, layout, WARPS, GROUP, HEAD_DIM)
        second = _load_query(query_ptr, 1, 2, HEAD_DIM // 2, layout, WARPS, GROUP, HEAD_DIM)
    else:
        whole: gl.constexpr = gl.DotOperandLayout(1, mma, 4 if FORMAT == INT8 else 2)
        first = _load_query(query_ptr, 0, 1, HEAD_DIM, whole, WARPS, GROUP, HEAD_DIM)
        second = first
    return first, second


@gluon.jit
def query_operands(first, second, mma: gl.constexpr, FORMAT: gl.constexpr, WARPS: gl.constexpr):
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
        first = (first.to(gl.float32) * FP8_SHIFT).to(first.dtype)
        second = (second.to(gl.float32) * FP8_SHIFT).to(second.dtype)
    return first, second, unit


@gluon.jit
def by_warps(tile, FORMAT: gl.constexpr, WARPS: gl.constexpr):
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
def tile_scores(keys, first, second, mma: gl.constexpr, FORMAT: gl.constexpr, WARPS: gl.constexpr):
    """Products [WARPS, tokens, 8] of a tile of keys in shared memory with the queries, without the keys' scales."""
    TOKENS: gl.constexpr = keys.shape[0] // WARPS
    return key_products(by_warps(keys, FORMAT, WARPS), first, second, [WARPS, TOKENS, QUERIES], mma, FORMAT)


@gluon.jit
def blocks_of_tile(table_ptr, tile, tile_end, length, tokens, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr):
    """The block id of each of some `tokens` of a tile; 0 past the row's or the piece's end."""
    blocks = (tile * TILE) // BLOCK_SIZE + tokens // BLOCK_SIZE  # one of TILE and BLOCK_SIZE divides the other
    return gl.load(table_ptr + blocks, mask=(blocks * BLOCK_SIZE < length) & (tile < tile_end), other=0)


@gluon.jit
def blocks_of_tiles(first_tile, tile_end, table_ptr, length, tokens, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
                  TILES: gl.constexpr, guessed, is_right, GUESS: gl.constexpr):  # fmt: skip
    """The block ids of a segment's first TILES tiles, of each of some `tokens`; those `guessed` where they are right,
    which stand for tokens past the row's end too."""
    blocks = ()
    for ahead in gl.static_range(TILES):
        if GUESS:
            tile = first_tile + gl.where(is_right, tile_end, ahead)  # right: nothing is loaded
            loaded = blocks_of_tile(table_ptr, tile, tile_end, length, tokens, BLOCK_SIZE, TILE)
            blocks += (gl.where(is_right, guessed[ahead], loaded),)
        else:
            blocks += (blocks_of_tile(table_ptr, first_tile + ahead, tile_end, length, tokens, BLOCK_SIZE, TILE),)
    return blocks


@gluon.jit
def guessed_blocks(tables_ptr, table_stride, max_rows, program, tokens, KV_HEADS: gl.constexpr,
                    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr):  # fmt: skip
    """The block ids of the first TILES tiles of the row that the program has if all have whole pairs of row and head,
    and slots are in order: loaded before anything is known."""
    row = program // KV_HEADS
    guessed = ()
    for tile in gl.static_range(TILES):
        blocks = (tile * TILE) // BLOCK_SIZE + tokens // BLOCK_SIZE
        is_entry = (blocks < table_stride) & (row < max_rows)
        guessed += (gl.load(tables_ptr + row.to(gl.int64) * table_stride + blocks, mask=is_entry, other=0),)
    return guessed


@gluon.jit
def scales_of_tile(key_scales_ptr, value_scales_ptr, blocks, head, tile, tile_end, length, tokens,
                 KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """The scales of a tile's tokens, float32; 0 past the row's or the piece's end."""
    is_token = (tile * TILE + tokens < length) & (tile < tile_end)
    in_block = (tile * TILE) % BLOCK_SIZE + tokens % BLOCK_SIZE
    places = (blocks * KV_HEADS + head) * BLOCK_SIZE + in_block  # below 2^31, or a layer had 256 GB
    key_scale = gl.load(key_scales_ptr + places, mask=is_token, other=0.0)
    value_scale = gl.load(value_scales_ptr + places, mask=is_token, other=0.0)
    return key_scale.to(gl.float32), value_scale.to(gl.float32)


@gluon.jit
def copy_tile_in_pieces(caches, blocks, head, tile, length, tiles, stage, tokens, units,
               KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr):  # fmt: skip
    """Ask for a tile of keys and of values, whose blocks are known; zeros for tokens past the row's end."""
    key_ptr, value_ptr = caches
    key_tiles, value_tiles = tiles
    TILE: gl.constexpr = key_tiles.shape[1]
    WIDTH: gl.constexpr = key_tiles.shape[2]
    in_block = (tile * TILE) % BLOCK_SIZE + tokens % BLOCK_SIZE
    starts = blocks.to(gl.int64) * (KV_HEADS * BLOCK_SIZE * WIDTH) + (head * BLOCK_SIZE + in_block) * WIDTH
    places = starts[:, None] + units[None, :]
    is_token = (tile * TILE + tokens < length)[:, None]
    async_copy.async_copy_global_to_shared(key_tiles.index(stage), key_ptr + places, mask=is_token)
    async_copy.async_copy_global_to_shared(value_tiles.index(stage), value_ptr + places, mask=is_token)


@gluon.jit
def copy_blocks(caches, blocks, head, tile, length, tiles, stage, tokens, units,
                KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr):  # fmt: skip
    """As `copy_tile_in_pieces`, by fewer instructions: where blocks begin, and places within them, which stay as they
    are from tile to tile."""
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
def ask_for_tiles(
    first_tile, begin, end, tile_end, read, caches, blocks, head, length, tiles, tokens, units,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for those of a segment's first STAGES - 1 tiles, whose `blocks` are known, that are from `begin` up to `end`;
    a group of copies for each, also for those past the segment's end. The first of the segment goes to stage `read`."""
    for ahead in gl.static_range(STAGES - 1):
        tile = first_tile + ahead
        if (tile >= begin) & (tile < end):
            if tile < tile_end:
                copy_tile_in_pieces(
                    caches, blocks[ahead], head, tile, length, tiles, (read + ahead) % STAGES, tokens, units,
                    KV_HEADS, BLOCK_SIZE,
                )  # fmt: skip
            async_copy.commit_group()


@gluon.jit
def beginning(
    query_ptr, row, head, query_stride, first_tile, tile_end, length, table_ptr, scales, copy_tokens, tokens,
    first_ids, mma: gl.constexpr, FORMAT: gl.constexpr, WARPS: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    GUESS: gl.constexpr,
):  # fmt: skip
    """What a segment needs beside its first tiles: its queries, the block ids of the tile that is asked for next, and,
    for 8 bits, the scales of its first tile and the block ids of the second."""
    guessed, is_right = first_ids
    group_ptr = query_ptr + row.to(gl.int64) * query_stride + head * (GROUP * HEAD_DIM)
    later_blocks = blocks_of_tile(table_ptr, first_tile + STAGES - 1, tile_end, length, copy_tokens, BLOCK_SIZE, TILE)
    first, second = _load_queries(group_ptr, mma, FORMAT, WARPS, GROUP, HEAD_DIM)
    TOKENS: gl.constexpr = TILE // WARPS
    token_layout: gl.constexpr = gl.SliceLayout(2, mma)
    key_scale = gl.full([WARPS, TOKENS], 1.0, gl.float32, token_layout)
    value_scale = key_scale
    next_blocks = gl.zeros([WARPS, TOKENS], gl.int32, token_layout)
    if FORMAT > 0:
        key_scales_ptr, value_scales_ptr = scales
        blocks = blocks_of_tiles(
            first_tile, tile_end, table_ptr, length, tokens, BLOCK_SIZE, TILE, 2, guessed, is_right, GUESS
        )
        key_scale, value_scale = scales_of_tile(
            key_scales_ptr, value_scales_ptr, blocks[0], head, first_tile, tile_end, length, tokens, KV_HEADS,
            BLOCK_SIZE, TILE,
        )  # fmt: skip
        next_blocks = blocks[1]
    return later_blocks, first, second, key_scale, value_scale, next_blocks


@gluon.jit
def across_warps(sums, shares, layout: gl.constexpr):
    """Sums [WARPS, rows, 8], times each warp's `shares`, added up: [rows, 8] in `layout` without its warps."""
    return gl.sum(gl.convert_layout(sums * gl.expand_dims(shares, 1), layout), axis=0)


@gluon.jit
def no_beginning(begun):
    """Nothing in the place of `_beginning`: so that its registers are free while tiles are computed."""
    none = ()
    for place in gl.static_range(len(begun)):
        none += (gl.zeros_like(begun[place]),)
    return none


@gluon.jit
def exchanged(even_sums, odd_sums, maximum, normaliser, tiles, statistics, stage, across: gl.constexpr,
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
    if FORMAT == FP8:
        shares = shares * FP8_UNSHIFT
    even = gl.sum(even_memory.load(across) * gl.expand_dims(shares, 1), axis=0)
    odd = even
    if FORMAT > 0:
        odd = gl.sum(odd_memory.load(across) * gl.expand_dims(shares, 1), axis=0)
    return even, odd, gl.convert_layout(highest, whole_column), gl.convert_layout(normaliser, whole_column)
