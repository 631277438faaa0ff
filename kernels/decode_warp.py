"""What the decode kernels on Hopper have in common: tiles by the copy engine, products with columns, merging.

A tile holds some tokens of one K/V head, in blocks that are contiguous boxes of the cache; a group's queries are the
eight columns of what products give. Called by kernels/decode_attention_hopper.py, kernels/decode_attention_team.py,
kernels/fused_decode_warps.py, for merging by kernels/attention_parts.py, and for the cache's boxes by
kernels/prefill_attention_hopper.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.decode_tile import FP8_PAIRS, INT8_PAIRS
from kernels.kv_quant import FP8, INT8

QUERIES = gl.constexpr(8)
block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.6 calls it otherwise


@gluon.jit
def box_rows_of(
    table_ptr, tile, head, length,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, BOX_ROWS: gl.constexpr,
):  # fmt: skip
    """The first row, in the cache as [rows, head_dim], of each box of a tile."""
    rows = ()
    for box in gl.static_range(TILE // BOX_ROWS):
        # edge: blocks past the row's last one are not in the table; the last is copied again in their place
        token = gl.minimum(tile * TILE + box * BOX_ROWS, ((length - 1) // BOX_ROWS) * BOX_ROWS)
        block = gl.load(table_ptr + token // BLOCK_SIZE)
        rows += ((block * KV_HEADS + head) * BLOCK_SIZE + token % BLOCK_SIZE,)
    return rows


@gluon.jit
def copy_tile(
    key_desc, value_desc, box_rows, key_boxes, value_boxes, full, stage,
    TILE: gl.constexpr, BOX_ROWS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Ask the copy engine for a tile of keys and of values; `full` tells when they are there."""
    BOXES: gl.constexpr = TILE // BOX_ROWS
    COLUMNS: gl.constexpr = key_boxes.shape[2]
    mbarrier.expect(full.index(stage), 2 * TILE * HALVES * COLUMNS * key_boxes.dtype.primitive_bitwidth // 8)
    for box in gl.static_range(BOXES):
        for half in gl.static_range(HALVES):
            place = (stage * HALVES + half) * BOXES + box
            tma.async_copy_global_to_shared(
                key_desc, [box_rows[box], half * COLUMNS], full.index(stage), key_boxes.index(place)
            )
            tma.async_copy_global_to_shared(
                value_desc, [box_rows[box], half * COLUMNS], full.index(stage), value_boxes.index(place)
            )


@gluon.jit
def allocate_tiles(
    DTYPE: gl.constexpr, FORMAT: gl.constexpr, STAGES: gl.constexpr, TILE: gl.constexpr, BOX_ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Shared memory for STAGES tiles, as the copy engine's boxes and as `left_operands` takes them: 8-bit as pairs."""
    HALVES: gl.constexpr = HEAD_DIM // 64 if FORMAT == 0 else 1
    BOXES: gl.constexpr = STAGES * HALVES * (TILE // BOX_ROWS)
    SWIZZLE: gl.constexpr = 128 if FORMAT == 0 else HEAD_DIM
    STORED: gl.constexpr = DTYPE if FORMAT == 0 else gl.int8
    shared: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=SWIZZLE, element_bitwidth=16 if FORMAT == 0 else 8, rank=2
    )
    pair_shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SWIZZLE, element_bitwidth=16, rank=2)
    tiles = gl.allocate_shared_memory(STORED, [STAGES, TILE, HEAD_DIM], shared)
    boxes = tiles._reinterpret(STORED, [BOXES, BOX_ROWS, HEAD_DIM // HALVES], shared)
    if FORMAT > 0:
        tiles = tiles._reinterpret(gl.int16, [STAGES, TILE, HEAD_DIM // 2], pair_shared)
    return boxes, tiles


@gluon.jit
def _unpacked(pairs, FORMAT: gl.constexpr):
    """Even and odd elements of int16 pairs in bfloat16; fp8: times 2^-120."""
    return gl.inline_asm_elementwise(
        INT8_PAIRS if FORMAT == INT8 else FP8_PAIRS,
        "=&r,=&r,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def left_operands(tile, mma: gl.constexpr, FORMAT: gl.constexpr):
    """A tile in shared memory as left operands of products: even and odd elements of pairs, or twice a plain tile."""
    first = tile.load(gl.DotOperandLayout(0, mma, 2))
    second = first
    if FORMAT > 0:
        first, second = _unpacked(first, FORMAT)
    return first, second


@gluon.jit
def key_products(keys, first, second, SHAPE: gl.constexpr, mma: gl.constexpr, FORMAT: gl.constexpr):
    """Products of keys in shared memory, over int8 as bytes, with two right operands made of queries: float32 SHAPE,
    [..., tokens, 8]. Over int8 `first` is multiples of 128, and `second` the rest."""
    zeros = gl.zeros(SHAPE, gl.float32, mma)
    if FORMAT == INT8:
        operand = keys.load(gl.DotOperandLayout(0, mma, 4))
        none = gl.zeros(SHAPE, gl.int32, mma)
        products = (mma_v2(operand, first, none) * 128 + mma_v2(operand, second, none)).to(gl.float32)
    elif FORMAT == FP8:
        even, odd = left_operands(keys, mma, FORMAT)
        products = mma_v2(odd, second, mma_v2(even, first, zeros))
    else:
        products = mma_v2(keys.load(gl.DotOperandLayout(0, mma, 2)), first, zeros)
    return products


@gluon.jit
def clean(values, token_count):
    """Zeros for the vectors of a tile from `token_count` on, if any: past a row's end there may be NaN."""
    TILE: gl.constexpr = values.shape[0]
    HEAD_DIM: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [1, 1], [1, 0])
    if token_count < TILE:
        places = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
        value = values.load(layout)
        values.store(gl.where((places < token_count)[:, None], value, gl.zeros_like(value)))
        fence_async_shared()


@gluon.jit
def store_columns(
    base_ptr, columns, first_dim: gl.constexpr, step: gl.constexpr, repeats: gl.constexpr, mma: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Store [dims, 8] as rows [8, head_dim], every `step`-th dim; every `repeats`-th column is a row."""
    dims = first_dim + step * gl.arange(0, columns.shape[0], layout=gl.SliceLayout(1, mma))
    queries = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, mma))
    is_row = (queries % repeats == 0) & (queries // repeats < GROUP)
    places = (queries // repeats)[None, :] * HEAD_DIM + dims[:, None]
    gl.store(base_ptr + places, columns.to(base_ptr.dtype.element_ty), mask=is_row[None, :])


@gluon.jit
def _load_parts(
    source, first_part, part_count, layout: gl.constexpr,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Sums [PARTS, HEADS, HEAD_DIM], maxima and normalisers [PARTS, HEADS]; past the last part what adds nothing."""
    partials_ptr, statistics_ptr, first_place, step, first_shift = source
    pair_layout: gl.constexpr = gl.SliceLayout(2, layout)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(0, pair_layout))
    parts = first_part + gl.arange(0, PARTS, layout=gl.SliceLayout(1, pair_layout))
    places = first_place + parts * step + gl.where(parts == 0, first_shift, 0)
    is_part = (parts < part_count)[:, None] & (heads < GROUP)[None, :]
    pairs = places[:, None] * QUERIES + heads[None, :]
    columns = gl.expand_dims(gl.expand_dims(dims, 0), 0)
    sums = gl.load(
        partials_ptr + gl.expand_dims(pairs, 2) * HEAD_DIM + columns, mask=gl.expand_dims(is_part, 2), other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    statistic = statistics_ptr + places[:, None] * (2 * QUERIES) + heads[None, :]
    maximum = gl.load(statistic, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    normaliser = gl.load(statistic + QUERIES, mask=is_part, other=0.0, cache_modifier=".cg")
    return sums, maximum, normaliser


@gluon.jit
def with_parts(state, maxima, normalisers, parts, row_layout: gl.constexpr, MAY_BE_EMPTY: gl.constexpr):
    """(maximum [HEADS], normaliser [HEADS], sums [HEADS, HEAD_DIM]) with some parts in: a running softmax.

    maxima, normalisers: [PARTS, HEADS]; parts: sums [PARTS, HEADS, HEAD_DIM]. MAY_BE_EMPTY: there are heads without a
    maximum in any part.
    """
    maximum, normaliser, sums = state
    new_maximum = gl.maximum(maximum, gl.max(maxima, axis=0))
    base = new_maximum
    if MAY_BE_EMPTY:
        base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = gl.exp2(maxima - base[None, :])
    shrink = gl.exp2(maximum - base)
    normaliser = normaliser * shrink + gl.sum(normalisers * weights, axis=0)
    shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, row_layout)), 1)
    sums = sums * shrink + gl.sum(parts * gl.expand_dims(weights, 2), axis=0)
    return new_maximum, normaliser, sums


@gluon.jit
def merge(
    output_ptr, partials_ptr, statistics_ptr, first_place, step, first_shift, part_count,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, NUMBERS: gl.constexpr,
    AHEAD: gl.constexpr = False, WARPS: gl.constexpr = 1,
):  # fmt: skip
    """Merge the parts of one (row, K/V head), NUMBERS sums a thread at a time; AHEAD: while as many are on their way.

    Part i is at `first_place` + i * `step`, the first at `first_shift` beyond that: in `partials` [place, 8, HEAD_DIM]
    the sums, in `statistics` [place, 2, 8] maxima (powers of two) and normalisers. A thread has some dims of one head
    of all parts, so that nothing is exchanged between threads. HEADS: GROUP's power of two.
    """
    LANES: gl.constexpr = 32 // HEADS
    DIMS: gl.constexpr = max(1, HEAD_DIM // (LANES * WARPS))
    PARTS: gl.constexpr = NUMBERS // DIMS
    layout: gl.constexpr = gl.BlockedLayout([1, 1, DIMS], [1, HEADS, LANES], [1, 1, WARPS], [2, 1, 0])
    pair_layout: gl.constexpr = gl.SliceLayout(2, layout)
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(0, pair_layout))
    maximum = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(0, pair_layout))
    normaliser = gl.zeros([HEADS], gl.float32, gl.SliceLayout(0, pair_layout))
    sums = gl.zeros([HEADS, HEAD_DIM], gl.float32, row_layout)
    source = (partials_ptr, statistics_ptr, first_place, step, first_shift)
    if AHEAD:
        loaded = _load_parts(source, 0, part_count, layout, GROUP, HEADS, HEAD_DIM, PARTS)
    for first_part in range(0, part_count, PARTS):
        if not AHEAD:
            loaded = _load_parts(source, first_part, part_count, layout, GROUP, HEADS, HEAD_DIM, PARTS)
        part_sums, part_maximum, part_normaliser = loaded
        if AHEAD and first_part + PARTS < part_count:
            loaded = _load_parts(source, first_part + PARTS, part_count, layout, GROUP, HEADS, HEAD_DIM, PARTS)
        maximum, normaliser, sums = with_parts(
            (maximum, normaliser, sums), part_maximum, part_normaliser, part_sums, row_layout, MAY_BE_EMPTY=True
        )  # heads past the group have no part
    share = 1.0 / gl.where(heads < GROUP, normaliser, 1.0)
    result = sums * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, row_layout)), 1)
    row_heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, row_layout))
    row_dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, row_layout))
    gl.store(
        output_ptr + row_heads[:, None] * HEAD_DIM + row_dims[None, :], result.to(output_ptr.dtype.element_ty),
        mask=(row_heads < GROUP)[:, None],
    )  # fmt: skip


@gluon.jit
def store_piece(
    output_ptr, partials_ptr, statistics_ptr, counters_ptr, even, odd, maximum, normaliser, row, head, start,
    first_tile, tile_end, row_tiles, piece, program, layout: gl.constexpr, column_layout: gl.constexpr,
    FORMAT: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, NUMBERS: gl.constexpr, WARPS: gl.constexpr = 1,
):  # fmt: skip
    """Store a (row, head) at once if the program has all of it, else its part; the last to store one merges them.

    output_ptr: the group's; even, odd: sums [dim, 8], of every second dim over 8-bit caches; maximum, normaliser: [8];
    start: of the (row, head) in the work, of which a program has `piece`.
    """
    step: gl.constexpr = 1 if FORMAT == 0 else 2
    if (first_tile == 0) & (tile_end == row_tiles):
        share = (1.0 / normaliser)[None, :]
        store_columns(output_ptr, even * share, 0, step, 1, layout, GROUP, HEAD_DIM)
        if FORMAT > 0:
            store_columns(output_ptr, odd * share, 1, step, 1, layout, GROUP, HEAD_DIM)
    elif tile_end > 0:
        part = program * 2 + (first_tile == 0).to(gl.int32)
        part_ptr = partials_ptr + part * (QUERIES * HEAD_DIM)
        store_columns(part_ptr, even, 0, step, 1, layout, GROUP, HEAD_DIM)
        if FORMAT > 0:
            store_columns(part_ptr, odd, 1, step, 1, layout, GROUP, HEAD_DIM)
        statistic = statistics_ptr + part * (2 * QUERIES) + gl.arange(0, QUERIES, layout=column_layout)
        gl.store(statistic, maximum)
        gl.store(statistic + QUERIES, normaliser)
        first_program = start // piece
        part_count = (start + row_tiles - 1) // piece - first_program + 1
        counter_ptr = counters_ptr + row * KV_HEADS + head
        block_barrier()  # all threads' parts are written before the counter says so
        arrived = gl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if arrived == part_count - 1:
            gl.store(counter_ptr, 0)
            # A (row, head) starts inside its first program's piece and at the start of every later one's.
            merge(
                output_ptr, partials_ptr, statistics_ptr, 2 * first_program, 2, 1, part_count,
                GROUP, HEADS, HEAD_DIM, NUMBERS, False, WARPS,
            )  # fmt: skip


@gluon.jit
def zero_empty_rows(
    output_ptr, slots_ptr, lengths_ptr, program, programs, row_count, output_stride, ROW: gl.constexpr,
    WARPS: gl.constexpr = 1,
):  # fmt: skip
    """Zeros, ROW numbers each, for this program's share of the rows without tokens."""
    dims: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    for empty in range(program, row_count, programs):
        if (gl.load(slots_ptr + empty) < 0) | (gl.load(lengths_ptr + empty) <= 0):
            empty_ptr = output_ptr + gl.cast(empty, gl.int64) * output_stride
            for first in range(0, ROW, 256):
                columns = first + gl.arange(0, 256, layout=dims)
                zeros = gl.zeros([256], output_ptr.dtype.element_ty, dims)
                gl.store(empty_ptr + columns, zeros, mask=columns < ROW)


def cache_descriptor(cache_tensor: torch.Tensor, tile_tokens: int) -> TensorDescriptor:
    """Boxes of one block, or tile, of one K/V head, 128 bytes wide; travels by value with the launch."""
    block_size, head_dim = cache_tensor.shape[2:]
    lines = cache_tensor.view(-1, head_dim)
    box_rows = min(block_size, tile_tokens)
    if cache_tensor.element_size() == 1:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=head_dim, element_bitwidth=8, rank=2)
        return TensorDescriptor.from_tensor(lines.view(torch.int8), [box_rows, head_dim], layout)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(lines, [box_rows, 64], layout)
