"""Random numbers for sampling on the CPU that depend only on seed, position and token id.

A request's noise at a position is a hash of these three. There is no generator with a state, so the same seed gives the
same numbers whatever the neighbours, the chunks, a preemption or run-ahead do. The hash and the formula are those of
`kernels/noise.py`, whose docstring has the sources; a test compares the two bit by bit.
"""

import numpy as np

_MASK = 0xFFFFFFFF
_LEAST_ABOVE_MINUS_ONE = np.float32(2**-24 - 1)


def _mix(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK
    x ^= x >> 15
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def row_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of one sampled position; `seed` is a uint64."""
    first = _mix(_mix((position + 0x9E3779B9) & _MASK) ^ (seed & _MASK))
    return first, _mix(((first ^ (seed >> 32)) + 0x85EBCA6B) & _MASK)


def random_bits(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """uint32 [n], uniform, one for each token id (uint32 [n])."""
    first, second = row_keys(seed, position)
    bits = token_ids ^ np.uint32(second)
    shifted = np.empty_like(bits)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits ^= np.right_shift(bits, np.uint32(shift), out=shifted)
        bits *= np.uint32(factor)
    bits ^= np.right_shift(bits, np.uint32(16), out=shifted)
    bits ^= np.uint32(first)
    bits *= np.uint32(0x9E3779B1)
    bits ^= np.right_shift(bits, np.uint32(15), out=shifted)
    return bits


def gumbel_from_bits(bits: np.ndarray) -> np.ndarray:
    """Gumbel noise, float32 [n], from uniform uint32 [n]: -log(-log(1 - u)), u = (bits + 1/2) / 2^32.

    Always finite, from -2.9 to 22.9. Small u keep all their digits, so that unlikely tokens get their due.
    """
    noise = bits.astype(np.float32)
    noise += np.float32(0.5)
    noise *= np.float32(-(2**-32))
    np.maximum(noise, _LEAST_ABOVE_MINUS_ONE, out=noise)
    np.log1p(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def gumbel_noise(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """Gumbel noise, float32 [n], for the token ids (uint32 [n]) at one position of a request with this seed."""
    return gumbel_from_bits(random_bits(seed, position, token_ids))
