"""Matrix products whose rows come out the same to the last bit whatever else is in the batch.

    y[m, n] = sum_k x[m, k] * weight[n, k]       accumulated in float32, k ascending, whatever m and M are
    out     = y (+ bias[n]) (+ residual[m, n])   the sums in float32, rounded once

A library chooses its kernel, and with it the order of the sum, by the number of rows. Here every element is one chain
of tensor core instructions over k; tiles differ with M, since a few rows need many narrow tiles to read W quickly, but
not the chain: a test holds all plans of a dtype to the same bits. Padding rows of a tile are zeros and are not stored.

| tensor   | axes   | dtype                        | strides                                        |
|----------|--------|------------------------------|------------------------------------------------|
| x        | [M, K] | bfloat16, float16 or float32 | last axis 1                                    |
| weight   | [N, K] | as x                         | last axis 1                                    |
| bias     | [N]    | any of the three             | 1                                              |
| residual | [M, N] | any of the three             | last axis 1; may be out                        |
| out      | [M, N] | any of the three             | last axis 1                                    |

M may be 0. Called by the batch-invariant pass (`--deterministic`).

Sources: 1. H. He and others, "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.checks import FLOATS, check_tensor
from kernels.launch import launch_options, let_next_start, shared_memory_bytes, wait_for_inputs

BUSY_TILES = 96
"""So many tiles keep the card busy; with fewer, smaller tiles are faster."""

GROUPED_TILES = 8
"""Tiles of rows that take turns on the same rows of W, so that both stay in the level-2 cache."""


def fixed_order_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The product and its sums in float32, not rounded."""
    y = x.float() @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    return y if residual is None else y + residual.float()


@dataclass(frozen=True)
class FixedOrderPlan:
    """A tile, and how the compiler is to take it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


FLOAT32_PLAN = FixedOrderPlan(32, 32, 32, num_warps=4, num_stages=2)
HALF_PLANS = (
    FixedOrderPlan(128, 256, 64, num_warps=8, num_stages=3),
    FixedOrderPlan(128, 128, 64, num_warps=8, num_stages=4),
    FixedOrderPlan(64, 64, 128, num_warps=4, num_stages=4),
    FixedOrderPlan(64, 32, 128, num_warps=4, num_stages=6),
    FixedOrderPlan(64, 16, 256, num_warps=4, num_stages=3),
)
"""Largest tile first: the best of a sweep on an NVIDIA H200. A tile has at least 64 rows, as its tensor cores do."""


def launch_plan(row_count: int, output_count: int, dtype: torch.dtype) -> FixedOrderPlan:
    """The plan with the largest tiles that keep the card busy; for few outputs the one with the smallest."""
    if dtype == torch.float32:
        return FLOAT32_PLAN
    for plan in HALF_PLANS:
        if triton.cdiv(row_count, plan.block_m) * triton.cdiv(output_count, plan.block_n) >= BUSY_TILES:
            return plan
    return HALF_PLANS[-1]


@cache
def fitted(plan: FixedOrderPlan, element_bytes: int, shared_bytes: int) -> FixedOrderPlan:
    """The plan with no more stages than that much shared memory holds. Sums do not depend on the number of stages."""
    stage_bytes = (plan.block_m + plan.block_n) * plan.block_k * element_bytes
    return replace(plan, num_stages=max(1, min(plan.num_stages, shared_bytes // stage_bytes)))


def bytes_moved(rows: int, outputs: int, inputs: int, element_bytes: int) -> int:
    """The fewest bytes that the product reads and writes: W once, x and y once."""
    return element_bytes * (outputs * inputs + rows * (inputs + outputs))


@triton.jit(do_not_specialize=["M"])
def _fixed_order_linear_kernel(
    x, weight, bias, residual, out, M, N, x_stride, weight_stride, residual_stride, out_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # 1. Locate: a tile of rows and of outputs; GROUP tiles of rows next to one another for each tile of outputs.
    let_next_start(PDL)
    program = tl.program_id(0)
    row_tiles = tl.cdiv(M, BLOCK_M)
    in_group = GROUP * tl.cdiv(N, BLOCK_N)
    first_tile = program // in_group * GROUP
    group = tl.minimum(row_tiles - first_tile, GROUP)
    m = (first_tile + program % in_group % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % in_group // group * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = (m < M)[:, None]  # edge: the last tile of rows
    is_output = (n < N)[:, None]  # edge: the last tile of outputs
    k = tl.arange(0, BLOCK_K)
    x_places = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    weight_places = weight + n[:, None].to(tl.int64) * weight_stride + k[None, :]
    wait_for_inputs(PDL)
    # 2. Accumulate, k ascending.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            rows = tl.load(x_places, mask=is_row, other=0.0)
            weights = tl.load(weight_places, mask=is_output, other=0.0)
        else:
            inside = (k0 + k < K)[None, :]  # edge: the rows' end
            rows = tl.load(x_places, mask=is_row & inside, other=0.0)
            weights = tl.load(weight_places, mask=is_output & inside, other=0.0)
        total = tl.dot(rows, weights.T, total, input_precision="ieee")
        x_places += BLOCK_K
        weight_places += BLOCK_K
    # 3. Add the neighbours and store.
    inside = is_row & (n < N)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        places = residual + m[:, None].to(tl.int64) * residual_stride + n[None, :]
        total += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m[:, None].to(tl.int64) * out_stride + n[None, :], total.to(out.dtype.element_ty), mask=inside)


def fixed_order_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    plan: FixedOrderPlan | None = None,
) -> None:
    """Write x W^T, plus bias and residual where given, to `out`. Shapes: the module's table.

    `plan` overrides `launch_plan`, for measurements. Raises ValueError for a shape, dtype, stride or device that
    differs from the table.
    """
    check_tensor("x", x, (None, None), FLOATS)
    rows, inputs = x.shape
    check_tensor("weight", weight, (None, inputs), x.dtype, like=x)
    outputs = weight.shape[0]
    check_tensor("out", out, (rows, outputs), FLOATS, like=x)
    if bias is not None:
        check_tensor("bias", bias, (outputs,), FLOATS, like=x)
    if residual is not None:
        check_tensor("residual", residual, (rows, outputs), FLOATS, like=x)
    if out.numel() == 0:
        return
    plan = fitted(plan or launch_plan(rows, outputs, x.dtype), x.element_size(), shared_memory_bytes(x.device))
    added = out if residual is None else residual
    programs = triton.cdiv(rows, plan.block_m) * triton.cdiv(outputs, plan.block_n)
    _fixed_order_linear_kernel[(programs,)](
        x, weight, weight if bias is None else bias, added, out, rows, outputs,
        x.stride(0), weight.stride(0), added.stride(0), out.stride(0),
        K=inputs, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, GROUP=GROUPED_TILES,
        STAGES=plan.num_stages, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        num_warps=plan.num_warps, **launch_options(x),
    )  # fmt: skip
