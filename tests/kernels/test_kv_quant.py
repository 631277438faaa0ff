"""The formats of a quantised cache: the definition against exact arithmetic, and the kernels' helper against it."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_format import TOPS, dequantise, quantise, round_half_away, vector_bytes
from kernels.kv_quant import as_elements, check_scales, quantised_levels, quantising_scale, read_levels
from tests.kernels.closeness import DEVICE

TYPES = [torch.int8, torch.float8_e4m3fn]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS, DIM = 16, 64


@triton.jit
def _quantise_kernel(source, stored, scales, read, FORMAT: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    row, column = tl.arange(0, N), tl.arange(0, D)
    place = row[:, None] * D + column[None, :]
    x = tl.load(source + place)
    scale, divisor = quantising_scale(tl.max(tl.abs(x), axis=1), FORMAT)
    levels = quantised_levels(x, divisor, FORMAT)
    tl.store(stored + place, as_elements(levels, FORMAT))
    tl.store(read + place, read_levels(levels, FORMAT))
    tl.store(scales + row, scale)


def by_kernel(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    stored = torch.zeros(vectors.shape, dtype=dtype, device=vectors.device)
    scales = torch.zeros(vectors.shape[0], dtype=torch.float16, device=vectors.device)
    read = torch.full_like(vectors, float("nan"))
    format_ = 1 if dtype == torch.int8 else 2
    _quantise_kernel[(1,)](vectors, stored, scales, read, FORMAT=format_, N=len(vectors), D=DIM)
    return stored, scales, read


def hard_vectors() -> torch.Tensor:
    """Rows of all magnitudes, zeros, single elements, halves, and what float16 scales cannot hold."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(ROWS, DIM, generator=generator)
    rows *= torch.tensor([1e-9, 1e-7, 1e-6, 1e-5, 1e-3, 1, 1, 30, 1e3, 1e5, 1e7, 1e9, 1, 1, 1, 1])[:, None]
    rows[5] = 0
    rows[6, 1:] = 0
    rows[12] = torch.arange(DIM) - 31.5  # halves, once the scale is 1
    rows[12, 0] = 127.0
    rows[13] = 1e38
    rows[14, ::2] = 0
    rows[15] = -1e-30
    return rows


@settings(deadline=None, max_examples=60)
@given(st.lists(FLOATS, min_size=1, max_size=6))
def test_int8_is_the_formula_in_exact_arithmetic(values):
    vector = torch.tensor(values, dtype=torch.float32)
    stored, scale = quantise(vector, torch.int8)
    largest = float(vector.abs().max())
    wanted = np.float16(min(max(np.float32(largest) / np.float32(127), np.float32(2.0**-24)), np.float32(65504)))
    assert scale.item() == (wanted if largest else 0)
    for value, level in zip(vector.tolist(), stored.tolist(), strict=True):
        if not largest:
            assert level == 0
            continue
        # The quotient is rounded to float32 before it is rounded to an integer.
        exact = Fraction(float(np.float32(min(max(value / float(scale), -3e38), 3e38))))
        level_wanted = int(abs(exact) + Fraction(1, 2)) * (1 if exact > 0 else -1)
        assert level == max(-127, min(127, level_wanted)), f"{value} of scale {float(scale)}"


def test_halves_go_away_from_zero_and_nothing_less_than_a_half_does():
    values = torch.tensor([0.5, -0.5, 1.5, -2.5, 0.49999997, -0.49999997, 126.5, 8388609.0])
    assert round_half_away(values).tolist() == [1, -1, 2, -3, 0, 0, 127, 8388609]


@pytest.mark.parametrize("dtype", TYPES)
def test_zero_vectors_give_zeros(dtype):
    stored, scales = quantise(torch.zeros(3, DIM), dtype)
    assert not stored.float().any() and not scales.any()
    assert not dequantise(stored, scales).any()


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_read_back_errs_by_half_a_step_at_most(dtype):
    vectors = hard_vectors()
    vectors[[10, 11, 13]] = 1.0  # beyond the largest scale: cut off, tested below
    stored, scales = quantise(vectors, dtype)
    back = dequantise(stored, scales)
    assert back.isfinite().all()
    step = scales.float()[:, None].expand_as(vectors)
    if dtype == torch.float8_e4m3fn:  # 3 bits after the leading one, down to 2^-9
        step = step * torch.maximum(stored.float().abs() * 2**-3, torch.tensor(2.0**-9))
    rounding_of_the_scale = vectors.abs() * 2**-11 + TOPS[dtype] * 2.0**-25
    assert ((back - vectors).abs() <= step / 2 * (1 + 1e-5) + rounding_of_the_scale).all()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.int8, 127 * 65504.0), (torch.float8_e4m3fn, 448 * 65504.0)])
def test_elements_beyond_the_largest_scale_are_cut_off(dtype, limit):
    back = dequantise(*quantise(torch.tensor([1e38, -1e38, 0.0, float("inf")]), dtype))
    assert back.tolist() == [limit, -limit, 0.0, limit]


@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernels_helper_stores_the_same_bits(dtype):
    vectors = hard_vectors().to(DEVICE)
    stored, scales, read = by_kernel(vectors, dtype)
    wanted, wanted_scales = quantise(vectors, dtype)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(stored.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(read, wanted.float()), "what it says that reading gives"


def test_every_level_is_read_as_it_was_rounded():
    """FP8 by arithmetic: every number that it has, and what lies around and between them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].sort().values
    between = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])  # ties too
    near = [torch.nextafter(between, torch.full_like(between, limit)) for limit in (-1e9, 1e9)]
    vectors = torch.cat([between, *near]).clamp(-448, 448)
    vectors = torch.nn.functional.pad(vectors, (0, -len(vectors) % (DIM - 1))).view(-1, DIM - 1)
    vectors = torch.nn.functional.pad(vectors, (0, 1), value=448.0)  # so that the scale is 1
    vectors = torch.nn.functional.pad(vectors, (0, 0, 0, -len(vectors) % ROWS), value=448.0).to(DEVICE)
    for rows in vectors.split(ROWS):
        stored, scales, read = by_kernel(rows, torch.float8_e4m3fn)
        assert (scales == 1).all()
        assert torch.equal(read, rows.to(torch.float8_e4m3fn).float()) and torch.equal(read, stored.float())


def test_bytes_of_a_vector():
    assert vector_bytes(128, torch.int8) * 256 == vector_bytes(128, torch.bfloat16) * 130
    assert vector_bytes(128, torch.float8_e4m3fn) == 130
    assert set(TOPS) == set(TYPES)


def test_scales_stand_beside_quantised_caches_only():
    cache, scales = torch.zeros(3, 2, 4, 8, dtype=torch.int8), torch.zeros(3, 2, 4, dtype=torch.float16)
    check_scales(cache, key_scales=scales, value_scales=scales)
    check_scales(cache.float(), key_scales=None, value_scales=None)
    with pytest.raises(ValueError, match=r"value_scales: wanted scales beside a cache of torch\.int8, got None"):
        check_scales(cache, key_scales=scales, value_scales=None)
    with pytest.raises(ValueError, match=r"key_scales: wanted None beside a cache of torch\.float32"):
        check_scales(cache.float(), key_scales=scales, value_scales=scales)
    with pytest.raises(ValueError, match=r"key_scales: wanted shape \[3, 2, 4\]"):
        check_scales(cache, key_scales=scales[:1], value_scales=scales)
    with pytest.raises(ValueError, match="contiguous"):
        check_scales(cache, key_scales=scales.transpose(0, 1).contiguous().transpose(0, 1), value_scales=scales)
