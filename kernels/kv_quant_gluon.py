"""Quantising K and V in kernels that are written in Gluon: to the bit as kernels/kv_quant.py, whose formats these are.

A vector's largest magnitude gives its scale and what its elements are divided by (`quantising_scale`); the quotients
(`divided`) are rounded to what the format stores (`whole_levels`), where of FP8 a negative that rounds to zero loses
its sign, which kernels/kv_quant.py keeps. Called by kernels/gemm_hopper.py and kernels/new_token_warp.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.kv_quant import INT8, LARGEST, SMALLEST


@gluon.jit
def divided(x, divisor, reciprocal):
    """x / divisor, rounded correctly: a number of 24 bits over one of 11 or fewer is never that near to a tie."""
    quotient = x * reciprocal
    return gl.fma(gl.fma(-quotient, divisor, x), reciprocal, quotient)


@gluon.jit
def quantising_scale(largest, FORMAT: gl.constexpr):
    """Vectors' scales, as float16 holds them, and what their elements are divided by; float32."""
    TOP: gl.constexpr = 127.0 if FORMAT == INT8 else 448.0
    scale = divided(largest, TOP, 1.0 / TOP)
    scale = gl.minimum(gl.maximum(scale, SMALLEST), LARGEST).to(gl.float16).to(gl.float32)
    return gl.where(largest == 0.0, 0.0, scale), gl.where(largest == 0.0, 1.0, scale)


@gluon.jit
def whole_levels(level, FORMAT: gl.constexpr):
    """Quotients within the format's range and rounded as it stores them, float32."""
    TOP: gl.constexpr = 127.0 if FORMAT == INT8 else 448.0
    level = gl.minimum(gl.maximum(level, -TOP), TOP)
    if FORMAT == INT8:
        below_half: gl.constexpr = 0.5 - 2**-25  # a half would take what is just below it to the next level
        whole = gl.where(level < 0.0, level - below_half, level + below_half).to(gl.int32)  # halves away from zero
        level = whole.to(gl.float32)
    else:
        # Rounded here: an element that is both stored in a word of four and converted back comes out of ptxas wrong.
        power = (level.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        shift = gl.maximum(power * 0.125, 2.0**-9) * (1.5 * 2.0**23)  # below it, float32 has e4m3's spacing
        level = (level + shift) - shift
    return level


@gluon.jit
def read_back(levels, scale):
    """Levels under their scales, as attention over the cache reads them: bfloat16; `kv_format.read_back` to the bit."""
    high = scale.to(gl.bfloat16).to(gl.float32)
    rest = (levels * (scale - high)).to(gl.bfloat16).to(gl.float32)
    return (levels * high + rest).to(gl.bfloat16)
