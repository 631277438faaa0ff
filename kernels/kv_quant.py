"""Quantising K and V inside a kernel: the device's side of `kv_format.py`, which has the formulas and the reference.

`quantising_scale`, `quantised_levels` and `as_elements` turn vectors into what is stored. Reading needs no function:
stored elements are exact in bfloat16, float16 and float32, so a tile is converted to the query's type as it is, and the
scales, one a key, multiply what the product gives (K) or what goes into it (V):

    scores[i, p]  = (q_i . k_p) * k_scale[p]          out_i = sum_p (weight[i, p] * v_scale[p]) * v_p

FORMAT is a constexpr, `kv_format.cache_format` of the cache. FP8 conversions need compute capability 8.9. Called by the
kernels that store and read the cache.
"""

import torch
import triton
import triton.language as tl

from kernels.checks import check_tensor
from kernels.kv_format import CACHE_FP8, CACHE_INT8, LARGEST_SCALE, SCALE_DTYPE, SMALLEST_SCALE, TOPS, scales_shape

INT8, FP8 = tl.constexpr(CACHE_INT8), tl.constexpr(CACHE_FP8)
"""A cache's FORMAT, as kernels compare it; 0: plain."""

SMALLEST, LARGEST = tl.constexpr(SMALLEST_SCALE), tl.constexpr(LARGEST_SCALE)


@triton.jit
def quantising_scale(largest, FORMAT: tl.constexpr):
    """(float16 scales, what elements are divided by) from the largest magnitude of each vector."""
    TOP: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0
    # Division by a constant is a multiplication to the compiler, and off by one rounding.
    scale = tl.div_rn(largest, tl.full(largest.shape, TOP, tl.float32))
    scale = tl.minimum(tl.maximum(scale, SMALLEST), LARGEST).to(tl.float16)
    is_zero = largest == 0.0
    scale = tl.where(is_zero, tl.zeros_like(scale), scale)
    return scale, tl.where(is_zero, 1.0, scale.to(tl.float32))


@triton.jit
def quantised_levels(x, divisor, FORMAT: tl.constexpr):
    """Float32 vectors [N, D] over their divisors [N], within the format's range; int8 in whole numbers."""
    TOP: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0
    level = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    level = tl.minimum(tl.maximum(level, -TOP), TOP)
    if FORMAT == INT8:
        whole = level.to(tl.int32)  # towards zero
        rest = level - whole.to(tl.float32)
        whole += (rest >= 0.5).to(tl.int32) - (rest <= -0.5).to(tl.int32)  # halves away from zero
        level = whole.to(tl.float32)
    return level


@triton.jit
def as_elements(levels, FORMAT: tl.constexpr):
    """Levels as elements of the format's type; FP8 rounds to the nearest, ties to even."""
    return levels.to(tl.int32).to(tl.int8) if FORMAT == INT8 else levels.to(tl.float8e4nv)


@triton.jit
def read_levels(levels, FORMAT: tl.constexpr):
    """What reading `as_elements` of levels gives, float32.

    FP8 is rounded here by arithmetic: Triton 3.6's ptxas takes what is converted back in the program that also stores
    it, in a word of four, out of a register that nothing has written.
    """
    if FORMAT == INT8:
        read = levels
    else:
        power = (levels.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shift = tl.maximum(power * 0.125, 2.0**-9) * (1.5 * 2.0**23)  # float32 beside it has e4m3's spacing
        read = (levels + shift) - shift
    return read


@triton.jit
def read_back(levels, scale, FORMAT: tl.constexpr):
    """Levels [N, D] as stored, under their scales [N], in bfloat16; `kv_format.read_back` to the bit."""
    wide = scale.to(tl.float32)[:, None]
    high = wide.to(tl.bfloat16).to(tl.float32)
    levels = read_levels(levels, FORMAT)
    rest = (levels * (wide - high)).to(tl.bfloat16).to(tl.float32)
    return (levels * high + rest).to(tl.bfloat16)


@triton.jit
def store_vector(cache, scales, x, place, column, inside, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Store a float32 vector [1, D] at a place of a contiguous cache; returns what reading it gives, in float32.

    `place`: (block * kv_heads + head) * block_size + position. Padding of `x` must hold zeros.
    """
    target = cache + place * HEAD_DIM + column[None, :]
    if FORMAT == 0:
        stored = x.to(cache.dtype.element_ty)
        tl.store(target, stored, mask=inside)
        read = stored.to(tl.float32)
    else:
        scale, divisor = quantising_scale(tl.max(tl.abs(x), axis=1), FORMAT)
        levels = quantised_levels(x, divisor, FORMAT)
        tl.store(target, as_elements(levels, FORMAT), mask=inside)
        first = tl.max(inside.to(tl.int32), axis=1) > 0
        tl.store(scales + place + tl.arange(0, 1), scale, mask=first)
        read = read_levels(levels, FORMAT) * scale.to(tl.float32)[:, None]
    return read


def check_scales(cache: torch.Tensor, **named_scales: torch.Tensor | None) -> None:
    """Scales stand beside a quantised cache and beside no other; ValueError names what differs."""
    for name, scales in named_scales.items():
        if cache.dtype not in TOPS:
            if scales is not None:
                raise ValueError(f"{name}: wanted None beside a cache of {cache.dtype}, got {list(scales.shape)}")
            continue
        if scales is None:
            raise ValueError(f"{name}: wanted scales beside a cache of {cache.dtype}, got None")
        check_tensor(name, scales, scales_shape(cache.shape), SCALE_DTYPE, like=cache)
        if not scales.is_contiguous():
            raise ValueError(f"{name}: wanted contiguous scales, got strides {scales.stride()}")
