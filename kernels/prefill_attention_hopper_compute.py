"""The computing side of kernels/prefill_attention_hopper.py: a warp group's online softmax between two products.

Reads the letters of kernels/prefill_attention_hopper_copy.py and the stages that are filled for it, and writes the
output. The scalars of a tile are read from shared memory one by one, not summed out of a vector: only so does the
compiler keep them in uniform registers, and addresses and descriptors leave the loop.

Called by kernels/prefill_attention_hopper.py alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.launch_gluon import wait_for_inputs
from kernels.prefill_attention_hopper_copy import MAIL_SLOTS, read_mail


@gluon.jit
def _softmax(scores, maximum, normaliser, positions, first_key, scale_log2, MASKED: gl.constexpr, layout: gl.constexpr):
    """Probabilities of a tile's scores under the new running maximum; also that, the shrink and the normaliser."""
    KEY_TILE: gl.constexpr = scores.shape[1]
    if MASKED:
        places = gl.arange(0, KEY_TILE, layout=gl.SliceLayout(0, layout))
        scores = gl.where((positions - first_key)[:, None] >= places[None, :], scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, axis=1) * scale_log2)
    base = new_maximum
    if MASKED:
        base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a query may see none of a diagonal tile
    probabilities = gl.exp2(scores * scale_log2 - base[:, None])
    shrink = gl.exp2(maximum - base)
    normaliser = normaliser * shrink + gl.sum(probabilities, axis=1)
    return probabilities, new_maximum, normaliser, shrink


@gluon.jit
def _held(values):
    """The values, unchanged, behind an instruction that is never executed and across which the assembler moves nothing.

    Left to itself ptxas hoists the wait for the products above the exponentials, and the overlap is gone.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p pmevent 1; mov.b32 $0, $1; }",
        "=f,f", [values], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _narrow(values, dtype: gl.constexpr):
    """The values in `dtype`, converted here: left to itself the compiler does it later and holds registers."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [values], dtype=gl.bfloat16, is_pure=False, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [values], dtype=gl.float16, is_pure=False, pack=2
        )


@gluon.jit
def _steps(
    begin, end, read, probabilities, accumulator, maximum, normaliser, query, positions, keys, values, key_full,
    key_empty, value_full, value_empty, scale_log2,
    MASKED: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, score_layout: gl.constexpr,
    value_layout: gl.constexpr,
):  # fmt: skip
    """Tiles `begin` - 1 down to `end`: scores of each beside the values of the one before it."""
    TILE: gl.constexpr = keys.shape[1]
    ROWS: gl.constexpr = query.shape[0]
    operand: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    empty = gl.zeros([ROWS, TILE], gl.float32, score_layout)
    for step in range(begin - end):
        tile = begin - 1 - step
        stage = read % STAGES
        next_stage = (read + 1) % STAGES
        if OVERLAP:
            operand_tile = gl.convert_layout(_narrow(probabilities, keys.dtype), operand)
        mbarrier.wait(key_full.index(next_stage), ((read + 1) // STAGES) & 1)
        scores = warpgroup_mma(query, keys.index(next_stage).permute((1, 0)), empty, use_acc=False, is_async=True)
        mbarrier.wait(value_full.index(stage), (read // STAGES) & 1)
        if not OVERLAP:
            operand_tile = gl.convert_layout(probabilities.to(keys.dtype), operand)
        accumulator = warpgroup_mma(operand_tile, values.index(stage), accumulator, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        mbarrier.arrive(key_empty.index(next_stage), count=1)
        probabilities, maximum, normaliser, shrink = _softmax(
            scores, maximum, normaliser, positions, tile * TILE, scale_log2, MASKED, score_layout
        )
        if OVERLAP:
            normaliser = _held(normaliser)
        accumulator, operand_tile = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator, operand_tile))
        mbarrier.arrive(value_empty.index(stage), count=1)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, value_layout))
        accumulator = accumulator * shrink[:, None]
        read += 1
    return read, probabilities, accumulator, maximum, normaliser


@gluon.jit
def consume(
    output_ptr, query_ptr, output_stride, query_stride, scale_log2, queries, keys, values, key_full, key_empty,
    value_full, value_empty, mail, mail_full, mail_empty, query_full,
    WARP_GROUP: gl.constexpr, GROUP: gl.constexpr, QUERY_TILE: gl.constexpr, STAGES: gl.constexpr,
    COPY_QUERY: gl.constexpr, OVERLAP: gl.constexpr, CLEAN_VALUES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Take letters until the last; compute 64 of a tile's rows each time, those of WARP_GROUP.

    COPY_QUERY: queries are copied behind the letter; CLEAN_VALUES: copied values may hold anything past a row's end.
    """
    dtype: gl.constexpr = keys.dtype
    TILE: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    ROWS: gl.constexpr = queries.shape[1]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])

    tile_rows = WARP_GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copy_layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, copy_layout))
    token_in_tile = tile_rows // GROUP
    head_places = (tile_rows % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    score_tokens = (WARP_GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, score_layout))) // GROUP
    key_places = gl.arange(0, TILE, layout=gl.SliceLayout(1, copy_layout))
    empty = gl.zeros([ROWS, TILE], gl.float32, score_layout)

    read = 0
    letter = 0
    is_work, query_start, query_count, first_token, length, head, key_end, _ = read_mail(mail, mail_full, letter)
    while is_work != 0:
        query = queries.index((letter % MAIL_SLOTS) * 2 + WARP_GROUP)
        if COPY_QUERY:
            mbarrier.wait(query_full.index(letter % MAIL_SLOTS), (letter // MAIL_SLOTS) & 1)
        else:
            wait_for_inputs(PDL)
            tokens = first_token + token_in_tile
            is_query = (token_in_tile < QUERY_TILE) & (tokens < query_count)
            places = (query_start + tokens).to(gl.int64)[:, None] * query_stride + head * (GROUP * HEAD_DIM)
            query.store(gl.load(query_ptr + (places + head_places), mask=is_query[:, None], other=0.0))
            fence_async_shared()

        positions = length - query_count + first_token + score_tokens
        first_position = length - query_count + first_token + (WARP_GROUP * ROWS) // GROUP
        tile_count = (key_end + (TILE - 1)) // TILE
        last_tile = tile_count - 1
        full_count = gl.minimum((first_position + 1) // TILE, last_tile)

        # The tile on the diagonal has no values of an earlier one to go with.
        stage = read % STAGES
        mbarrier.wait(key_full.index(stage), (read // STAGES) & 1)
        scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        mbarrier.arrive(key_empty.index(stage), count=1)
        if CLEAN_VALUES and tile_count * TILE > length:
            # Past the row's end the copied blocks may hold anything; both groups write the same zeros there.
            mbarrier.wait(value_full.index(stage), (read // STAGES) & 1)
            value = values.index(stage).load(copy_layout)
            is_token = last_tile * TILE + key_places < length
            values.index(stage).store(gl.where(is_token[:, None], value, gl.zeros_like(value)))
            fence_async_shared()
        maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
        normaliser = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, score_layout))
        accumulator = gl.zeros([ROWS, HEAD_DIM], gl.float32, value_layout)
        probabilities, maximum, normaliser, _ = _softmax(
            scores, maximum, normaliser, positions, last_tile * TILE, scale_log2, True, score_layout
        )

        read, probabilities, accumulator, maximum, normaliser = _steps(
            last_tile, full_count, read, probabilities, accumulator, maximum, normaliser, query, positions,
            keys, values, key_full, key_empty, value_full, value_empty, scale_log2,
            True, STAGES, OVERLAP, score_layout, value_layout,
        )  # fmt: skip
        read, probabilities, accumulator, maximum, normaliser = _steps(
            full_count, 0, read, probabilities, accumulator, maximum, normaliser, query, positions,
            keys, values, key_full, key_empty, value_full, value_empty, scale_log2,
            False, STAGES, OVERLAP, score_layout, value_layout,
        )  # fmt: skip

        stage = read % STAGES
        mbarrier.wait(value_full.index(stage), (read // STAGES) & 1)
        operand_tile = gl.convert_layout(probabilities.to(dtype), operand)
        accumulator = warpgroup_mma(operand_tile, values.index(stage), accumulator, is_async=True)
        accumulator, operand_tile = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator, operand_tile))
        mbarrier.arrive(value_empty.index(stage), count=1)
        read += 1

        reciprocal = gl.convert_layout(1.0 / normaliser, gl.SliceLayout(1, value_layout))
        result = accumulator * reciprocal[:, None]
        query.store(result.to(dtype))
        tokens = first_token + token_in_tile
        is_query = (token_in_tile < QUERY_TILE) & (tokens < query_count)
        places = (query_start + tokens).to(gl.int64)[:, None] * output_stride + head * (GROUP * HEAD_DIM)
        gl.store(output_ptr + (places + head_places), query.load(copy_layout), mask=is_query[:, None])
        fence_async_shared()
        mbarrier.arrive(mail_empty.index(letter % MAIL_SLOTS), count=1)

        letter += 1
        is_work, query_start, query_count, first_token, length, head, key_end, _ = read_mail(mail, mail_full, letter)
