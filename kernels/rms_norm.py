"""RMSNorm over rows, with the residual addition before it in the same launch.

    residual' = residual + x                                     (only with a residual; rounded to its dtype, in place)
    residual' = residual + sum over s of x[s]                    x in S parts, as a product with split K leaves them
    out       = z / sqrt(mean(z^2) + eps) * weight               z = residual' or x; float32 inside

Sources: 1. B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019.

| tensor   | axes     | dtype                        | strides          | notes                              |
|----------|----------|------------------------------|------------------|------------------------------------|
| x        | [T, H]   | bfloat16, float16 or float32 | last axis 1      | not written                        |
|          | [S, T, H] | any of the three            | last axis 1      | parts; only with a residual        |
| residual | [T, H]   | as x; any beside parts       | last axis 1      | read and overwritten by the sum    |
| weight   | [H]      | any of the three             | 1                |                                    |
| out      | [T, H]   | as x; as the residual beside parts | last axis 1 | may be x                          |

Every row is independent, so padding rows hold anything, NaN included. H is at most 65,536. T may be 0. With a
`token_count`, int32 [1] on the device, rows from there on are not read, and stay as they are in out and residual.

Measured on an H200 at commit 1356a8c by `python -m benchmarks.kernels.bench_rms_norm`: 1.7 us for one row of
1,024 (torch 2.4); 3.99 TB/s for 8,192 rows of 4,096 with the residual, 87 % of the read limit of that run. At commit
cf6694d, in a chain of such launches: 1.5 us for 64 rows of 1,024 in four parts, 2.2 for 256.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import FLOATS, check_tensor
from kernels.launch import launch_options, let_next_start, wait_for_inputs

MAX_HIDDEN = 65_536
FEW_ROWS = 512  # up to here the time is that of one program, and more warps shorten it


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`(out, new residual)` computed in float32; the sum is rounded to the residual's dtype as the kernel stores it."""
    added = x.float().sum(0) if x.dim() == 3 else x.float()
    summed = None if residual is None else (residual.float() + added).to(residual.dtype)
    z = (x if summed is None else summed).float()
    scale = torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    return (z * scale * weight.float()).to(x.dtype if residual is None else residual.dtype), summed


@dataclass(frozen=True)
class RmsNormPlan:
    """One program a row, holding the row in one tile."""

    grid: tuple[int, ...]
    block_hidden: int
    num_warps: int


def launch_plan(row_count: int, hidden: int) -> RmsNormPlan:
    """The grid and tile for `row_count` rows of `hidden` elements."""
    block = max(triton.next_power_of_2(hidden), 16)
    elements = 128 if row_count <= FEW_ROWS else 512  # a warp's
    return RmsNormPlan((row_count,), block, num_warps=min(max(block // elements, 1), 16))


def bytes_moved(row_count: int, hidden: int, element_bytes: int, with_residual: bool) -> int:
    """The fewest bytes that the operation reads and writes."""
    return row_count * hidden * element_bytes * (4 if with_residual else 2) + hidden * element_bytes


@triton.jit
def _rms_norm_kernel(
    x, weight, residual, out, token_count, part_stride, x_stride, residual_stride, out_stride, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN  # the row's end
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if token_count is not None:
        inside = inside & (row < tl.load(token_count))  # the step's end; rule 4 of kernels/launch.py
    wait_for_inputs(PDL)
    z = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual_row = residual + row * residual_stride + column
        before = tl.load(residual_row, mask=inside, other=0.0)
        z = z.to(tl.float32)
        for part in tl.static_range(1, PARTS):
            place = x + part * part_stride + row * x_stride + column
            z += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        z = (z + before.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual_row, z, mask=inside)
    z = z.to(tl.float32)
    z = z * tl.rsqrt(tl.sum(z * z, axis=0) / HIDDEN + eps)
    tl.store(out + row * out_stride + column, (z * scale).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    one_plan: bool = False,
    token_count: torch.Tensor | None = None,
) -> None:
    """Write RMSNorm(x) to `out`, or add x or its parts into `residual` and write RMSNorm(residual). Shapes: the
    module's table.

    `one_plan` launches as for one row, so that a row's bits do not depend on how many there are.

    Raises ValueError for a shape, dtype, stride or device that differs from the table.
    """
    parts = x.shape[0] if x.dim() == 3 else 1
    check_tensor("x", x, (None, None, None) if x.dim() == 3 else (None, None), FLOATS)
    row_count, hidden = x.shape[-2:]
    check_tensor("weight", weight, (hidden,), FLOATS, like=x)
    if x.dim() == 3 and residual is None:
        raise ValueError("residual: wanted one beside an x in parts, got None")
    dtype = x.dtype if residual is None or x.dim() == 2 else residual.dtype
    check_tensor("out", out, (row_count, hidden), dtype, like=x)
    if residual is not None:
        check_tensor("residual", residual, (row_count, hidden), dtype, like=x)
    if token_count is not None:
        check_tensor("token_count", token_count, (1,), torch.int32, like=x)
    if hidden > MAX_HIDDEN:
        raise ValueError(f"x: wanted at most {MAX_HIDDEN} columns, got {hidden}")
    if row_count == 0:
        return
    plan = launch_plan(1 if one_plan else row_count, hidden)
    added = x if residual is None else residual
    _rms_norm_kernel[(row_count,)](
        x, weight, added, out, token_count, x.stride(0), x.stride(-2), added.stride(-2), out.stride(0), eps,
        HIDDEN=hidden, BLOCK=plan.block_hidden, PARTS=parts, HAS_RESIDUAL=residual is not None,
        num_warps=plan.num_warps, **launch_options(x),
    )  # fmt: skip
