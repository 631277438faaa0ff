"""A row's new token inside a decode kernel: its queries, and its key and value, made of the row's product qkv.

The same arithmetic as kernels/qk_norm_rope_store.py, for one K/V head and the query heads of its group. The norm's
gains, cosines and sines are loaded apart from the heads: a kernel can do it before it waits for the product.

Called by kernels/decode_attention.py and kernels/fused_decode_attention.py.
"""

import triton
import triton.language as tl

from kernels.kv_quant import store_vector
from kernels.qk_norm_rope_store import head_pairs, normed_rotated


@triton.jit
def new_queries(
    source, head, dims, is_query, gain, partner_gain, cos, sin, eps,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The queries [ROWS, D] of a K/V head's group, normed and rotated, in the dtype of `source`: the row of qkv."""
    places = (head * GROUP + tl.arange(0, ROWS)[:, None]) * HEAD_DIM + dims[None, :]
    x, partner = head_pairs(source, places, dims, is_query, HALF)
    query = normed_rotated(x, partner, gain, partner_gain, cos, sin, eps, HEAD_DIM, HALF, HAS_NORM)
    return query.to(source.dtype.element_ty)


@triton.jit
def stored_new_token(
    source, keys, values, key_scales, value_scales, head, place, dims, owns_new, gain, partner_gain, cos, sin, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Store the new key and value at `place` (as `store_vector`) where `owns_new` [1, D]; both [1, D] in float32 as
    the cache gives them back."""
    places = (KV_HEADS * GROUP + head) * HEAD_DIM + dims[None, :]
    value = tl.load(source + places + KV_HEADS * HEAD_DIM, mask=owns_new, other=0.0).to(tl.float32)
    x, partner = head_pairs(source, places, dims, owns_new, HALF)
    key = normed_rotated(x, partner, gain, partner_gain, cos, sin, eps, HEAD_DIM, HALF, HAS_NORM)
    key = store_vector(keys, key_scales, key, place, dims, owns_new, HEAD_DIM, FORMAT)
    value = store_vector(values, value_scales, value, place, dims, owns_new, HEAD_DIM, FORMAT)
    return key, value
