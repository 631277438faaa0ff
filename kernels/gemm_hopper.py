"""Products of many rows on Hopper, with what follows inside: the kernel of kernels/gemm.py.

Operations and tensors' shapes stand there. A program stays on its multiprocessor and computes one tile after another:
128 rows of x by 256 or 128 of W (with silu_mul half of them gate's and half up's). One warp asks the tensor copy engine
for tiles of K; two warp groups compute, each 64 rows of the tile. The second begins a step behind the first and stays
behind: while one applies what follows to its sums and stores them, the tensor cores have the other's products.

    warps 0-3    rows 0-63      sums of K's steps | what follows, staged in shared memory, stored by the copy engine
    warps 4-7    rows 64-127    the same, OFFSET steps later
    warp 8       x[i % stages], W[i % stages]

N is a multiple of the tile's columns; with HEADS so are the columns of q and those of k. Rows past M read as zeros and
are not stored. With a count of tokens in device memory, rows from there on have no tiles; so there may be none at all.
The count is read once, before the warps part, and not by the copying one, which has 24 registers.

A row's heads come to be in a thread and its three neighbours, a rotation's pairs in one thread, since a tensor core's
sums lie so: norm and rotation cost no exchange through memory. The arithmetic is that of kernels/qk_norm_rope_store.py,
without rounding to 16 bits between the product and the norm; for 8-bit caches, by kernels/kv_quant_gluon.py, without
rounding between rotation and quantising either.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gemm import HeadStore
from kernels.kv_format import CACHE_PLAIN, cache_format
from kernels.kv_quant_gluon import divided, quantising_scale, read_back, whole_levels
from kernels.launch import HOPPER_SHARED_BYTES
from kernels.launch_gluon import let_next_start, wait_for_inputs

TILE_M, TILE_K = 128, 64
OFFSET = 1
GROUP_M = 16
PLAIN, RESIDUAL, SILU_MUL, HEADS = (gl.constexpr(kind) for kind in range(4))
"""What follows the product."""

PASSED_COLUMNS = gl.constexpr(128)
"""Columns of 8-bit elements that change threads at a time, on their way to a cache."""


@gluon.jit
def _place(tile, m_tiles, n_tiles, GROUP_M: gl.constexpr):
    """Tile number to (m, n): down GROUP_M tiles of rows, then to the next of columns, so that a wave shares both."""
    band = tile // (GROUP_M * n_tiles)
    height = gl.minimum(m_tiles - band * GROUP_M, GROUP_M)
    inside = tile - band * (GROUP_M * n_tiles)
    return band * GROUP_M + inside % height, inside // height


@gluon.jit
def _silu(x):
    """x / (1 + e^-x), by the units for powers and reciprocals, whose error is far below 16 bits'."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
        "rcp.approx.ftz.f32 e, e; mul.f32 $0, $1, e; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _ask_weights(weight_desc, weights, full, stage, n, step, half_rows, pred, HALVES: gl.constexpr):
    """Ask for a step's columns of a tile's rows of W; with two halves, of gate's rows and of up's."""
    WIDTH: gl.constexpr = weights.shape[1]
    for half in gl.static_range(HALVES):
        tma.async_copy_global_to_shared(
            weight_desc, [n * WIDTH + half * half_rows, step * 64], full.index(stage),
            weights.index(stage * HALVES + half), pred=pred,
        )  # fmt: skip


@gluon.jit
def _produce(
    x_desc, weight_desc, rows, weights, full, empty, steps, m_tiles, n_tiles, half_rows,
    STAGES: gl.constexpr, HALVES: gl.constexpr, GROUP_M: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Ask for the steps of K of one tile after another; for the first ones of W without waiting."""
    HEIGHT: gl.constexpr = rows.shape[1]
    WIDTH: gl.constexpr = weights.shape[1]
    BYTES: gl.constexpr = (HEIGHT + WIDTH * HALVES) * 128
    first = gl.program_id(0)
    tiles = m_tiles * n_tiles
    ahead = 0
    if first < tiles:
        ahead = gl.minimum(steps, STAGES)
        _, first_n = _place(first, m_tiles, n_tiles, GROUP_M)
        for step in range(ahead):
            mbarrier.expect(full.index(step), BYTES)
            _ask_weights(weight_desc, weights, full, step, first_n, step, half_rows, True, HALVES)
    wait_for_inputs(PDL)
    asked = 0
    for tile in range(first, tiles, gl.num_programs(0)):
        m, n = _place(tile, m_tiles, n_tiles, GROUP_M)
        for step in range(steps):
            stage = asked % STAGES
            is_new = asked >= ahead
            mbarrier.wait(empty.index(stage), ((asked // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES, pred=is_new)
            tma.async_copy_global_to_shared(x_desc, [m * HEIGHT, step * 64], full.index(stage), rows.index(stage))
            _ask_weights(weight_desc, weights, full, stage, n, step, half_rows, is_new, HALVES)
            asked += 1


@gluon.jit
def _gains(weight_ptr, layout: gl.constexpr, HALF: gl.constexpr):
    """A norm's weight at the two halves of a head's columns, [1, 1, HALF] each."""
    dims = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    first = gl.load(weight_ptr + dims).to(gl.float32)
    second = gl.load(weight_ptr + HALF + dims).to(gl.float32)
    return gl.expand_dims(first[None, :], 1), gl.expand_dims(second[None, :], 1)


@gluon.jit
def _normed_rotated(
    heads, weight_ptr, table_ptr, positions_ptr, first_row, M, eps, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr
):
    """Heads [row, column] of q or k, float32, after their norm and rotation."""
    ROWS: gl.constexpr = heads.shape[0]
    COUNT: gl.constexpr = heads.shape[1] // HEAD_DIM
    HALF: gl.constexpr = HEAD_DIM // 2
    pairs = gl.permute(gl.reshape(heads, [ROWS, COUNT, 2, HALF]), (0, 1, 3, 2))
    first, second = gl.split(pairs)
    layout: gl.constexpr = first.type.layout
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(first * first + second * second, axis=2) / HEAD_DIM + eps)
        first_gain, second_gain = _gains(weight_ptr, layout, HALF)
        first = first * gl.expand_dims(scale, 2) * first_gain
        second = second * gl.expand_dims(scale, 2) * second_gain
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, row_layout))
    dims = gl.arange(0, HALF, layout=gl.SliceLayout(0, row_layout))
    positions = gl.load(positions_ptr + rows, mask=rows < M, other=0).to(gl.int64)
    angle_ptr = table_ptr + positions[:, None] * HEAD_DIM + dims[None, :]
    cos = gl.expand_dims(gl.load(angle_ptr), 1)
    sin = gl.expand_dims(gl.load(angle_ptr + HALF), 1)
    turned = first * cos - second * sin
    second = second * cos + first * sin
    joined = gl.permute(gl.join(turned, second), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(joined, [ROWS, COUNT * HEAD_DIM]), heads.type.layout)


@gluon.jit
def _store_cached(
    staged, cache_ptr, slots_ptr, first_row, first_column, M, block_stride, head_stride,
    HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Heads [row, column] from shared memory to their tokens' places in a paged cache; `first_column` counts from its
    first head's."""
    ROWS: gl.constexpr = staged.shape[0]
    COLUMNS: gl.constexpr = staged.shape[1]
    LANES: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    slots = gl.load(slots_ptr + rows, mask=rows < M, other=-1)
    places = (slots // BLOCK_SIZE) * block_stride + (slots % BLOCK_SIZE) * HEAD_DIM
    inside = (columns // HEAD_DIM) * head_stride + columns % HEAD_DIM
    gl.store(cache_ptr + (places[:, None] + inside[None, :]), staged.load(layout), mask=(slots >= 0)[:, None])


@gluon.jit
def _first_slots(slots_ptr, first_row, M, layout: gl.constexpr, ROWS: gl.constexpr):
    """The slots of rows from `first_row` on; -1 past the last."""
    rows = first_row + gl.arange(0, ROWS, layout=layout)
    return gl.load(slots_ptr + rows, mask=rows < M, other=-1)


@gluon.jit
def _store_bytes(
    elements, passed, cache_ptr, slots_ptr, first_row, first_column, M, block_stride, head_stride,
    HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """8-bit elements of heads [row, column] to their tokens' places by way of `passed`: a thread stores 16 of a row."""
    ROWS: gl.constexpr = passed.shape[0]
    COLUMNS: gl.constexpr = passed.shape[1]
    LANES: gl.constexpr = COLUMNS // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [4, 1], [1, 0])
    passed.store(elements)
    slots = _first_slots(slots_ptr, first_row, M, gl.SliceLayout(1, layout), ROWS)
    columns = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    places = (slots // BLOCK_SIZE) * block_stride + (slots % BLOCK_SIZE) * HEAD_DIM
    inside = (columns // HEAD_DIM) * head_stride + columns % HEAD_DIM
    gl.store(cache_ptr + (places[:, None] + inside[None, :]), passed.load(layout), mask=(slots >= 0)[:, None])


@gluon.jit
def _store_quantised(
    total, cache_ptr, scales_ptr, slots_ptr, passed, first_row, first_column, M, strides, FORMAT: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Heads [row, column] of k or v to an 8-bit cache, by way of `passed`, and their scales beside it. Returns what
    attention will read of them."""
    block_stride, head_stride, scale_block_stride, scale_head_stride = strides
    ROWS: gl.constexpr = total.shape[0]
    COUNT: gl.constexpr = total.shape[1] // HEAD_DIM
    heads = gl.reshape(total, [ROWS, COUNT, HEAD_DIM])
    largest = gl.max(gl.abs(heads), axis=2)
    scale, divisor = quantising_scale(largest, FORMAT)
    layout: gl.constexpr = scale.type.layout
    slots = _first_slots(slots_ptr, first_row, M, gl.SliceLayout(1, layout), ROWS)
    head = first_column // HEAD_DIM + gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout))
    places = (slots // BLOCK_SIZE) * scale_block_stride + slots % BLOCK_SIZE
    places = places[:, None] + (head * scale_head_stride)[None, :]
    gl.store(scales_ptr + places, scale.to(gl.float16), mask=(slots >= 0)[:, None])
    level = divided(heads, gl.expand_dims(divisor, 2), gl.expand_dims(1.0 / divisor, 2))
    level = whole_levels(level, FORMAT)
    elements = gl.reshape(level.to(passed.dtype), [ROWS, COUNT * HEAD_DIM])
    if passed.shape[1] == COUNT * HEAD_DIM:
        _store_bytes(
            elements, passed, cache_ptr, slots_ptr, first_row, first_column, M, block_stride, head_stride, HEAD_DIM,
            BLOCK_SIZE,
        )  # fmt: skip
    else:
        HALF: gl.constexpr = passed.shape[1]
        first, second = gl.split(gl.permute(gl.reshape(elements, [ROWS, 2, HALF]), (0, 2, 1)))
        _store_bytes(
            first, passed, cache_ptr, slots_ptr, first_row, first_column, M, block_stride, head_stride, HEAD_DIM,
            BLOCK_SIZE,
        )  # fmt: skip
        _store_bytes(
            second, passed, cache_ptr, slots_ptr, first_row, first_column + HALF, M, block_stride, head_stride,
            HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
    return gl.reshape(read_back(level, gl.expand_dims(scale, 2)), [ROWS, COUNT * HEAD_DIM])


@gluon.jit
def _store_tile(values, out_desc, staged, first_row, first_column):
    """Values to `out`, by way of `staged`, once the copy engine has read what was there before."""
    tma.store_wait(pendings=0)
    staged.store(values.to(staged.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [first_row, first_column], staged)


@gluon.jit
def _finish_heads(
    total, out_desc, heads, staged, passed, first_row, column, M, Q_COLUMNS: gl.constexpr, KV_COLUMNS: gl.constexpr,
    FORMAT: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, HAS_NORM: gl.constexpr,
    KEEPS_KV: gl.constexpr,
):  # fmt: skip
    """Heads from `column` of the product on: of q to `out`, of k and v to the cache, and with KEEPS_KV to `out` too."""
    k_ptr, v_ptr, k_scales, v_scales, slots_ptr, positions_ptr, table_ptr, q_weight, k_weight, eps, strides = heads
    if column < Q_COLUMNS + KV_COLUMNS:
        weight = q_weight
        if column >= Q_COLUMNS:
            weight = k_weight
        total = _normed_rotated(total, weight, table_ptr, positions_ptr, first_row, M, eps, HEAD_DIM, HAS_NORM)
    if column < Q_COLUMNS:
        _store_tile(total, out_desc, staged, first_row, column)
    else:
        cache_ptr = k_ptr
        scales_ptr = k_scales
        first_column = column - Q_COLUMNS
        if first_column >= KV_COLUMNS:
            cache_ptr = v_ptr
            scales_ptr = v_scales
            first_column = first_column - KV_COLUMNS
        if FORMAT > 0:
            read = _store_quantised(
                total, cache_ptr, scales_ptr, slots_ptr, passed, first_row, first_column, M, strides, FORMAT,
                HEAD_DIM, BLOCK_SIZE,
            )  # fmt: skip
            if KEEPS_KV:
                _store_tile(gl.convert_layout(read, total.type.layout), out_desc, staged, first_row, column)
        else:
            if KEEPS_KV:
                _store_tile(total, out_desc, staged, first_row, column)
            else:
                tma.store_wait(pendings=0)
                staged.store(total.to(staged.dtype))
            _store_cached(
                staged, cache_ptr, slots_ptr, first_row, first_column, M, strides[0], strides[1], HEAD_DIM, BLOCK_SIZE
            )


@gluon.jit
def _consume(
    out_desc, residual_desc, heads, rows, weights, staged, passed, full, empty, behind, residual_full, M, steps,
    m_tiles, n_tiles,
    WARP_GROUP: gl.constexpr, STAGES: gl.constexpr, OFFSET: gl.constexpr, FOLLOWS: gl.constexpr,
    GROUP_M: gl.constexpr, Q_COLUMNS: gl.constexpr, KV_COLUMNS: gl.constexpr, FORMAT: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, HAS_NORM: gl.constexpr, KEEPS_KV: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The sums of 64 rows of each tile, and what follows."""
    ROWS: gl.constexpr = rows.shape[1]
    COLUMNS: gl.constexpr = weights.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    place = staged.index(WARP_GROUP)
    own_passed = passed
    if FORMAT > 0:
        own_passed = passed.index(WARP_GROUP)
    own_residual = residual_full.index(WARP_GROUP)
    read = 0
    phase = 0
    wait_for_inputs(PDL)
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = _place(tile, m_tiles, n_tiles, GROUP_M)
        first_row = m * (2 * ROWS) + WARP_GROUP * ROWS
        if FOLLOWS == RESIDUAL:
            tma.store_wait(pendings=0)
            mbarrier.expect(own_residual, ROWS * COLUMNS * 2)
            tma.async_copy_global_to_shared(residual_desc, [first_row, n * COLUMNS], own_residual, place)
        total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        if OFFSET > 0 and WARP_GROUP == 1:
            mbarrier.wait(behind, 0)  # signalled once, in the first tile
        for step in range(steps):
            stage = read % STAGES
            mbarrier.wait(full.index(stage), (read // STAGES) & 1)
            x = rows.index(stage * 2 + WARP_GROUP)
            total = warpgroup_mma(x, weights.index(stage).permute((1, 0)), total, use_acc=step > 0, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            # The step before this one has been multiplied.
            mbarrier.arrive(empty.index((read - 1) % STAGES), count=1, pred=step > 0)
            if OFFSET > 0 and WARP_GROUP == 0:
                mbarrier.arrive(behind, count=1, pred=read == gl.minimum(OFFSET, steps - 1))
            read += 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(empty.index((read - 1) % STAGES), count=1)
        if FOLLOWS == HEADS:
            _finish_heads(
                total, out_desc, heads, place, own_passed, first_row, n * COLUMNS, M, Q_COLUMNS, KV_COLUMNS,
                FORMAT, HEAD_DIM, BLOCK_SIZE, HAS_NORM, KEEPS_KV,
            )  # fmt: skip
        else:
            if FOLLOWS == RESIDUAL:
                mbarrier.wait(own_residual, phase)
                total = total + place.load(layout).to(gl.float32)
            elif FOLLOWS == SILU_MUL:
                gate, up = gl.split(gl.permute(gl.reshape(total, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))
                total = _silu(gate) * up
            _store_tile(total, out_desc, place, first_row, n * place.shape[1])
        phase = phase ^ 1
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["M", "N", "steps"])
def _gemm_kernel(
    x_desc, weight_desc, out_desc, residual_desc, heads, token_count_ptr, M, N, steps,
    STAGES: gl.constexpr, OFFSET: gl.constexpr, FOLLOWS: gl.constexpr, GROUP_M: gl.constexpr,
    TILE_N: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr, Q_COLUMNS: gl.constexpr, KV_COLUMNS: gl.constexpr,
    FORMAT: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, HAS_NORM: gl.constexpr,
    KEEPS_KV: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token_count = M
    if token_count_ptr is not None:
        token_count = gl.minimum(gl.load(token_count_ptr), M)  # rule 4 of kernels/launch.py: of the step's plan
    dtype: gl.constexpr = x_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    HALVES: gl.constexpr = 2 if FOLLOWS == SILU_MUL else 1
    rows = gl.allocate_shared_memory(dtype, [STAGES * 2, 64, 64], shared)
    weights = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, 64], shared)
    staged = gl.allocate_shared_memory(out_desc.dtype, [2, 64, TILE_N // HALVES], out_desc.layout)
    passed = staged
    if FORMAT > 0:
        flat: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
        passed = gl.allocate_shared_memory(heads[0].dtype.element_ty, [2, 64, min(TILE_N, PASSED_COLUMNS)], flat)
    row_boxes = rows._reinterpret(dtype, [STAGES, 128, 64], shared)
    weight_boxes = weights._reinterpret(dtype, [STAGES * HALVES, TILE_N // HALVES, 64], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    behind = gl.allocate_shared_memory(gl.int64, [1], bars)
    residual_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(behind, count=1)
    mbarrier.init(residual_full.index(0), count=1)
    mbarrier.init(residual_full.index(1), count=1)
    m_tiles = (token_count + 127) // 128
    n_tiles = N // TILE_N
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc, residual_desc, heads, rows, weights, staged, passed, full, empty, behind,
                    residual_full, token_count, steps, m_tiles, n_tiles, gl.constexpr(0), STAGES, OFFSET, FOLLOWS,
                    GROUP_M, Q_COLUMNS, KV_COLUMNS, FORMAT, HEAD_DIM, BLOCK_SIZE, HAS_NORM, KEEPS_KV, PDL,
                ),
            ),
            (
                _consume,
                (
                    out_desc, residual_desc, heads, rows, weights, staged, passed, full, empty, behind,
                    residual_full, token_count, steps, m_tiles, n_tiles, gl.constexpr(1), STAGES, OFFSET, FOLLOWS,
                    GROUP_M, Q_COLUMNS, KV_COLUMNS, FORMAT, HEAD_DIM, BLOCK_SIZE, HAS_NORM, KEEPS_KV, PDL,
                ),
            ),
            (
                _produce,
                (
                    x_desc, weight_desc, row_boxes, weight_boxes, full, empty, steps, m_tiles, n_tiles, N // 2,
                    STAGES, HALVES, GROUP_M, PDL,
                ),
            ),
        ],
        [4, 1],
        [COMPUTE_REGISTERS, 24],
    )  # fmt: skip


def stage_count(tile_n: int, follows: int, cache_format: int = CACHE_PLAIN) -> int:
    """As many stages as fit beside what is staged."""
    staged = TILE_M * tile_n // (2 if follows == SILU_MUL.value else 1) * 2
    if cache_format != CACHE_PLAIN:
        staged += TILE_M * min(tile_n, PASSED_COLUMNS.value)
    return min(6, (HOPPER_SHARED_BYTES - 1024 - staged) // ((TILE_M + tile_n) * TILE_K * 2))


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


def launch(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, tile_n: int, programs: int,
    residual: torch.Tensor | None = None, silu_mul: bool = False, store: HeadStore | None = None,
    token_count: torch.Tensor | None = None, pdl: bool = False, offset: int = OFFSET, group_m: int = GROUP_M,
    stages: int = 0,
) -> None:  # fmt: skip
    """One product, by that many programs, on arguments that were checked."""
    rows, inputs = x.shape
    kind = HEADS if store is not None else SILU_MUL if silu_mul else PLAIN if residual is None else RESIDUAL
    follows = kind.value
    halves = 2 if silu_mul else 1
    heads, sizes = (0,), dict(
        Q_COLUMNS=0, KV_COLUMNS=0, FORMAT=CACHE_PLAIN, HEAD_DIM=128, BLOCK_SIZE=16, HAS_NORM=False, KEEPS_KV=False
    )  # fmt: skip
    if store is not None:
        cache, new, scales = store.key_cache, store.new, store.key_scales
        block_size, head_dim = cache.shape[2:]
        has_norm = new.q_weight is not None
        strides = (*cache.stride()[:2], *(() if scales is None else scales.stride()[:2]))
        heads = (
            cache, store.value_cache, scales, store.value_scales, store.slot_mapping, store.positions, new.rope_table,
            new.q_weight if has_norm else out, new.k_weight if has_norm else out, new.eps, strides,
        )  # fmt: skip
        q_columns = weight.shape[0] - 2 * store.columns
        sizes = dict(
            Q_COLUMNS=q_columns, KV_COLUMNS=store.columns, FORMAT=cache_format(cache.dtype), HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size, HAS_NORM=has_norm, KEEPS_KV=out.shape[1] > q_columns,
        )  # fmt: skip
    stages = stages or stage_count(tile_n, follows, sizes["FORMAT"])
    _gemm_kernel[(programs,)](
        _descriptor(x, TILE_M, TILE_K), _descriptor(weight, tile_n // halves, TILE_K),
        _descriptor(out, TILE_M // 2, tile_n // halves),
        None if residual is None else _descriptor(residual, TILE_M // 2, tile_n), heads, token_count, rows,
        weight.shape[0], inputs // TILE_K, STAGES=stages, OFFSET=offset, FOLLOWS=follows,
        GROUP_M=group_m, TILE_N=tile_n, COMPUTE_REGISTERS=240, **sizes, PDL=pdl, num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
