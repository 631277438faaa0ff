"""Products in one order: right, and the same bits whatever is in the batch and whichever plan runs."""

import pytest
import torch

from kernels.fixed_order_linear import (
    FLOAT32_PLAN,
    HALF_PLANS,
    bytes_moved,
    fitted,
    fixed_order_linear,
    fixed_order_linear_reference,
    launch_plan,
)
from kernels.launch import HOPPER_SHARED_BYTES
from tests.kernels.closeness import DEVICE, DTYPES, assert_as_exact, assert_replay_equals_eager, random_tensor


def product(x, weight, dtype=None, **options) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=dtype or x.dtype, device=DEVICE)
    fixed_order_linear(x, weight, out, **options)
    return out


def operands(rows, outputs, inputs, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = random_tensor(rows, inputs, dtype=dtype, seed=1)
    return x, random_tensor(outputs, inputs, dtype=dtype, seed=2, scale=inputs**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 96), (5, 34, 100), (70, 33, 64)])
def test_matches_float32(rows, outputs, inputs, dtype):
    x, weight = operands(rows, outputs, inputs, dtype)
    assert_as_exact(product(x, weight), fixed_order_linear_reference(x, weight))
    assert_as_exact(product(x, weight, torch.float32), fixed_order_linear_reference(x, weight))
    bias, residual = random_tensor(outputs, dtype=dtype, seed=3), random_tensor(rows, outputs, dtype=dtype, seed=4)
    want = fixed_order_linear_reference(x, weight, bias, residual)
    fixed_order_linear(x, weight, residual, bias=bias, residual=residual)
    assert_as_exact(residual, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    """Alone, at any place, beside NaN, and with every plan, since plans change with the number of rows."""
    sizes = (200, 144, 384) if DEVICE == "cuda" else (70, 33, 48)
    x, weight = operands(*sizes, dtype)
    plans = (FLOAT32_PLAN,) if dtype == torch.float32 else HALF_PLANS
    if DEVICE == "cpu":
        plans = plans[:1]  # the interpreter's products add up in NumPy's order, which depends on the tile
    whole = product(x, weight, plan=plans[0])
    for plan in plans[1:]:
        assert torch.equal(product(x, weight, plan=plan), whole), f"{plan} gives other bits than {plans[0]}"
    for row in (0, 37, sizes[0] - 1):
        alone = product(x[row : row + 1], weight, plan=plans[0] if DEVICE == "cpu" else None)
        assert torch.equal(alone, whole[row : row + 1]), f"row {row} alone"
    x[1:37] = float("nan")
    assert torch.equal(product(x, weight, plan=plans[-1])[37:], whole[37:]), "NaN of neighbours"


def test_no_rows():
    assert product(*operands(0, 8, 16, torch.float32)).shape == (0, 8)


def test_wrong_arguments_are_named():
    x, weight = operands(2, 8, 16, torch.float32)
    with pytest.raises(ValueError, match=r"out: wanted shape \[2, 8\], got \[2, 7\]"):
        fixed_order_linear(x, weight, torch.empty(2, 7, device=DEVICE))
    with pytest.raises(ValueError, match=r"bias: wanted shape \[8\]"):
        fixed_order_linear(x, weight, torch.empty(2, 8, device=DEVICE), bias=torch.empty(7, device=DEVICE))


def test_plans_and_bytes_without_a_gpu():
    assert launch_plan(5000, 64, torch.float32) == launch_plan(1, 64, torch.float32) == FLOAT32_PLAN
    sizes = [(8192, 1024), (2048, 1024), (1, 6144), (1, 4096), (1, 1024)]
    assert [launch_plan(*size, torch.bfloat16) for size in sizes] == list(HALF_PLANS)
    assert bytes_moved(2, 8, 16, 2) == 2 * (8 * 16 + 2 * 24)


def test_cards_with_less_shared_memory_get_fewer_stages():
    assert [fitted(plan, 2, HOPPER_SHARED_BYTES) for plan in HALF_PLANS] == list(HALF_PLANS)
    assert [fitted(plan, 2, 99 * 1024).num_stages for plan in HALF_PLANS] == [2, 3, 3, 4, 2]
    assert fitted(HALF_PLANS[0], 2, 1).num_stages == 1


@pytest.mark.gpu
def test_replay_equals_eager():
    x, weight = operands(3, 64, 64, torch.bfloat16)
    out = torch.empty(3, 64, dtype=torch.bfloat16, device=DEVICE)
    assert_replay_equals_eager(lambda: fixed_order_linear(x, weight, out), out)
