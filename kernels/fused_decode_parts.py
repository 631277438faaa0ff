"""The kernel of kernels/fused_decode_attention.py in which the new token is a part of its own.

A program of that file's kernel executes some 2,400 instructions, each of them once, and so waits for instructions more
than for anything else. Here fewer lie on the way: the new token has a program of its own, beside those of the cached
tokens, unless one tile holds them all; queries are normed and rotated as few rows and only then repeated to the height
of a tensor core's tile; the next tile is loaded only where there is one; a merge takes half as many parts at a time.

With LEAVE nobody merges: each part is divided by its normaliser and stays in `left`, in 16 bits where qkv has 16, for
the output product, whose programs merge the parts as they read them (kernels/attention_parts.py). The last to finish
would read what the product reads anyway, and between two kernels that takes longer than the rest of this one.

Arguments and tensors are those of the other kernel. Called by kernels/fused_decode_attention.py.
"""

import triton
import triton.language as tl

from kernels.decode_tile import (
    attend_tile,
    load_tile,
    merge_parts,
    prefetch_tile,
    query_parts,
    split_sums,
    whole_sums,
)
from kernels.launch import let_next_start, wait_for_inputs
from kernels.new_token import new_queries, norm_gains, repeated, rotation, stored_new_token


@triton.jit
def fused_decode_parts_kernel(
    qkv, output, key_cache, value_cache, key_scales, value_scales, next_key_cache, next_value_cache,
    block_tables, row_slots, context_lengths, rope_table, q_weight, k_weight, partials, left, counters,
    qkv_stride, output_stride, table_stride, eps, scale_log2,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_NEXT: tl.constexpr, HEADS: tl.constexpr, MERGE_HEADS: tl.constexpr, PARTS: tl.constexpr, LEAVE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # 1. Locate: one part of one K/V head of one row. Nothing read here is written by the kernels just ahead.
    let_next_start(PDL)
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    slot = tl.load(row_slots + row)
    length = tl.load(context_lengths + row)
    is_real = (slot >= 0) & (length > 0)
    cached = tl.where(is_real, length - 1, 0)
    tiles = tl.cdiv(cached, TILE)
    share = tl.cdiv(tiles, max(SPLITS - 1, 1))
    parts = 1
    ALONE: tl.constexpr = 0 if LEAVE else 1  # up to so many tiles are in one part with the new token
    if (SPLITS > 1) & (tiles > ALONE):
        parts = tl.cdiv(tiles, share) + 1  # the last is the new token
    HALF: tl.constexpr = HEAD_DIM // 2
    REPEATS: tl.constexpr = ROWS // HEADS  # a query fills that many rows of a tensor core's tile
    column = tl.arange(0, HEAD_DIM)
    is_column = column >= 0
    tile_row = tl.arange(0, ROWS)
    query = tile_row // REPEATS
    is_query = ((tile_row % REPEATS == 0) & (query < GROUP))[:, None] & is_column[None, :]
    output_place = output + row.to(tl.int64) * output_stride + head * (GROUP * HEAD_DIM)
    place = output_place + query[:, None] * HEAD_DIM + column[None, :]
    if is_real == 0:
        wait_for_inputs(PDL)
        if (split == 0) & (not LEAVE):
            tl.store(place, tl.zeros([ROWS, HEAD_DIM], dtype=output.dtype.element_ty), mask=is_query)
    elif split < parts:
        table = block_tables + slot.to(tl.int64) * table_stride
        DTYPE: tl.constexpr = qkv.dtype.element_ty
        # 2. Load the first tile of keys and values, which earlier steps wrote, and what turns the new token's heads.
        first = split * share
        last = tl.minimum(first + share, tiles)
        lane = tl.arange(0, TILE)
        inside = first * TILE + lane < cached
        keys, key_scale, values, value_scale, tile_place = load_tile(
            key_cache, value_cache, key_scales, value_scales, table, first * TILE, inside, head,
            KV_HEADS, BLOCK_SIZE, TILE, HEAD_DIM, FORMAT,
        )  # fmt: skip
        rope_row = rope_table + (length - 1).to(tl.int64) * HEAD_DIM
        cos, sin = rotation(rope_row, column, HALF)
        q_gain, q_partner_gain = norm_gains(q_weight, column, HEAD_DIM, HALF, HAS_NORM)
        if HAS_NEXT:
            prefetch_tile(next_key_cache, tile_place, inside, HEAD_DIM, FORMAT, PDL)
            prefetch_tile(next_value_cache, tile_place, inside, HEAD_DIM, FORMAT, PDL)
        pair = row * KV_HEADS + head
        part = pair * SPLITS + split
        sums_place = partials + part * (ROWS * HEAD_DIM)
        left_place = left + part * (ROWS * HEAD_DIM)
        statistics = partials + tl.num_programs(2) * (KV_HEADS * SPLITS * ROWS * HEAD_DIM)
        # 3. The group's queries, and the new token's key and value, which the last part stores and attends to.
        source = qkv + row.to(tl.int64) * qkv_stride
        maximum = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        normaliser = tl.zeros([ROWS], dtype=tl.float32)
        accumulator = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
        if split == parts - 1:
            new_block = tl.load(table + (length - 1) // BLOCK_SIZE).to(tl.int64)
            new_place = (new_block * KV_HEADS + head) * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
            k_gain, k_partner_gain = norm_gains(k_weight, column, HEAD_DIM, HALF, HAS_NORM)
            wait_for_inputs(PDL)
            q = new_queries(source, head, column, is_column, q_gain, q_partner_gain, cos, sin, eps,
                            GROUP, HEAD_DIM, HALF, HAS_NORM, HEADS)  # fmt: skip
            k, v = stored_new_token(
                source, key_cache, value_cache, key_scales, value_scales, head, new_place, column, is_column[None, :],
                k_gain, k_partner_gain, cos, sin, eps, KV_HEADS, GROUP, HEAD_DIM, HALF, HAS_NORM, FORMAT,
            )  # fmt: skip
            score = tl.sum(q.to(tl.float32) * k, axis=1) * scale_log2
            if LEAVE:
                heads = tl.arange(0, HEADS)
                tl.store(left_place + heads[:, None] * HEAD_DIM + column[None, :],
                         (v + tl.zeros([HEADS, HEAD_DIM], tl.float32)).to(DTYPE))  # fmt: skip
                tl.store(statistics + part * (2 * ROWS) + heads, score)
            elif parts > 1:
                heads = tl.arange(0, HEADS)
                tl.store(sums_place + heads[:, None] * HEAD_DIM + column[None, :],
                         v + tl.zeros([HEADS, HEAD_DIM], tl.float32))  # fmt: skip
                tl.store(statistics + part * (2 * ROWS) + heads, score)
                tl.store(statistics + part * (2 * ROWS) + ROWS + heads, tl.full([HEADS], 1.0, tl.float32))
            else:
                maximum = tl.max(repeated(score[:, None], ROWS), axis=1)
                normaliser = tl.full([ROWS], 1.0, dtype=tl.float32)
                accumulator += v
        else:
            wait_for_inputs(PDL)
            q = new_queries(source, head, column, is_column, q_gain, q_partner_gain, cos, sin, eps,
                            GROUP, HEAD_DIM, HALF, HAS_NORM, HEADS)  # fmt: skip
        if first < last:
            # 4. The cached tokens of this part, the next tile loaded behind each.
            even_q, odd_q, unit = query_parts(repeated(q, ROWS), FORMAT, NATIVE, False)
            even_sums, odd_sums = split_sums(accumulator, FORMAT, NATIVE)
            for tile in range(first, last):
                maximum, normaliser, even_sums, odd_sums = attend_tile(
                    even_q, odd_q, unit, keys, key_scale, values, value_scale, inside, scale_log2, maximum, normaliser,
                    even_sums, odd_sums, DTYPE, FORMAT, NATIVE,
                )  # fmt: skip
                if tile + 1 < last:
                    inside = (tile + 1) * TILE + lane < cached
                    keys, key_scale, values, value_scale, _ = load_tile(
                        key_cache, value_cache, key_scales, value_scales, table, (tile + 1) * TILE, inside, head,
                        KV_HEADS, BLOCK_SIZE, TILE, HEAD_DIM, FORMAT,
                    )  # fmt: skip
            accumulator = whole_sums(even_sums, odd_sums, FORMAT, NATIVE)
            if LEAVE:
                total = accumulator * (1.0 / normaliser)[:, None]
                tl.store(left_place + query[:, None] * HEAD_DIM + column[None, :], total.to(DTYPE), mask=is_query)
                tl.store(statistics + part * (2 * ROWS) + query, maximum + tl.log2(normaliser),
                         mask=tile_row % REPEATS == 0)  # fmt: skip
            elif parts > 1:
                tl.store(sums_place + query[:, None] * HEAD_DIM + column[None, :], accumulator, mask=is_query)
                is_first = tile_row % REPEATS == 0
                tl.store(statistics + part * (2 * ROWS) + query, maximum, mask=is_first)
                tl.store(statistics + part * (2 * ROWS) + ROWS + query, normaliser, mask=is_first)
        # 5. Leave the parts, or store the result, or let the last to finish merge them.
        if LEAVE:
            pass
        elif parts == 1:
            tl.store(place, (accumulator / normaliser[:, None]).to(output.dtype.element_ty), mask=is_query)
        else:
            tl.debug_barrier()  # all threads' parts are written before the counter says so
            if tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu") == parts - 1:
                tl.store(counters + pair, 0)
                merge_parts(output_place, partials, statistics, pair * SPLITS, 1, 0, parts,
                            GROUP, HEAD_DIM, ROWS, HEAD_DIM, PARTS, MERGE_HEADS)  # fmt: skip
