"""A row's new token in the decode kernel of single warps on Hopper: as kernels/new_token.py, in Gluon.

Queries, key and value are made of the row's product qkv with the arithmetic of kernels/qk_norm_rope_store.py, but that
the norm's weight is multiplied into the angles, ahead of the product; 8-bit vectors are to the bit those of
kernels/kv_quant.py.

Called by kernels/fused_decode_warps.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.decode_warp import QUERIES
from kernels.kv_quant_gluon import divided, quantising_scale, whole_levels
from kernels.launch_gluon import wait_for_inputs


@gluon.jit
def _factors(rope_ptr, gain_ptr, position, dims, HALF: gl.constexpr, HAS_NORM: gl.constexpr):
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
def _rotated(x, partner, cos, sin, eps, axis: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr):
    """Heads, their elements along `axis`, normed and rotated in float32 by `_factors` of as many dimensions."""
    x = x.to(gl.float32)
    turned = x * cos + partner.to(gl.float32) * sin
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(x * x, axis=axis) / HEAD_DIM + eps)
        if axis == 1:
            scale = gl.expand_dims(scale, 1)
        turned = turned * scale
    return turned


@gluon.jit
def _quantised(x, dtype: gl.constexpr, FORMAT: gl.constexpr):
    """A float32 vector [D] as elements of an 8-bit type, the same in float32, and their float16 scale; to the bit as
    kernels/kv_quant.py."""
    bits = gl.abs(x).to(gl.int32, bitcast=True)  # in the same order, and one instruction compares those of all lanes
    largest = gl.max(bits, axis=0).to(gl.float32, bitcast=True)
    scale, divisor = quantising_scale(largest, FORMAT)
    level = whole_levels(divided(x, divisor, 1.0 / divisor), FORMAT)
    return level.to(dtype), level, scale


@gluon.jit
def _stored(cache_ptr, scales_ptr, x, place, dims, HEAD_DIM: gl.constexpr, FORMAT: gl.constexpr):
    """Store a float32 vector [D] at a place of a contiguous cache; what reading it gives, in float32."""
    place = place.to(gl.int64)
    if FORMAT == 0:
        elements = x.to(cache_ptr.dtype.element_ty)
        read = elements.to(gl.float32)
    else:
        elements, level, scale = _quantised(x, cache_ptr.dtype.element_ty, FORMAT)
        gl.store(scales_ptr + place, scale.to(gl.float16))
        read = level * scale
    gl.store(cache_ptr + place * HEAD_DIM + dims, elements)
    return read


@gluon.jit
def new_key(
    qkv_ptr, key_ptr, key_scales_ptr, rope_ptr, query_gain_ptr, key_gain_ptr, statistic_ptr, head, position, place, eps,
    scale_log2,
    FORMAT: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Store the new key, and leave the statistics of the part that it is: its products with the queries, as stored."""
    HALF: gl.constexpr = HEAD_DIM // 2
    line: gl.constexpr = gl.BlockedLayout([HEAD_DIM // 32], [32], [1], [0])
    dims = gl.arange(0, HEAD_DIM, layout=line)
    partners = (dims + HALF) % HEAD_DIM
    key_cos, key_sin = _factors(rope_ptr, key_gain_ptr, position, dims, HALF, HAS_NORM)
    cos, sin = _factors(rope_ptr, query_gain_ptr, position, dims, HALF, HAS_NORM)
    wait_for_inputs(PDL)
    source = qkv_ptr + (KV_HEADS * GROUP + head) * HEAD_DIM
    key = gl.load(source + dims)
    partner = gl.load(source + partners)
    queries = ()  # all are asked for before the key is stored, which they would wait for
    for index in gl.static_range(GROUP):
        source = qkv_ptr + (head * GROUP + index) * HEAD_DIM
        queries += ((gl.load(source + dims), gl.load(source + partners)),)
    key = _rotated(key, partner, key_cos, key_sin, eps, 0, HEAD_DIM, HAS_NORM)
    key = _stored(key_ptr, key_scales_ptr, key, place, dims, HEAD_DIM, FORMAT)
    for index in gl.static_range(GROUP):
        query, partner = queries[index]
        query = _rotated(query, partner, cos, sin, eps, 0, HEAD_DIM, HAS_NORM).to(qkv_ptr.dtype.element_ty)
        score = gl.sum(query.to(gl.float32) * key, axis=0) * scale_log2
        gl.store(statistic_ptr + index, score)
        gl.store(statistic_ptr + QUERIES + index, 1.0)


@gluon.jit
def new_value(
    source, value_ptr, value_scales_ptr, sums_ptr, output_ptr, place, is_alone,
    FORMAT: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Store the new value, and leave it as stored as the sums of its part; alone, it is the output."""
    line: gl.constexpr = gl.BlockedLayout([HEAD_DIM // 32], [32], [1], [0])
    dims = gl.arange(0, HEAD_DIM, layout=line)
    wait_for_inputs(PDL)
    value = gl.load(source + dims).to(gl.float32)
    value = _stored(value_ptr, value_scales_ptr, value, place, dims, HEAD_DIM, FORMAT)
    for index in gl.static_range(GROUP):
        if is_alone:
            gl.store(output_ptr + index * HEAD_DIM + dims, value.to(output_ptr.dtype.element_ty))
        else:
            gl.store(sums_ptr + index * HEAD_DIM + dims, value)


@gluon.constexpr_function
def _group_layout(heads: int, head_dim: int) -> gl.BlockedLayout:
    """Of a group's queries [heads, 8 / heads, head_dim]: each head in as many lanes."""
    return gl.BlockedLayout([1, QUERIES.value // heads, head_dim * heads // 32], [heads, 1, 32 // heads], [1, 1, 1],
                            [2, 1, 0])  # fmt: skip


@gluon.jit
def query_factors(rope_ptr, query_gain_ptr, position, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
                  HAS_NORM: gl.constexpr):  # fmt: skip
    """`_factors` of a group's queries."""
    rows: gl.constexpr = gl.SliceLayout(1, _group_layout(HEADS, HEAD_DIM))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, rows))
    return _factors(rope_ptr, query_gain_ptr, position, dims, HEAD_DIM // 2, HAS_NORM)


@gluon.jit
def new_queries(
    qkv_ptr, cos, sin, head, eps,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """A group's queries [8, HEAD_DIM], normed and rotated by `query_factors`, each 8 / HEADS times; past it zeros."""
    cube: gl.constexpr = _group_layout(HEADS, HEAD_DIM)
    rows: gl.constexpr = gl.SliceLayout(1, cube)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, rows))
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, rows))
    source = qkv_ptr + (head * GROUP + heads)[:, None] * HEAD_DIM
    is_head = (heads < GROUP)[:, None]
    query = gl.load(source + dims[None, :], mask=is_head, other=0.0)
    partner = gl.load(source + ((dims + HEAD_DIM // 2) % HEAD_DIM)[None, :], mask=is_head, other=0.0)
    query = _rotated(query, partner, cos[None, :], sin[None, :], eps, 1, HEAD_DIM, HAS_NORM)
    query = query.to(qkv_ptr.dtype.element_ty)
    zeros = gl.zeros([HEADS, QUERIES // HEADS, HEAD_DIM], query.dtype, cube)
    repeated, _ = gl.broadcast(gl.expand_dims(query, 1), zeros)
    return gl.reshape(repeated, [QUERIES, HEAD_DIM])
