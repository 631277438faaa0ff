"""Packed variable-length attention over the paged cache: all query tokens of all chunk rows in one launch.

Row r holds the query tokens query_starts[r] .. query_starts[r + 1] of the packed batch, the last of its
n = context_lengths[r] tokens; all n keys and values are in the cache already, this step's included. For query token i
of m, at position q = n - m + i, and query head h, with g = h // group:

    s_p   = cap(scale * query[i, h] . K[g, p])   for p <= q (and p > q - sliding_window, if that is > 0)
    out   = sum_p softmax(s)_p * V[g, p]         cap(x) = soft_cap * tanh(x / soft_cap), or x

A tile is `query_tile` = tile_rows // group tokens times the query heads of one group, so that a K/V tile serves the
whole group. It goes through its tiles of keys with a running maximum and normaliser [1]. Only tiles on the diagonal, at
the row's end or at the window's edge are masked.

How the work is split, which is decided on the device: the tiles of a row are ordered from its last tokens (most keys)
to its first, heads next to one another. The grid is as large as the card holds at once; a program takes its first tile
by its own number and each later one from a ticket counter, so a program that got short tiles takes more of them. The
kernel for Hopper has an order of its own (kernels/prefill_attention_hopper_copy.py).

| tensor   | axes                                 | dtype        | padding                                             |
|----------|--------------------------------------|--------------|-----------------------------------------------------|
| query    | [token_count, query_heads, head_dim] | bf16/f16/f32 | tokens from query_starts[max_rows] on have no row   |
| output   | as query                             | as query     | tokens of no row, of slot -1 or of length 0 get     |
|          |                                      |              | zeros; decode rows' tokens are left alone           |
| counters | [2]                                  | int32        | zero before the first call and after every call     |
| fresh    | [token_count, kv_heads, head_dim] x2 | as query     | keys and values of these tokens, to the bit as the  |
|          |                                      |              | cache is read; anything for tokens of no row        |

Caches, their scales, block_tables, row_slots, context_lengths and query_starts: see kernels/paged_kv.py.

How a bucket is computed, and by which kernel, is a plan of kernels/prefill_plans.py: large buckets of long rows take
kernels/prefill_attention_hopper.py where they can. Rows with few new tokens and a long context fill few programs: their
keys are not split.

Measured: one NVIDIA H200, bf16, 16 query and 8 K/V heads of 128, blocks of 16, commit 234bd89, by
`python -m benchmarks.kernels.bench_prefill_attention`: 4x4096 400 TFLOP/s without the Hopper kernel. In one
masked loop, beside torch on contiguous tensors (docs/log.md): 8x32 5.2 us (torch 8.6), 8x64 5.5 (8.5), 8x128 8.6 (8.8).

Limits: head_dim 64, 80, 96, 128, 256; group <= 128; max_rows <= 1024; block_size a power of two <= 128.

Sources: [1] Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135 and 2307.08691.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.checks import check_tensor, copies_boxes
from kernels.launch import launch_options, let_next_start, wait_for_inputs
from kernels.paged_kv import (
    LOG2_E,
    LOG2_E_CONSTANT,
    HeadShape,
    check_options,
    check_paged_inputs,
    check_rows,
    compile_options,
    paged_attention_reference,
    row_of_work,
    soft_capped,
    wanted,
)
from kernels.prefill_plans import PrefillPlan, can_specialise

COUNTER_COUNT = 2


prefill_attention_reference = paged_attention_reference
"""All rows' attention, with the arguments of `prefill_attention` from `query` to `query_starts` and its options."""


def flops(query_lengths: list[int], context_lengths: list[int], query_heads: int, head_dim: int) -> int:
    """Multiplications and additions of the two products over the (query, key) pairs that causality leaves."""
    pairs = 0
    for query_length, context_length in zip(query_lengths, context_lengths, strict=True):
        pairs += query_length * (context_length - query_length) + query_length * (query_length + 1) // 2
    return 4 * pairs * query_heads * head_dim


@triton.jit(do_not_specialize=["max_rows", "token_count", "wave", "table_stride"])
def _prefill_kernel(
    output_ptr, query_ptr, key_ptr, value_ptr, tables_ptr, slots_ptr, lengths_ptr, starts_ptr, decode_rows_ptr,
    counters_ptr, key_scales_ptr, value_scales_ptr, max_rows, token_count, wave, output_stride, query_stride,
    table_stride, scale_log2, soft_cap,
    QUANTISED: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_DECODE_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr, QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
    ROWS_TILE: tl.constexpr, TOKEN_TILE: tl.constexpr, ONE_LOOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)

    # 1. Count the tiles of every row.
    rows = tl.arange(0, ROWS_TILE)
    first_row = 0
    if HAS_DECODE_ROWS:
        first_row = tl.load(decode_rows_ptr)
    is_row = (rows >= first_row) & (rows < max_rows)  # edge: rows past the bucket, and decode rows
    slots = tl.load(slots_ptr + rows, mask=is_row, other=-1)
    lengths = tl.load(lengths_ptr + rows, mask=is_row, other=0)
    query_counts = tl.load(starts_ptr + rows + 1, mask=is_row, other=0)
    query_counts -= tl.load(starts_ptr + rows, mask=is_row, other=0)
    is_owned = (slots >= 0) & (lengths > 0)
    unowned = tl.max(tl.where(is_owned, 0, query_counts))
    has_unowned = (unowned > 0) | (tl.load(starts_ptr + max_rows) < token_count)
    query_counts = tl.where(is_owned, query_counts, 0)  # edge: padding rows have no tiles
    ends = tl.cumsum(tl.cdiv(query_counts, QUERY_TILE), axis=0)
    total = tl.max(ends) * KV_HEADS

    dims = tl.arange(0, DIM_TILE)
    is_dim = dims < HEAD_DIM  # edge: head dims that are no power of two
    tile_rows = tl.arange(0, TILE_ROWS)
    token_in_tile = tile_rows // GROUP
    head_places = (tile_rows % GROUP)[:, None] * HEAD_DIM + dims[None, :]

    work = program
    if (total <= programs) & (program >= wave) & (program < total):
        # Every tile has its program: those that come second to a multiprocessor take the tiles from the light end.
        work = total - 1 - (program - wave)
    while work < total:
        # 2. Locate: the row, its tile of queries, the K/V head.
        row, row_start = row_of_work(work, ends, KV_HEADS)
        query_start = tl.load(starts_ptr + row)
        query_count = tl.load(starts_ptr + row + 1) - query_start
        length = tl.load(lengths_ptr + row)
        table_ptr = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
        head = (work - row_start) % KV_HEADS
        query_tile = tl.cdiv(query_count, QUERY_TILE) - 1 - (work - row_start) // KV_HEADS
        first_token = query_tile * QUERY_TILE
        first_position = length - query_count + first_token
        key_end = length - query_count + tl.minimum(first_token + QUERY_TILE, query_count)

        tokens = first_token + token_in_tile
        is_query = (token_in_tile < QUERY_TILE) & (tokens < query_count)  # edge: the row's last tile, odd groups
        token_places = (query_start + tokens).to(tl.int64)[:, None]
        query_places = query_ptr + token_places * query_stride + head * (GROUP * HEAD_DIM) + head_places
        full_begin = 0
        full_end = (first_position + 1) // KEY_TILE * KEY_TILE
        if WINDOW > 0:
            window_begin = tl.maximum(first_position - WINDOW + 1, 0) // KEY_TILE * KEY_TILE
            full_begin = tl.cdiv(tl.maximum(key_end - WINDOW, 0), KEY_TILE) * KEY_TILE
            full_end = tl.maximum(full_begin, full_end)
            if ONE_LOOP:
                full_end = window_begin
        elif ONE_LOOP:
            full_end = 0
        first_blocks = None
        if ONE_LOOP:
            first_blocks = _blocks_of(table_ptr, full_end, key_end, KEY_TILE, BLOCK_SIZE)
        wait_for_inputs(PDL)
        let_next_start(PDL)

        query = tl.load(query_places, mask=is_query[:, None] & is_dim[None, :], other=0.0)
        positions = first_position + token_in_tile
        maximum = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
        normaliser = tl.zeros([TILE_ROWS], dtype=tl.float32)
        accumulator = tl.zeros([TILE_ROWS, DIM_TILE], dtype=tl.float32)

        # 3. Accumulate: the window's edge with masks, the full tiles without, the diagonal with masks. Few tokens are
        # quicker in one loop with masks throughout, whose loads the compiler overlaps from its first tile to its last.
        if WINDOW > 0 and not ONE_LOOP:
            edge_end = tl.minimum(full_begin, tl.cdiv(key_end, KEY_TILE) * KEY_TILE)
            accumulator, maximum, normaliser = _accumulate(
                accumulator, maximum, normaliser, query, positions, None, key_ptr, value_ptr, key_scales_ptr,
                value_scales_ptr, table_ptr, head, window_begin, edge_end, key_end, scale_log2, soft_cap,
                True, QUANTISED, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, HAS_SOFT_CAP, KEY_TILE, DIM_TILE,
            )  # fmt: skip
        if not ONE_LOOP:
            accumulator, maximum, normaliser = _accumulate(
                accumulator, maximum, normaliser, query, positions, None, key_ptr, value_ptr, key_scales_ptr,
                value_scales_ptr, table_ptr, head, full_begin, full_end, key_end, scale_log2, soft_cap,
                False, QUANTISED, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, HAS_SOFT_CAP, KEY_TILE, DIM_TILE,
            )  # fmt: skip
        accumulator, maximum, normaliser = _accumulate(
            accumulator, maximum, normaliser, query, positions, first_blocks, key_ptr, value_ptr, key_scales_ptr,
            value_scales_ptr, table_ptr, head, full_end, key_end, key_end, scale_log2, soft_cap,
            True, QUANTISED, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, HAS_SOFT_CAP, KEY_TILE, DIM_TILE,
        )  # fmt: skip

        # 4. Store.
        result = accumulator * (1.0 / tl.where(is_query, normaliser, 1.0))[:, None]
        output_places = output_ptr + token_places * output_stride + head * (GROUP * HEAD_DIM) + head_places
        tl.store(output_places, result.to(output_ptr.dtype.element_ty), mask=is_query[:, None] & is_dim[None, :])

        # 5. Draw the next tile, where there are more tiles than programs.
        work = total
        if total > programs:
            work = programs + tl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")

    # 6. The last program to finish puts the counters back to zero.
    wait_for_inputs(PDL)  # also a program without a tile: who waits for this kernel waits for those before it
    let_next_start(PDL)
    if total > programs:
        finished = tl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu")
        if finished == programs - 1:
            tl.store(counters_ptr, 0)
            tl.store(counters_ptr + 1, 0)

    if has_unowned:
        _zero_unowned(
            output_ptr, output_stride, slots_ptr, lengths_ptr, starts_ptr, first_row, max_rows, token_count,
            KV_HEADS * GROUP * HEAD_DIM, TOKEN_TILE,
        )  # fmt: skip


@triton.jit
def _blocks_of(table_ptr, begin, end, KEY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The block ids of a tile's keys, which begin at `begin`; 0 from `end` on."""
    keys = begin + tl.arange(0, KEY_TILE)
    return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def _accumulate(
    accumulator, maximum, normaliser, query, positions, blocks, key_ptr, value_ptr, key_scales_ptr,
    value_scales_ptr, table_ptr, head, begin, end, key_end, scale_log2, soft_cap,
    MASKED: tl.constexpr, QUANTISED: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, KEY_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):  # fmt: skip
    """Take the keys begin .. end (begin a multiple of KEY_TILE) into the running sums; masks only where MASKED.

    `blocks`: ids of the first tile's, if they have been read already.
    """
    dims = tl.arange(0, DIM_TILE)
    is_dim = dims < HEAD_DIM
    places_in_tile = tl.arange(0, KEY_TILE)
    if blocks is None:
        blocks = _blocks_of(table_ptr, begin, end, KEY_TILE, BLOCK_SIZE)
    if QUANTISED:  # scales are read one tile ahead, as block ids are: they are too short for the compiler to do it
        scale_places = (blocks.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE + (begin + places_in_tile) % BLOCK_SIZE
        scale_end = tl.minimum(end, key_end)  # edge: nothing past the last query is read
        key_scale = tl.load(key_scales_ptr + scale_places, mask=begin + places_in_tile < scale_end, other=0.0)
        value_scale = tl.load(value_scales_ptr + scale_places, mask=begin + places_in_tile < scale_end, other=0.0)
    for start in range(begin, end, KEY_TILE):
        keys = start + places_in_tile
        offsets = (blocks.to(tl.int64) * KV_HEADS + head) * (BLOCK_SIZE * HEAD_DIM) + (keys % BLOCK_SIZE) * HEAD_DIM
        places = offsets[:, None] + dims[None, :]
        # The next tile's block ids, read one tile ahead of its keys. Edge: no tile follows.
        blocks = _blocks_of(table_ptr, start + KEY_TILE, end, KEY_TILE, BLOCK_SIZE)
        if MASKED:
            is_loaded = (keys < key_end)[:, None] & is_dim[None, :]  # edge: values past the last query may be NaN
        if HEAD_DIM == DIM_TILE:
            key = tl.load(key_ptr + places)
        else:
            key = tl.load(key_ptr + places, mask=is_dim[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)))
        multiplier = scale_log2
        if QUANTISED:
            scores = scores * (key_scale.to(tl.float32) * scale_log2)[None, :]
            multiplier = 1.0
            scale_places = (blocks.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE + (keys + KEY_TILE) % BLOCK_SIZE
            key_scale = tl.load(key_scales_ptr + scale_places, mask=keys + KEY_TILE < scale_end, other=0.0)
        if HAS_SOFT_CAP:
            scores = soft_capped(scores * (multiplier / LOG2_E_CONSTANT), soft_cap)
            multiplier = LOG2_E_CONSTANT
        if MASKED:
            is_seen = (positions - start)[:, None] >= places_in_tile[None, :]  # edge: the diagonal
            if WINDOW > 0:
                is_seen &= (positions - start - WINDOW)[:, None] < places_in_tile[None, :]  # edge: the window
            scores = tl.where(is_seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * multiplier)
        base = new_maximum
        if MASKED and WINDOW > 0:
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a query may see none of the edge tile
        probabilities = tl.exp2(scores * multiplier - base[:, None])
        shrink = tl.exp2(maximum - base)
        normaliser = normaliser * shrink + tl.sum(probabilities, axis=1)
        maximum = new_maximum
        accumulator = accumulator * shrink[:, None]
        if QUANTISED:
            probabilities = probabilities * value_scale.to(tl.float32)[None, :]
            value_scale = tl.load(value_scales_ptr + scale_places, mask=keys + KEY_TILE < scale_end, other=0.0)
        if MASKED:
            value = tl.load(value_ptr + places, mask=is_loaded, other=0.0)
        elif HEAD_DIM == DIM_TILE:
            value = tl.load(value_ptr + places)
        else:
            value = tl.load(value_ptr + places, mask=is_dim[None, :], other=0.0)
        accumulator = tl.dot(probabilities.to(query.dtype), value.to(query.dtype), accumulator)
    return accumulator, maximum, normaliser


@triton.jit
def _zero_unowned(
    output_ptr, output_stride, slots_ptr, lengths_ptr, starts_ptr, first_row, max_rows, token_count,
    TOKEN_SIZE: tl.constexpr, TOKEN_TILE: tl.constexpr,
):  # fmt: skip
    """Write zeros to the tokens of padding rows and to those past the last row, shared out between the programs."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    places = tl.arange(0, TOKEN_TILE)
    zeros = tl.zeros([TOKEN_TILE], dtype=output_ptr.dtype.element_ty)
    for row in range(first_row + program, max_rows, programs):
        if (tl.load(slots_ptr + row) < 0) | (tl.load(lengths_ptr + row) <= 0):
            for token in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
                token_ptr = output_ptr + tl.cast(token, tl.int64) * output_stride
                tl.store(token_ptr + places, zeros, mask=places < TOKEN_SIZE)
    for token in range(tl.load(starts_ptr + max_rows) + program, token_count, programs):
        token_ptr = output_ptr + tl.cast(token, tl.int64) * output_stride
        tl.store(token_ptr + places, zeros, mask=places < TOKEN_SIZE)


def _check_fresh(
    plan: PrefillPlan, shape: HeadShape, query: torch.Tensor, fresh: tuple[torch.Tensor, torch.Tensor] | None
) -> None:
    """Tensors beside a plan that reads them, as the copy engine takes them, and beside no other."""
    wanted(plan.specialised or not plan.fresh, "fresh plan", "only of the Hopper kernel", plan)
    wanted((fresh is not None) == plan.fresh, "fresh", "keys and values beside a fresh plan, else None", type(fresh))
    for name, tensor in zip(("fresh keys", "fresh values"), fresh or (), strict=False):
        check_tensor(name, tensor, (query.shape[0], shape.kv_heads, shape.head_dim), query.dtype, like=query)
        strides, line_bytes = tensor.stride(), tensor.stride(0) * tensor.element_size()
        wanted(strides[1] == shape.head_dim, f"{name} strides", f"(any, {shape.head_dim}, 1)", strides)
        place = (line_bytes, tensor.data_ptr())
        wanted(copies_boxes(tensor), f"{name} alignment", "tokens at multiples of 16 bytes", place)


def prefill_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    query_starts: torch.Tensor,
    counters: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    decode_row_count: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
    pdl: bool = False,
) -> None:
    """Write the attention of the chunk rows to `output` (layout table in the module's docstring).

    `plan` is `launch_plan` of the bucket; `counters` is its workspace, shared by calls that follow one another on a
    stream. `decode_row_count`, an int32 device scalar [1], says how many leading rows are left to the decode kernel;
    None: none. `fresh`: the step's own keys and values, wanted if and only if the plan is `fresh`. `pdl` launches while
    the previous kernel still runs and waits for it inside, where the card can do that. Neither allocates nor
    synchronises. Raises ValueError naming the argument, what was wanted and what came.
    """
    shape = check_paged_inputs(
        output, query, key_cache, value_cache, block_tables, row_slots, context_lengths, key_scales, value_scales
    )
    check_options(scale, sliding_window, soft_cap)
    check_rows(row_slots.shape[0], plan.rows_tile, counters, COUNTER_COUNT, query_starts)
    wanted(plan.query_tile * shape.group <= plan.tile_rows, "plan group", shape.group, plan)
    _check_fresh(plan, shape, query, fresh)
    early = pdl and launch_options(output)["PDL"]
    inputs = (output, query, key_cache, value_cache, block_tables, row_slots, context_lengths, query_starts)
    if plan.specialised:
        is_quantised = key_scales is not None
        is_possible = can_specialise(shape, query.dtype, sliding_window, soft_cap, quantised=is_quantised)
        wanted(is_possible, "specialised plan", "only where can_specialise(...)", (shape, query.dtype))
        from kernels import prefill_attention_hopper

        prefill_attention_hopper.launch(
            *inputs, counters, decode_row_count, key_scales, value_scales, fresh, shape, plan, scale * LOG2_E, early
        )  # fmt: skip
        return
    _prefill_kernel[(plan.program_count,)](
        *inputs, decode_row_count, counters, key_scales, value_scales,
        row_slots.shape[0], query.shape[0], plan.wave, output.stride(0), query.stride(0), block_tables.stride(0),
        scale * LOG2_E, soft_cap,
        QUANTISED=key_scales is not None, KV_HEADS=shape.kv_heads, GROUP=shape.group, HEAD_DIM=shape.head_dim,
        BLOCK_SIZE=shape.block_size, WINDOW=sliding_window, HAS_SOFT_CAP=soft_cap > 0,
        HAS_DECODE_ROWS=decode_row_count is not None, TILE_ROWS=plan.tile_rows, QUERY_TILE=plan.query_tile,
        KEY_TILE=plan.key_tile, DIM_TILE=plan.dim_tile, ROWS_TILE=plan.rows_tile,
        TOKEN_TILE=triton.next_power_of_2(shape.query_heads * shape.head_dim), ONE_LOOP=plan.one_loop, PDL=early,
        num_warps=plan.num_warps, num_stages=plan.num_stages, **compile_options(plan.max_registers, early),
    )  # fmt: skip
