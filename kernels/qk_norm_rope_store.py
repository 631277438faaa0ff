"""Everything between the qkv product and attention, in one launch: q/k norm, RoPE, and the store of K and V.

    q, k, v   = split(qkv[t])                                    rows of hq, hkv and hkv heads of d elements
    h         = h / sqrt(mean(h^2) + eps) * weight               h in q, k; only with norm weights; float32 inside
    h[i]      = h[i] * cos[p, i] - h[i + r/2] * sin[p, i]        i < r/2, p = positions[t], r = rotary_dim
    h[i+r/2]  = h[i + r/2] * cos[p, i] + h[i] * sin[p, i]        elements from r on pass through
    q_out[t]  = q;   key_cache[b, :, s] = k;   value_cache[b, :, s] = v        slot_mapping[t] = b * block_size + s

Sources: 1. J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (half-split pairing, as
GPT-NeoX introduced it). 2. A. Henry et al., "Query-Key Normalization for Transformers", 2020.

| tensor       | axes                              | dtype          | notes                                    |
|--------------|-----------------------------------|----------------|------------------------------------------|
| qkv          | [T, (hq + 2 hkv) d]               | any float      | last axis 1; q heads, then k, then v     |
|              | [S, T, (hq + 2 hkv) d]            | any float      | the same in S parts, added up in float32 |
| q_out        | [T, hq, d]                        | as qkv; any beside parts | last axis 1, heads adjacent    |
| key_cache,   | [block, kv head, position, d]     | any float, int8 | last axis 1; 64-bit offsets             |
| value_cache  |                                   | or float8_e4m3fn |                                        |
| key_scales,  | [block, kv head, position]        | float16        | beside int8 and fp8 caches; else None    |
| value_scales |                                   |                |                                          |
| slot_mapping | [T]                               | int64          | -1: K and V of this row are not stored   |
| positions    | [T]                               | int32 or int64 | below max_position, also in padding rows |
| rope_table   | [max_position, r]                 | float32        | cos in the first r/2 columns, then sin   |
| q_weight, k_weight | [d]                         | any float      | both or neither                          |

"Any float" is bfloat16, float16 or float32. A padding row still writes its q, so its qkv row may hold anything. r is
even and at most d; r = 0 applies no rotation. Quantised K and V (`kv_format.py`) are made of the float32 heads, with no
rounding to a float type between. What was stored can be written back into k's and v's columns of qkv, as it will be
read: attention of the same step finds it there in one piece, and need not dequantise it
(kernels/prefill_attention_hopper.py).

With early launch (`launch.py`), slot_mapping and positions are read while the kernel ahead still runs: what writes them
must have completed when that one starts. A step's embedding kernel sees to it.

Measured on an H200 at commit cf6694d by `python -m benchmarks.kernels.bench_qk_norm_rope_store`: for 16 + 2 x 8
heads of 128: 3.55 TB/s for 8,192 tokens, 84 % of a copy's rate in that run; from two parts 1.9 us for 64, 3.1 for 256.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import kv_format
from kernels.checks import FLOATS, check_head_inputs, check_tensor
from kernels.kv_format import cache_format, quantise, vector_bytes
from kernels.kv_quant import as_elements, check_scales, quantised_levels, quantising_scale, read_back
from kernels.launch import launch_options, let_next_start, wait_for_inputs

CACHE_DTYPES = (*FLOATS, torch.int8, torch.float8_e4m3fn)

PROGRAM_TARGET = 2048  # above this many programs, a program takes a larger group of a token's heads


def rotate_reference(heads: torch.Tensor, positions: torch.Tensor, rope_table: torch.Tensor) -> torch.Tensor:
    """RoPE of `heads` [T, h, d] in float32, the first rotary_dim elements of each head in half-split pairs."""
    half = rope_table.shape[1] // 2
    rows = rope_table[positions.long()].float()[:, None, :]
    cos, sin = rows[..., :half], rows[..., half:]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def qk_norm_rope_store_reference(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    query_heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    write_back: bool = False,
) -> torch.Tensor:
    """Store K and V into the caches in place and return q [T, hq, d], all arithmetic in float32."""
    _, kv_heads, block_size, head_dim = key_cache.shape
    rows = qkv.float().sum(0) if qkv.dim() == 3 else qkv.float()
    heads = rows.view(rows.shape[0], -1, head_dim)
    q, k, v = heads.split((query_heads, kv_heads, kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps) * q_weight.float()
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * k_weight.float()
    q, k = rotate_reference(q, positions, rope_table), rotate_reference(k, positions, rope_table)
    stored = slot_mapping >= 0
    block, place = slot_mapping[stored] // block_size, slot_mapping[stored] % block_size
    for part, heads, cache, scales in (
        (-2, k[stored], key_cache, key_scales),
        (-1, v[stored], value_cache, value_scales),
    ):
        if scales is None:
            written = cache[block, :, place] = heads.to(cache.dtype)
        else:
            vectors, scale = cache[block, :, place], scales[block, :, place] = quantise(heads, cache.dtype)
            written = kv_format.read_back(vectors, scale)
        if write_back:
            qkv.unflatten(1, (-1, kv_heads * head_dim))[stored, part] = written.flatten(1).to(qkv.dtype)
    return q.to(key_cache.dtype if qkv.dim() == 3 and key_scales is None else qkv.dtype)


@dataclass(frozen=True)
class QkNormRopeStorePlan:
    """One program a token and a group of its heads: as many of q as of k and v in proportion."""

    grid: tuple[int, int]
    query_heads: int
    kv_heads: int
    num_warps: int


def launch_plan(token_count: int, query_heads: int, kv_heads: int, head_dim: int) -> QkNormRopeStorePlan:
    """The grid and tile: a few heads a program for a small batch, the whole token for a large one."""
    groups = 1
    while (
        kv_heads % (2 * groups) == 0 and query_heads % (2 * groups) == 0 and token_count * 2 * groups <= PROGRAM_TARGET
    ):
        groups *= 2
    elements = (query_heads + 2 * kv_heads) // groups * head_dim
    warps = min(max(triton.next_power_of_2(elements) // 1024, 1), 8)
    return QkNormRopeStorePlan((token_count, groups), query_heads // groups, kv_heads // groups, warps)


def bytes_moved(
    token_count: int, query_heads: int, kv_heads: int, head_dim: int, element_bytes: int,
    cache_dtype: torch.dtype | None = None, write_back: bool = False,
) -> int:  # fmt: skip
    """The fewest bytes that the operation reads and writes: every head once each way, scales written."""
    stored = head_dim * element_bytes if cache_dtype is None else vector_bytes(head_dim, cache_dtype)
    read = (query_heads + 2 * kv_heads) * head_dim * element_bytes
    written = (query_heads + 2 * kv_heads * write_back) * head_dim * element_bytes
    return token_count * (read + written + 2 * kv_heads * stored)


@triton.jit
def _loaded(row, part_stride, head, column, inside, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr):
    """Elements `column` of heads `head`, float32 [H, D]; the sum of their parts."""
    place = row + head[:, None] * HEAD_DIM + column[None, :]
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(place + part * part_stride, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _split_heads(
    row, part_stride, head, heads, half, rest, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr
):
    """Heads as the two halves that rotate and the rest; the rest is a stand-in where there is none."""
    is_head = head[:, None] < heads
    inside = is_head & (half[None, :] < SPLIT)
    first = _loaded(row, part_stride, head, half, inside, HEAD_DIM, PARTS)
    second = _loaded(row, part_stride, head, half + SPLIT, inside, HEAD_DIM, PARTS)
    left = first
    if HEAD_DIM > 2 * SPLIT:
        left = _loaded(row, part_stride, head, rest, is_head & (rest[None, :] < HEAD_DIM), HEAD_DIM, PARTS)
    return first, second, left


@triton.jit
def _column_gains(weight, half, rest, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr):
    """The norm's weight at the columns of `_split_heads`."""
    first = tl.load(weight + half, mask=half < SPLIT, other=0.0).to(tl.float32)
    second = tl.load(weight + half + SPLIT, mask=half < SPLIT, other=0.0).to(tl.float32)
    left = first
    if HEAD_DIM > 2 * SPLIT:
        left = tl.load(weight + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)
    return first, second, left


@triton.jit
def _normed_rotated(
    x, gains, cos, sin, eps, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Split heads after norm and rotation."""
    first, second, left = x
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        if HEAD_DIM > 2 * SPLIT:
            squares += tl.sum(left * left, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = first * scale * gains[0][None, :]
        second = second * scale * gains[1][None, :]
        if HEAD_DIM > 2 * SPLIT:
            left = left * scale * gains[2][None, :]
    if HALF > 0:
        turned = first * cos[None, :] - second * sin[None, :]
        second = second * cos[None, :] + first * sin[None, :]
        first = turned
    return first, second, left


@triton.jit
def _store_split(place, x, stored, half, rest, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr):
    """Write split heads [H, D] in their place's type; `place`: the pointer to each head's first element, [H]."""
    first, second, left = x
    dtype = place.dtype.element_ty
    inside = stored[:, None] & (half[None, :] < SPLIT)
    tl.store(place[:, None] + half[None, :], first.to(dtype), mask=inside)
    tl.store(place[:, None] + SPLIT + half[None, :], second.to(dtype), mask=inside)
    if HEAD_DIM > 2 * SPLIT:
        tl.store(place[:, None] + rest[None, :], left.to(dtype), mask=stored[:, None] & (rest[None, :] < HEAD_DIM))


@triton.jit
def _store_cached(
    cache, scales, x, slot, head, is_head, half, rest, cache_strides, scale_strides,
    row, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr,
    WRITE_BACK: tl.constexpr,
):  # fmt: skip
    """Write split heads at a token's slot of a paged cache, and what reading them gives to `row`; nothing for slot -1.

    `row`: the pointer to each head's first element in qkv, [H]; written to only with WRITE_BACK.
    """
    stored = is_head & (slot >= 0)
    block_stride, head_stride, position_stride = cache_strides
    place = cache + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * position_stride
    if FORMAT != 0:
        first, second, left = x
        largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        if HEAD_DIM > 2 * SPLIT:
            largest = tl.maximum(largest, tl.max(tl.abs(left), axis=1))
        scale, divisor = quantising_scale(largest, FORMAT)
        first = quantised_levels(first, divisor, FORMAT)
        second = quantised_levels(second, divisor, FORMAT)
        elements = left
        if HEAD_DIM > 2 * SPLIT:
            left = quantised_levels(left, divisor, FORMAT)
            elements = as_elements(left, FORMAT)
        x = (as_elements(first, FORMAT), as_elements(second, FORMAT), elements)
        block_stride, scale_head_stride, position_stride = scale_strides
        scale_place = scales + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * position_stride
        tl.store(scale_place + head * scale_head_stride, scale, mask=stored)
        if WRITE_BACK:
            if HEAD_DIM > 2 * SPLIT:
                left = read_back(left, scale, FORMAT)
            written = (read_back(first, scale, FORMAT), read_back(second, scale, FORMAT), left)
            _store_split(row, written, stored, half, rest, HEAD_DIM, SPLIT)
    elif WRITE_BACK:
        _store_split(row, x, stored, half, rest, HEAD_DIM, SPLIT)
    _store_split(place + head * head_stride, x, stored, half, rest, HEAD_DIM, SPLIT)


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv, q_out, key_cache, value_cache, slot_mapping, positions, rope_table, q_weight, k_weight, key_scales,
    value_scales, part_stride, qkv_stride, q_stride, k_strides, v_strides, scale_strides, eps,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUP_QUERIES: tl.constexpr, GROUP_KEYS: tl.constexpr, BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, HAS_NORM: tl.constexpr,
    PARTS: tl.constexpr, FORMAT: tl.constexpr, WRITE_BACK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # 1. Locate: this program's token and heads. A head lies in two halves that rotate and a rest that does not.
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    SPLIT: tl.constexpr = HALF if HALF > 0 else HEAD_DIM // 2
    half = tl.arange(0, BLOCK_HALF)
    rest = 2 * SPLIT + tl.arange(0, BLOCK_REST)
    query = tl.arange(0, BLOCK_QUERIES)
    key = tl.arange(0, BLOCK_KEYS)
    is_key = key < GROUP_KEYS
    first_query = tl.program_id(1) * GROUP_QUERIES
    first_key = tl.program_id(1) * GROUP_KEYS
    # 2. Load what the kernel ahead does not write.
    slot = tl.load(slot_mapping + token)
    cos = tl.zeros((BLOCK_HALF,), tl.float32)
    sin = cos
    if HALF > 0:
        rope_row = rope_table + tl.load(positions + token).to(tl.int64) * (2 * HALF)
        cos = tl.load(rope_row + half, mask=half < HALF, other=1.0)
        sin = tl.load(rope_row + HALF + half, mask=half < HALF, other=0.0)
    q_gains = (cos, cos, cos)
    k_gains = q_gains
    if HAS_NORM:
        q_gains = _column_gains(q_weight, half, rest, HEAD_DIM, SPLIT)
        k_gains = _column_gains(k_weight, half, rest, HEAD_DIM, SPLIT)
    wait_for_inputs(PDL)
    # 3. Load all heads, then norm, rotate and store: queries to q_out, keys and values to the cache.
    row = qkv + token * qkv_stride
    q = _split_heads(
        row + first_query * HEAD_DIM, part_stride, query, GROUP_QUERIES, half, rest, HEAD_DIM, SPLIT, PARTS
    )
    k_row = row + (QUERY_HEADS + first_key) * HEAD_DIM
    k = _split_heads(k_row, part_stride, key, GROUP_KEYS, half, rest, HEAD_DIM, SPLIT, PARTS)
    v_row = k_row + KV_HEADS * HEAD_DIM
    v = _split_heads(v_row, part_stride, key, GROUP_KEYS, half, rest, HEAD_DIM, SPLIT, PARTS)
    q = _normed_rotated(q, q_gains, cos, sin, eps, HEAD_DIM, SPLIT, HALF, HAS_NORM)
    place = q_out + token * q_stride + (first_query + query) * HEAD_DIM
    _store_split(place, q, query < GROUP_QUERIES, half, rest, HEAD_DIM, SPLIT)
    k = _normed_rotated(k, k_gains, cos, sin, eps, HEAD_DIM, SPLIT, HALF, HAS_NORM)
    head = (first_key + key).to(tl.int64)
    _store_cached(key_cache, key_scales, k, slot, head, is_key, half, rest, k_strides, scale_strides,
                  k_row + key * HEAD_DIM, HEAD_DIM, SPLIT, BLOCK_SIZE, FORMAT, WRITE_BACK)  # fmt: skip
    CHANGES_V: tl.constexpr = WRITE_BACK and FORMAT != 0
    _store_cached(value_cache, value_scales, v, slot, head, is_key, half, rest, v_strides, scale_strides,
                  v_row + key * HEAD_DIM, HEAD_DIM, SPLIT, BLOCK_SIZE, FORMAT, CHANGES_V)  # fmt: skip


def _check(
    qkv: torch.Tensor, q_out: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, positions: torch.Tensor, rope_table: torch.Tensor, q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
) -> None:  # fmt: skip
    check_tensor("key_cache", key_cache, (None, None, None, None), CACHE_DTYPES, like=qkv)
    check_tensor("value_cache", value_cache, key_cache.shape, key_cache.dtype, like=qkv)
    check_tensor("q_out", q_out, (None, None, key_cache.shape[3]), FLOATS, like=qkv)
    token_count, query_heads, head_dim = q_out.shape
    width = (query_heads + 2 * key_cache.shape[1]) * head_dim
    if qkv.dim() == 3:
        check_tensor("qkv", qkv, (None, token_count, width), FLOATS)
    else:
        check_tensor("qkv", qkv, (token_count, width), q_out.dtype)
    check_tensor("slot_mapping", slot_mapping, (token_count,), torch.int64, like=qkv)
    check_tensor("positions", positions, (token_count,), (torch.int32, torch.int64), like=qkv)
    check_head_inputs(rope_table, q_weight, k_weight, head_dim, like=qkv)
    if token_count and q_out.stride(1) != head_dim:
        raise ValueError(f"q_out: wanted adjacent heads (stride {head_dim}), got strides {q_out.stride()}")


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_out: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    one_plan: bool = False,
    write_back: bool = False,
) -> None:
    """Norm and rotate q and k, write q to `q_out` and store K and V at `slot_mapping`. Shapes: the module's table.

    `one_plan` launches as for one token, so that a token's bits do not depend on how many there are. `write_back` puts
    what was stored, as it will be read (`kv_format.read_back`), into k's and v's columns of qkv: attention of the same
    step may then read it there. Rows of slot -1 keep theirs.

    Raises ValueError for a shape, dtype, stride or device that differs from the table.
    """
    _check(qkv, q_out, key_cache, value_cache, slot_mapping, positions, rope_table, q_weight, k_weight)
    check_scales(key_cache, key_scales=key_scales, value_scales=value_scales)
    if write_back and (qkv.dim() == 3 or (key_scales is None and key_cache.dtype != qkv.dtype)):
        raise ValueError(
            f"write_back: wanted qkv in one part, of the cache's type or an 8-bit cache, got {qkv.dtype}, "
            f"{qkv.dim()} axes and {key_cache.dtype}"
        )
    token_count, query_heads, head_dim = q_out.shape
    kv_heads, block_size = key_cache.shape[1:3]
    if token_count == 0:
        return
    plan = launch_plan(1 if one_plan else token_count, query_heads, kv_heads, head_dim)
    has_norm = q_weight is not None
    half = rope_table.shape[1] // 2
    split = half or head_dim // 2
    _qk_norm_rope_store_kernel[(token_count, plan.grid[1])](
        qkv, q_out, key_cache, value_cache, slot_mapping, positions, rope_table,
        q_weight if has_norm else qkv, k_weight if has_norm else qkv, key_scales, value_scales,
        qkv.stride(0), qkv.stride(-2), q_out.stride(0), key_cache.stride()[:3], value_cache.stride()[:3],
        (0, 0, 0) if key_scales is None else key_scales.stride(), eps,
        QUERY_HEADS=query_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=half, BLOCK_SIZE=block_size,
        GROUP_QUERIES=plan.query_heads, GROUP_KEYS=plan.kv_heads,
        BLOCK_QUERIES=triton.next_power_of_2(plan.query_heads), BLOCK_KEYS=triton.next_power_of_2(plan.kv_heads),
        BLOCK_HALF=triton.next_power_of_2(split), BLOCK_REST=triton.next_power_of_2(max(head_dim - 2 * split, 1)),
        HAS_NORM=has_norm, PARTS=qkv.shape[0] if qkv.dim() == 3 else 1, FORMAT=cache_format(key_cache.dtype),
        WRITE_BACK=write_back,
        num_warps=plan.num_warps, **launch_options(qkv),
    )  # fmt: skip
