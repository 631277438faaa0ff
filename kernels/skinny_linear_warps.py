"""Products of 1 to 16 rows on Hopper: W waits in registers as the tensor cores' operand, K is shared among warps.

    out[m, n] = y[m, n]  |  residual[m, n] + y[m, n]  |  SiLU(y[m, n]) * y[m, N/2 + n]        y = norm(x) W^T

What `kernels/skinny_linear.py` computes, for so few rows that a product's time is that of its longest chain of waits:
for the kernel ahead, for x, for the sums. A program has `block_n` rows of W. Each of its warps takes another stretch of
K and holds it from before the kernel ahead has ended, in the places where the tensor cores want it: a lane's eight
neighbouring elements, 16 bytes in one load, are four of one instruction's k and four of the next one's. x is read in
the same order, so that nothing is exchanged between lanes. W is the left operand, 16 of its rows, and x the right one,
8 of its rows. The warps' sums meet once, in shared memory.

The norm costs no meeting of its own: its weight is multiplied into x as pairs, and the sum of a row's squares is the
diagonal of x times itself, by one instruction more on the same registers (a right operand's are those of half a left
one). In float16 the products of pairs may be too large or too small, so there `kernels.tuning` has the norm apart.

x may also be one row of attention that was left in parts: kernels/attention_parts.py.

| tensor          | axes                | dtype               | notes                                              |
|-----------------|---------------------|---------------------|----------------------------------------------------|
| x               | [M, K]              | bfloat16 or float16 | M <= 16; K a multiple of `block_k` times the warps |
| weight          | [N, K]              | as x                | with silu_mul rows [0, N/2) are gate, the rest up  |
| norm_weight     | [K]                 | as x                | x times it stays in the dtype's range              |
| residual, out   | [M, N], or [M, N/2] | any float           | last axis 1; out may be the residual               |

Measured on an H200, the four products of Qwen3-0.6B's 28 layers in a row, us: 326 with one row, 319 with 2, 338 with 8,
473 with 16; by the kernels of `kernels/skinny_linear.py` 341, 434, 477 and 499 (docs/log.md, 2026-11-30).
`python -m benchmarks.kernels.bench_skinny_linear` measures such chains.

Limits: compute capability 9, Triton 3.6; `fits`. Called by `kernels.skinny_linear` alone, whose reference it is checked
against.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from kernels.attention_parts import PARTS_AT_A_TIME, merged_row, part_count_of
from kernels.decode_warp import block_barrier
from kernels.fused_decode_attention import AttentionParts
from kernels.launch_gluon import let_next_start, wait_for_inputs
from kernels.tuning import WARPS_MOST_ROWS as MAX_ROWS
from kernels.tuning import LinearPlan

LANE_ELEMENTS = 8  # neighbouring elements of W or x in a lane: 16 bytes
FEWEST_COLUMNS = 4 * LANE_ELEMENTS  # of K, which a warp's instruction spans
MOST_WEIGHT_REGISTERS = 160  # of a thread, of 255


@gluon.jit
def _times(x, gain):
    """Products of pairs, rounded once."""
    if x.dtype == gl.bfloat16:
        product = gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, gain], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        product = gl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, gain], dtype=gl.float16, is_pure=True, pack=2
        )
    return product


@gluon.jit
def _twice(rows):
    """[W, 8, K] as [W, 16, K]: each row once more, in the same registers."""
    doubled = gl.permute(gl.join(rows, rows), (0, 3, 1, 2))
    return gl.reshape(doubled, [rows.shape[0], 16, rows.shape[2]])


@gluon.jit(do_not_specialize=["M"])
def _warps_kernel(
    x, weight, norm_weight, residual, out, M, N, x_stride, weight_stride, residual_stride, out_stride, eps,
    statistics_ptr, slots_ptr, lengths_ptr,
    K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, ROWS: gl.constexpr, HAS_NORM: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SILU_MUL: gl.constexpr, WHOLE: gl.constexpr, PDL: gl.constexpr,
    SPLITS: gl.constexpr, TILE: gl.constexpr, HEAD_ROWS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    # 1. Locate: BLOCK_N rows of W, with SILU_MUL half of them gate's and half up's; a warp has every WARPS-th BLOCK_K
    # columns.
    let_next_start(PDL)
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = K // (BLOCK_K * WARPS)
    OUTPUTS: gl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    first_output = gl.program_id(0) * OUTPUTS
    w_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))[:, None, None]
    w_row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :, None]
    w_column = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, None, :]
    output = first_output + w_row % OUTPUTS
    is_output = output < N
    if SILU_MUL:
        output = output + gl.where(w_row >= OUTPUTS, N, 0)
    x_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))[:, None, None]
    x_column = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))[None, :, None]
    x_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))[None, None, :]
    x_row = gl.minimum(x_row, M - 1)  # edge: rows past the batch repeat its last one and are not stored
    # 2. Load W and the norm's weight, which no kernel writes, while the kernel ahead still runs.
    w_place = weight + output.to(gl.int64) * weight_stride + (w_warp * BLOCK_K + w_column)
    x_place = x_warp * BLOCK_K + x_column
    tiles = ()
    gains = ()
    for step in gl.static_range(STEPS):
        first_column = step * (BLOCK_K * WARPS)
        if WHOLE:
            tiles += (gl.load(w_place + first_column, eviction_policy="evict_first"),)
        else:
            tiles += (gl.load(w_place + first_column, mask=is_output, other=0.0, eviction_policy="evict_first"),)
        if HAS_NORM:
            gains += (gl.load(norm_weight + x_place + first_column),)
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_N, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    squares = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    OUTPUT_LANES: gl.constexpr = min(OUTPUTS, 32)
    result: gl.constexpr = gl.BlockedLayout([1, 1], [OUTPUT_LANES, 32 // OUTPUT_LANES], [1, WARPS], [0, 1])
    n = first_output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, result))[:, None]
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, result))[None, :]
    is_result = (n < N) & (m < M)
    if SPLITS > 0:
        part_count = part_count_of(slots_ptr, lengths_ptr, SPLITS, TILE)
        merged = gl.allocate_shared_memory(
            weight.dtype.element_ty, [STEPS, WARPS, BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    wait_for_inputs(PDL)
    # 3. All that the kernels ahead have made is asked for at once, then multiplied; sums of steps do not wait for one
    # another.
    if HAS_RESIDUAL:
        added = gl.load(residual + m * residual_stride + n, mask=is_result, other=0.0)
    rows = ()
    if SPLITS > 0:
        HEADS: gl.constexpr = K // HEAD_DIM
        row = merged_row(
            x, statistics_ptr, part_count, weight.dtype.element_ty, SPLITS, HEAD_ROWS, HEADS, KV_HEADS, HEAD_DIM,
            PARTS_AT_A_TIME,
        )  # fmt: skip
        merged._reinterpret(weight.dtype.element_ty, [HEADS, HEAD_DIM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(
            row
        )
        block_barrier()
        zero_rows = gl.zeros([WARPS, BLOCK_K, ROWS], weight.dtype.element_ty, right)
        for step in gl.static_range(STEPS):
            columns = merged.index(step).load(gl.SliceLayout(2, right))
            columns, _ = gl.broadcast(gl.expand_dims(columns, 2), zero_rows)
            rows += (columns,)
    else:
        for step in gl.static_range(STEPS):
            rows += (gl.load(x + x_row * x_stride + (x_place + step * (BLOCK_K * WARPS))),)
    zeros = gl.zeros([WARPS, BLOCK_N, ROWS], gl.float32, mma)
    total = zeros
    crossed = gl.zeros([WARPS, 16, ROWS], gl.float32, mma)
    for step in gl.static_range(STEPS):
        z = rows[step]
        if HAS_NORM:
            across = gl.permute(z, (0, 2, 1))
            if ROWS == 8:
                across = _twice(across)
            crossed = mma_v2(gl.convert_layout(across, left), z, crossed)
            z, gain = gl.broadcast(z, gains[step])
            z = _times(z, gain)
        total = total + mma_v2(tiles[step], z, zeros)
    # 4. The warps' sums meet.
    sums.store(total)
    if HAS_NORM:
        first = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
        second = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
        squares.store(gl.sum(gl.where(first == second, crossed, 0.0), axis=1))
    block_barrier()
    sums = sums._reinterpret(gl.float32, [WARPS, BLOCK_N, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    y = gl.zeros([OUTPUTS, ROWS], gl.float32, result)
    up = y
    for warp in gl.static_range(WARPS):
        if SILU_MUL:
            y = y + sums.index(warp).slice(0, OUTPUTS, 0).load(result)
            up = up + sums.index(warp).slice(OUTPUTS, OUTPUTS, 0).load(result)
        else:
            y = y + sums.index(warp).load(result)
    # 5. The neighbours' work, then the store.
    if HAS_NORM:
        squares = squares._reinterpret(gl.float32, [WARPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        square = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, result))
        for warp in gl.static_range(WARPS):
            square = square + squares.index(warp).load(gl.SliceLayout(0, result))
        scale = gl.rsqrt(square / K + eps)[None, :]
        y = y * scale
        up = up * scale
    if SILU_MUL:
        y = y / (1.0 + gl.exp(-y)) * up
    if HAS_RESIDUAL:
        y = y + added.to(gl.float32)
    gl.store(out + m * out_stride + n, y.to(out.dtype.element_ty), mask=is_result)


def fits(plan: LinearPlan, inputs: int) -> bool:
    """Whether K divides into the plan's steps, and W into its registers."""
    is_whole = inputs % (plan.block_k * plan.num_warps) == 0 and plan.block_k % FEWEST_COLUMNS == 0
    return is_whole and plan.block_n * inputs // (64 * plan.num_warps) <= MOST_WEIGHT_REGISTERS


def launch(
    plan: LinearPlan, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, norm_weight: torch.Tensor | None,
    eps: float, residual: torch.Tensor | None, silu_mul: bool, pdl: bool,
) -> None:  # fmt: skip
    """Launch on arguments that `kernels.skinny_linear` has checked."""
    _launch(plan, x, None, weight, out, norm_weight, eps, residual, silu_mul, pdl)


def launch_on_parts(
    plan: LinearPlan, parts: AttentionParts, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor, pdl: bool
) -> None:
    """The same of one row of attention that was left in parts, with a residual."""
    _launch(plan, parts.parts.view(1, -1), parts, weight, out, None, 0.0, residual, False, pdl)


def _launch(
    plan: LinearPlan, x: torch.Tensor, parts: AttentionParts | None, weight: torch.Tensor, out: torch.Tensor,
    norm_weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None, silu_mul: bool, pdl: bool,
) -> None:  # fmt: skip
    (rows, outputs), inputs = out.shape, weight.shape[1]
    assert rows <= MAX_ROWS and fits(plan, inputs), f"{rows} rows of {inputs} columns are not for {plan}"
    columns = plan.block_n // 2 if silu_mul else plan.block_n
    added = out if residual is None else residual
    gain = weight if norm_weight is None else norm_weight
    strides = (x.stride(0), weight.stride(0), added.stride(0), out.stride(0))
    _warps_kernel[(triton.cdiv(outputs, columns),)](
        x, weight, gain, added, out, rows, outputs, *strides, eps,
        *((x, x, x) if parts is None else (parts.statistics, parts.row_slots, parts.context_lengths)),
        K=inputs, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, ROWS=8 if rows <= 8 else 16,
        HAS_NORM=norm_weight is not None, HAS_RESIDUAL=residual is not None, SILU_MUL=silu_mul,
        WHOLE=outputs % columns == 0, PDL=pdl, num_warps=plan.num_warps, **({"launch_pdl": True} if pdl else {}),
        SPLITS=parts.splits if parts else 0, TILE=parts.tile if parts else 0,
        HEAD_ROWS=parts.head_rows if parts else 0, KV_HEADS=parts.kv_heads if parts else 0,
        HEAD_DIM=parts.head_dim if parts else 0,
        **({"maxnreg": plan.max_registers} if plan.max_registers else {}),
    )  # fmt: skip
