"""Products of 9 to 256 rows on Hopper: W waits in shared memory before the rows of x exist, and sums leave in parts.

    parts[s, m, n] = sum over the s-th share of k of x[m, k] * weight[n, k]        float32, S shares; or, with silu_mul,
    out[m, n]      = SiLU(y[m, n]) * y[m, N/2 + n]                                  y = x W^T, one share

A decode step is a chain of products, each waiting for the one before. So a program asks the tensor copy engine for its
tile of W first, waits for the kernel ahead only then, and streams x through a ring of stages into the tensor cores. A
product with few outputs fills the card only if K is split as well; its parts are added up by the kernel that reads them
(`rms_norm`, `qk_norm_rope_store`), which costs less than a second meeting of the programs here, and the order of the
sum is always the same.

| tensor | axes                      | dtype               | notes                                                  |
|--------|---------------------------|---------------------|--------------------------------------------------------|
| x      | [M, K]                    | bfloat16 or float16 | rows of 16-byte multiples; K a multiple of 64 and S    |
| weight | [N, K]                    | as x                | as x; rows [0, N/2) are gate, the others up (silu_mul) |
| out    | [S, M, N], or [M, N/2]    | float32, or any     | last axis 1                                            |

Rows are independent. Limits: compute capability 9, Triton 3.6. Called by `kernels.skinny_linear` alone, whose reference
it is checked against.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.launch import HOPPER_SHARED_BYTES
from kernels.launch_gluon import let_next_start, wait_for_inputs
from kernels.tuning import LinearPlan

PANEL = 64  # columns of a copied box: 128 bytes, what the tensor cores' swizzle spans


@gluon.jit
def _ask(desc, row, panel, full, box, pred, BYTES: gl.constexpr):
    """Ask the copy engine for a box: panels of 64 columns of some rows."""
    mbarrier.expect(full, BYTES, pred=pred)
    tma.async_copy_global_to_shared(desc, [panel, row, 0], full, box, pred=pred)


@gluon.jit
def _ask_weights(desc, first_n, panel, N, full, boxes, stage, pred, BYTES: gl.constexpr, HALVES: gl.constexpr):
    """The same of W; with two halves, of gate's rows and of up's, on one barrier."""
    mbarrier.expect(full, BYTES * HALVES, pred=pred)
    for half in gl.static_range(HALVES):
        box = boxes.index(stage * HALVES + half)
        tma.async_copy_global_to_shared(desc, [panel, first_n + half * N, 0], full, box, pred=pred)


@gluon.jit(do_not_specialize=["M"])
def _resident_kernel(
    x_desc, weight_desc, out, M, N, part_stride, row_stride,
    STEPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PANELS: gl.constexpr, W_PANELS: gl.constexpr,
    X_STAGES: gl.constexpr, W_STAGES: gl.constexpr, SILU_MUL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # 1. Locate: BLOCK_N outputs of BLOCK_M rows, over STEPS times PANELS panels of K.
    let_next_start(PDL)
    dtype: gl.constexpr = weight_desc.dtype
    HALVES: gl.constexpr = 2 if SILU_MUL else 1
    X_BYTES: gl.constexpr = PANELS * BLOCK_M * 128
    W_BYTES: gl.constexpr = W_PANELS * BLOCK_N * 128
    W_STEPS: gl.constexpr = W_PANELS // PANELS
    first_n = gl.program_id(0) * BLOCK_N
    first_panel = gl.program_id(1) * (STEPS * PANELS)
    first_m = gl.program_id(2) * BLOCK_M
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    cube: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    weights = gl.allocate_shared_memory(dtype, [W_STAGES * HALVES * W_PANELS, BLOCK_N, 64], shared)
    rows = gl.allocate_shared_memory(dtype, [X_STAGES * PANELS, BLOCK_M, 64], shared)
    weight_boxes = weights._reinterpret(dtype, [W_STAGES * HALVES, W_PANELS, BLOCK_N, 64], cube)
    row_boxes = rows._reinterpret(dtype, [X_STAGES, PANELS, BLOCK_M, 64], cube)
    weight_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], bars)
    row_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], bars)
    for stage in gl.static_range(W_STAGES):
        mbarrier.init(weight_full.index(stage), count=1)
    for stage in gl.static_range(X_STAGES):
        mbarrier.init(row_full.index(stage), count=1)
    # 2. W, which no kernel writes, while the kernel ahead still runs; x after it.
    for stage in gl.static_range(W_STAGES):
        _ask_weights(weight_desc, first_n, first_panel + stage * W_PANELS, N, weight_full.index(stage), weight_boxes,
                     stage, True, W_BYTES, HALVES)  # fmt: skip
    wait_for_inputs(PDL)
    for stage in gl.static_range(X_STAGES):
        _ask(
            x_desc, first_m, first_panel + stage * PANELS, row_full.index(stage), row_boxes.index(stage), True, X_BYTES
        )
    # 3. Multiply step by step; a stage is filled again when the step that read it has finished.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    total_up = total
    for step in range(STEPS):
        w_step = step // W_STEPS
        w_stage = w_step % W_STAGES
        x_stage = step % X_STAGES
        mbarrier.wait(weight_full.index(w_stage), (w_step // W_STAGES) & 1)
        mbarrier.wait(row_full.index(x_stage), (step // X_STAGES) & 1)
        for panel in gl.static_range(PANELS):
            z = rows.index(x_stage * PANELS + panel)
            place = w_stage * HALVES * W_PANELS + (step % W_STEPS) * PANELS + panel
            total = warpgroup_mma(z, weights.index(place).permute((1, 0)), total, is_async=True)
            if SILU_MUL:
                up = weights.index(place + W_PANELS)
                total_up = warpgroup_mma(z, up.permute((1, 0)), total_up, is_async=True)
        if SILU_MUL:
            total, total_up = warpgroup_mma_wait(num_outstanding=PANELS * HALVES, deps=(total, total_up))
        else:
            total = warpgroup_mma_wait(num_outstanding=PANELS, deps=(total,))
        if X_STAGES < STEPS:
            ahead = step - 1 + X_STAGES
            x_free = ahead % X_STAGES
            wanted = (step > 0) & (ahead < STEPS)
            _ask(x_desc, first_m, first_panel + ahead * PANELS, row_full.index(x_free), row_boxes.index(x_free),
                 wanted, X_BYTES)  # fmt: skip
        if W_STAGES * W_STEPS < STEPS:
            ahead = step - 1 + W_STAGES
            w_free = ahead % W_STAGES
            wanted = (step > 0) & (ahead < STEPS)
            _ask_weights(weight_desc, first_n, first_panel + ahead * W_PANELS, N, weight_full.index(w_free),
                         weight_boxes, w_free, wanted, W_BYTES, HALVES)  # fmt: skip
    # 4. The neighbour's work, then the store; edges: rows beyond the batch, outputs beyond N.
    if SILU_MUL:
        total, total_up = warpgroup_mma_wait(num_outstanding=0, deps=(total, total_up))
        total = total / (1.0 + gl.exp(-total)) * total_up
    else:
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    m = first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    place = out + gl.program_id(1).to(gl.int64) * part_stride
    place = place + m.to(gl.int64)[:, None] * row_stride + n[None, :]
    gl.store(place, total.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def shared_bytes(plan: LinearPlan, inputs: int, silu_mul: bool) -> int:
    """Shared memory of a program, barriers left out."""
    steps = inputs // plan.block_k // plan.split_k
    weight_steps = min(plan.weight_stages or steps, steps)
    rows = min(plan.num_stages, steps) * plan.block_m + weight_steps * plan.block_n * (2 if silu_mul else 1)
    return rows * plan.block_k * 2


def fits(plan: LinearPlan, inputs: int, silu_mul: bool) -> bool:
    """Whether K divides into the plan's steps, and its program fits on a multiprocessor."""
    panels = inputs // plan.split_k // PANEL
    whole = inputs % (plan.block_k * plan.split_k) == 0 and plan.block_k % PANEL == 0
    is_box = plan.weight_stages > 0 or (panels <= 256 and panels & (panels - 1) == 0)
    return whole and is_box and shared_bytes(plan, inputs, silu_mul) <= HOPPER_SHARED_BYTES - 512


def _descriptor(tensor: torch.Tensor, panels: int, rows: int) -> TensorDescriptor:
    """Boxes of `rows` rows of `panels` panels; a box lies in memory panel by panel."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    row_count, columns = tensor.shape
    shape, strides = [columns // PANEL, row_count, PANEL], [PANEL, tensor.stride(0), 1]
    return TensorDescriptor(tensor, shape, strides, [panels, rows, PANEL], layout)


def launch(
    plan: LinearPlan, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, silu_mul: bool, pdl: bool
) -> None:
    """Launch on arguments that `kernels.skinny_linear` has checked; `out` is [S, M, N] or, with silu_mul, [M, N/2]."""
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    steps = inputs // plan.block_k // plan.split_k
    panels = plan.block_k // PANEL
    weight_panels = panels if plan.weight_stages else steps * panels
    grid = (triton.cdiv(outputs, plan.block_n), plan.split_k, triton.cdiv(rows, plan.block_m))
    _resident_kernel[grid](
        _descriptor(x, panels, plan.block_m), _descriptor(weight, weight_panels, plan.block_n), out, rows, outputs,
        out.stride(0) if out.dim() == 3 else 0, out.stride(-2),
        STEPS=steps, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, PANELS=panels, W_PANELS=weight_panels,
        X_STAGES=min(plan.num_stages, steps), W_STAGES=min(plan.weight_stages, steps) if plan.weight_stages else 1,
        SILU_MUL=silu_mul, PDL=pdl, num_warps=plan.num_warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
