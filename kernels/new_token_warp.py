"""A row's new token in decode kernels of single warps on Hopper: as kernels/new_token.py, in Gluon.

Queries, key and value are made of the row's product qkv with the arithmetic of kernels/qk_norm_rope_store.py, but that
the norm's weight is multiplied into the angles; 8-bit vectors are to the bit those of kernels/kv_quant.py. In
`new_token` and `new_queries` qkv is the sum of PARTS parts that lie `part_stride` elements apart.

Called by kernels/decode_attention_hopper.py and kernels/fused_decode_warps.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.decode_warp import INT8, QUERIES


@gluon.jit
def _summed(pointers, mask, part_stride, PARTS: gl.constexpr):
    """What lies at the pointers, all parts added up; float32."""
    if mask is None:
        x = gl.load(pointers).to(gl.float32)
        for part in gl.static_range(1, PARTS):
            x += gl.load(pointers + part * part_stride).to(gl.float32)
    else:
        x = gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
        for part in gl.static_range(1, PARTS):
            x += gl.load(pointers + part * part_stride, mask=mask, other=0.0).to(gl.float32)
    return x


@gluon.jit
def factors(rope_ptr, gain_ptr, position, dims, HALF: gl.constexpr, HAS_NORM: gl.constexpr):
    """What a head's elements, and their partners in the rotation, are multiplied by: cosines and signed sines, each
    times the norm's weight. It does not need the product ahead."""
    row_ptr = rope_ptr + position.to(gl.int64) * (2 * HALF)
    cos = gl.load(row_ptr + dims % HALF)
    sin = gl.load(row_ptr + HALF + dims % HALF)
    sin = gl.where(dims < HALF, -sin, sin)
    if HAS_NORM:
        cos = cos * gl.load(gain_ptr + dims).to(gl.float32)
        sin = sin * gl.load(gain_ptr + (dims + HALF) % (2 * HALF)).to(gl.float32)
    return cos, sin


@gluon.jit
def rotated(x, partner, cos, sin, eps, axis: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr):
    """Heads, their elements along `axis`, normed and rotated in float32 by `factors` of as many dimensions."""
    x = x.to(gl.float32)
    turned = x * cos + partner.to(gl.float32) * sin
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(x * x, axis=axis) / HEAD_DIM + eps)
        if axis == 1:
            scale = gl.expand_dims(scale, 1)
        turned = turned * scale
    return turned


@gluon.jit
def _divided(x, divisor, reciprocal):
    """x / divisor, rounded correctly: a number of 24 bits over one of 11 or fewer is never that near to a tie."""
    quotient = x * reciprocal
    return gl.fma(gl.fma(-quotient, divisor, x), reciprocal, quotient)


@gluon.jit
def _quantised(x, dtype: gl.constexpr, FORMAT: gl.constexpr):
    """A float32 vector [D] as elements of an 8-bit type and their float16 scale, to the bit as kernels/kv_quant.py."""
    TOP: gl.constexpr = 127.0 if FORMAT == INT8 else 448.0
    largest = gl.max(gl.abs(x), axis=0)
    scale = _divided(largest, TOP, 1.0 / TOP)
    scale = gl.minimum(gl.maximum(scale, 5.9604644775390625e-08), 65504.0).to(gl.float16).to(gl.float32)
    scale = gl.where(largest == 0.0, 0.0, scale)
    divisor = gl.where(largest == 0.0, 1.0, scale)
    level = _divided(x, divisor, 1.0 / divisor)
    level = gl.minimum(gl.maximum(level, -TOP), TOP)
    if FORMAT == INT8:
        below_half: gl.constexpr = 0.5 - 2**-25  # a half would take what is just below it to the next level
        level = gl.where(level < 0.0, level - below_half, level + below_half).to(gl.int32)  # halves away from zero
    return level.to(dtype), scale


@gluon.jit
def stored(cache_ptr, scales_ptr, x, place, dims, HEAD_DIM: gl.constexpr, FORMAT: gl.constexpr):
    """Store a float32 vector [D] at a place of a contiguous cache; what reading it gives, in float32."""
    place = place.to(gl.int64)
    if FORMAT == 0:
        elements = x.to(cache_ptr.dtype.element_ty)
        read = elements.to(gl.float32)
    else:
        elements, scale = _quantised(x, cache_ptr.dtype.element_ty, FORMAT)
        gl.store(scales_ptr + place, scale.to(gl.float16))
        read = elements.to(gl.float32) * scale
    gl.store(cache_ptr + place * HEAD_DIM + dims, elements)
    return read


@gluon.jit
def new_token(
    qkv_ptr, part_stride, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, rope_ptr, query_gain_ptr, key_gain_ptr,
    head, position, place, eps, dtype: gl.constexpr, columns_layout: gl.constexpr,
    FORMAT: gl.constexpr, PARTS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Store a row's new key and value of one K/V head at `place`.

    Returns the products [8] of the group's queries, in `dtype`, with the key as stored, each 8 / HEADS times, and the
    value as stored [HEAD_DIM]; both float32.
    """
    HALF: gl.constexpr = HEAD_DIM // 2
    line: gl.constexpr = gl.BlockedLayout([HEAD_DIM // 32], [32], [1], [0])
    dims = gl.arange(0, HEAD_DIM, layout=line)
    partners = (dims + HALF) % HEAD_DIM
    key_source = qkv_ptr + (KV_HEADS * GROUP + head) * HEAD_DIM
    key = _summed(key_source + dims, None, part_stride, PARTS)
    partner = _summed(key_source + partners, None, part_stride, PARTS)
    value = _summed(key_source + KV_HEADS * HEAD_DIM + dims, None, part_stride, PARTS)
    cos, sin = factors(rope_ptr, key_gain_ptr, position, dims, HALF, HAS_NORM)
    key = rotated(key, partner, cos, sin, eps, 0, HEAD_DIM, HAS_NORM)
    key = stored(key_ptr, key_scales_ptr, key, place, dims, HEAD_DIM, FORMAT)
    value = stored(value_ptr, value_scales_ptr, value, place, dims, HEAD_DIM, FORMAT)
    cos, sin = factors(rope_ptr, query_gain_ptr, position, dims, HALF, HAS_NORM)
    columns = gl.arange(0, QUERIES, layout=columns_layout)
    scores = gl.zeros([QUERIES], gl.float32, columns_layout)
    for index in range(GROUP):
        source = qkv_ptr + (head * GROUP + index) * HEAD_DIM
        query = rotated(
            _summed(source + dims, None, part_stride, PARTS), _summed(source + partners, None, part_stride, PARTS),
            cos, sin, eps, 0, HEAD_DIM, HAS_NORM,
        ).to(dtype)  # fmt: skip
        score = gl.sum(query.to(gl.float32) * key, axis=0)
        scores = gl.where(columns // (QUERIES // HEADS) == index, score, scores)
    return scores, value


@gluon.constexpr_function
def _group_layout(heads: int, head_dim: int) -> gl.BlockedLayout:
    """Of a group's queries [heads, 8 / heads, head_dim]: each head in as many lanes."""
    return gl.BlockedLayout([1, QUERIES.value // heads, head_dim * heads // 32], [heads, 1, 32 // heads], [1, 1, 1],
                            [2, 1, 0])  # fmt: skip


@gluon.jit
def query_factors(rope_ptr, query_gain_ptr, position, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
                  HAS_NORM: gl.constexpr):  # fmt: skip
    """`factors` of a group's queries."""
    rows: gl.constexpr = gl.SliceLayout(1, _group_layout(HEADS, HEAD_DIM))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, rows))
    return factors(rope_ptr, query_gain_ptr, position, dims, HEAD_DIM // 2, HAS_NORM)


@gluon.jit
def new_queries(
    qkv_ptr, part_stride, cos, sin, head, eps, dtype: gl.constexpr,
    PARTS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """A group's queries [8, HEAD_DIM], normed and rotated by `query_factors`, in `dtype`: each 8 / HEADS times; zeros
    past the group."""
    cube: gl.constexpr = _group_layout(HEADS, HEAD_DIM)
    rows: gl.constexpr = gl.SliceLayout(1, cube)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, rows))
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, rows))
    source = qkv_ptr + (head * GROUP + heads)[:, None] * HEAD_DIM
    is_head = (heads < GROUP)[:, None]
    query = _summed(source + dims[None, :], is_head, part_stride, PARTS)
    partner = _summed(source + ((dims + HEAD_DIM // 2) % HEAD_DIM)[None, :], is_head, part_stride, PARTS)
    query = rotated(query, partner, cos[None, :], sin[None, :], eps, 1, HEAD_DIM, HAS_NORM).to(dtype)
    repeated, _ = gl.broadcast(gl.expand_dims(query, 1), gl.zeros([HEADS, QUERIES // HEADS, HEAD_DIM], dtype, cube))
    return gl.reshape(repeated, [QUERIES, HEAD_DIM])


@gluon.jit
def in_shared(matrix):
    """A matrix of two bytes an element, put in shared memory."""
    layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, 2 * matrix.shape[1]), element_bitwidth=16, rank=2
    )
    shared = gl.allocate_shared_memory(matrix.dtype, matrix.shape, layout)
    shared.store(matrix)
    return shared
