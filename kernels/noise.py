"""Noise for sampling that depends only on a seed, a position and a token id, the same in torch and in Triton.

    bits(seed, position, id)   a 32-bit integer hash: two keys from seed and position, then three multiplications an id
    u       = (bits + 1/2) / 2^32, at most 1 - 2^-24              never 0 and never 1
    E       = -log(1 - u), by its series for small u              an exponential variable, fine near 0 where it matters
    gumbel  = -log(E)                                             in [-2.9, 22.9]

The token with the largest logit + gumbel is a sample of softmax(logits). There is no generator state: a request's
draws do not depend on its neighbours, on the batch, or on how often a step is repeated. Called by `kernels.sampling`.

Sources: 1. J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (counter-based generation). 2. C.
Wellons, "Prospecting for Hash Functions", 2018 (the multipliers of `_mix`). 3. E. Gumbel, 1954; C. Maddison et al.,
"A* Sampling", 2014 (the maximum trick). The numbers that are added or multiplied in `noise_bits` and `noise_keys` only
need to be odd and without pattern: 2^32 over the golden ratio, one of MurmurHash3's, and xxHash's first prime.
"""

import torch
import triton
import triton.language as tl

from kernels.launch import interpreted

MASK = 0xFFFFFFFF
HAS_PTX = tl.constexpr(not interpreted() and torch.version.hip is None)
"""Whether kernels may contain NVIDIA's assembly."""


def _mix_reference(x: torch.Tensor) -> torch.Tensor:
    """A one-to-one scrambling of 32-bit integers, held as int64 [2]."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def noise_bits_reference(seed: torch.Tensor, position: torch.Tensor, token_id: torch.Tensor) -> torch.Tensor:
    """The hash as int64 values below 2^32; the arguments are int64 and broadcast. Only seed's 64 bits matter."""
    low, high = seed & MASK, (seed >> 32) & MASK
    first = _mix_reference(_mix_reference((position + 0x9E3779B9) & MASK) ^ low)
    second = _mix_reference(((first ^ high) + 0x85EBCA6B) & MASK)
    x = _mix_reference((token_id & MASK) ^ second) ^ first
    x = (x * 0x9E3779B1) & MASK
    return x ^ (x >> 15)


def gumbel_reference(bits: torch.Tensor) -> torch.Tensor:
    """Gumbel noise in float32 from 32-bit integers held as int64."""
    u = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return -torch.log(torch.where(u < 1 / 64, series, -torch.log(1 - u)))


@triton.jit
def _mix(x):
    """`_mix_reference` of uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_keys(seed_low, seed_high, position):
    """The two uint32 keys of a row, from its seed's halves and its position, all int32."""
    low = seed_low.to(tl.uint32, bitcast=True)
    high = seed_high.to(tl.uint32, bitcast=True)
    first = _mix(_mix(position.to(tl.uint32, bitcast=True) + 0x9E3779B9) ^ low)
    return first, _mix((first ^ high) + 0x85EBCA6B)


@triton.jit
def noise_bits(first, second, token_id):
    """The uint32 hash of token ids (int32) under a row's keys."""
    x = _mix(token_id.to(tl.uint32, bitcast=True) ^ second) ^ first
    x = x * 0x9E3779B1
    return x ^ (x >> 15)


@triton.jit
def _log(x):
    """The logarithm of normal numbers; on a GPU its own instruction, off by at most 2^-22 (absolutely near 1)."""
    if HAS_PTX:
        base_2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        y = base_2 * 0.6931471805599453
    else:
        y = tl.log(x)
    return y


@triton.jit
def gumbel(bits):
    """Gumbel noise in float32 from uint32 bits; finite for all of them."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    series = u * (1.0 + u * (1.0 / 2.0 + u * (1.0 / 3.0 + u * (1.0 / 4.0))))
    return -_log(tl.where(u < 1.0 / 64.0, series, -_log(1.0 - u)))
