"""Which kernel and tile a product uses: a table measured on the card for few rows, and rules where there is none.

`skinny_linear.json` holds, for each card, dtype and operation, the fastest plan for a bucket of rows. Regenerate it
for the card at hand with `python -m benchmarks.kernels.tune_skinny_linear`. Prompts' products go by rule (`gemm_plan`).
Called by `kernels.skinny_linear` and `kernels.gemm`; knows no tensors.
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels.launch import capability_major, multiprocessor_count, takes_gluon

TABLE_PATH = Path(__file__).with_name("skinny_linear.json")
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class LinearPlan:
    """How one product is launched: by the kernel "matvec", "small_m", "warps", "resident" or "gemm" with a tile, or
    "library".

    held: W's tiles are loaded into registers before the kernel ahead has finished. norm_apart: the norm has its own
    launch. block_m, weight_stages: of "resident", rows of a program, and steps of W in shared memory (0: all of them).
    max_registers: of "warps", what a thread may have (0: all it wants), since other kernels' programs wait beside it.
    """

    kernel: str
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 1
    split_k: int = 1
    held: bool = False
    norm_apart: bool = False
    block_m: int = 0
    weight_stages: int = 0
    max_registers: int = 0


LIBRARY = LinearPlan("library")
GLUON_KERNELS = ("warps", "resident", "gemm")
GEMM_TILE_ROWS = 128
GEMM_FEWEST_ROWS = 225
"""Nearly two tiles of rows: of 256 rows some products were faster than by what serves fewer, of 128 none."""

NARROW_WAVE = 0.54
"""What a wave of tiles of 128 x 128 takes of the time of one of 128 x 256: measured."""

GEMM_FILLED, GEMM_FILLED_FUSED = 0.9, 0.75
"""The least share of the card's tiles that are filled, in a product's waves, for kernels/gemm_hopper.py to do what the
library, which splits K, would do, or the library and the kernel that follows. By itself a product with a residual is up
to 6 % slower than the library's then, in a layer of 8,192 tokens 5 us; early launch, for which no kernel of the library
may stand between, gains 13 there (docs/log.md, 2026-11-30)."""

WARPS_MOST_ROWS = 16
WARPS_MOST_BYTES = 34 << 20  # W of 4,096 x 4,096, which takes 11 us and the library 15; of 6,144 x 4,096 20 and 18
WARPS_WEIGHT_REGISTERS = 144  # of a thread
SIXTEEN_WARPS_WEIGHT_REGISTERS = 96
"""Of a thread that has 128 registers at most: with 128 of W, which 8,192 inputs take, it spilled 184 bytes; 344 with 96
beside a norm."""


def operation_key(outputs: int, inputs: int, silu_mul: bool, has_norm: bool, in_parts: bool = False) -> str:
    """The name of an operation in the table, such as `n4096_k1024_norm`."""
    fusion = ("_norm" if has_norm else "") + ("_silu" if silu_mul else "") + ("_parts" if in_parts else "")
    return f"n{outputs}_k{inputs}{fusion}"


@functools.cache
def _table() -> dict:
    return json.loads(TABLE_PATH.read_text()) if TABLE_PATH.exists() else {}


@functools.cache
def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def default_plan(
    rows: int, outputs: int, inputs: int, silu_mul: bool, *, by_warps: bool = False, has_norm: bool = False
) -> LinearPlan:
    """A plan by rule, for a shape or a card that was not measured.

    `by_warps`: the card runs kernels/skinny_linear_warps.py. Few rows go there, if W is of a size that the card's
    registers hold; else one or two rows go to matvec, and the rest to the library.
    """
    if by_warps and rows <= WARPS_MOST_ROWS and 2 * outputs * inputs <= WARPS_MOST_BYTES:
        block_n = 32 if outputs >= 4096 and inputs <= 1024 else 16
        for warps in (2, 4, 8) if has_norm else (2, 4, 8, 16):
            registers = SIXTEEN_WARPS_WEIGHT_REGISTERS if warps == 16 else WARPS_WEIGHT_REGISTERS
            is_whole = inputs % (32 * warps) == 0
            if is_whole and block_n * inputs <= 64 * warps * registers:
                share = inputs // warps
                return LinearPlan("warps", block_n, min(64, share & -share), warps)
    halves = 2 if silu_mul else 1
    if rows > 2 or inputs * 2 * halves > 32_768:
        return LIBRARY
    block_n = 8 // halves if outputs >= 4096 and inputs <= 4096 else 4 // halves
    return LinearPlan("matvec", block_n=block_n, block_k=1024, num_warps=4)


def gemm_tiles(columns: int, inputs: int) -> Iterator[LinearPlan]:
    """The tiles of kernels/gemm_hopper.py that fill so many columns of a product, wide ones first; with silu_mul the
    columns of gate and up together, since a tile takes half from each."""
    for block_n in (256, 128):
        if columns % block_n == 0 and inputs % 64 == 0:
            yield LinearPlan("gemm", block_n, 64, 4, block_m=GEMM_TILE_ROWS, norm_apart=True)


def gemm_plan(
    rows: int, outputs: int, inputs: int, programs: int, *, fused: bool = False, part: int = 0
) -> LinearPlan | None:
    """The plan of many rows for kernels/gemm_hopper.py, on a card with so many multiprocessors; None where it would be
    slower, or does not compute the shape.

    `fused`: what follows the product would be another kernel otherwise. `part`: of how many columns its parts consist,
    across whose ends no tile may reach.
    """
    if rows < GEMM_FEWEST_ROWS:
        return None
    best, best_cost = None, math.inf
    for plan in gemm_tiles(math.gcd(outputs, part), inputs):
        tiles = -(-rows // GEMM_TILE_ROWS) * (outputs // plan.block_n)
        waves = -(-tiles // programs)
        cost = waves * (1.0 if plan.block_n == 256 else NARROW_WAVE)
        filled = tiles / (waves * programs)
        if filled >= (GEMM_FILLED_FUSED if fused else GEMM_FILLED) and cost < best_cost:
            best, best_cost = plan, cost
    return best


def measured_plan(device: torch.device, dtype: torch.dtype, rows: int, operation: str) -> LinearPlan | None:
    """The fastest plan of this card for the next measured number of rows; None where none is measured, or where it
    takes a Triton that is not installed."""
    operations = _table().get(_card(device), {}).get(str(dtype).removeprefix("torch."), {})
    measured = operations.get(operation, {})
    bucket = next((str(bucket) for bucket in ROW_BUCKETS if bucket >= rows and str(bucket) in measured), None)
    if bucket is None:
        return None
    plan = LinearPlan(**measured[bucket]["plan"])
    return None if plan.kernel in GLUON_KERNELS and not takes_gluon(capability_major(device)) else plan


def find_plan(
    device: torch.device, dtype: torch.dtype, rows: int, outputs: int, inputs: int, *, silu_mul: bool, has_norm: bool
) -> LinearPlan:
    """The measured plan of this card for the bucket of `rows`, or one by rule. `outputs` counts W's rows.

    With a norm and float16, not one that multiplies the norm's weight into x before it knows the row's scale: what a
    model's rows hold, times that, may be more than float16 has, or so little that few of its digits are left.
    """
    plan = _found_plan(device, dtype, rows, outputs, inputs, silu_mul, has_norm)
    rounds_early = has_norm and dtype == torch.float16 and plan.kernel in ("warps", "small_m")
    return replace(plan, norm_apart=True) if rounds_early else plan


def most_library_rows(device: torch.device, dtype: torch.dtype, max_rows: int, outputs: int, inputs: int) -> int:
    """Up to how many rows, of `max_rows`, the library does a product with SiLU * up; measured rows count as such."""
    fewest = min(max_rows, ROW_BUCKETS[-1])
    tiles_of_rows = range(max_rows // GEMM_TILE_ROWS * GEMM_TILE_ROWS, fewest, -GEMM_TILE_ROWS)
    for rows in (max_rows, *tiles_of_rows):  # the plan is the same for all that fill as many tiles
        if find_plan(device, dtype, rows, outputs, inputs, silu_mul=True, has_norm=True).kernel == "library":
            return rows
    return fewest


def _found_plan(
    device: torch.device, dtype: torch.dtype, rows: int, outputs: int, inputs: int, silu_mul: bool, has_norm: bool
) -> LinearPlan:
    measured = measured_plan(device, dtype, rows, operation_key(outputs, inputs, silu_mul, has_norm))
    if measured is None and not has_norm:  # what is fast with a norm is so without
        measured = measured_plan(device, dtype, rows, operation_key(outputs, inputs, silu_mul, True))
    if measured is not None:
        return measured
    by_gluon = dtype.itemsize == 2 and takes_gluon(capability_major(device))
    if by_gluon:
        plan = gemm_plan(rows, outputs, inputs, multiprocessor_count(device), fused=silu_mul)
        if plan is not None:
            return plan
    return default_plan(rows, outputs, inputs, silu_mul, by_warps=by_gluon, has_norm=has_norm)
