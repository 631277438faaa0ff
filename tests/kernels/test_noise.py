"""The hash and the Gumbel noise: equal in torch and Triton, finite everywhere, and distributed as they should be."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.noise import (
    gumbel,
    gumbel_bound,
    gumbel_reference,
    noise_bits,
    noise_bits_of_run,
    noise_bits_reference,
    noise_keys,
)
from tests.kernels.closeness import DEVICE

COUNT = 512


@triton.jit
def _bits_kernel(seed_low, seed_high, position, out, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    first, second = noise_keys(tl.load(seed_low), tl.load(seed_high), tl.load(position))
    tl.store(out + lane, noise_bits(first, second, lane * 293).to(tl.int32, bitcast=True))


@triton.jit
def _gumbel_kernel(bits, out, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    tl.store(out + lane, gumbel(tl.load(bits + lane).to(tl.uint32, bitcast=True)))


@triton.jit
def _run_bits_kernel(seed_low, seed_high, position, start, out, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    first, second = noise_keys(tl.load(seed_low), tl.load(seed_high), tl.load(position))
    tl.store(out + lane, noise_bits_of_run(first, second, tl.load(start), lane).to(tl.int32, bitcast=True))


@triton.jit
def _bound_kernel(bits, out_bound, out_noise, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    x = tl.load(bits + lane).to(tl.uint32, bitcast=True)
    tl.store(out_bound + lane, gumbel_bound(x))
    tl.store(out_noise + lane, gumbel(x))


def as_int32(values: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 values as int32."""
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the wrap-around that the hash is made of
def test_bits_equal_the_reference():
    ids = torch.arange(COUNT, device=DEVICE) * 293
    for seed, position in ((0, 0), (1, 5), (-1, 40_000), (2**63 - 1, 2**31 - 1), (0x123456789ABCDEF0, 1)):
        parts = torch.tensor([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, position], device=DEVICE)
        low, high, place = as_int32(parts).split(1)
        out = torch.zeros(COUNT, dtype=torch.int32, device=DEVICE)
        _bits_kernel[(1,)](low, high, place, out, COUNT=COUNT)
        want = noise_bits_reference(torch.tensor(seed, device=DEVICE), torch.tensor(position, device=DEVICE), ids)
        assert torch.equal(out, as_int32(want)), f"seed {seed}, position {position}"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the wrap-around that the hash is made of
@pytest.mark.parametrize("start", [0, COUNT, 0xFFFF + 1 - COUNT, 0x10000, 149 * COUNT, 0x7FFFFE00])
def test_bits_of_a_run_of_ids_equal_the_reference(start):
    parts = torch.tensor([0x89ABCDEF, 0x01234567, 77, start], device=DEVICE)
    low, high, place, first_id = as_int32(parts).split(1)
    out = torch.zeros(COUNT, dtype=torch.int32, device=DEVICE)
    _run_bits_kernel[(1,)](low, high, place, first_id, out, COUNT=COUNT)
    ids = torch.arange(start, start + COUNT, device=DEVICE)
    seed, position = (torch.tensor(number, device=DEVICE) for number in (0x0123456789ABCDEF, 77))
    assert torch.equal(out, as_int32(noise_bits_reference(seed, position, ids)))


def test_no_noise_exceeds_its_bound():
    """For small u, where winners come from, by at most a thousandth; bits of every size, and those on both edges."""
    sizes = torch.linspace(0, 32, 4000, dtype=torch.float64).exp2().long() - 1
    bits = torch.cat((sizes.clamp(max=2**32 - 1), torch.arange(300), 2**32 - 1 - torch.arange(300)))
    bits = torch.cat((bits, torch.zeros(-len(bits) % COUNT, dtype=torch.int64))).to(DEVICE)
    for part in bits.split(COUNT):
        bound, noise = torch.empty(2, COUNT, device=DEVICE)
        _bound_kernel[(1,)](as_int32(part), bound, noise, COUNT=COUNT)
        assert (bound > noise).all() and bound.isfinite().all()
        assert (bound - noise)[part < 2**22].max() < 1e-3 if (part < 2**22).any() else True


def test_fault_b12_no_bits_give_infinite_noise():
    extremes = [0, 1, 2**32 - 1, 2**32 - 2, 2**31, 2**31 - 1, 2**26 - 1, 2**26]
    bits = torch.tensor(extremes * (COUNT // len(extremes)), device=DEVICE)
    want = gumbel_reference(bits)
    out = torch.empty(COUNT, device=DEVICE)
    _gumbel_kernel[(1,)](as_int32(bits), out, COUNT=COUNT)
    assert want.isfinite().all() and out.isfinite().all()
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-5)
    assert float(out.max()) < 23 and float(out.min()) > -3


def test_small_u_keeps_its_resolution():
    """Near u = 0, where the largest noise comes from, neighbouring bits must still differ."""
    noise = gumbel_reference(torch.arange(1, 2000))
    assert (noise.diff() < 0).all()


def test_noise_is_gumbel_and_uncorrelated():
    ids = torch.arange(200_000)
    streams = [
        gumbel_reference(noise_bits_reference(torch.tensor(seed), torch.tensor(position), ids)).double()
        for seed, position in ((1, 0), (2, 0), (1, 1))
    ]
    for stream in streams:
        assert abs(float(stream.mean()) - 0.5772157) < 0.01 and abs(float(stream.var()) - 1.6449) < 0.03
        neighbours = torch.corrcoef(torch.stack((stream[:-1], stream[1:])))[0, 1]
        assert abs(float(neighbours)) < 0.01
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(3, dtype=torch.float64)
    assert float(correlations.abs().max()) < 0.01
