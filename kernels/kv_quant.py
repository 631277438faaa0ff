"""Quantising K and V inside a kernel: the device's side of `kv_format.py`, which has the formulas and the reference.

`quantised(x, FORMAT)` turns vectors into what is stored. Reading needs no function: stored elements are exact in
bfloat16, float16 and float32, so a tile is converted to the query's type as it is, and the scales, one a key, multiply
what the product gives (K) or what goes into it (V):

    scores[i, p]  = (q_i . k_p) * k_scale[p]          out_i = sum_p (weight[i, p] * v_scale[p]) * v_p

FORMAT is a constexpr, `kv_format.CACHE_INT8` or `CACHE_FP8`. FP8 conversions need compute capability 8.9. Called by the
kernels that store and read the cache.
"""

import torch
import triton
import triton.language as tl

from kernels.checks import check_tensor
from kernels.kv_format import SCALE_DTYPE, TOPS, scales_shape


@triton.jit
def quantising_scale(largest, FORMAT: tl.constexpr):
    """(float16 scales, what elements are divided by) from the largest magnitude of each vector."""
    TOP: tl.constexpr = 127.0 if FORMAT == 1 else 448.0
    # Division by a constant is a multiplication to the compiler, and off by one rounding.
    scale = tl.div_rn(largest, tl.full(largest.shape, TOP, tl.float32))
    scale = tl.minimum(tl.maximum(scale, 5.9604644775390625e-08), 65504.0).to(tl.float16)
    is_zero = largest == 0.0
    scale = tl.where(is_zero, tl.zeros_like(scale), scale)
    return scale, tl.where(is_zero, 1.0, scale.to(tl.float32))


@triton.jit
def quantised_elements(x, divisor, FORMAT: tl.constexpr):
    """Float32 vectors [N, D] over their divisors [N] as elements of the format's type."""
    TOP: tl.constexpr = 127.0 if FORMAT == 1 else 448.0
    level = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    level = tl.minimum(tl.maximum(level, -TOP), TOP)
    if FORMAT == 1:
        whole = level.to(tl.int32)  # towards zero
        rest = level - whole.to(tl.float32)
        whole += (rest >= 0.5).to(tl.int32) - (rest <= -0.5).to(tl.int32)  # halves away from zero
        stored = whole.to(tl.int8)
    else:
        stored = level.to(tl.float8e4nv)
    return stored


@triton.jit
def quantised(x, FORMAT: tl.constexpr):
    """Float32 vectors [N, D] -> (elements [N, D] of the format's type, float16 scales [N]). Padding must hold zeros."""
    scale, divisor = quantising_scale(tl.max(tl.abs(x), axis=1), FORMAT)
    return quantised_elements(x, divisor, FORMAT), scale


@triton.jit
def read_back(stored, scale):
    """Quantised vectors [N, D] under their scales [N] in bfloat16; `kv_format.read_back` to the bit."""
    wide = scale.to(tl.float32)[:, None]
    high = wide.to(tl.bfloat16).to(tl.float32)
    levels = stored.to(tl.float32)
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
        stored, scale = quantised(x, FORMAT)
        tl.store(target, stored, mask=inside)
        first = tl.max(inside.to(tl.int32), axis=1) > 0
        tl.store(scales + place + tl.arange(0, 1), scale, mask=first)
        read = stored.to(tl.float32) * scale.to(tl.float32)[:, None]
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
