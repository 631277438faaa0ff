"""The gated activation of a feed-forward layer: out = SiLU(gate) * up, from the fused row of both.

    out[t, i] = g / (1 + exp(-g)) * gate_up[t, I + i]            g = gate_up[t, i]; float32 inside

Sources: 1. N. Shazeer, "GLU Variants Improve Transformer", 2020.

| tensor  | axes    | dtype                        | strides     | notes                            |
|---------|---------|------------------------------|-------------|----------------------------------|
| gate_up | [T, 2I] | bfloat16, float16 or float32 | last axis 1 | gate in the first half, then up  |
| out     | [T, I]  | as gate_up                   | last axis 1 | not a view of gate_up            |

Every row is independent, so padding rows hold anything. T may be 0.

Measured on an H200 at commit 1356a8c by `python -m benchmarks.kernels.bench_silu_mul`: 1.1 us for one row of
3,072; 4.19 TB/s for 8,192 rows of 14,336, 92 % of the read limit of that run.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import FLOATS, check_tensor
from kernels.launch import launch_options, let_next_start, wait_for_inputs

BLOCK = 1024


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The activation computed in float32 and rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@dataclass(frozen=True)
class SiluMulPlan:
    """One program a row and a block of columns."""

    grid: tuple[int, int]
    block: int
    num_warps: int


def launch_plan(row_count: int, intermediate: int) -> SiluMulPlan:
    """The grid and tile for `row_count` rows with `intermediate` outputs each."""
    block = min(BLOCK, max(triton.next_power_of_2(intermediate), 16))
    return SiluMulPlan((row_count, triton.cdiv(intermediate, block)), block, num_warps=max(block // 256, 1))


def bytes_moved(row_count: int, intermediate: int, element_bytes: int) -> int:
    """The fewest bytes that the operation reads and writes."""
    return 3 * row_count * intermediate * element_bytes


@triton.jit
def _silu_mul_kernel(gate_up, out, in_stride, out_stride, INTERMEDIATE, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE  # the last block's end
    source = gate_up + row * in_stride + column
    wait_for_inputs(PDL)
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + INTERMEDIATE, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Write SiLU(gate) * up to `out`. Shapes: the module's table; ValueError for any other."""
    check_tensor("out", out, (None, None), FLOATS)
    row_count, intermediate = out.shape
    check_tensor("gate_up", gate_up, (row_count, 2 * intermediate), out.dtype, like=out)
    if out.numel() == 0:
        return
    plan = launch_plan(row_count, intermediate)
    _silu_mul_kernel[plan.grid](
        gate_up, out, gate_up.stride(0), out.stride(0), intermediate,
        BLOCK=plan.block, num_warps=plan.num_warps, **launch_options(out),
    )  # fmt: skip
