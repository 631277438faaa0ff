"""Products of up to 128 rows on Hopper in equal shares: as many programs as fit at once, each with as many steps of W.

    parts[s, m, n] = sum over the s-th share of k of x[m, k] * weight[n, k]        float32, S parts; or one whole
    out[m, n]      = y[m, n], or SiLU(y[m, n]) * y[m, N/2 + n]                     y = x W^T

The work is a row of steps, tile of outputs after tile, and each program takes an equal stretch of it [1], wherever in a
tile that begins or ends: no multiprocessor reads more of W than another, and W comes without a pause between tiles. A
program that needs less than half of a multiprocessor's shared memory leaves room for one of the product behind, whose
first tiles then arrive while this one still computes.

A tile that several programs share is left in parts, which the kernel that reads them adds up; a tile that fewer share
than most has zeros in their place. Where the result is to be whole, a program has at least a tile's work, so that a
tile has two programs at most: the one with its end has it first in its stretch and leaves the sums in the workspace,
the one with its beginning has it last and adds them. That one is launched later, so it waits for nobody that may not
have started. Either way the order of a sum is always the same.

| tensor   | axes                         | dtype               | notes                                              |
|----------|------------------------------|---------------------|----------------------------------------------------|
| x        | [M, K]                       | bfloat16 or float16 | rows of 16-byte multiples; K a multiple of block_k |
| weight   | [N, K]                       | as x                | as x; rows [0, N/2) gate, the others up (silu_mul) |
| out      | [S, M, N], [M, N], [M, N/2]  | float32, or any     | last axis 1                                        |
| partials | [programs, halves, M, block] | float32             | only for a whole result; block_n outputs           |
| flags    | [programs]                   | int32               | zero between launches                              |

Limits: compute capability 9, Triton 3.6, M at most the plan's block_m. Called by `kernels.skinny_linear` alone, whose
reference it is checked against.

Sources: 1. M. Osama, D. Merrill, C. Cecka, M. Garland, J. D. Owens, "Stream-K: Work-centric Parallel Decomposition for
Dense Matrix-Matrix Multiplication on the GPU", 2023.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.decode_warp import block_barrier
from kernels.launch import HOPPER_SHARED_BYTES
from kernels.launch_gluon import let_next_start, wait_for_inputs
from kernels.skinny_linear_hopper import PANEL, ask_box, ask_weights, descriptor
from kernels.tuning import LinearPlan


@gluon.jit
def _ask_step(
    desc, ahead, first, count, wanted, N, full, boxes,
    STEPS: gl.constexpr, PANELS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Ask for W of the stretch's step `ahead`, if it has one."""
    stage = ahead % STAGES
    tile = (first + ahead) // STEPS
    panel = (first + ahead) % STEPS * PANELS
    wanted = wanted & (ahead < count)
    BYTES: gl.constexpr = PANELS * BLOCK_N * 128
    ask_weights(desc, tile * BLOCK_N, panel, N, full.index(stage), boxes, stage, wanted, BYTES, HALVES)


@gluon.jit
def _leave(partials, flags, total, total_up, work, place, inside, SIZE, SILU_MUL: gl.constexpr):
    """Leave a tile's end to the program that has its beginning."""
    HALVES: gl.constexpr = 2 if SILU_MUL else 1
    mine = partials + work * HALVES * SIZE + place
    gl.store(mine, total, mask=inside)
    if SILU_MUL:
        gl.store(mine + SIZE, total_up, mask=inside)
    block_barrier()  # all threads' sums are written before the flag says so
    gl.atomic_add(flags + work, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def _collect(partials, flags, total, total_up, other, place, inside, SIZE, SILU_MUL: gl.constexpr):
    """Wait for what program `other` leaves, which started earlier, and add it; its flag is zero again."""
    HALVES: gl.constexpr = 2 if SILU_MUL else 1
    arrived = gl.atomic_add(flags + other, 0, sem="acq_rel", scope="gpu")
    while arrived == 0:
        arrived = gl.atomic_add(flags + other, 0, sem="acq_rel", scope="gpu")
    block_barrier()
    theirs = partials + other * HALVES * SIZE + place
    total = total + gl.load(theirs, mask=inside, other=0.0, cache_modifier=".cg")
    if SILU_MUL:
        total_up = total_up + gl.load(theirs + SIZE, mask=inside, other=0.0, cache_modifier=".cg")
    gl.store(flags + other, 0)
    return total, total_up


@gluon.jit(do_not_specialize=["M"])
def _stream_kernel(
    x_desc, weight_desc, out, partials, flags, M, N, part_stride, row_stride,
    STEPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PANELS: gl.constexpr, X_STAGES: gl.constexpr,
    W_STAGES: gl.constexpr, PARTS: gl.constexpr, SILU_MUL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # 1. Locate: `count` steps from step `first` on; the last stretch is the first program's.
    let_next_start(PDL)
    dtype: gl.constexpr = weight_desc.dtype
    HALVES: gl.constexpr = 2 if SILU_MUL else 1
    X_BYTES: gl.constexpr = PANELS * BLOCK_M * 128
    programs = gl.num_programs(0)
    work = programs - 1 - gl.program_id(0)
    units = (N + BLOCK_N - 1) // BLOCK_N * STEPS
    first = work * units // programs
    count = (work + 1) * units // programs - first
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    cube: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    weights = gl.allocate_shared_memory(dtype, [W_STAGES * HALVES * PANELS, BLOCK_N, 64], shared)
    rows = gl.allocate_shared_memory(dtype, [X_STAGES * PANELS, BLOCK_M, 64], shared)
    weight_boxes = weights._reinterpret(dtype, [W_STAGES * HALVES, PANELS, BLOCK_N, 64], cube)
    row_boxes = rows._reinterpret(dtype, [X_STAGES, PANELS, BLOCK_M, 64], cube)
    weight_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], bars)
    row_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], bars)
    for stage in gl.static_range(W_STAGES):
        mbarrier.init(weight_full.index(stage), count=1)
    for stage in gl.static_range(X_STAGES):
        mbarrier.init(row_full.index(stage), count=1)
    # 2. W, which no kernel writes, while the kernel ahead still runs; x after it.
    for stage in gl.static_range(W_STAGES):
        _ask_step(weight_desc, stage, first, count, True, N, weight_full, weight_boxes,
                  STEPS, PANELS, BLOCK_N, W_STAGES, HALVES)  # fmt: skip
    wait_for_inputs(PDL)
    for stage in gl.static_range(X_STAGES):
        ask_box(x_desc, 0, (first + stage) % STEPS * PANELS, row_full.index(stage), row_boxes.index(stage),
             stage < count, X_BYTES)  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    first_tile = first // STEPS
    for tile in range(first_tile, (first + count - 1) // STEPS + 1):
        # 3. Multiply step by step; a stage is filled again when the step that read it has finished.
        begin = gl.maximum(first - tile * STEPS, 0)
        end = gl.minimum(first + count - tile * STEPS, STEPS)
        total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
        total_up = total
        for step in range(begin, end):
            place = tile * STEPS + step - first
            w_stage = place % W_STAGES
            x_stage = place % X_STAGES
            mbarrier.wait(weight_full.index(w_stage), (place // W_STAGES) & 1)
            mbarrier.wait(row_full.index(x_stage), (place // X_STAGES) & 1)
            for panel in gl.static_range(PANELS):
                z = rows.index(x_stage * PANELS + panel)
                gate = weights.index(w_stage * HALVES * PANELS + panel)
                total = warpgroup_mma(z, gate.permute((1, 0)), total, is_async=True)
                if SILU_MUL:
                    up = weights.index(w_stage * HALVES * PANELS + panel + PANELS)
                    total_up = warpgroup_mma(z, up.permute((1, 0)), total_up, is_async=True)
            if SILU_MUL:
                total, total_up = warpgroup_mma_wait(num_outstanding=PANELS * HALVES, deps=(total, total_up))
            else:
                total = warpgroup_mma_wait(num_outstanding=PANELS, deps=(total,))
            ahead = place - 1 + X_STAGES
            x_free = ahead % X_STAGES
            ask_box(x_desc, 0, (first + ahead) % STEPS * PANELS, row_full.index(x_free), row_boxes.index(x_free),
                 (place > 0) & (ahead < count), X_BYTES)  # fmt: skip
            _ask_step(weight_desc, place - 1 + W_STAGES, first, count, place > 0, N, weight_full, weight_boxes,
                      STEPS, PANELS, BLOCK_N, W_STAGES, HALVES)  # fmt: skip
        if SILU_MUL:
            total, total_up = warpgroup_mma_wait(num_outstanding=0, deps=(total, total_up))
        else:
            total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        # 4. Store; edges: rows beyond the batch, outputs beyond N.
        n = tile * BLOCK_N + columns
        inside = (m[:, None] < M) & (n[None, :] < N)
        target = out + m.to(gl.int64)[:, None] * row_stride + n[None, :]
        if PARTS > 0:
            part = work - ((tile * STEPS + 1) * programs - 1) // units  # programs with earlier steps of the tile
            gl.store(target + part.to(gl.int64) * part_stride, total, mask=inside)
            if end == STEPS:
                nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
                for missing in range(part + 1, PARTS):
                    gl.store(target + missing.to(gl.int64) * part_stride, nothing, mask=inside)
        else:
            slot = m[:, None] * BLOCK_N + columns[None, :]
            is_row = (m[:, None] < M) & (columns[None, :] < BLOCK_N)
            if begin > 0:
                _leave(partials, flags, total, total_up, work, slot, is_row, M * BLOCK_N, SILU_MUL)
            else:
                if end < STEPS:
                    total, total_up = _collect(
                        partials, flags, total, total_up, work + 1, slot, is_row, M * BLOCK_N, SILU_MUL
                    )
                if SILU_MUL:
                    total = total / (1.0 + gl.exp(-total)) * total_up
                gl.store(target, total.to(out.dtype.element_ty), mask=inside)


def shared_bytes(plan: LinearPlan, silu_mul: bool) -> int:
    """Shared memory of a program, barriers left out."""
    weight_rows = plan.weight_stages * plan.block_n * (2 if silu_mul else 1)
    return (plan.num_stages * plan.block_m + weight_rows) * plan.block_k * 2


def fits(plan: LinearPlan, outputs: int, inputs: int, silu_mul: bool, in_parts: bool) -> bool:
    """Whether K divides into the plan's steps, its program fits on a multiprocessor, and a whole result's tiles have
    two programs at most. `outputs` counts the result's columns."""
    tiles = triton.cdiv(outputs, plan.block_n)
    enough = tiles * (inputs // plan.block_k) if in_parts else tiles
    whole = inputs % plan.block_k == 0 and plan.block_k % PANEL == 0
    return whole and plan.programs <= enough and shared_bytes(plan, silu_mul) <= HOPPER_SHARED_BYTES - 512


def launch(
    plan: LinearPlan, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, partials: torch.Tensor,
    flags: torch.Tensor, silu_mul: bool, pdl: bool,
) -> None:  # fmt: skip
    """Launch on arguments that `kernels.skinny_linear` has checked; `out` is [S, M, N], or whole as the table has it.

    Raises ValueError for more rows than the plan's tile has, or too small a workspace.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    in_parts = out.dim() == 3
    needed = 0 if in_parts else plan.programs * rows * plan.block_n * (2 if silu_mul else 1)
    if rows > plan.block_m or partials.numel() < needed or flags.numel() < plan.programs:
        raise ValueError(
            f"x and workspace: wanted at most {plan.block_m} rows, {needed} partial sums and {plan.programs} counters, "
            f"got {rows}, {partials.numel()} and {flags.numel()}"
        )
    panels = plan.block_k // PANEL
    _stream_kernel[(plan.programs,)](
        descriptor(x, panels, plan.block_m), descriptor(weight, panels, plan.block_n), out, partials, flags, rows,
        outputs, out.stride(0) if in_parts else 0, out.stride(-2),
        STEPS=inputs // plan.block_k, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, PANELS=panels,
        X_STAGES=plan.num_stages, W_STAGES=plan.weight_stages, PARTS=out.shape[0] if in_parts else 0,
        SILU_MUL=silu_mul, PDL=pdl, num_warps=plan.num_warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
