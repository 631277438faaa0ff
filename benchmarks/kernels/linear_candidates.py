"""Which plans of a skinny product are worth timing: tiles that fit registers and shared memory and fill the card.

Knows the shapes, and neither tensors nor how a plan is timed. Called by tune_skinny_linear.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.kernels.linear_shapes import LinearShape
from kernels import skinny_linear_warps
from kernels.skinny_linear_hopper import fits
from kernels.tuning import GEMM_TILE_ROWS, LIBRARY, LinearPlan, gemm_tiles

SHARED_BYTES = 200_000


def matvec_candidates(shape: LinearShape, rows: int) -> Iterator[LinearPlan]:
    """Tiles whose rows of W fit in registers and whose programs fill the card."""
    halves = 2 if "silu" in shape.fusion else 1
    for warps in (1, 2, 4, 8) if rows == 1 else (1, 2, 4):
        for block_n in (1, 2, 4, 8) if rows == 1 else (2, 4):
            programs = shape.out_columns / block_n
            for block_k in (256, 512, 1024, 2048) if rows == 1 else (512, 1024):
                tile = block_n * block_k
                held = block_n * halves * (shape.inputs + block_k - 1) // block_k * block_k * 2 / (32 * warps)
                sums = tile * halves * 4 / (32 * warps)
                fits = held + sums <= (640 if rows == 1 else 480) and held >= 48
                if fits and tile >= 256 * warps and block_k < 2 * shape.inputs and programs >= 100:
                    yield LinearPlan("matvec", block_n=block_n, block_k=block_k, num_warps=warps)


def small_m_candidates(shape: LinearShape, rows: int) -> Iterator[LinearPlan]:
    """Pipelined tensor-core tiles: 100 to 1,100 programs (more for a very wide W), stages that fit shared memory."""
    halves = 2 if "silu" in shape.fusion else 1
    block_m = max(16, rows)
    for block_n in (16, 32, 64, 128):
        for split_k in (1, 2, 4):
            programs = -(-shape.out_columns // block_n) * split_k
            if programs < 100 or (programs > 800 and (split_k > 1 or block_n < 64)):
                continue
            for block_k in (64, 128, 256):
                if shape.inputs // block_k < split_k:
                    continue
                stage = (block_n * halves + block_m) * block_k * 2
                stages = min(6, SHARED_BYTES // stage, max(2, shape.inputs // block_k // split_k))
                if stages >= 2 and stage >= 4096:
                    apart = "norm" in shape.fusion
                    yield LinearPlan("small_m", block_n, block_k, 4, stages, split_k, norm_apart=apart)


def held_candidates(shape: LinearShape) -> Iterator[LinearPlan]:
    """Tensor-core tiles with W in registers, loaded early."""
    halves = 2 if "silu" in shape.fusion else 1
    for block_n in (16, 32, 64):
        for split_k in (1, 2, 4):
            programs = -(-shape.out_columns // block_n) * split_k
            if programs < 100 or (split_k > 1 and programs > 600):
                continue
            for warps in (2, 4):
                held = block_n * halves * shape.inputs * 2 / split_k / (32 * warps)
                if 96 <= held <= (256 if halves == 2 else 512) and shape.inputs % (256 * split_k) == 0:
                    yield LinearPlan("small_m", block_n, 256, warps, 1, split_k, held=True)


def warps_candidates(shape: LinearShape) -> Iterator[LinearPlan]:
    """Tensor-core tiles with W in registers and K shared among warps: 30 to 800 programs, more for a very wide W."""
    halves = 2 if "silu" in shape.fusion else 1
    for block_n in (16, 32, 64):
        programs = -(-shape.out_columns * halves // block_n)
        if programs < 30 or (programs > 800 and (shape.outputs < 50_000 or block_n < 64)):
            continue
        for warps in (1, 2, 4, 8, 16):
            share = shape.inputs // warps
            plan = LinearPlan("warps", block_n, min(64, share & -share), warps)
            held = block_n * shape.inputs // (64 * warps)
            if skinny_linear_warps.fits(plan, shape.inputs) and held >= 16:
                yield plan
                if held >= 128:  # without a limit they take up to 230
                    yield replace(plan, max_registers=192)


def resident_candidates(shape: LinearShape, rows: int) -> Iterator[LinearPlan]:
    """Hopper's tiles: 80 to 300 programs; all of W in shared memory, or a ring for one or for two programs of an SM."""
    silu = "silu" in shape.fusion
    most = 900 if silu else 3000 if shape.outputs > 50_000 else 300
    for block_m, warps in (64, 4), (128, 8), (256, 8):
        if block_m > 64 and (block_m >= 2 * rows or rows <= 64):
            continue
        for block_n in (16, 32, 64, 128):
            width = block_n * (2 if silu else 1)
            if width * block_m > 128 * 256 or (width == 16 and shape.outputs > 1024) or (block_n == 16 and rows > 64):
                continue
            for split_k in (1,) if silu or most == 3000 or not shape.fusion else (1, 2, 3, 4, 6, 8):
                programs = -(-shape.out_columns // block_n) * split_k * -(-rows // block_m)
                if 80 <= programs <= most * -(-rows // 256):
                    tile = LinearPlan("resident", block_n, 0, warps, 1, split_k, norm_apart=True, block_m=block_m)
                    for block_k in _step_choices(shape, width + block_m):
                        yield from _stage_choices(shape, replace(tile, block_k=block_k), width)


def gemm_candidates(shape: LinearShape, rows: int) -> Iterator[LinearPlan]:
    """The tiles of prompts' products, for as many rows as one of them holds."""
    if rows >= GEMM_TILE_ROWS:
        yield from gemm_tiles(shape.outputs, shape.inputs)


def _step_choices(shape: LinearShape, lines: int) -> tuple[int, ...]:
    """Columns of K a step, for so many lines of W and x."""
    if shape.inputs % 128 or lines > 256:
        return (64,)
    return (128, 256) if lines <= 128 else (128,)


def _stage_choices(shape: LinearShape, plan: LinearPlan, width: int) -> Iterator[LinearPlan]:
    steps = shape.inputs // plan.block_k // plan.split_k
    row_bytes, weight_bytes = plan.block_m * plan.block_k * 2, width * plan.block_k * 2
    choices = {
        (min(steps, 65_536 // row_bytes), 0),
        *((min(steps, room // (row_bytes + weight_bytes)),) * 2 for room in (112_000, 224_000)),
    }
    for stages, weight_stages in sorted(choices):
        choice = replace(plan, num_stages=stages, weight_stages=weight_stages)
        if stages >= 2 and fits(choice, shape.inputs, "silu" in shape.fusion):
            yield choice


def candidates(shape: LinearShape, rows: int) -> list[LinearPlan]:
    """Every plan worth timing for `rows` rows."""
    plans = [LIBRARY]
    if "parts" in shape.fusion or shape.fusion in (("silu",), ()):
        if rows <= 16:
            plans += held_candidates(shape)
            plans += warps_candidates(shape) if "parts" not in shape.fusion else ()
        if "parts" not in shape.fusion:
            plans += gemm_candidates(shape, rows)
        return plans + list(resident_candidates(shape, rows))
    if rows <= 4:
        plans += matvec_candidates(shape, rows)
    if rows <= skinny_linear_warps.MAX_ROWS:
        plans += warps_candidates(shape)
    if 2 <= rows <= 16:
        plans += held_candidates(shape)
    if 16 <= rows <= 64 or (2 <= rows <= 64 and shape.outputs > 50_000):
        plans += small_m_candidates(shape, rows)
    if rows >= 32 and shape.outputs > 30_000:
        plans += resident_candidates(shape, rows)
    return plans
