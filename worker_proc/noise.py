"""Random numbers for sampling that depend on seed, position and token id alone.

A request's noise at a position is a hash of these three: no generator has a state, so neither neighbours, nor chunking,
nor preemption, nor run-ahead can change what a seed gives. The first round of the hash is MurmurHash3's 32-bit
finaliser (Appleby), the second one "lowbias32" of Wellons' hash-prospector; the key is splitmix64 (Steele et al. 2014).
"""

import numpy as np

_MASK64 = 2**64 - 1
_TOKEN_STEP = np.uint32(0x9E3779B1)
_LARGEST_BELOW_ONE = np.float32(1 - 2**-24)


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of one sampled position; `seed` is a uint64."""
    state = (seed ^ (position * 0xD1342543DE82EF95)) & _MASK64
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    state ^= state >> 31
    return state & 0xFFFFFFFF, state >> 32


def random_bits(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """uint32 [n], uniform, one for each token id (uint32 [n])."""
    first, second = row_key(seed, position)
    bits = token_ids * _TOKEN_STEP
    bits += np.uint32(first)
    shifted = np.empty_like(bits)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        _mix(bits, shifted, shift, factor)
    bits ^= np.right_shift(bits, np.uint32(16), out=shifted)
    bits += np.uint32(second)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        _mix(bits, shifted, shift, factor)
    bits ^= np.right_shift(bits, np.uint32(16), out=shifted)
    return bits


def _mix(bits: np.ndarray, shifted: np.ndarray, shift: int, factor: int) -> None:
    bits ^= np.right_shift(bits, np.uint32(shift), out=shifted)
    bits *= np.uint32(factor)


def gumbel_from_bits(bits: np.ndarray) -> np.ndarray:
    """Gumbel noise, float32 [n], from uniform uint32 [n]: -log(-log(1 - w)), w = (bits + 0.5) / 2^32.

    Always finite, from -2.9 to 22.9. Small w keep all their digits, so that unlikely tokens get their due.
    """
    noise = bits.astype(np.float32)
    noise += np.float32(0.5)
    noise *= np.float32(2**-32)
    np.minimum(noise, _LARGEST_BELOW_ONE, out=noise)
    np.negative(noise, out=noise)
    np.log1p(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def gumbel_noise(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """Gumbel noise, float32 [n], for the token ids (uint32 [n]) at one position of a request with this seed."""
    return gumbel_from_bits(random_bits(seed, position, token_ids))
