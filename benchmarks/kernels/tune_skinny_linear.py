"""Measure every candidate plan of the skinny products on this card and write the table that ships with the kernels.

    python -m benchmarks.kernels.tune_skinny_linear [--models qwen3-0.6b,llama-3.1-8b] [--rows 1,2,...] [--table FILE]
        [--kinds layer,head,parts]

Candidates are compiled by several processes first (each launches its share once, which fills Triton's cache), then
timed one by one in a graph, over enough copies of W that it comes from memory. A candidate must agree with the float32
reference before it is timed. A product that leaves parts is timed with the kernel that reads them. The entries of this
card and dtype are replaced, all others are kept.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.kernels.harness import argument_parser, copies_to_exceed_l2, device_name, time_us
from benchmarks.kernels.linear_shapes import MODELS, LinearShape, make_arguments, make_reader
from kernels.skinny_linear import MAX_ROWS, Workspace, run_parts_plan, run_plan, skinny_linear_reference
from kernels.skinny_linear_hopper import fits
from kernels.tuning import LIBRARY, ROW_BUCKETS, TABLE_PATH, LinearPlan, operation_key

DTYPE = torch.bfloat16
SHARED_BYTES = 200_000
MULTIPROCESSORS = 132


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


def resident_candidates(shape: LinearShape, rows: int) -> Iterator[LinearPlan]:
    """Hopper's tiles: 80 to 300 programs; all of W in shared memory, or a ring for one or for two programs of an SM."""
    silu = "silu" in shape.fusion
    most = 900 if silu else 3000 if shape.outputs > 50_000 else 300
    for block_m, warps in (64, 4), (128, 8), (256, 8):
        if block_m > 64 and (block_m >= 2 * rows or rows <= 64):
            continue
        for block_n in (16, 32, 64, 128):
            width = block_n * (2 if silu else 1)
            if width * block_m > 128 * 256 or (block_n == 16 and (shape.outputs > 1024 or rows > 64)):
                continue
            for split_k in (1,) if silu or most == 3000 else (1, 2, 3, 4, 6, 8):
                programs = -(-shape.out_columns // block_n) * split_k * -(-rows // block_m)
                if 80 <= programs <= most * -(-rows // 256):
                    tile = LinearPlan("resident", block_n, 0, warps, 1, split_k, norm_apart=True, block_m=block_m)
                    for block_k in _step_choices(shape, width + block_m):
                        yield from _stage_choices(shape, replace(tile, block_k=block_k), width)


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
    if "parts" in shape.fusion or shape.fusion == ("silu",):
        if rows <= 16:
            plans += held_candidates(shape)
        return plans + list(resident_candidates(shape, rows))
    if rows <= 4:
        plans += matvec_candidates(shape, rows)
    if 2 <= rows <= 16:
        plans += held_candidates(shape)
    if 16 <= rows <= 64 or (2 <= rows <= 64 and shape.outputs > 50_000):
        plans += small_m_candidates(shape, rows)
    if rows >= 32 and shape.outputs > 30_000:
        plans += resident_candidates(shape, rows)
    return plans


def jobs_for(models: list[str], row_counts: list[int], kinds: list[str]) -> list[tuple[LinearShape, int]]:
    """The distinct operations of the models with each number of rows; lm_head last, being the largest."""
    shapes: dict[LinearShape, None] = {}
    for name in models:
        model = MODELS[name]
        groups = {"parts": model.in_parts, "layer": model.layer, "head": (model.lm_head,)}
        for shape in (shape for kind in groups if kind in kinds for shape in groups[kind]):
            shapes[shape] = None
    return [(shape, rows) for shape in shapes for rows in row_counts]


def run_candidate(plan: LinearPlan, shape: LinearShape, item: dict, workspace: Workspace, upcoming=None) -> None:
    """Launch the product, and what reads its parts; `item` holds `make_arguments` and "reader"."""
    if "parts" in shape.fusion:
        item["reader"](run_parts_plan(plan, item["x"], item["weight"], workspace))
    else:
        rest = {name: value for name, value in item.items() if name != "reader"}
        run_plan(plan, workspace=workspace, upcoming=upcoming, **rest)


def make_item(shape: LinearShape, rows: int) -> dict:
    """Arguments of one call."""
    reader = make_reader(shape, rows, DTYPE, "cuda") if "parts" in shape.fusion else None
    return make_arguments(shape, rows, DTYPE, "cuda") | {"reader": reader}


def make_workspace(outputs: int = 32_768) -> Workspace:
    return Workspace.allocate(MAX_ROWS, 16_384, outputs, DTYPE, torch.device("cuda"))


def _compile_share(share: list[tuple[LinearShape, int, LinearPlan]], ahead: bool) -> None:
    torch.cuda.init()
    workspace = make_workspace()
    arguments: dict = {}
    for shape, rows, plan in share:
        if (shape, rows) not in arguments:
            arguments = {(shape, rows): make_item(shape, rows)}
        try:
            item = arguments[shape, rows]
            run_candidate(plan, shape, item, workspace, item["weight"] if ahead else None)
        except Exception as error:  # a candidate that does not build is only not a candidate
            print(f"cannot build {shape.name} {plan}: {error!r}"[:300], file=sys.stderr)


def compile_all(jobs: list[tuple[LinearShape, int]], process_count: int, ahead: bool) -> None:
    """Fill Triton's cache. One representative number of rows is enough for the kernel that does not depend on it."""
    work = {}
    for shape, rows in jobs:
        for plan in candidates(shape, rows):
            if plan != LIBRARY:
                row_class = 0 if plan.kernel == "resident" else rows
                work[shape, row_class, plan] = (shape, rows, plan)
    shares = [list(work.values())[index::process_count] for index in range(process_count)]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compile_share, args=(share, ahead)) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def is_right(plan: LinearPlan, shape: LinearShape, workspace: Workspace, item: dict, ahead: bool) -> bool:
    """Whether the plan's result is within bf16's error of the float32 reference."""
    names = ("x", "weight", "norm_weight", "eps", "residual", "silu_mul")
    want = skinny_linear_reference(**{name: item[name] for name in names})
    if "parts" in shape.fusion:
        workspace.partials.fill_(float("nan"))
        workspace.wide.fill_(float("nan"))
        got = run_parts_plan(plan, item["x"], item["weight"], workspace).float().sum(0)
    else:
        got = item["out"].fill_(float("nan"))
        run_candidate(plan, shape, item, workspace, item["weight"] if ahead else None)
    error = (got.float() - want).norm() / want.norm()
    return bool(error < 1e-2)


def short_name(plan: LinearPlan) -> str:
    """A plan in a few letters, for the printed table."""
    flags = "h" * plan.held + "a" * plan.norm_apart
    tile = f"{plan.block_m}x{plan.block_n}" if plan.block_m else f"{plan.block_n}"
    stages = f"s{plan.num_stages}.{plan.weight_stages}" if plan.block_m else f"s{plan.num_stages}"
    return f"{plan.kernel[0]}{tile}x{plan.block_k}w{plan.num_warps}{stages}k{plan.split_k}{flags}"


def tune(shape: LinearShape, rows: int, workspace: Workspace, ahead: bool) -> dict:
    """Time all candidates; returns the table's entry for the fastest."""
    copies = [make_item(shape, rows) for _ in range(copies_to_exceed_l2(shape.weight_bytes, at_most=32))]
    timed: list[tuple[float, LinearPlan]] = []
    for plan in candidates(shape, rows):
        try:
            if not is_right(plan, shape, workspace, copies[0], ahead):
                print(f"wrong result: {shape.name} rows {rows} {plan}", file=sys.stderr)
                continue
            calls = [
                lambda a=a, p=plan, n=n: run_candidate(p, shape, a, workspace, n["weight"] if ahead else None)
                for a, n in zip(copies, copies[1:] + copies[:1], strict=True)
            ]
            timed.append((time_us(calls, inner=max(8, len(calls)), replays=5), plan))
        except Exception as error:
            print(f"cannot run {shape.name} rows {rows} {plan}: {error!r}"[:300], file=sys.stderr)
    timed.sort(key=lambda item: item[0])
    best_us, best = timed[0]
    library_us = next(us for us, plan in timed if plan == LIBRARY)
    runners_up = "  ".join(f"{us:.2f}:{short_name(plan)}" for us, plan in timed[:4])
    print(f"{shape.name:8} rows {rows:3} best {best_us:7.2f} us {shape.weight_bytes / best_us / 1e6:5.2f} TB/s  "
          f"library {library_us:7.2f}  {runners_up}", flush=True)  # fmt: skip
    return {"plan": asdict(best), "us": round(best_us, 2), "library_us": round(library_us, 2)}


def merge(table: dict, entries: dict[tuple[LinearShape, int], dict]) -> dict:
    """The table with this card's entries replaced."""
    operations = table.setdefault(device_name(), {}).setdefault(str(DTYPE).removeprefix("torch."), {})
    for (shape, rows), entry in entries.items():
        fusion = ("silu" in shape.fusion, "norm" in shape.fusion, "parts" in shape.fusion)
        key = operation_key(shape.outputs, shape.inputs, *fusion)
        operations.setdefault(key, {})[str(rows)] = entry
    return table


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--models", default="qwen3-0.6b,llama-3.1-8b,smollm2-135m")
    parser.add_argument("--rows", default=",".join(map(str, ROW_BUCKETS)))
    parser.add_argument("--kinds", default="layer,head,parts", help="products: parts for 16 rows and more")
    parser.add_argument("--prefetch", action="store_true", help="each launch prefetches the next one's weight")
    parser.add_argument("--table", type=Path, default=TABLE_PATH)
    options = parser.parse_args()
    row_counts = [int(rows) for rows in options.rows.split(",")]
    jobs = jobs_for(options.models.split(","), row_counts, options.kinds.split(","))
    start_s = time.perf_counter()
    compile_all(jobs, min(16, os.cpu_count() or 1), options.prefetch)
    print(f"compiled in {time.perf_counter() - start_s:.0f} s", flush=True)
    workspace = make_workspace(151_936)
    entries = {(shape, rows): tune(shape, rows, workspace, options.prefetch) for shape, rows in jobs}
    table = json.loads(options.table.read_text()) if options.table.exists() else {}
    options.table.write_text(json.dumps(merge(table, entries), indent=1) + "\n")


if __name__ == "__main__":
    main()
