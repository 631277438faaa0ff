"""Everything between the qkv product and attention, in one launch: q/k norm, RoPE, and the store of K and V.

    q, k, v   = split(qkv[t])                                    rows of hq, hkv and hkv heads of d elements
    h         = h / sqrt(mean(h^2) + eps) * weight               h in q, k; only with norm weights; float32 inside
    h[i]      = h[i] * cos[p, i] - h[i + r/2] * sin[p, i]        i < r/2, p = positions[t], r = rotary_dim
    h[i+r/2]  = h[i + r/2] * cos[p, i] + h[i] * sin[p, i]        elements from r on pass through
    q_out[t]  = q;   k_cache[b, :, s] = k;   v_cache[b, :, s] = v        slot_mapping[t] = b * block_size + s

Sources: 1. J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (half-split pairing, as
GPT-NeoX introduced it). 2. A. Henry et al., "Query-Key Normalization for Transformers", 2020.

| tensor       | axes                              | dtype          | notes                                    |
|--------------|-----------------------------------|----------------|------------------------------------------|
| qkv          | [T, (hq + 2 hkv) d]               | any float      | last axis 1; q heads, then k, then v     |
| q_out        | [T, hq, d]                        | as qkv         | last axis 1, heads adjacent              |
| k_cache, v_cache | [block, kv head, position, d] | any float, int8 or float8_e4m3fn | last axis 1; 64-bit offsets |
| k_scales, v_scales | [block, kv head, position]  | float16        | beside int8 and fp8 caches; else None    |
| slot_mapping | [T]                               | int64          | -1: K and V of this row are not stored   |
| positions    | [T]                               | int32 or int64 | below max_position, also in padding rows |
| rope_table   | [max_position, r]                 | float32        | cos in the first r/2 columns, then sin   |
| q_weight, k_weight | [d]                         | any float      | both or neither                          |

"Any float" is bfloat16, float16 or float32. A padding row still writes its q, so its qkv row may hold anything. r is
even and at most d; r = 0 applies no rotation. Quantised K and V (`kv_format.py`) are made of the float32 heads, with no
rounding to a float type between.

Measured on an H200 at commit 1356a8c by `python -m benchmarks.kernels.bench_qk_norm_rope_store`: for 16 + 2 x 8
heads of 128: 1.6 us for one token, 3.1 for 64, 5.5 for 256; 1.94 TB/s for 8,192, 42 % of the read limit of that run.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import FLOATS, check_tensor
from kernels.kv_format import cache_format, quantise, vector_bytes
from kernels.kv_quant import check_scales, quantised
from kernels.launch import launch_options, let_next_start, wait_for_inputs

CACHE_DTYPES = (*FLOATS, torch.int8, torch.float8_e4m3fn)

PROGRAM_TARGET = 4096  # above this many programs, one program takes several heads


def rotate_reference(heads: torch.Tensor, positions: torch.Tensor, rope_table: torch.Tensor) -> torch.Tensor:
    """RoPE of `heads` [T, h, d] in float32, the first rotary_dim elements of each head in half-split pairs."""
    half = rope_table.shape[1] // 2
    rows = rope_table[positions.long()].float()[:, None, :]
    cos, sin = rows[..., :half], rows[..., half:]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def qk_norm_rope_store_reference(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    query_heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store K and V into the caches in place and return q [T, hq, d], all arithmetic in float32."""
    _, kv_heads, block_size, head_dim = k_cache.shape
    heads = qkv.float().view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.split((query_heads, kv_heads, kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps) * q_weight.float()
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * k_weight.float()
    q, k = rotate_reference(q, positions, rope_table), rotate_reference(k, positions, rope_table)
    stored = slot_mapping >= 0
    block, place = slot_mapping[stored] // block_size, slot_mapping[stored] % block_size
    for heads, cache, scales in ((k[stored], k_cache, k_scales), (v[stored], v_cache, v_scales)):
        if scales is None:
            cache[block, :, place] = heads.to(cache.dtype)
        else:
            cache[block, :, place], scales[block, :, place] = quantise(heads, cache.dtype)
    return q.to(qkv.dtype)


@dataclass(frozen=True)
class QkNormRopeStorePlan:
    """One program a token and a block of heads of one kind (q, k or v)."""

    grid: tuple[int, int]
    heads_per_program: int
    block_dim: int
    num_warps: int


def launch_plan(token_count: int, query_heads: int, kv_heads: int, head_dim: int) -> QkNormRopeStorePlan:
    """The grid and tile: single heads for a small batch, several heads a program for a large one."""
    heads = 1
    while (
        heads < 8
        and query_heads % (2 * heads) == 0
        and kv_heads % (2 * heads) == 0
        and token_count * (query_heads + 2 * kv_heads) // heads > PROGRAM_TARGET
    ):
        heads *= 2
    block = triton.next_power_of_2(head_dim)
    warps = max(heads * block // 256, 1)
    return QkNormRopeStorePlan((token_count, (query_heads + 2 * kv_heads) // heads), heads, block, warps)


def bytes_moved(
    token_count: int, query_heads: int, kv_heads: int, head_dim: int, element_bytes: int,
    cache_dtype: torch.dtype | None = None,
) -> int:  # fmt: skip
    """The fewest bytes that the operation reads and writes: every head once each way, scales written."""
    stored = head_dim * element_bytes if cache_dtype is None else vector_bytes(head_dim, cache_dtype)
    read = (query_heads + 2 * kv_heads) * head_dim * element_bytes
    return token_count * (read + query_heads * head_dim * element_bytes + 2 * kv_heads * stored)


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
def _normed_rotated_heads(
    heads, weight, rope_row, eps, offset, column, inside,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    x, partner = head_pairs(heads, offset, column, inside, HALF)
    gain, partner_gain = norm_gains(weight, column, HEAD_DIM, HALF, HAS_NORM)
    cos, sin = rotation(rope_row, column, HALF)
    return normed_rotated(x, partner, gain, partner_gain, cos, sin, eps, HEAD_DIM, HALF, HAS_NORM)


@triton.jit
def _store_heads(
    cache, scales, x, slot, head, column, inside, cache_strides, scale_strides,
    BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Store float32 heads [H, D] at a token's slot of a paged cache; nothing for slot -1."""
    block_stride, head_stride, position_stride = cache_strides
    place = cache + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * position_stride
    target = place + head[:, None].to(tl.int64) * head_stride + column[None, :]
    if FORMAT == 0:
        tl.store(target, x.to(cache.dtype.element_ty), mask=inside & (slot >= 0))
    else:
        stored, scale = quantised(x, FORMAT)
        tl.store(target, stored, mask=inside & (slot >= 0))
        block_stride, head_stride, position_stride = scale_strides
        place = scales + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * position_stride
        tl.store(place + head.to(tl.int64) * head_stride, scale, mask=(head >= 0) & (slot >= 0))


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv, q_out, k_cache, v_cache, slot_mapping, positions, rope_table, q_weight, k_weight, k_scales, v_scales,
    qkv_stride, q_stride, k_strides, v_strides, scale_strides, eps,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
    FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # 1. Locate: this program's token and heads.
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    head = first_head + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_DIM)
    inside = (head[:, None] >= 0) & (column[None, :] < HEAD_DIM)  # the head's end
    offset = head[:, None] * HEAD_DIM + column[None, :]
    row = qkv + token * qkv_stride
    wait_for_inputs(PDL)
    slot = tl.load(slot_mapping + token)
    rope_row = rope_table + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    # 2. Queries go to q_out; keys and values to the cache.
    if first_head < QUERY_HEADS:
        x = _normed_rotated_heads(row, q_weight, rope_row, eps, offset, column, inside, HEAD_DIM, HALF, HAS_NORM)
        tl.store(q_out + token * q_stride + offset, x.to(q_out.dtype.element_ty), mask=inside)
    elif first_head < QUERY_HEADS + KV_HEADS:
        x = _normed_rotated_heads(row, k_weight, rope_row, eps, offset, column, inside, HEAD_DIM, HALF, HAS_NORM)
        head = head - QUERY_HEADS
        _store_heads(k_cache, k_scales, x, slot, head, column, inside, k_strides, scale_strides, BLOCK_SIZE, FORMAT)
    else:
        x = tl.load(row + offset, mask=inside, other=0.0).to(tl.float32)
        head = head - QUERY_HEADS - KV_HEADS
        _store_heads(v_cache, v_scales, x, slot, head, column, inside, v_strides, scale_strides, BLOCK_SIZE, FORMAT)


def _check(qkv, q_out, k_cache, v_cache, slot_mapping, positions, rope_table, q_weight, k_weight) -> None:
    check_tensor("k_cache", k_cache, (None, None, None, None), CACHE_DTYPES, like=qkv)
    check_tensor("v_cache", v_cache, k_cache.shape, k_cache.dtype, like=qkv)
    check_tensor("q_out", q_out, (None, None, k_cache.shape[3]), FLOATS, like=qkv)
    token_count, query_heads, head_dim = q_out.shape
    check_tensor("qkv", qkv, (token_count, (query_heads + 2 * k_cache.shape[1]) * head_dim), q_out.dtype)
    check_tensor("slot_mapping", slot_mapping, (token_count,), torch.int64, like=qkv)
    check_tensor("positions", positions, (token_count,), (torch.int32, torch.int64), like=qkv)
    check_tensor("rope_table", rope_table, (None, None), torch.float32, like=qkv)
    if rope_table.shape[1] % 2 or rope_table.shape[1] > head_dim or not rope_table.is_contiguous():
        raise ValueError(
            f"rope_table: wanted a contiguous table with an even number of columns up to {head_dim}, "
            f"got {list(rope_table.shape)} with strides {rope_table.stride()}"
        )
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight: wanted both or neither, got one")
    if q_weight is not None and k_weight is not None:
        check_tensor("q_weight", q_weight, (head_dim,), FLOATS, like=qkv)
        check_tensor("k_weight", k_weight, (head_dim,), FLOATS, like=qkv)
    if token_count and q_out.stride(1) != head_dim:
        raise ValueError(f"q_out: wanted adjacent heads (stride {head_dim}), got strides {q_out.stride()}")


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Norm and rotate q and k, write q to `q_out` and store K and V at `slot_mapping`. Shapes: the module's table.

    Raises ValueError for a shape, dtype, stride or device that differs from the table.
    """
    _check(qkv, q_out, k_cache, v_cache, slot_mapping, positions, rope_table, q_weight, k_weight)
    check_scales(k_cache, k_scales=k_scales, v_scales=v_scales)
    token_count, query_heads, head_dim = q_out.shape
    kv_heads, block_size = k_cache.shape[1:3]
    if token_count == 0:
        return
    plan = launch_plan(token_count, query_heads, kv_heads, head_dim)
    has_norm = q_weight is not None
    _qk_norm_rope_store_kernel[plan.grid](
        qkv, q_out, k_cache, v_cache, slot_mapping, positions, rope_table,
        q_weight if has_norm else qkv, k_weight if has_norm else qkv, k_scales, v_scales,
        qkv.stride(0), q_out.stride(0), k_cache.stride()[:3], v_cache.stride()[:3],
        (0, 0, 0) if k_scales is None else k_scales.stride(), eps,
        QUERY_HEADS=query_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=rope_table.shape[1] // 2,
        BLOCK_SIZE=block_size, HEADS=plan.heads_per_program, BLOCK_DIM=plan.block_dim, HAS_NORM=has_norm,
        FORMAT=cache_format(k_cache.dtype), num_warps=plan.num_warps, **launch_options(qkv),
    )  # fmt: skip
