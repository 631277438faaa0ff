"""Paged decode attention: one query token per row against its cached keys and values, split over the whole card.

For each row r and query head h, with g = h // group, n = context_lengths[r] and position n - 1 for the query:

    s_p   = cap(scale * q . K[g, p])            for p in 0 .. n - 1 (the last `sliding_window` of them, if > 0)
    out   = sum_p softmax(s)_p * V[g, p]        cap(x) = soft_cap * tanh(x / soft_cap), or x

It is computed in tiles with a running maximum and normaliser [1]. The query heads of a group are the rows of one tile,
so that each K/V tile is read once and both products run on tensor cores. The keys of a row are split between programs
[2].

How the work is split, which is decided on the device: a row of n tokens has `ceil(n / tile)` tiles for each K/V head,
plus `start_tiles` for what starting it costs. All tiles of all rows form one line, row by row and head by head; every
program takes an equal piece of that line [3]. A program whose piece covers a whole (row, head) writes its output. A
program that has only a part of one writes maximum, normaliser and a float32 accumulator; whichever program finishes
last with that (row, head), as an atomic counter tells, merges the parts by log-sum-exp. A piece can be cut only at its
two ends, so two places for partial results per program are enough whatever the lengths are, and one captured graph is
correct, and balanced, for every mix of lengths. docs/how-it-works.md has an example.

The kernel is compiled for a FORMAT of the cache (`kv_format.cache_format`). Over 8-bit ones NATIVE and SINGLE say by
which instructions elements are converted and multiplied: kernels/decode_tile.py, which also has the merge.

| tensor   | axes                                 | dtype        | padding                                          |
|----------|--------------------------------------|--------------|--------------------------------------------------|
| query    | [token_count, query_heads, head_dim] | bf16/f16/f32 | row r's query is token r                         |
| output   | as query                             | as query     | rows with slot -1 or length 0 get zeros; rows at |
|          |                                      |              | or past decode_row_count are left alone          |
| partials | [workspace_floats]                   | float32      | contents never matter                            |
| counters | [counter_count]                      | int32        | zero before the first call and after every call  |

Caches, their scales, block_tables, row_slots and context_lengths: see kernels/paged_kv.py.

Measured: one NVIDIA H200, bf16, 16 query and 8 K/V heads of 128, blocks of 16, cold L2, in a graph, commit 234bd89, by
`python -m benchmarks.kernels.bench_decode_attention`: 1x1024 9.5 us, 8x512 13-15 us, 1x32768 46 us, 32x1024 37 us,
32x4096 130 us, 256x1024 252 us (4.27 TB/s), 256x4096 954 us (4.50 TB/s, 98 % of what a sum over the same bytes reads).
Over int8, in tiles of 64 by two warps, at commit a82871e by tune_attention: 256x1024 156 us, 64x256 17 us. The Hopper
kernel's figures are in its module.

Limits: head_dim 64, 80, 96, 128, 256; group <= 128; max_rows <= 1024; block_size a power of two <= 128.

Sources: [1] Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135. [2] Flash-Decoding, PyTorch blog,
2023-10. [3] the stream-k idea of Osama et al., arXiv:2301.03598, applied to keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.decode_tile import (
    add_weighted,
    has_single_keys,
    is_native,
    merge_parts,
    merge_sizes,
    query_parts,
    scores_of,
    whole_sums,
)
from kernels.kv_format import cache_format, vector_bytes
from kernels.launch import launch_options, let_next_start, wait_for_inputs
from kernels.paged_kv import (
    LOG2_E,
    LOG2_E_CONSTANT,
    HeadShape,
    check_options,
    check_paged_inputs,
    check_partials,
    check_rows,
    compile_options,
    gluon_attends,
    paged_attention_reference,
    row_of_work,
    soft_capped,
    wanted,
)

MAX_ROWS = 1024
MAX_GROUP = 128
SPECIALISED_GROUP = 8
"""Query heads of a K/V head that the Hopper kernels take: the columns of a tensor core instruction's result."""


def decode_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Result [max_rows, query_heads, head_dim]; zeros for padding rows. `options`: of `paged_attention_reference`, of
    whose rows each has one token. Synchronises."""
    rows = len(row_slots)
    cache = (key_cache, value_cache, block_tables, row_slots, context_lengths)
    return paged_attention_reference(query[:rows], *cache, torch.arange(rows + 1), **options)


@dataclass(frozen=True)
class DecodePlan:
    """Everything a launch fixes; a pure function of the bucket and the head shape (`launch_plan`).

    Attributes:
        program_count: programs, all of them on the card at once.
        tile_tokens: keys of a tile.
        group_rows: rows of a tile of queries, the query heads of one K/V head among them.
        dim_tile, rows_tile: powers of two that hold head_dim and the bucket's rows.
        min_tiles: of a program's piece; more than 1 leaves programs without work rather than cut rows small.
        start_tiles: tiles that beginning a (row, head) is counted as.
        num_stages: tiles on their way at a time.
        max_registers: of a thread; None: as the compiler likes.
        workspace_floats, counter_count: elements of `partials` and `counters`.
        specialised: a Hopper kernel's.
    """

    program_count: int
    tile_tokens: int
    group_rows: int
    dim_tile: int
    rows_tile: int
    min_tiles: int
    start_tiles: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    workspace_floats: int
    counter_count: int
    specialised: bool = False


@dataclass(frozen=True)
class _Sizes:
    """A tile, programs a multiprocessor, warps of each, tiles that a beginning counts as, and tiles on their way at a
    time; as measured."""

    tile_tokens: int
    programs: int
    num_warps: int
    start_tiles: int = 1
    num_stages: int = 3


# Either fills the shared memory. A layer of 256 rows of 658 tokens on average takes 200.6 us by six programs and 203.2
# by four, one of 64 x 256 42.0 and 39.1 (NVIDIA H200, docs/log.md): there most of the shorter pieces are cut.
_HOPPER_PLAIN = _Sizes(32, 6, 1, start_tiles=2, num_stages=2)
_HOPPER_PLAIN_FEW = _Sizes(32, 4, 1, start_tiles=2)
_HOPPER_8_BITS = _Sizes(16, 12, 1, start_tiles=2)  # programs of one warp fill the shared memory
_HOPPER_8_BITS_FEW = _Sizes(128, 2, 4, start_tiles=0)
FEW_ROWS = 64
"""Up to here teams of warps are taken over 8-bit caches: 32 x 1024 22.2 us instead of 26.0, 1 x 1024 6.8 instead of
12.3, 48 x 1024 32.6 instead of 37.8 (int8, NVIDIA H200, docs/log.md). Over a plain cache fewer programs."""


def _usual_sizes(max_rows: int, dim_tile: int, quantised: bool, specialised: bool) -> _Sizes:
    is_few = max_rows <= FEW_ROWS
    if specialised and quantised:
        return _HOPPER_8_BITS_FEW if is_few else _HOPPER_8_BITS
    if specialised:
        return _HOPPER_PLAIN_FEW if is_few else _HOPPER_PLAIN
    if dim_tile > 128:
        return _Sizes(32, 2, 4)
    return _Sizes(64, 4, 2) if quantised else _Sizes(64, 2, 4)


def can_specialise(
    shape: HeadShape,
    dtype: torch.dtype,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    *,
    quantised: bool = False,
    capability_major: int = 9,
    triton_version: str = triton.__version__,
) -> bool:
    """Whether the Hopper kernels compute such calls on a card of that compute capability.

    `dtype` is the query's; `quantised`: the cache holds 8-bit elements.
    """
    card = {"capability_major": capability_major, "triton_version": triton_version}
    is_plain = sliding_window == 0 and soft_cap == 0
    return is_plain and gluon_attends(shape, dtype, SPECIALISED_GROUP, quantised=quantised, **card)


def launch_plan(
    max_rows: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    multiprocessor_count: int,
    *,
    quantised: bool = False,
    specialised: bool = False,
    tile_tokens: int | None = None,
    programs_per_multiprocessor: int | None = None,
    min_tiles: int = 1,
    start_tiles: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> DecodePlan:
    """The launch for a bucket of `max_rows` rows; `quantised`: over an 8-bit cache.

    `specialised` takes a Hopper kernel, by `num_warps` that of single warps or that of teams: pass it only where
    `can_specialise(...)`. The other keyword arguments are for tests and benchmarks.
    """
    wanted(1 <= max_rows <= MAX_ROWS, "max_rows", f"1..{MAX_ROWS}", max_rows)
    wanted(query_heads // kv_heads <= MAX_GROUP, "query heads a K/V head", f"<= {MAX_GROUP}", query_heads // kv_heads)
    dim_tile = triton.next_power_of_2(head_dim)
    sizes = _usual_sizes(max_rows, dim_tile, quantised, specialised)
    program_count = multiprocessor_count * (programs_per_multiprocessor or sizes.programs)
    group_rows = SPECIALISED_GROUP if specialised else max(16, triton.next_power_of_2(query_heads // kv_heads))
    return DecodePlan(
        program_count=program_count,
        tile_tokens=tile_tokens or sizes.tile_tokens,
        group_rows=group_rows,
        dim_tile=dim_tile,
        rows_tile=triton.next_power_of_2(max_rows),
        min_tiles=min_tiles,
        start_tiles=sizes.start_tiles if start_tiles is None else start_tiles,
        num_warps=num_warps or sizes.num_warps,
        num_stages=num_stages or sizes.num_stages,
        max_registers=None,
        workspace_floats=2 * program_count * group_rows * (dim_tile + 2),
        counter_count=max_rows * kv_heads,
        specialised=specialised,
    )


def bytes_moved(
    context_lengths: list[int], query_heads: int, kv_heads: int, head_dim: int, element_bytes: int,
    cache_dtype: torch.dtype | None = None,
) -> int:  # fmt: skip
    """Bytes a call must move: each K and V and their scales read once, each query read and output written once."""
    stored = element_bytes * head_dim if cache_dtype is None else vector_bytes(head_dim, cache_dtype)
    rows = len(context_lengths)
    return 2 * kv_heads * sum(context_lengths) * stored + 2 * query_heads * rows * element_bytes * head_dim


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["row_count_ptr"])
def _decode_kernel(
    output_ptr, query_ptr, key_ptr, value_ptr, tables_ptr, slots_ptr, lengths_ptr, row_count_ptr, partials_ptr,
    counters_ptr, key_scales_ptr, value_scales_ptr, max_rows, output_stride, query_stride, table_stride, scale_log2,
    soft_cap,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, SINGLE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    HAS_ROW_COUNT: tl.constexpr, TILE: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM_TILE: tl.constexpr,
    ROWS_TILE: tl.constexpr, MIN_TILES: tl.constexpr, START_TILES: tl.constexpr,
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
    tile_places = tl.arange(0, TILE)
    # A tile is loaded as elements, or as pairs of 8-bit elements; keys that are multiplied singly, as elements.
    WIDTH: tl.constexpr = HEAD_DIM if FORMAT == 0 else HEAD_DIM // 2
    units = tl.arange(0, DIM_TILE if FORMAT == 0 else DIM_TILE // 2)
    is_unit = (units < WIDTH)[None, :]  # edge: head dims that are no power of two
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

        maximum = tl.full([GROUP_ROWS], float("-inf"), dtype=tl.float32)
        normaliser = tl.zeros([GROUP_ROWS], dtype=tl.float32)
        query_places = query_ptr + row.to(tl.int64) * query_stride + head * (GROUP * HEAD_DIM) + head_places
        query = tl.load(query_places, mask=is_query, other=0.0)
        even_sums = tl.zeros([GROUP_ROWS, units.shape[0]], dtype=tl.float32)
        odd_sums = even_sums
        first_query, second_query, query_unit = query_parts(query, FORMAT, NATIVE, SINGLE)

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
            places = offsets[:, None] + units[None, :]
            next_positions = positions + TILE
            is_next = (next_positions < length) & (tile + 1 < tile_end)  # edge: no tile follows
            if TILE % BLOCK_SIZE != 0:
                in_block = next_positions % BLOCK_SIZE
            blocks = tl.load(table_ptr + next_positions // BLOCK_SIZE, mask=is_next, other=0)
            if SINGLE:
                key_places = (offsets * 2)[:, None] + dims[None, :]
                keys = tl.load(key_tiles_ptr + key_places, mask=is_token[:, None] & is_dim[None, :], other=0.0)
            else:
                keys = tl.load(key_tiles_ptr + places, mask=is_token[:, None] & is_unit, other=0)
            values = tl.load(value_tiles_ptr + places, mask=is_token[:, None] & is_unit, other=0)
            scores = scores_of(first_query, second_query, query_unit, keys, FORMAT, NATIVE, SINGLE)
            if FORMAT > 0:
                scores = scores * (key_scale.to(tl.float32) * scale_log2)[None, :]
                scale_places = (blocks.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE + in_block
                key_scale = tl.load(key_scales_ptr + scale_places, mask=is_next, other=0.0)
            else:
                scores = scores * scale_log2
            if HAS_SOFT_CAP:
                scores = soft_capped(scores * (1.0 / LOG2_E_CONSTANT), soft_cap) * LOG2_E_CONSTANT
            is_seen = is_token
            if WINDOW > 0:
                is_seen = is_seen & (positions >= length - WINDOW)  # edge: the window's first tile
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            # Every tile holds a seen position, so the new maximum is finite.
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_maximum[:, None])
            shrink = tl.exp2(maximum - new_maximum)
            normaliser = normaliser * shrink + tl.sum(weights, axis=1)
            maximum = new_maximum
            even_sums, odd_sums = add_weighted(
                even_sums, odd_sums, shrink, weights, values, value_scale, DTYPE, FORMAT, NATIVE
            )
            if FORMAT > 0:
                value_scale = tl.load(value_scales_ptr + scale_places, mask=is_next, other=0.0)
            positions = next_positions
        accumulator = whole_sums(even_sums, odd_sums, FORMAT, NATIVE)

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


def _common_options(
    shape: HeadShape, plan: DecodePlan, cache_dtype: torch.dtype, has_row_count: bool
) -> dict[str, int | bool]:
    """What all three kernels are compiled for."""
    return {
        "FORMAT": cache_format(cache_dtype), "KV_HEADS": shape.kv_heads, "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim, "BLOCK_SIZE": shape.block_size, "HAS_ROW_COUNT": has_row_count,
        "TILE": plan.tile_tokens, "ROWS_TILE": plan.rows_tile, "MIN_TILES": plan.min_tiles,
        "START_TILES": plan.start_tiles, "num_warps": plan.num_warps, **compile_options(plan.max_registers),
    }  # fmt: skip


def decode_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    partials: torch.Tensor,
    counters: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    decode_row_count: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write the attention of the decode rows to `output` (layout table in the module's docstring).

    `plan` is `launch_plan` of the bucket; `partials` and `counters` are its workspace, shared by calls that follow one
    another on a stream. `decode_row_count`, an int32 device scalar [1], says how many leading rows are decode rows;
    None: all. `pdl` launches while the previous kernel still runs and waits for it inside; what the Hopper kernel reads
    before that, its module says. Neither allocates nor synchronises. Raises ValueError naming the argument, what was
    wanted and what came.
    """
    shape = check_paged_inputs(
        output, query, key_cache, value_cache, block_tables, row_slots, context_lengths, key_scales, value_scales
    )
    check_options(scale, sliding_window, soft_cap)
    max_rows = row_slots.shape[0]
    wanted(query.shape[0] >= max_rows, "query token_count", f">= {max_rows} rows", query.shape[0])
    check_rows(max_rows, plan.rows_tile, counters, max_rows * shape.kv_heads)
    check_partials(partials, plan.workspace_floats)
    early = launch_options(output) if pdl else {"PDL": False}
    tensors = (output, query, key_cache, value_cache, block_tables, row_slots, context_lengths, decode_row_count)
    workspace = (partials, counters, key_scales, value_scales)
    numbers = (max_rows, output.stride(0), query.stride(0), block_tables.stride(0), scale * LOG2_E)
    options = _common_options(shape, plan, key_cache.dtype, decode_row_count is not None) | early
    if plan.specialised:
        is_possible = can_specialise(shape, query.dtype, sliding_window, soft_cap, quantised=key_scales is not None)
        wanted(is_possible, "specialised plan", "only where can_specialise(...)", (shape, query.dtype))
        from kernels import decode_attention_hopper, decode_attention_team

        kernel = decode_attention_hopper if plan.num_warps == 1 else decode_attention_team
        options |= {"STAGES": plan.num_stages, "HEADS": triton.next_power_of_2(shape.group)}
        kernel.launch(*tensors, *workspace, *numbers, plan=plan, **options)
        return
    merge_parts, merge_group = merge_sizes(shape.group, plan.dim_tile)
    _decode_kernel[(plan.program_count,)](
        *tensors, *workspace, *numbers, soft_cap,
        NATIVE=is_native(query, key_cache), SINGLE=has_single_keys(query, key_cache), WINDOW=sliding_window,
        HAS_SOFT_CAP=soft_cap > 0, GROUP_ROWS=plan.group_rows, DIM_TILE=plan.dim_tile, MERGE_PARTS=merge_parts,
        MERGE_GROUP=merge_group, num_stages=plan.num_stages, **options,
    )  # fmt: skip
