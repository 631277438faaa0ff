"""The matrix-vector kernel of `kernels.skinny_linear` with W staged in shared memory: for Hopper, one to four rows.

The arithmetic, the arguments and what may be fused are those of `_matvec_kernel` there. The difference is where W waits
for x: a program copies its rows of W to shared memory asynchronously, before the kernel ahead has finished, and needs
few registers meanwhile. So the programs of several kernels of a decode step fit on the card together (a layer of a
0.6B model is 31 MB, shared memory 30 MB), and memory need not pause between them.

    program p: W[p * BLOCK_N : (p + 1) * BLOCK_N, :] -> shared memory | wait for x | sums within a warp | epilogue

Limits: K a multiple of BLOCK_K, 16-byte rows of W; BLOCK_N a multiple of the warps; what is staged fits shared memory.
No table names it yet: the tuner checks and times it beside
the others, and nothing else chooses it. Called by `kernels.skinny_linear.run_plan`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def _signal(ASSEMBLY: gl.constexpr):
    gl.inline_asm_elementwise(ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _stage(staged, weight, n, k, weight_stride, TILES: gl.constexpr, BLOCK_K: gl.constexpr, FIRST: gl.constexpr):
    """Start copying rows `n` of W to the tiles from FIRST on."""
    rows = weight + n[:, None].to(gl.int64) * weight_stride + k[None, :]
    for tile in gl.static_range(TILES):
        async_copy.async_copy_global_to_shared(staged.index(FIRST + tile), rows + tile * BLOCK_K, cache_modifier=".cg")


@gluon.jit
def _product(staged, z, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Row sums of a staged tile times z, within each warp."""
    return gl.sum(staged.index(TILE).load(LAYOUT).to(gl.float32) * z[None, :], axis=1)


@gluon.jit
def staged_matvec_kernel(
    x, weight, norm_weight, residual, out, N, x_stride, weight_stride, residual_stride, out_stride, eps,
    ROWS: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    HAS_NORM: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SILU_MUL: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    # 1. Locate: a warp holds whole rows, so that sums stay within it. Rows beyond N repeat the last one.
    if PDL:
        _signal("griddepcontrol.launch_dependents; // $0")
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TILES: gl.constexpr = K // BLOCK_K
    HALVES: gl.constexpr = 2 if SILU_MUL else 1
    n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    inside = n < N
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    held = gl.minimum(n, N - 1)
    # 2. Start loading W, which no kernel writes, while the kernel ahead still runs.
    staged = gl.allocate_shared_memory(weight.dtype.element_ty, [TILES * HALVES, BLOCK_N, BLOCK_K], plain)
    _stage(staged, weight, held, k, weight_stride, TILES, BLOCK_K, 0)
    if SILU_MUL:
        _stage(staged, weight, held + N, k, weight_stride, TILES, BLOCK_K, TILES)
    async_copy.commit_group()
    if PDL:
        _signal("griddepcontrol.wait; // $0")
    # 3. One row of x after another against the same W.
    for row in gl.static_range(ROWS):
        y = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, layout))
        y_up = y
        squares = gl.zeros([BLOCK_K], gl.float32, gl.SliceLayout(0, layout))
        if HAS_RESIDUAL:
            added = gl.load(residual + row * residual_stride + n, mask=inside, other=0.0)
        for tile in gl.static_range(TILES):
            z = gl.load(x + row * x_stride + tile * BLOCK_K + k).to(gl.float32)
            if HAS_NORM:
                squares += z * z
                z = z * gl.load(norm_weight + tile * BLOCK_K + k).to(gl.float32)
            if row == 0 and tile == 0:
                async_copy.wait_group(0)
                gl.thread_barrier()
            y += _product(staged, z, tile, layout)
            if SILU_MUL:
                y_up += _product(staged, z, TILES + tile, layout)
        if HAS_NORM:
            scale = gl.rsqrt(gl.sum(squares, axis=0) / K + eps)
            y = y * scale
            y_up = y_up * scale
        # 4. The neighbour's work, then the store.
        if SILU_MUL:
            y = y / (1.0 + gl.exp(-y)) * y_up
        if HAS_RESIDUAL:
            y += added.to(gl.float32)
        gl.store(out + row * out_stride + n, y.to(out.dtype.element_ty), mask=inside)
