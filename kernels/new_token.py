"""A row's new token inside a decode kernel: its queries, and its key and value, made of the row's product qkv.

The same arithmetic as kernels/qk_norm_rope_store.py, for one K/V head and the query heads of its group. The norm's
gains, cosines and sines are loaded apart from the heads: a kernel can do it before it waits for the product.

Called by kernels/fused_decode_attention.py and kernels/fused_decode_parts.py; whoever launches them makes `NewTokens`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import check_head_inputs, check_tensor
from kernels.kv_quant import store_vector


@dataclass(frozen=True)
class NewTokens:
    """What it takes to make queries, keys and values of each row's new token inside the kernel.

    rope_table float32 [max_position, r], q_weight and k_weight [head_dim] or None: as kernels/qk_norm_rope_store.py.
    """

    rope_table: torch.Tensor
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6

    def check(self, qkv: torch.Tensor, output: torch.Tensor, kv_heads: int) -> None:
        """Raise ValueError for a shape or dtype that does not fit the attention's."""
        rows, query_heads, head_dim = output.shape
        check_tensor("qkv", qkv, (rows, (query_heads + 2 * kv_heads) * head_dim), output.dtype, like=output)
        check_head_inputs(self.rope_table, self.q_weight, self.k_weight, head_dim, like=output)


@triton.jit
def _partner(column, HALF: tl.constexpr):
    return tl.where(column < HALF, column + HALF, column - HALF)


@triton.jit
def rotation(rope_row, column, HALF: tl.constexpr):
    """Cosines and signed sines of a head's elements [D]; `rope_row`: the position's cosines."""
    rotary = column < 2 * HALF  # elements that take part
    first = column < HALF
    angle = tl.where(first, column, column - HALF)
    cos = tl.load(rope_row + angle, mask=rotary, other=1.0)
    sin = tl.load(rope_row + HALF + angle, mask=rotary, other=0.0)
    return cos, tl.where(first, -sin, sin)


@triton.jit
def norm_gains(weight, column, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """The norm's weight of a head's elements and of their partners in the rotation, float32 [D]."""
    gain = tl.full(column.shape, 1.0, tl.float32)
    partner_gain = gain
    if HAS_NORM:
        gain = tl.load(weight + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
        if HALF > 0:
            partner_gain = tl.load(weight + _partner(column, HALF), mask=column < 2 * HALF, other=0.0).to(tl.float32)
    return gain, partner_gain


@triton.jit
def head_pairs(heads, offset, column, inside, HALF: tl.constexpr):
    """Heads [H, D] at `heads` + `offset`, and each element's partner in the rotation."""
    own = tl.load(heads + offset, mask=inside, other=0.0)
    other = own
    if HALF > 0:
        rotary = inside & (column < 2 * HALF)[None, :]
        other = tl.load(heads + offset + (_partner(column, HALF) - column)[None, :], mask=rotary, other=0.0)
    return own, other


@triton.jit
def normed_rotated(x, partner, gain, partner_gain, cos, sin, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
                   HAS_NORM: tl.constexpr):  # fmt: skip
    """Heads [H, D] from `head_pairs`, normed and rotated in float32 by what `norm_gains` and `rotation` gave."""
    x = x.to(tl.float32)
    y = partner.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x = x * scale * gain[None, :]
        y = y * scale * partner_gain[None, :]
    if HALF > 0:
        x = x * cos[None, :] + y * sin[None, :]
    return x


@triton.jit
def new_queries(
    source, head, dims, is_dim, gain, partner_gain, cos, sin, eps,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The queries [HEADS, D] of a K/V head's group, normed and rotated, in the dtype of `source`: the row of qkv.

    HEADS: a power of two, at least GROUP; the queries past the group are zeros.
    """
    query = tl.arange(0, HEADS)[:, None]
    is_query = (query < GROUP) & is_dim[None, :]
    x, partner = head_pairs(source, (head * GROUP + query) * HEAD_DIM + dims[None, :], dims, is_query, HALF)
    result = normed_rotated(x, partner, gain, partner_gain, cos, sin, eps, HEAD_DIM, HALF, HAS_NORM)
    return result.to(source.dtype.element_ty)


@triton.jit
def repeated(rows, ROWS: tl.constexpr):
    """Rows [H, D] -> [ROWS, D], each ROWS / H times in a row."""
    HEADS: tl.constexpr = rows.shape[0]
    D: tl.constexpr = rows.shape[1]
    return tl.reshape(tl.broadcast_to(rows[:, None, :], [HEADS, ROWS // HEADS, D]), [ROWS, D])


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
