"""Matrix products for decode, y = x W^T with 1 to 256 rows of x, with the neighbouring elementwise work inside.

    z         = x / sqrt(mean(x^2) + eps) * norm_weight          with a norm weight; else z = x; float32
    y[m, n]   = sum_k z[m, k] * weight[n, k]                     accumulated in float32
    out       = y                                                plain
              | residual + y                                     with a residual; out may be the residual itself
              | SiLU(y[:, :N/2]) * y[:, N/2:]                    with silu_mul

At these sizes the time is that of reading W once, so a kernel is judged by bytes of W a second. Two kernels do it.
`_matvec_kernel` keeps a block of W's rows in registers, loaded before the kernel ahead has finished, and multiplies one
row of x after another; `_small_m_kernel` uses the tensor cores, and splits K over programs where N is small. Hopper has
three more: `skinny_linear_warps.py` for up to 16 rows, `skinny_linear_hopper.py` for up to 256, and for the rows of
prompts, where arithmetic is what takes the time, `gemm.py`. Which one, and with what tile, comes from a table measured
on the card, or from a rule (`kernels/tuning`); a shape that the library does faster goes there.

| tensor      | axes                           | dtype     | strides     |
|-------------|--------------------------------|-----------|-------------|
| x           | [M, K]                         | any float | last axis 1 |
| weight      | [N, K]                         | as x      | last axis 1 |
| norm_weight | [K]                            | any float | 1           |
| residual    | [M, N]                         | as out    | last axis 1 |
| out         | [M, N], or [M, N/2] (silu_mul) | any float | last axis 1 |

"Any float" is bfloat16, float16 or float32. Every row is independent, so padding rows hold anything. M may be 0; above
256 rows it is `gemm.py` or the library.

Measured on an H200 at commit a3503ac by `python -m benchmarks.kernels.bench_skinny_linear`: the four products of
Qwen3-0.6B's 28 layers in a row take 337 us with one row (2.6 TB/s, 58 % of the read limit of that run), 484 with 2,
565 with 4, 580 with 8, 594 with 16, 822 with 32 and 800 with 64; by the library 1110, 1039, 1029, 931, 948, 972 and
999. The lm_head takes 71 us with one row (4.4 TB/s, 98 %) and 91 with 64; by the library 85 and 121. In parts, with the
kernels that read them, a layer takes 17.6 us with 16 rows, 21.4 with 64, 26.4 with 128 and 34.6 with 256 at commit
cf6694d, by the library 35.5, 37.4 and 41.9 from 64 rows on. Since then up to 16 rows have become
skinny_linear_warps.py's there, which has its own figures.
"""

import torch
import triton
import triton.language as tl

from kernels.checks import FLOATS, check_tensor, copies_boxes
from kernels.fused_decode_attention import AttentionParts
from kernels.gemm import gemm
from kernels.launch import launch_options, let_next_start, prefetch, prefetch_share, wait_for_inputs
from kernels.linear_workspace import COUNTERS, FEWEST_TILE_ROWS, Workspace, plan_key
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul as silu_mul_rows
from kernels.tuning import LIBRARY, LinearPlan, measured_plan, operation_key


def skinny_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
) -> torch.Tensor:
    """The product and its neighbours in float32, not rounded."""
    z = x.float()
    if norm_weight is not None:
        z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    y = z @ weight.float().T
    if silu_mul:
        gate, up = y.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.float()


def bytes_moved(rows: int, outputs: int, inputs: int, element_bytes: int) -> int:
    """The fewest bytes that the product reads and writes: W once, x and y once."""
    return element_bytes * (outputs * inputs + rows * (inputs + outputs))


def tile_rows(rows: int) -> int:
    """Rows of the one tile that holds all rows of x."""
    return max(triton.next_power_of_2(rows), FEWEST_TILE_ROWS)


def split_floats(plan: LinearPlan, rows: int, outputs: int, silu_mul: bool) -> int:
    """Elements of `Workspace.partials` that a product of `outputs` result columns takes, its programs meeting again."""
    halves = 2 if silu_mul else 1
    return triton.cdiv(outputs, plan.block_n) * plan.split_k * tile_rows(rows) * (plan.block_n * halves + 1)


@triton.jit
def _weight_tile(weight, n, k0, N, weight_stride, K: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr):
    """Rows `n` of W, BLOCK_K columns from `k0`; zeros beyond either edge. Tiles are aligned to spans of SPAN columns.

    W is read once, so it need not stay in cache.
    """
    k = k0 + tl.arange(0, BLOCK_K)
    inside = n[:, None] < N
    if K % SPAN != 0:
        inside = inside & (k[None, :] < K)  # the row's end
    place = weight + n[:, None].to(tl.int64) * weight_stride + k[None, :]
    return tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector(pointer, k0, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """BLOCK_K elements of a vector of K from `k0` on, float32; zeros beyond its end."""
    k = k0 + tl.arange(0, BLOCK_K)
    if K % BLOCK_K == 0:
        return tl.load(pointer + k).to(tl.float32)
    return tl.load(pointer + k, mask=k < K, other=0.0).to(tl.float32)


@triton.jit
def _silu(x):
    """x * sigmoid(x); kernels/silu_mul.py has the source."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _matvec_kernel(
    x, weight, norm_weight, residual, out, upcoming, upcoming_bytes,
    N, x_stride, weight_stride, residual_stride, out_stride, eps,
    ROWS: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SILU_MUL: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # 1. Locate: BLOCK_N outputs; with SILU_MUL also as many rows of `up`, N below those of `gate`.
    let_next_start(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # 2. Load W and the norm's weight, which no kernel writes, while the kernel ahead still runs.
    tiles = ()
    ups = ()
    scales = ()
    for tile in tl.static_range(TILES):
        tiles = tiles + (_weight_tile(weight, n, tile * BLOCK_K, N, weight_stride, K, BLOCK_K, BLOCK_K),)
        if SILU_MUL:
            up_rows = weight + N.to(tl.int64) * weight_stride
            ups = ups + (_weight_tile(up_rows, n, tile * BLOCK_K, N, weight_stride, K, BLOCK_K, BLOCK_K),)
        if HAS_NORM:
            scales = scales + (_vector(norm_weight, tile * BLOCK_K, K, BLOCK_K),)
    prefetch(upcoming, upcoming_bytes, PREFETCH, PDL)
    wait_for_inputs(PDL)
    # 3. One row of x after another against the same W.
    for row in tl.static_range(ROWS):
        total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        total_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        squares = tl.zeros((BLOCK_K,), tl.float32)
        if HAS_RESIDUAL:
            added = tl.load(residual + row * residual_stride + n, mask=n < N, other=0.0)
        for tile in tl.static_range(TILES):
            z = _vector(x + row * x_stride, tile * BLOCK_K, K, BLOCK_K)
            if HAS_NORM:
                squares += z * z
                z = z * scales[tile]
            total += tiles[tile].to(tl.float32) * z[None, :]
            if SILU_MUL:
                total_up += ups[tile].to(tl.float32) * z[None, :]
        y = tl.sum(total, axis=1)
        scale = 1.0
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y = y * scale
        # 4. The neighbour's work, then the store.
        if SILU_MUL:
            y = _silu(y) * (tl.sum(total_up, axis=1) * scale)
        if HAS_RESIDUAL:
            y += added.to(tl.float32)
        tl.store(out + row * out_stride + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _rows_tile(x, norm_weight, m, k0, M, x_stride, K: tl.constexpr, BLOCK_K: tl.constexpr, HAS_NORM: tl.constexpr):
    """Columns from `k0` of the rows of x, times the norm's weight, and their sums of squares."""
    k = k0 + tl.arange(0, BLOCK_K)
    inside = (m[:, None] < M) & (k[None, :] < K)  # rows beyond the batch, the row's end
    z = tl.load(x + m[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
    squares = tl.zeros((m.shape[0],), tl.float32)
    if HAS_NORM:
        wide = z.to(tl.float32)
        squares = tl.sum(wide * wide, axis=1)
        gain = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
        z = (wide * gain[None, :]).to(z.dtype)
    return z, squares


@triton.jit(do_not_specialize=["M"])
def _small_m_kernel(
    x, weight, norm_weight, residual, out, partials, counters, upcoming, upcoming_bytes,
    M, N, x_stride, weight_stride, residual_stride, out_stride, eps,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr, HELD: tl.constexpr, LEAVE: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SILU_MUL: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # 1. Locate: BLOCK_N outputs, and this program's share of K.
    let_next_start(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (TILES + SPLIT_K - 1) // SPLIT_K
    start = split * SHARE
    stop = tl.minimum(start + SHARE, TILES)
    up_rows = weight + N.to(tl.int64) * weight_stride
    tiles = ()
    ups = ()
    if HELD:
        for step in tl.static_range(SHARE):
            k0 = (start + step) * BLOCK_K
            tiles = tiles + (_weight_tile(weight, n, k0, N, weight_stride, K, BLOCK_K, SHARE * BLOCK_K),)
            if SILU_MUL:
                ups = ups + (_weight_tile(up_rows, n, k0, N, weight_stride, K, BLOCK_K, SHARE * BLOCK_K),)
    prefetch(upcoming, upcoming_bytes, PREFETCH, PDL)
    wait_for_inputs(PDL)
    # 2. Accumulate on the tensor cores; the norm's scale is a factor of the row, so it is applied at the end.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    edge = (m[:, None] < M) & (n[None, :] < N)
    if HELD:
        for step in tl.static_range(SHARE):
            z, more = _rows_tile(x, norm_weight, m, (start + step) * BLOCK_K, M, x_stride, K, BLOCK_K, HAS_NORM)
            squares += more
            total = tl.dot(z, tiles[step].T, total, input_precision="ieee")
            if SILU_MUL:
                total_up = tl.dot(z, ups[step].T, total_up, input_precision="ieee")
    else:
        for step in tl.range(start, stop, num_stages=STAGES):
            z, more = _rows_tile(x, norm_weight, m, step * BLOCK_K, M, x_stride, K, BLOCK_K, HAS_NORM)
            squares += more
            w = _weight_tile(weight, n, step * BLOCK_K, N, weight_stride, K, BLOCK_K, BLOCK_K)
            total = tl.dot(z, w.T, total, input_precision="ieee")
            if SILU_MUL:
                up = _weight_tile(up_rows, n, step * BLOCK_K, N, weight_stride, K, BLOCK_K, BLOCK_K)
                total_up = tl.dot(z, up.T, total_up, input_precision="ieee")
    # 3. Splits leave their parts in the workspace; the last to finish adds them up in the order of the splits, or
    # whoever reads them next does.
    last = True
    if LEAVE:
        last = False
        tl.store(partials + (split * M + m[:, None]) * N + n[None, :], total, mask=edge)
    elif SPLIT_K > 1:
        PART: tl.constexpr = BLOCK_M * BLOCK_N
        PARTS: tl.constexpr = 2 if SILU_MUL else 1
        STRIDE: tl.constexpr = PART * PARTS + BLOCK_M
        place = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mine = partials + (tile * SPLIT_K + split) * STRIDE
        tl.store(mine + place, total)
        if SILU_MUL:
            tl.store(mine + PART + place, total_up)
        tl.store(mine + PART * PARTS + m, squares)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            squares = tl.zeros((BLOCK_M,), tl.float32)
            for other in tl.static_range(SPLIT_K):
                theirs = partials + (tile * SPLIT_K + other) * STRIDE
                total += tl.load(theirs + place, cache_modifier=".cg")
                if SILU_MUL:
                    total_up += tl.load(theirs + PART + place, cache_modifier=".cg")
                squares += tl.load(theirs + PART * PARTS + m, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    # 4. The neighbour's work, then the store.
    if last:
        y = total
        if HAS_NORM:
            scale = tl.rsqrt(squares / K + eps)[:, None]
            y = y * scale
            total_up = total_up * scale
        if SILU_MUL:
            y = _silu(y) * total_up
        if HAS_RESIDUAL:
            y += tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=edge, other=0.0).to(tl.float32)
        tl.store(out + m[:, None] * out_stride + n[None, :], y.to(out.dtype.element_ty), mask=edge)


def _by_library(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, norm_weight: torch.Tensor | None, eps: float,
    residual: torch.Tensor | None, silu_mul: bool, workspace: Workspace,
) -> None:  # fmt: skip
    """The same operation with the library's product and this package's neighbours."""
    rows, inputs = x.shape
    if norm_weight is not None:
        normed = workspace.rows("normed", rows, inputs)
        rms_norm(x, norm_weight, eps, normed)
        x = normed
    if silu_mul:
        wide = workspace.rows("wide", rows, weight.shape[0])
        torch.mm(x, weight.T, out=wide)
        silu_mul_rows(wide, out)
    elif residual is not None and residual.dtype == x.dtype:
        torch.addmm(residual, x, weight.T, out=out)
    elif out.dtype == x.dtype:
        torch.mm(x, weight.T, out=out)
    elif out.dtype == torch.float32 and x.is_cuda:
        torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(x, weight.T))  # allocates; no product of an engine on a GPU comes here


def _check(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, norm_weight: torch.Tensor | None,
    residual: torch.Tensor | None, silu_mul: bool,
) -> None:  # fmt: skip
    check_tensor("x", x, (None, None), FLOATS)
    rows, inputs = x.shape
    check_tensor("weight", weight, (None, inputs), x.dtype, like=x)
    outputs = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    check_tensor("out", out, (rows, outputs), FLOATS, like=x)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (inputs,), FLOATS, like=x)
    if residual is not None:
        check_tensor("residual", residual, (rows, outputs), out.dtype, like=x)
        if silu_mul:
            raise ValueError("residual and silu_mul: wanted at most one of them, got both")


def run_plan(
    plan: LinearPlan, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, norm_weight: torch.Tensor | None,
    eps: float, residual: torch.Tensor | None, silu_mul: bool, workspace: Workspace,
    upcoming: torch.Tensor | None = None, token_count: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Launch one given plan; the tuner calls this, everyone else `skinny_linear`."""
    rows, inputs = x.shape
    if norm_weight is not None and _is_norm_apart(plan, x.dtype, norm_weight.dtype):
        normed = workspace.rows("normed", rows, inputs)
        rms_norm(x, norm_weight, eps, normed, token_count=token_count)
        x, norm_weight = normed, None
    if plan.kernel == "library" or (plan.kernel == "gemm" and not _is_gemm(x, weight, out, residual)):
        _by_library(x, weight, out, norm_weight, eps, residual, silu_mul, workspace)
        return
    if plan.kernel == "gemm":
        gemm(x, weight, out, plan, residual=residual, silu_mul=silu_mul, token_count=token_count)
        return
    if plan.kernel == "resident":
        assert residual is None, "a plan of this kind adds no residual"
        _by_hopper(plan, x, weight, out if silu_mul else out[None], silu_mul)
        return
    if plan.kernel == "warps":
        from kernels import skinny_linear_warps  # needs a Triton that older installations lack

        early = launch_options(x)["PDL"]
        skinny_linear_warps.launch(plan, x, weight, out, norm_weight, eps, residual, silu_mul, early)
        return
    outputs = out.shape[1]
    added = out if residual is None else residual
    gain = weight if norm_weight is None else norm_weight
    tiles = triton.cdiv(outputs, plan.block_n)
    all_bytes, share_bytes = prefetch_share(upcoming, tiles * plan.split_k)
    options = dict(
        K=inputs, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, HAS_NORM=norm_weight is not None,
        HAS_RESIDUAL=residual is not None, SILU_MUL=silu_mul, PREFETCH=share_bytes, num_warps=plan.num_warps,
        **launch_options(x),
    )  # fmt: skip
    ahead = (weight if upcoming is None else upcoming, all_bytes)
    strides = (x.stride(0), weight.stride(0), added.stride(0), out.stride(0))
    if plan.kernel == "matvec":
        _matvec_kernel[(tiles,)](x, weight, gain, added, out, *ahead, outputs, *strides, eps, ROWS=rows, **options)
        return
    block_m = tile_rows(rows)
    if plan.split_k > 1:
        needed = split_floats(plan, rows, outputs, silu_mul)
        if workspace.partials.numel() < needed or tiles > COUNTERS:
            raise ValueError(f"workspace: wanted {needed} partial sums, got {workspace.partials.numel()}")
    _small_m_kernel[(tiles, plan.split_k)](
        x, weight, gain, added, out, workspace.partials, workspace.counters, *ahead, rows, outputs, *strides, eps,
        BLOCK_M=block_m, SPLIT_K=plan.split_k, STAGES=plan.num_stages, HELD=plan.held, LEAVE=False, **options,
    )  # fmt: skip


def _is_gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether kernels/gemm.py takes these: a result in x's dtype, and rows that the copy engine can copy."""
    return out.dtype == x.dtype and copies_boxes(x, weight, out, *(() if residual is None else (residual,)))


def _is_norm_apart(plan: LinearPlan, dtype: torch.dtype, norm_dtype: torch.dtype) -> bool:
    """Whether the norm has its own launch: "resident" knows none, and "warps" only one with a weight of x's dtype."""
    return plan.norm_apart or plan.kernel == "resident" or (plan.kernel == "warps" and norm_dtype != dtype)


def _by_hopper(plan: LinearPlan, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, silu_mul: bool) -> None:
    """By kernels/skinny_linear_hopper.py; `out` as its table."""
    from kernels import skinny_linear_hopper  # needs a Triton that older installations lack

    skinny_linear_hopper.launch(plan, x, weight, out, silu_mul, launch_options(x)["PDL"])


def run_parts_plan(
    plan: LinearPlan, x: torch.Tensor, weight: torch.Tensor, workspace: Workspace, upcoming: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear_parts` with one given plan, for the tuner."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    if plan.kernel == "library":
        wide = workspace.rows("wide", rows, outputs)
        torch.mm(x, weight.T, out=wide)
        return wide[None]
    parts = workspace.rows("partials", plan.split_k * rows, outputs).view(plan.split_k, rows, outputs)
    if plan.kernel == "resident":
        _by_hopper(plan, x, weight, parts, silu_mul=False)
        return parts
    strides = (x.stride(0), weight.stride(0), 0, 0)
    tiles = triton.cdiv(outputs, plan.block_n)
    all_bytes, share_bytes = prefetch_share(upcoming, tiles * plan.split_k)
    ahead = (weight if upcoming is None else upcoming, all_bytes)
    _small_m_kernel[(tiles, plan.split_k)](
        x, weight, weight, parts, parts, parts, workspace.counters, *ahead, rows, outputs, *strides, 0.0,
        K=inputs, BLOCK_M=tile_rows(rows), BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
        SPLIT_K=plan.split_k, STAGES=plan.num_stages, HELD=plan.held, LEAVE=True, HAS_NORM=False, HAS_RESIDUAL=False,
        SILU_MUL=False, PREFETCH=share_bytes, num_warps=plan.num_warps, **launch_options(x),
    )  # fmt: skip
    return parts


def parts_plan(rows: int, weight: torch.Tensor) -> LinearPlan | None:
    """The measured plan for leaving the product of `rows` rows in parts; None where this card has none."""
    return measured_plan(weight.device, weight.dtype, rows, operation_key(*weight.shape, False, False, in_parts=True))


def linear_parts(
    x: torch.Tensor, weight: torch.Tensor, workspace: Workspace, upcoming: torch.Tensor | None = None
) -> torch.Tensor:
    """y = x W^T as parts [S, M, N] that the reader adds up; they stay until the workspace's next use.

    `upcoming` as in `skinny_linear`; a kernel that holds all of W ahead leaves it out.

    Raises ValueError for a shape, dtype, stride or device that differs from the module's table, or a small workspace.
    """
    check_tensor("x", x, (None, None), FLOATS)
    check_tensor("weight", weight, (None, x.shape[1]), x.dtype, like=x)
    key = plan_key(x.shape[0], *weight.shape, in_parts=True)
    plan = workspace.plans.get(key)
    if plan is None:
        plan = workspace.plans[key] = parts_plan(x.shape[0], weight) or LIBRARY
    return run_parts_plan(plan, x, weight, workspace, upcoming)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    upcoming: torch.Tensor | None = None,
    token_count: torch.Tensor | None = None,
) -> None:
    """Write norm(x) W^T, plus the residual or through SiLU * up, to `out`. Shapes: the module's table.

    `upcoming` is the weight that a kernel soon after this one reads: a contiguous tensor that no kernel writes. Its
    first 16 MiB are brought into the level-2 cache meanwhile; not by Hopper's kernels, nor by the library.
    `token_count`, int32 [1] on the device: only the first so many rows count, and others of `out` hold anything. It
    spares kernels/gemm.py, and a norm ahead of it, the rest; what is for few rows computes all.

    Raises ValueError for a shape, dtype, stride or device that differs from the table, or a workspace that is too
    small.
    """
    _check(x, weight, out, norm_weight, residual, silu_mul)
    rows = x.shape[0]
    if out.numel() == 0:
        return
    plan = workspace.plan_of(rows, weight, has_norm=norm_weight is not None, silu_mul=silu_mul)
    run_plan(plan, x, weight, out, norm_weight, eps, residual, silu_mul, workspace, upcoming, token_count)


def merges_parts(workspace: Workspace, weight: torch.Tensor, query_heads: int, head_dim: int) -> bool:
    """Whether `linear_of_parts` computes one row of a model's attention times such a W here."""
    plan = workspace.plan_of(1, weight)
    return plan.kernel == "warps" and AttentionParts.can_merge(query_heads, head_dim, plan.num_warps)


def linear_of_parts(
    parts: AttentionParts, weight: torch.Tensor, out: torch.Tensor, workspace: Workspace, *, residual: torch.Tensor
) -> None:
    """Write residual + x W^T to `out` [1, N], x being one row of attention that was left in parts. `out` may be the
    residual [1, N] itself; `weight` is [N, query_heads * head_dim].

    Raises ValueError for a shape, dtype or device that differs from the module's table, and where not `merges_parts`.
    """
    check_tensor("weight", weight, (None, parts.query_heads * parts.head_dim), parts.parts.dtype, like=parts.parts)
    check_tensor("out", out, (1, weight.shape[0]), FLOATS, like=weight)
    check_tensor("residual", residual, (1, weight.shape[0]), out.dtype, like=weight)
    if not merges_parts(workspace, weight, parts.query_heads, parts.head_dim):
        raise ValueError(f"weight: no plan for {list(weight.shape)} in {weight.dtype} merges {parts.query_heads} heads")
    from kernels import skinny_linear_warps

    plan, early = workspace.plan_of(1, weight), launch_options(weight)["PDL"]
    skinny_linear_warps.launch_on_parts(plan, parts, weight, out, residual, early)
