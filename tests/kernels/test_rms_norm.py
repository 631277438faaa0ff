"""RMSNorm and residual addition against float32."""

import pytest
import torch

from kernels.rms_norm import bytes_moved, launch_plan, rms_norm, rms_norm_reference
from tests.kernels.closeness import (
    DEVICE,
    DTYPES,
    assert_as_exact,
    assert_replay_equals_eager,
    random_tensor,
)

EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (3, 100), (5, 576), (2, 1024), (4, 1)])
def test_matches_float32(rows, hidden, with_residual, dtype):
    x = random_tensor(rows, hidden, dtype=dtype, seed=1, scale=3)
    weight = random_tensor(hidden, dtype=dtype, seed=2)
    residual = random_tensor(rows, hidden, dtype=dtype, seed=3) if with_residual else None
    want, want_sum = rms_norm_reference(x.float(), weight, EPS, None if residual is None else residual.float())
    if residual is not None:
        want_sum = (residual.float() + x.float()).to(dtype)
        want, _ = rms_norm_reference(want_sum.float(), weight, EPS)
    out = torch.full_like(x, float("nan"))
    rms_norm(x, weight, EPS, out, residual)
    assert_as_exact(out, want)
    if residual is not None:
        assert torch.equal(residual, want_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part_count", [1, 2, 5])
def test_parts_are_added_to_the_residual(part_count, dtype):
    parts = random_tensor(part_count, 3, 100, seed=1)
    weight, residual = random_tensor(100, dtype=dtype, seed=2), random_tensor(3, 100, dtype=dtype, seed=3)
    want_sum = (residual.float() + parts.sum(0)).to(dtype)
    want, _ = rms_norm_reference(want_sum.float(), weight, EPS)
    out = torch.full_like(residual, float("nan"))
    rms_norm(parts, weight, EPS, out, residual)
    assert_as_exact(out, want)
    assert_as_exact(residual, want_sum.float())
    with pytest.raises(ValueError, match="residual: wanted one beside an x in parts"):
        rms_norm(parts, weight, EPS, out)


def test_a_row_of_nan_stays_alone_and_zeros_give_zeros():
    x = random_tensor(3, 32)
    x[0], x[1] = float("nan"), 0.0
    out = torch.full_like(x, 7.0)
    rms_norm(x, torch.ones(32, device=DEVICE), EPS, out)
    assert out[0].isnan().all() and (out[1] == 0).all() and out[2].isfinite().all()


def test_strided_rows_and_in_place_output():
    wide = random_tensor(4, 80, seed=5)
    x = wide[:, :48]
    want, _ = rms_norm_reference(x.clone(), torch.ones(48, device=DEVICE), EPS)
    beyond = wide[:, 48:].clone()
    rms_norm(x, torch.ones(48, device=DEVICE), EPS, x)
    assert_as_exact(x, want)
    assert torch.equal(wide[:, 48:], beyond)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_rows_past_the_count_of_tokens_stay_as_they_are(count, with_residual):
    x, weight = random_tensor(4, 48, seed=1), random_tensor(48, seed=2)
    residual = random_tensor(4, 48, seed=3) if with_residual else None
    want, want_sum = rms_norm_reference(x, weight, EPS, residual)
    out = torch.full_like(x, 7.0)
    before = None if residual is None else residual.clone()
    counts = torch.tensor([1, 0, count], dtype=torch.int32, device=DEVICE)
    rms_norm(x, weight, EPS, out, residual, token_count=counts[2:])
    assert_as_exact(out[:count], want[:count])
    assert (out[count:] == 7.0).all()
    if residual is not None:
        assert torch.equal(residual[:count], want_sum[:count]) and torch.equal(residual[count:], before[count:])
    with pytest.raises(ValueError, match=r"token_count: wanted shape \[1\], got \[3\]"):
        rms_norm(x, weight, EPS, out, residual, token_count=counts)


def test_no_rows_is_no_work():
    room = torch.full((2, 64), float("nan"), device=DEVICE)
    rms_norm(torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE), EPS, room[:0])
    assert room.isnan().all()


def test_plan_and_bytes():
    assert launch_plan(7, 1000).grid == (7,) and launch_plan(7, 1000).block_hidden == 1024
    assert launch_plan(1, 16384).num_warps == 16
    assert bytes_moved(2, 10, 2, with_residual=True) == 2 * 10 * 2 * 4 + 20


def test_wrong_arguments_are_named():
    x, weight = torch.zeros(2, 8, device=DEVICE), torch.zeros(8, device=DEVICE)
    with pytest.raises(ValueError, match=r"weight: wanted shape \[8\], got \[7\]"):
        rms_norm(x, weight[:7], EPS, torch.zeros_like(x))
    with pytest.raises(ValueError, match=r"out: wanted dtype torch.float32, got torch.float16"):
        rms_norm(x, weight, EPS, x.half())
    with pytest.raises(ValueError, match="wanted a contiguous last axis"):
        rms_norm(torch.zeros(8, 2, device=DEVICE).T, weight, EPS, torch.zeros_like(x))


@pytest.mark.gpu
def test_replay_equals_eager():
    x, weight = random_tensor(9, 1024, dtype=torch.bfloat16), random_tensor(1024, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    assert_replay_equals_eager(lambda: rms_norm(x, weight, EPS, out), out)
