"""Attention over the paged cache whose result for a query has the same bits in every batch and in every chunk.

Rows, caches and formula are those of kernels/prefill_attention.py, decode rows included. The keys of a row are cut into
spans at positions 0, SPAN, 2 SPAN, ...; a span is taken in tiles with a running maximum and normaliser, from nothing:

    m_j, l_j, a_j   = maximum, normaliser, accumulator of span j         (tiles of keys at fixed positions, ascending)
    m, l, a         = fold of the spans, ascending:  m' = max(m, m_j), x = 2^(m - m'), y = 2^(m_j - m')
                                                     l' = l x + l_j y,  a' = a x + a_j y
    out             = a / l

None of this depends on other rows or on which queries share a tile: keys that a query does not see add exact zeros. So
rows with one query may have their spans computed all over the card, by `_singles_kernel`, and folded afterwards, where
rows with several, in `_chunks_kernel`, fold as they go. Both are compiled without fusing multiplications and additions,
which a compiler may do in one place and not in another.

| tensor   | axes                                 | dtype        | padding                                             |
|----------|--------------------------------------|--------------|-----------------------------------------------------|
| query    | [token_count, query_heads, head_dim] | bf16/f16/f32 | tokens from query_starts[max_rows] on have no row   |
| output   | as query                             | as query     | tokens of no row or of slot -1 are left alone       |
| partials | [plan.workspace_floats]              | float32      | holds nothing between calls                         |
| counters | [max_rows * kv_heads]                | int32        | zero before the first call and after every call     |

Caches, their scales, block_tables, row_slots, context_lengths and query_starts: see kernels/paged_kv.py.

Limits: head_dim 64, 80, 96, 128, 256; group <= 64; max_rows <= 1024; block_size a power of two <= 128; no soft cap.
Called by the batch-invariant pass (`--deterministic`).

Sources: 1. H. He and others, "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025: splits of a
fixed size. 2. Milakov and Gimelshein, arXiv:1805.02867.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.launch import launch_options, wait_for_inputs
from kernels.paged_kv import (
    LOG2_E,
    check_options,
    check_paged_inputs,
    check_partials,
    check_rows,
    row_of_work,
    wanted,
)

SPAN = 512
"""Keys of a span: eight tiles, some ten microseconds of one multiprocessor."""

TILE_ROWS = 64
MAX_ROWS = 1024
PART_COUNT = 4096
"""Spans of single rows that can wait to be folded; with more, rows are many enough to fold as they go."""


@dataclass(frozen=True)
class FixedOrderAttentionPlan:
    """Everything a launch fixes; tiles and spans are the same for all sizes.

    Attributes:
        chunk_programs, single_programs: of the two kernels; the first has as many for each K/V head.
        query_tile: tokens of a tile of queries, each with the query heads of one K/V head.
        key_tile: keys of a tile.
        dim_tile, rows_tile, group_tile: powers of two that hold head_dim, the rows, and a K/V head's query heads.
        span: keys that are summed up from nothing before they are folded.
        tile_rows: rows of a tile of queries.
    """

    chunk_programs: int
    single_programs: int
    query_tile: int
    key_tile: int
    dim_tile: int
    rows_tile: int
    group_tile: int
    span: int
    tile_rows: int = TILE_ROWS

    @property
    def part_floats(self) -> int:
        """Of one span of one row and K/V head: accumulator, maximum and normaliser of each query head."""
        return self.group_tile * (self.dim_tile + 2)

    @property
    def workspace_floats(self) -> int:
        """Elements of `partials`."""
        return PART_COUNT * self.part_floats


def launch_plan(
    token_count: int, max_rows: int, query_heads: int, kv_heads: int, head_dim: int, multiprocessor_count: int,
    *, span: int = SPAN, key_tile: int | None = None,
) -> FixedOrderAttentionPlan:  # fmt: skip
    """The launch for `token_count` query tokens in up to `max_rows` rows; the keyword arguments are for tests."""
    group = query_heads // kv_heads
    wanted(1 <= max_rows <= MAX_ROWS, "max_rows", f"1..{MAX_ROWS}", max_rows)
    wanted(group <= TILE_ROWS, "query heads a K/V head", f"<= {TILE_ROWS}", group)
    query_tile = TILE_ROWS // group
    return FixedOrderAttentionPlan(
        chunk_programs=token_count // query_tile + min(max_rows, token_count),
        single_programs=max(1, min(2 * multiprocessor_count, max_rows * kv_heads * 16)),
        query_tile=query_tile,
        key_tile=key_tile or (64 if head_dim <= 128 else 32),
        dim_tile=triton.next_power_of_2(head_dim),
        rows_tile=triton.next_power_of_2(max_rows),
        group_tile=triton.next_power_of_2(group),
        span=span,
    )


@triton.jit
def _fold(accumulator, maximum, normaliser, part, part_maximum, part_normaliser):
    """The next span's sums into those before it; a span of which a query sees nothing changes nothing."""
    new_maximum = tl.maximum(maximum, part_maximum)
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    keep = tl.exp2(maximum - base)
    add = tl.exp2(part_maximum - base)
    normaliser = normaliser * keep + part_normaliser * add
    accumulator = accumulator * keep[:, None] + part * add[:, None]
    return accumulator, new_maximum, normaliser


@triton.jit
def _span(
    query, positions, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, table_ptr, head, begin, end, scale_log2,
    QUANTISED: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TILE_ROWS: tl.constexpr, KEY_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """Accumulator, maximum and normaliser of the keys begin .. end (begin a multiple of the span), from nothing."""
    dims = tl.arange(0, DIM_TILE)
    is_dim = dims < HEAD_DIM
    places_in_tile = tl.arange(0, KEY_TILE)
    maximum = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    normaliser = tl.zeros([TILE_ROWS], dtype=tl.float32)
    accumulator = tl.zeros([TILE_ROWS, DIM_TILE], dtype=tl.float32)
    blocks = tl.load(table_ptr + (begin + places_in_tile) // BLOCK_SIZE, mask=begin + places_in_tile < end, other=0)
    for start in range(begin, end, KEY_TILE):
        keys = start + places_in_tile
        is_key = keys < end  # edge: nothing past the last query is read
        cells = (blocks.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE + keys % BLOCK_SIZE
        places = (cells * HEAD_DIM)[:, None] + dims[None, :]
        is_loaded = is_key[:, None] & is_dim[None, :]
        # The next tile's block ids, read one tile ahead of its keys. Edge: no tile follows.
        blocks = tl.load(table_ptr + (keys + KEY_TILE) // BLOCK_SIZE, mask=keys + KEY_TILE < end, other=0)
        key = tl.load(key_ptr + places, mask=is_loaded, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)))
        if QUANTISED:
            key_scale = tl.load(key_scales_ptr + cells, mask=is_key, other=0.0)
            scores = scores * (key_scale.to(tl.float32) * scale_log2)[None, :]
        else:
            scores = scores * scale_log2
        is_seen = positions[:, None] >= keys[None, :]  # edge: the diagonal
        if WINDOW > 0:
            is_seen &= keys[None, :] > (positions - WINDOW)[:, None]  # edge: the window
        scores = tl.where(is_seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a query may see none of a tile
        probabilities = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maximum - base)
        normaliser = normaliser * shrink + tl.sum(probabilities, axis=1)
        maximum = new_maximum
        accumulator = accumulator * shrink[:, None]
        if QUANTISED:
            value_scale = tl.load(value_scales_ptr + cells, mask=is_key, other=0.0)
            probabilities = probabilities * value_scale.to(tl.float32)[None, :]
        value = tl.load(value_ptr + places, mask=is_loaded, other=0.0)
        accumulator = tl.dot(probabilities.to(query.dtype), value.to(query.dtype), accumulator)
    return accumulator, maximum, normaliser


@triton.jit
def _folded_spans(
    query, positions, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, table_ptr, head, first, end, scale_log2,
    QUANTISED: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TILE_ROWS: tl.constexpr, KEY_TILE: tl.constexpr, DIM_TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """All spans from position `first` (a multiple of SPAN) to `end`, folded; the normalised result."""
    maximum = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    normaliser = tl.zeros([TILE_ROWS], dtype=tl.float32)
    accumulator = tl.zeros([TILE_ROWS, DIM_TILE], dtype=tl.float32)
    for begin in range(first, end, SPAN):
        part, part_maximum, part_normaliser = _span(
            query, positions, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, table_ptr, head, begin,
            tl.minimum(begin + SPAN, end), scale_log2, QUANTISED, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE_ROWS,
            KEY_TILE, DIM_TILE,
        )  # fmt: skip
        accumulator, maximum, normaliser = _fold(
            accumulator, maximum, normaliser, part, part_maximum, part_normaliser
        )  # fmt: skip
    return accumulator * (1.0 / tl.where(normaliser > 0, normaliser, 1.0))[:, None]


@triton.jit
def _chunks_kernel(
    output_ptr, query_ptr, key_ptr, value_ptr, tables_ptr, slots_ptr, lengths_ptr, starts_ptr, key_scales_ptr,
    value_scales_ptr, max_rows, output_stride, query_stride, table_stride, scale_log2,
    QUANTISED: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE_ROWS: tl.constexpr, QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr, DIM_TILE: tl.constexpr, ROWS_TILE: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # 1. Locate: the row, its tile of queries (the last tokens first), the K/V head.
    wait_for_inputs(PDL)
    work = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.arange(0, ROWS_TILE)
    is_row = rows < max_rows
    slots = tl.load(slots_ptr + rows, mask=is_row, other=-1)
    counts = tl.load(starts_ptr + rows + 1, mask=is_row, other=0) - tl.load(starts_ptr + rows, mask=is_row, other=0)
    counts = tl.where((slots >= 0) & (counts > 1), counts, 0)  # padding rows have no tiles, and single ones none here
    ends = tl.cumsum(tl.cdiv(counts, QUERY_TILE), axis=0)
    if work < tl.max(ends):
        row, row_start = row_of_work(work, ends, 1)
        query_start = tl.load(starts_ptr + row)
        count = tl.load(starts_ptr + row + 1) - query_start
        length = tl.load(lengths_ptr + row)
        table_ptr = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
        first_token = (tl.cdiv(count, QUERY_TILE) - 1 - (work - row_start)) * QUERY_TILE
        end = length - count + tl.minimum(first_token + QUERY_TILE, count)
        # 2. Load the queries.
        dims = tl.arange(0, DIM_TILE)
        tile_rows = tl.arange(0, TILE_ROWS)
        tokens = first_token + tile_rows // GROUP
        is_query = (tile_rows // GROUP < QUERY_TILE) & (tokens < count)  # edge: the row's last tile, odd groups
        inside = is_query[:, None] & (dims < HEAD_DIM)[None, :]
        place = (query_start + tokens).to(tl.int64)[:, None]
        heads = head * (GROUP * HEAD_DIM) + (tile_rows % GROUP)[:, None] * HEAD_DIM + dims[None, :]
        query = tl.load(query_ptr + place * query_stride + heads, mask=inside, other=0.0)
        positions = length - count + tokens
        first = 0
        if WINDOW > 0:
            first = tl.maximum(length - count + first_token - WINDOW + 1, 0) // SPAN * SPAN
        # 3. Fold the spans as they come, and store.
        result = _folded_spans(
            query, positions, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, table_ptr, head, first, end,
            scale_log2, QUANTISED, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE_ROWS, KEY_TILE, DIM_TILE, SPAN,
        )  # fmt: skip
        tl.store(output_ptr + place * output_stride + heads, result.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _singles_kernel(
    output_ptr, query_ptr, key_ptr, value_ptr, tables_ptr, slots_ptr, lengths_ptr, starts_ptr, key_scales_ptr,
    value_scales_ptr, partials_ptr, counters_ptr, max_rows, output_stride, query_stride, table_stride, scale_log2,
    QUANTISED: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE_ROWS: tl.constexpr, KEY_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr, ROWS_TILE: tl.constexpr, GROUP_TILE: tl.constexpr, PART_COUNT: tl.constexpr,
    SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # 1. Count the spans of the rows with one query. Few rows are split into their spans; many are taken whole.
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rows = tl.arange(0, ROWS_TILE)
    is_row = rows < max_rows
    slots = tl.load(slots_ptr + rows, mask=is_row, other=-1)
    lengths = tl.load(lengths_ptr + rows, mask=is_row, other=0)
    starts = tl.load(starts_ptr + rows, mask=is_row, other=0)
    is_single = (slots >= 0) & (tl.load(starts_ptr + rows + 1, mask=is_row, other=0) == starts + 1)
    spans = tl.where(is_single, tl.cdiv(lengths, SPAN), 0)
    if WINDOW > 0:
        spans -= tl.where(is_single, tl.maximum(lengths - WINDOW, 0) // SPAN, 0)
    row_work = tl.sum(is_single.to(tl.int32), axis=0) * KV_HEADS
    is_split = (row_work < programs) & (tl.sum(spans, axis=0) * KV_HEADS <= PART_COUNT)
    ends = tl.cumsum(tl.where(is_split, spans, is_single.to(tl.int32)), axis=0)
    total = tl.max(ends) * KV_HEADS

    dims = tl.arange(0, DIM_TILE)
    is_dim = (dims < HEAD_DIM)[None, :]
    tile_rows = tl.arange(0, TILE_ROWS)
    is_query = (tile_rows < GROUP)[:, None] & is_dim
    queries = tl.arange(0, GROUP_TILE)
    is_kept = (queries < GROUP)[:, None] & is_dim
    PART: tl.constexpr = GROUP_TILE * (DIM_TILE + 2)
    for work in range(program, total, programs):
        # 2. Locate: the row, the K/V head, and with split rows the span.
        row, row_start = row_of_work(work, ends, KV_HEADS)
        length = tl.load(lengths_ptr + row)
        table_ptr = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
        first_span = 0
        if WINDOW > 0:
            first_span = tl.maximum(length - WINDOW, 0) // SPAN
        span_count = tl.cdiv(length, SPAN) - first_span
        parts = tl.where(is_split, span_count, 1)
        head = (work - row_start) // parts
        token = tl.load(starts_ptr + row).to(tl.int64)
        heads = head * (GROUP * HEAD_DIM) + tile_rows[:, None] * HEAD_DIM + dims[None, :]
        query = tl.load(query_ptr + token * query_stride + heads, mask=is_query, other=0.0)
        positions = length - 1 + tile_rows // GROUP
        if (parts < span_count) | (span_count == 1):
            # 3. A whole row: as in the other kernel.
            result = _folded_spans(
                query, positions, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, table_ptr, head,
                first_span * SPAN, length, scale_log2, QUANTISED, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE_ROWS,
                KEY_TILE, DIM_TILE, SPAN,
            )  # fmt: skip
            place = output_ptr + token * output_stride + heads
            tl.store(place, result.to(output_ptr.dtype.element_ty), mask=is_query)
        else:
            # 4. A span: leave its sums in the workspace; the last of the row to finish folds them in order.
            begin = (first_span + (work - row_start) % parts) * SPAN
            part, part_maximum, part_normaliser = _span(
                query, positions, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, table_ptr, head, begin,
                tl.minimum(begin + SPAN, length), scale_log2, QUANTISED, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW,
                TILE_ROWS, KEY_TILE, DIM_TILE,
            )  # fmt: skip
            mine = partials_ptr + work * PART
            tl.store(mine + tile_rows[:, None] * DIM_TILE + dims[None, :], part, mask=(tile_rows < GROUP)[:, None])
            tl.store(mine + GROUP_TILE * DIM_TILE + tile_rows, part_maximum, mask=tile_rows < GROUP)
            tl.store(mine + GROUP_TILE * (DIM_TILE + 1) + tile_rows, part_normaliser, mask=tile_rows < GROUP)
            tl.debug_barrier()  # all threads' sums are written before the counter says so
            counter_ptr = counters_ptr + row * KV_HEADS + head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == parts - 1:
                tl.store(counter_ptr, 0)
                maximum = tl.full([GROUP_TILE], float("-inf"), dtype=tl.float32)
                normaliser = tl.zeros([GROUP_TILE], dtype=tl.float32)
                accumulator = tl.zeros([GROUP_TILE, DIM_TILE], dtype=tl.float32)
                first_part = partials_ptr + (row_start + head * parts) * PART
                for other in range(0, parts):
                    theirs = first_part + other * PART
                    place = theirs + queries[:, None] * DIM_TILE + dims[None, :]
                    other_part = tl.load(place, mask=(queries < GROUP)[:, None], other=0.0, cache_modifier=".cg")
                    statistics = theirs + GROUP_TILE * DIM_TILE + queries
                    other_maximum = tl.load(
                        statistics, mask=queries < GROUP, other=float("-inf"), cache_modifier=".cg"
                    )  # fmt: skip
                    other_normaliser = tl.load(
                        statistics + GROUP_TILE, mask=queries < GROUP, other=0.0, cache_modifier=".cg"
                    )  # fmt: skip
                    accumulator, maximum, normaliser = _fold(
                        accumulator, maximum, normaliser, other_part, other_maximum, other_normaliser
                    )  # fmt: skip
                folded = accumulator * (1.0 / tl.where(normaliser > 0, normaliser, 1.0))[:, None]
                place = output_ptr + token * output_stride + head * (GROUP * HEAD_DIM)
                place += queries[:, None] * HEAD_DIM + dims[None, :]
                tl.store(place, folded.to(output_ptr.dtype.element_ty), mask=is_kept)


def fixed_order_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    query_starts: torch.Tensor,
    partials: torch.Tensor,
    counters: torch.Tensor,
    plan: FixedOrderAttentionPlan,
    *,
    scale: float,
    sliding_window: int = 0,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    has_chunks: bool = True,
    pdl: bool = False,
) -> None:
    """Write the attention of all rows to `output` (layout table in the module's docstring).

    `plan` is `launch_plan` of the bucket; `partials` and `counters` are its workspace, shared by calls that follow one
    another on a stream. Without `has_chunks` every row has one query token. `pdl` launches while the kernel before
    still runs, where the card can. Neither allocates nor synchronises. Raises ValueError naming the argument, what was
    wanted and what came.
    """
    shape = check_paged_inputs(
        output, query, key_cache, value_cache, block_tables, row_slots, context_lengths, key_scales, value_scales
    )
    check_options(scale, sliding_window, 0.0)
    max_rows = row_slots.shape[0]
    check_rows(max_rows, plan.rows_tile, counters, max_rows * shape.kv_heads, query_starts)
    check_partials(partials, plan.workspace_floats)
    inputs = (
        output, query, key_cache, value_cache, block_tables, row_slots, context_lengths, query_starts, key_scales,
        value_scales,
    )  # fmt: skip
    numbers = (max_rows, output.stride(0), query.stride(0), block_tables.stride(0), scale * LOG2_E)
    common = dict(
        QUANTISED=key_scales is not None, KV_HEADS=shape.kv_heads, GROUP=shape.group, HEAD_DIM=shape.head_dim,
        BLOCK_SIZE=shape.block_size, WINDOW=sliding_window, TILE_ROWS=plan.tile_rows, KEY_TILE=plan.key_tile,
        DIM_TILE=plan.dim_tile, ROWS_TILE=plan.rows_tile, SPAN=plan.span, num_warps=4, num_stages=2,
        enable_fp_fusion=False, **(launch_options(query) if pdl else {"PDL": False}),
    )  # fmt: skip
    if has_chunks:
        _chunks_kernel[(plan.chunk_programs, shape.kv_heads)](*inputs, *numbers, QUERY_TILE=plan.query_tile, **common)
    _singles_kernel[(plan.single_programs,)](
        *inputs, partials, counters, *numbers, GROUP_TILE=plan.group_tile, PART_COUNT=PART_COUNT, **common
    )
