"""The formats of a quantised KV cache: its element types, and quantising and dequantising in plain torch.

For the vector x of one token and one K/V head, in float32:

    scale   = float16(clamp(max(abs(x)) / top, 2^-24, 65504)),  0 if x is all zeros        top: 127 or 448
    int8    q = half_away_from_zero(clamp(x / scale, -127, 127))
    fp8     q = e4m3(clamp(x / scale, -448, 448)),  to the nearest, ties to even
    x'      = q * scale,  zeros where the scale is 0

The scale is rounded to float16 before it divides, so the error of an element is at most half a step of the stored
scale. A scale below float16's range becomes its smallest number, 2^-24, and one above becomes its largest: vectors
whose largest element is under 1e-5 lose precision, and elements over 8e6 (int8) or 2.9e7 (fp8) are clipped. x must not
contain NaN.

Scales are stored beside the blocks: `[block, kv_head, position]` float16, for K and for V. At head_dim d a vector takes
d + 2 bytes instead of 2 d: 130/256 of bfloat16 at d = 128.

Imports no Triton, so that a CPU worker can read and write its cache with it. `kv_quant.py` is the same on a GPU.

Sources: 1. T. Dettmers et al., LLM.int8(), arXiv:2208.07339 (a vector's scale from its largest element). 2. P.
Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433 (e4m3).
"""

import torch

CACHE_PLAIN, CACHE_INT8, CACHE_FP8 = 0, 1, 2
SCALE_DTYPE = torch.float16
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0
TOPS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest element of each stored type."""


def cache_format(dtype: torch.dtype) -> int:
    """The kernels' number for a cache of this element type."""
    return {torch.int8: CACHE_INT8, torch.float8_e4m3fn: CACHE_FP8}.get(dtype, CACHE_PLAIN)


def scales_shape(cache_shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales beside a cache [block, kv_head, position, head_dim]."""
    return tuple(cache_shape[:3])


def vector_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one token's vector of one K/V head takes, its scale included."""
    return head_dim * dtype.itemsize + (SCALE_DTYPE.itemsize if dtype in TOPS else 0)


def quantise(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [..., head_dim] -> (elements of `dtype` in the same shape, scales float16 [...])."""
    top, wide = TOPS[dtype], vectors.float()
    largest = wide.abs().amax(-1)
    scales = (largest / top).clamp(SMALLEST_SCALE, LARGEST_SCALE).to(SCALE_DTYPE)
    scales = torch.where(largest > 0, scales, 0)
    divisor = torch.where(largest > 0, scales, 1).float()
    levels = (wide / divisor.unsqueeze(-1)).clamp(-top, top)
    if dtype == torch.int8:
        levels = round_half_away(levels)
    return levels.to(dtype), scales


def round_half_away(values: torch.Tensor) -> torch.Tensor:
    """To the nearest integer, halves away from zero. Adding a half would round 0.49999997 up."""
    whole = values.trunc()
    return whole + ((values - whole).abs() >= 0.5) * values.sign()


def read_back(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`dequantise` in bfloat16, to the bit as the prefill kernel for Hopper rounds it: int8 but for one part in 2^17.

    A scale is the sum of two bfloat16, `high` and `low`; q * low is rounded before q * high is added to it.
    """
    high = scales.to(torch.bfloat16).float().unsqueeze(-1)
    low = scales.float().unsqueeze(-1) - high
    levels = stored.float()
    return (levels * high + (levels * low).to(torch.bfloat16).float()).to(torch.bfloat16)


def dequantise(stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What quantised vectors [..., head_dim] with scales [...] stand for, multiplied in float32, in `dtype`."""
    return (stored.float() * scales.float().unsqueeze(-1)).to(dtype)
