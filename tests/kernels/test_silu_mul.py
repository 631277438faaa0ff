"""SiLU(gate) * up against float32."""

import pytest
import torch

from kernels.silu_mul import bytes_moved, launch_plan, silu_mul, silu_mul_reference
from tests.kernels.closeness import (
    DEVICE,
    DTYPES,
    assert_as_exact,
    assert_replay_equals_eager,
    random_tensor,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "intermediate"), [(1, 64), (3, 100), (2, 1536), (5, 1)])
def test_matches_float32(rows, intermediate, dtype):
    gate_up = random_tensor(rows, 2 * intermediate, dtype=dtype, seed=1, scale=3)
    out = torch.full((rows, intermediate), float("nan"), dtype=dtype, device=DEVICE)
    silu_mul(gate_up, out)
    assert_as_exact(out, silu_mul_reference(gate_up.float()))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's: exp(-gate) is meant to reach inf
def test_extreme_gates_and_nan_rows():
    gate_up = torch.ones(2, 8, device=DEVICE)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -1e30])
    gate_up[1] = float("nan")
    out = torch.empty(2, 4, device=DEVICE)
    silu_mul(gate_up, out)
    assert torch.equal(out[0].cpu(), torch.tensor([0.0, 200.0, 0.0, 0.0])) and out[1].isnan().all()


def test_no_rows_is_no_work():
    room = torch.full((2, 32), float("nan"), device=DEVICE)
    silu_mul(torch.empty(0, 64, device=DEVICE), room[:0])
    assert room.isnan().all()


def test_plan_and_bytes():
    assert launch_plan(3, 3072).grid == (3, 3) and launch_plan(3, 40).block == 64
    assert bytes_moved(2, 10, 2) == 120


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"gate_up: wanted shape \[2, 16\], got \[2, 8\]"):
        silu_mul(torch.zeros(2, 8, device=DEVICE), torch.zeros(2, 8, device=DEVICE))


@pytest.mark.gpu
def test_replay_equals_eager():
    gate_up = random_tensor(9, 6144, dtype=torch.bfloat16)
    out = torch.empty(9, 3072, dtype=torch.bfloat16, device=DEVICE)
    assert_replay_equals_eager(lambda: silu_mul(gate_up, out), out)
