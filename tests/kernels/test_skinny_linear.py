"""Skinny products and the work fused into them, against float32."""

import itertools
import json
from dataclasses import asdict, replace

import pytest
import torch

from kernels import skinny_linear_hopper, skinny_linear_warps, tuning
from kernels.launch import prefetch_share
from kernels.linear_workspace import Workspace, plan_key
from kernels.skinny_linear import (
    bytes_moved,
    linear_parts,
    run_parts_plan,
    run_plan,
    skinny_linear,
    skinny_linear_reference,
    split_floats,
)
from kernels.tuning import LIBRARY, TABLE_PATH, LinearPlan, default_plan, find_plan, measured_plan
from tests.kernels.closeness import DEVICE, DTYPES, assert_as_exact, assert_replay_equals_eager, random_tensor
from tests.kernels.gluon_emulator import emulate

PLANS = [
    LinearPlan("matvec", block_n=4, block_k=32, num_warps=1),
    LinearPlan("matvec", block_n=2, block_k=64, num_warps=2),
    LinearPlan("small_m", block_n=16, block_k=32, num_warps=4, num_stages=2),
    LinearPlan("small_m", block_n=16, block_k=16, num_warps=2, num_stages=3, split_k=3),
    LinearPlan("small_m", block_n=16, block_k=32, num_warps=2, split_k=2, held=True),
    LinearPlan("small_m", block_n=16, block_k=64, num_warps=4, num_stages=2, norm_apart=True),
    LIBRARY,
]
FUSIONS = ["plain", "norm", "residual", "norm_silu", "silu"]


def make_case(rows, outputs, inputs, dtype, fusion):
    """Arguments of `run_plan` after the plan; the output buffer is poisoned."""
    silu = "silu" in fusion
    x = random_tensor(rows, inputs, dtype=dtype, seed=1)
    weight = random_tensor(outputs, inputs, dtype=dtype, seed=2, scale=inputs**-0.5)
    norm_weight = random_tensor(inputs, dtype=dtype, seed=3) if "norm" in fusion else None
    out = torch.full((rows, outputs // 2 if silu else outputs), float("nan"), dtype=dtype, device=DEVICE)
    residual = random_tensor(rows, outputs, dtype=dtype, seed=4) if fusion == "residual" else None
    return x, weight, out, norm_weight, residual, silu


def workspace_for(dtype) -> Workspace:
    return Workspace.allocate(16, 256, 256, dtype, torch.device(DEVICE))


ONE_ROW, ROWS = (1, 40, 96), (3, 34, 70)
"""Rows, outputs and inputs: in whole tiles of some plans, and of none."""

KERNEL_CASES = [
    *itertools.product([ONE_ROW, ROWS], PLANS, [torch.float32, torch.float16]),
    # Each is compiled by itself on a card: one row is what the first kernel is for, rows are what the others are for.
    *(
        pytest.param(ONE_ROW if plan.kernel == "matvec" else ROWS, plan, torch.bfloat16, marks=pytest.mark.gpu)
        for plan in PLANS
    ),
]


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(
    ("sizes", "plan", "dtype"),
    KERNEL_CASES,
    ids=lambda case: f"{case.kernel}_n{case.block_n}_k{case.block_k}" if isinstance(case, LinearPlan) else None,
)
def test_matches_float32(sizes, plan, fusion, dtype):
    rows, outputs, inputs = sizes
    x, weight, out, norm_weight, residual, silu = make_case(rows, outputs, inputs, dtype, fusion)
    want = skinny_linear_reference(x, weight, norm_weight=norm_weight, residual=residual, silu_mul=silu)
    workspace = workspace_for(dtype)
    run_plan(plan, x, weight, out, norm_weight, 1e-6, residual, silu, workspace)
    # The normed row is rounded for the tensor cores, and the library's product once more before its neighbour.
    assert_as_exact(out, want, steps=1 if plan.kernel == "matvec" else 3)
    assert (workspace.counters == 0).all()


def test_residual_in_place_and_rows_of_nan_stay_alone():
    x, weight, _, _, residual, _ = make_case(3, 40, 64, torch.float32, "residual")
    x[1] = float("nan")
    want = skinny_linear_reference(x, weight, residual=residual)
    for plan in PLANS:
        stream = residual.clone()
        run_plan(plan, x, weight, stream, None, 1e-6, stream, False, workspace_for(torch.float32))
        assert stream[1].isnan().all()
        assert_as_exact(stream[[0, 2]], want[[0, 2]])


def test_float32_logits_from_half_weights():
    x, weight, _, norm_weight, _, _ = make_case(2, 40, 64, torch.float16, "norm")
    want = skinny_linear_reference(x, weight, norm_weight=norm_weight)
    for plan in PLANS:
        out = torch.full((2, 40), float("nan"), device=DEVICE)
        run_plan(plan, x, weight, out, norm_weight, 1e-6, None, False, workspace_for(torch.float16))
        assert float((out - want).abs().max()) < 5e-3


def test_public_function_finds_a_plan_and_takes_no_rows():
    x, weight, out, norm_weight, _, _ = make_case(1, 40, 64, torch.float32, "norm")
    workspace = workspace_for(torch.float32)
    skinny_linear(x, weight, out, workspace, norm_weight=norm_weight)
    assert_as_exact(out, skinny_linear_reference(x, weight, norm_weight=norm_weight))
    skinny_linear(x[:0], weight, out[:0], workspace)


def test_wrong_arguments_are_named():
    x, weight, out, _, _, _ = make_case(2, 40, 64, torch.float32, "plain")
    workspace = workspace_for(torch.float32)
    with pytest.raises(ValueError, match=r"weight: wanted shape \[any, 64\], got \[40, 63\]"):
        skinny_linear(x, weight[:, :63], out, workspace)
    with pytest.raises(ValueError, match=r"out: wanted shape \[2, 20\], got \[2, 40\]"):
        skinny_linear(x, weight, out, workspace, silu_mul=True)
    with pytest.raises(ValueError, match="at most one of them"):
        skinny_linear(x, weight, out[:, :20].contiguous(), workspace, silu_mul=True, residual=out[:, :20].contiguous())
    with pytest.raises(ValueError, match=r"workspace.normed: wanted 2 x 512 elements"):
        Workspace.allocate(1, 512, 8, torch.float32, torch.device("cpu")).rows("normed", 2, 512)


def test_table_and_rules():
    assert default_plan(1, 4096, 1024, False).kernel == "matvec" and default_plan(40, 4096, 1024, False) == LIBRARY
    assert find_plan(torch.device("cpu"), torch.bfloat16, 257, 8, 8, silu_mul=False, has_norm=False) == LIBRARY
    assert bytes_moved(2, 3, 5, 2) == 2 * (15 + 2 * 8)


def test_a_plan_serves_down_to_the_measured_size_below(monkeypatch):
    plans = {rows: LinearPlan("small_m", block_n=rows, block_k=16) for rows in (4, 64)}
    entries = {str(rows): {"plan": asdict(plan)} for rows, plan in plans.items()}
    monkeypatch.setattr(tuning, "_table", lambda: {"cpu": {"float16": {"n8_k16_parts": entries}}})
    found = [measured_plan(torch.device("cpu"), torch.float16, rows, "n8_k16_parts") for rows in (1, 4, 5, 64, 65)]
    assert found == [plans[4], plans[4], plans[64], plans[64], None]
    assert measured_plan(torch.device("cpu"), torch.float16, 1, "n8_k17_parts") is None


@pytest.mark.parametrize("kernel", ["warps", "resident"])
@pytest.mark.parametrize("triton_takes_it", [True, False])
def test_measured_plans_are_for_a_triton_that_has_their_kernels(kernel, triton_takes_it, monkeypatch):
    """Triton 3.4 and 3.5 on a measured card: the first step could not import them."""
    plan = LinearPlan(kernel, block_n=16, block_k=32)
    monkeypatch.setattr(tuning, "_table", lambda: {"cpu": {"bfloat16": {"n8_k64": {"4": {"plan": asdict(plan)}}}}})
    monkeypatch.setattr(tuning, "takes_gluon", lambda _: triton_takes_it)
    found = find_plan(torch.device("cpu"), torch.bfloat16, 4, 8, 64, silu_mul=False, has_norm=False)
    assert found == (plan if triton_takes_it else LIBRARY)


def test_every_plan_of_the_table_is_well_formed():
    for card, dtypes in json.loads(TABLE_PATH.read_text()).items():
        for operations in dtypes.values():
            for operation, buckets in operations.items():
                for bucket, entry in buckets.items():
                    plan = LinearPlan(**entry["plan"])
                    kernels = ("matvec", "small_m", "warps", "resident", "gemm", "library")
                    assert plan.kernel in kernels, (card, operation, bucket)
                    inputs = int(operation.split("_")[1][1:])
                    assert plan.kernel != "warps" or skinny_linear_warps.fits(plan, inputs), (operation, bucket)
                    assert plan.kernel == "library" or (plan.block_n > 0 and plan.block_k > 0)


@pytest.mark.parametrize("most", [1, 8, 64, 256])
def test_every_plan_of_the_table_finds_room_in_the_workspace(most):
    """In an engine whose largest step has so many rows; gate and up are the widest of a model's products."""
    for operations in (found for dtypes in json.loads(TABLE_PATH.read_text()).values() for found in dtypes.values()):
        for operation, buckets in operations.items():
            outputs, inputs = (int(size[1:]) for size in operation.split("_")[:2])
            widest = 6144 if inputs < 4096 else 28_672
            room = Workspace.allocate(most, inputs, widest, torch.bfloat16, torch.device("meta")).partials.numel()
            silu = "_silu" in operation
            for bucket, entry in buckets.items():
                plan, rows = LinearPlan(**entry["plan"]), min(int(bucket), most)
                if operation.endswith("_parts") and plan.kernel != "library":
                    assert plan.split_k * rows * outputs <= room, (operation, rows)
                elif plan.kernel == "small_m" and plan.split_k > 1:
                    assert split_floats(plan, rows, outputs // 2 if silu else outputs, silu) <= room, (operation, rows)


def test_prefetching_the_next_weight_changes_nothing():
    x, weight, out, norm_weight, _, _ = make_case(3, 40, 64, torch.float32, "norm")
    want = skinny_linear_reference(x, weight, norm_weight=norm_weight)
    upcoming = random_tensor(1000, 7)
    for plan in PLANS:
        out.fill_(float("nan"))
        run_plan(plan, x, weight, out, norm_weight, 1e-6, None, False, workspace_for(torch.float32), upcoming)
        assert_as_exact(out, want)
    for plan in PARTS_PLANS:
        parts = run_parts_plan(plan, x, weight, workspace_for(torch.float32), upcoming)
        assert_as_exact(parts.sum(0), skinny_linear_reference(x, weight))
    assert prefetch_share(upcoming, 10) == (27 * 1024, 3 * 1024) and prefetch_share(None, 10) == (0, 0)


PARTS_PLANS = [
    LinearPlan("small_m", block_n=16, block_k=16, num_warps=2, num_stages=3, split_k=3),
    LinearPlan("small_m", block_n=16, block_k=32, num_warps=2, split_k=2, held=True),
    LinearPlan("small_m", block_n=32, block_k=32, num_warps=4, num_stages=2),
    LIBRARY,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", PARTS_PLANS, ids=lambda plan: f"{plan.kernel}_s{plan.split_k}")
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 96), (19, 34, 100)])
def test_parts_add_up_to_float32(rows, outputs, inputs, plan, dtype):
    x, weight, _, _, _, _ = make_case(rows, outputs, inputs, dtype, "plain")
    workspace = Workspace.allocate(32, 256, 256, dtype, torch.device(DEVICE))
    workspace.partials.fill_(float("nan"))
    parts = run_parts_plan(plan, x, weight, workspace)
    assert parts.shape == (plan.split_k, rows, outputs)
    want = skinny_linear_reference(x, weight)
    assert_as_exact(parts.float().sum(0).to(dtype), want, steps=2 if plan == LIBRARY else 1)
    assert_as_exact(linear_parts(x, weight, workspace).float().sum(0).to(dtype), want, steps=2)


def test_the_plans_of_a_product_and_of_its_parts_are_kept_apart_under_keys_of_one_kind():
    """Parts had keys of their own making beside those of `plan_key`."""
    x, weight, out, _, _, _ = make_case(2, 40, 64, torch.float32, "plain")
    workspace, plan = workspace_for(torch.float32), PARTS_PLANS[0]
    key = plan_key(2, 40, 64)
    skinny_linear(x, weight, out, workspace)
    assert list(workspace.plans) == [key]
    workspace.plans[plan_key(2, 40, 64, in_parts=True)] = plan
    assert linear_parts(x, weight, workspace).shape == (plan.split_k, 2, 40), "by the plan that is kept for parts"
    workspace.plans.clear()
    linear_parts(x, weight, workspace)
    assert list(workspace.plans) == [plan_key(2, 40, 64, in_parts=True)] != [key]


def test_parts_that_do_not_fit_are_refused():
    x, weight, _, _, _, _ = make_case(16, 200, 64, torch.float32, "plain")
    with pytest.raises(ValueError, match=r"workspace.partials: wanted 32 x 200 elements, got 256"):
        run_parts_plan(PARTS_PLANS[1], x, weight, Workspace.allocate(1, 2, 1, torch.float32, torch.device(DEVICE)))


RESIDENT_PLANS = [
    LinearPlan("resident", 32, 128, 4, 2, 1, block_m=64),
    LinearPlan("resident", 16, 64, 4, 3, 2, block_m=64, weight_stages=3),
    LinearPlan("resident", 64, 128, 8, 2, 2, block_m=128, weight_stages=2),
    LinearPlan("resident", 64, 64, 8, 2, 1, block_m=256, weight_stages=2),
]


@pytest.mark.parametrize("plan", RESIDENT_PLANS, ids=lambda plan: f"{plan.block_m}x{plan.block_n}s{plan.split_k}")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype"),
    [
        (9, 80, 1024, torch.bfloat16),
        (64, 4096, 512, torch.bfloat16),
        (200, 96, 2048, torch.bfloat16),
        (64, 4096, 512, torch.float16),
    ],
)
def test_hopper_kernel_matches_float32(rows, outputs, inputs, dtype, plan, hopper_device, monkeypatch):
    if hopper_device == "cpu":
        emulate(monkeypatch, skinny_linear_hopper, "_resident_kernel")
    x, weight, out, _, _, _ = make_case(rows, outputs, inputs, dtype, "silu")
    workspace = Workspace.allocate(256, 2048, 4096, dtype, torch.device(DEVICE))
    for _ in range(
        3 if hopper_device == "cuda" else 1
    ):  # a ring that is filled too early gives another result now and then
        workspace.partials.fill_(float("nan"))
        parts = run_parts_plan(plan, x, weight, workspace)
        assert parts.shape == (plan.split_k, rows, outputs)
        assert_as_exact(parts.sum(0).to(dtype), skinny_linear_reference(x, weight))
    from kernels.skinny_linear_hopper import fits

    if plan.split_k == 1 and fits(plan, inputs, True):
        run_plan(plan, x, weight, out, None, 1e-6, None, True, workspace)
        assert_as_exact(out, skinny_linear_reference(x, weight, silu_mul=True))


def test_rings_and_boxes_that_do_not_fit():
    hopper = pytest.importorskip("kernels.skinny_linear_hopper")
    assert hopper.fits(RESIDENT_PLANS[0], 1024, False) and hopper.shared_bytes(RESIDENT_PLANS[0], 1024, False) == 98_304
    assert not hopper.fits(RESIDENT_PLANS[0], 1024 + 64, False)  # K in whole steps
    assert not hopper.fits(RESIDENT_PLANS[0], 3072, False)  # 48 panels of W are no box
    assert not hopper.fits(replace(RESIDENT_PLANS[0], block_n=128), 1024, True)  # 512 KiB of W


@pytest.mark.gpu
@pytest.mark.parametrize(
    "plan", PLANS[:-1], ids=lambda plan: f"{plan.kernel}_n{plan.block_n}_k{plan.block_k}_s{plan.split_k}"
)
def test_replay_equals_eager(plan):
    x, weight, out, norm_weight, _, _ = make_case(3, 256, 256, torch.bfloat16, "norm")
    workspace = workspace_for(torch.bfloat16)
    assert_replay_equals_eager(lambda: run_plan(plan, x, weight, out, norm_weight, 1e-6, None, False, workspace), out)
