"""Queries and keys in the decode kernel of single warps on Hopper: operands of products, and scores.

A group's queries are the eight columns of a right operand. 8-bit keys: fp8 as even and odd dims in bfloat16, which two
products add up; int8 as they are, times queries of 15-bit levels in two bytes.

Called by kernels/decode_attention_hopper.py; kernels/fused_decode_warps.py takes the operands of fp8 for int8 too.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from kernels.decode_tile import FP8_SHIFT
from kernels.decode_warp import FP8, INT8, QUERIES, left_operands
from kernels.new_token_warp import in_shared

LEVELS = gl.constexpr(127.0 * 128.0)


@gluon.jit
def _load_query(query_ptr, first_dim: gl.constexpr, step: gl.constexpr, dims: gl.constexpr, layout: gl.constexpr,
                GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):  # fmt: skip
    """Queries of a group as the columns [dims, 8] of a product's right operand; every `step`-th dim."""
    rows = first_dim + step * gl.arange(0, dims, layout=gl.SliceLayout(1, layout))
    queries = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, layout))
    places = queries[None, :] * HEAD_DIM + rows[:, None]
    return gl.load(query_ptr + places, mask=(queries < GROUP)[None, :], other=0.0)


@gluon.jit
def load_queries(query_ptr, mma: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """A group's queries as right operands of the keys' product: whole, over fp8 even and odd dims."""
    if FORMAT == FP8:
        layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
        first = _load_query(query_ptr, 0, 2, HEAD_DIM // 2, layout, GROUP, HEAD_DIM)
        second = _load_query(query_ptr, 1, 2, HEAD_DIM // 2, layout, GROUP, HEAD_DIM)
    else:
        WIDTH: gl.constexpr = 4 if FORMAT == INT8 else 2
        first = _load_query(query_ptr, 0, 1, HEAD_DIM, gl.DotOperandLayout(1, mma, WIDTH), GROUP, HEAD_DIM)
        second = first
    return first, second


@gluon.jit
def as_operands(rows, mma: gl.constexpr, FORMAT: gl.constexpr):
    """Queries [8, HEAD_DIM] as `load_queries` gives them."""
    if FORMAT == FP8:
        even, odd = gl.split(gl.reshape(rows, [QUERIES, rows.shape[1] // 2, 2]))
        first_shared, second_shared = in_shared(even), in_shared(odd)  # both, before one is waited for
        first = first_shared.permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2))
        second = second_shared.permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2))
    else:
        WIDTH: gl.constexpr = 4 if FORMAT == INT8 else 2
        first = in_shared(rows).permute((1, 0)).load(gl.DotOperandLayout(1, mma, WIDTH))
        second = first
    return first, second


@gluon.jit
def scaled(first, second, mma: gl.constexpr, FORMAT: gl.constexpr):
    """The operands as a product takes them, and a factor [8] of what it gives."""
    column: gl.constexpr = gl.SliceLayout(0, mma)
    unit = gl.full([QUERIES], 1.0, gl.float32, column)
    if FORMAT == INT8:
        wide = first.to(gl.float32)
        largest = gl.max(gl.abs(wide), axis=0) / LEVELS
        largest = gl.where(largest > 0.0, largest, 1.0)
        level = wide / largest[None, :]
        multiple = gl.floor(level / 128.0 + 0.5)
        first = multiple.to(gl.int8)
        second = gl.floor(level - multiple * 128.0 + 0.5).to(gl.int8)
        unit = gl.convert_layout(largest, column)
    elif FORMAT == FP8:
        first = (first.to(gl.float32) * FP8_SHIFT).to(first.dtype)
        second = (second.to(gl.float32) * FP8_SHIFT).to(second.dtype)
    return first, second, unit


@gluon.jit
def scores_of(keys, first, second, mma: gl.constexpr, FORMAT: gl.constexpr):
    """Products [tile, 8] of a tile of keys in shared memory with the queries, without the keys' scales."""
    TILE: gl.constexpr = keys.shape[0]
    zeros = gl.zeros([TILE, QUERIES], gl.float32, mma)
    if FORMAT == INT8:
        BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * keys.shape[1], element_bitwidth=8, rank=2)
        operand = keys._reinterpret(gl.int8, [TILE, 2 * keys.shape[1]], BYTES).load(gl.DotOperandLayout(0, mma, 4))
        none = gl.zeros([TILE, QUERIES], gl.int32, mma)
        scores = (mma_v2(operand, first, none) * 128 + mma_v2(operand, second, none)).to(gl.float32)
    elif FORMAT == FP8:
        even, odd = left_operands(keys, mma, FORMAT)
        scores = mma_v2(odd, second, mma_v2(even, first, zeros))
    else:
        scores = mma_v2(keys.load(gl.DotOperandLayout(0, mma, 2)), first, zeros)
    return scores
