"""Measure every candidate plan of the skinny products on this card and write the table that ships with the kernels.

    python -m benchmarks.kernels.tune_skinny_linear [--models qwen3-0.6b,llama-3.1-8b] [--rows 1,2,...] [--table FILE]
        [--kinds layer,head,alone,parts] [--kernels warps]

Candidates are compiled by several processes first (each launches its share once, which fills Triton's cache), then
timed one by one in a graph, over enough copies of W that it comes from memory. A candidate must agree with the float32
reference before it is timed. A product that leaves parts is timed with the kernel that reads them. The fastest few of
each operation are then exchanged for one another in a chain of whole layers, for few rows with their attention, where a
kernel also meets its neighbours. The entries of this card and dtype are replaced, all others are kept.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from benchmarks.kernels.decode_chain import ChainShape, DecodeChain, few_rows
from benchmarks.kernels.harness import argument_parser, copies_to_exceed_l2, device_name, time_us
from benchmarks.kernels.linear_candidates import candidates
from benchmarks.kernels.linear_shapes import MODELS, LinearShape, ModelShape, make_arguments, make_reader
from common.processors import granted_threads
from kernels.fused_decode_attention import MAX_ROWS as MOST_FUSED_ROWS
from kernels.linear_workspace import MAX_ROWS, Workspace, plan_key
from kernels.skinny_linear import run_parts_plan, run_plan, skinny_linear_reference
from kernels.tuning import LIBRARY, ROW_BUCKETS, TABLE_PATH, LinearPlan, measured_plan, operation_key

DTYPE = torch.bfloat16
CHAIN_CHOICES = 6  # plans of an operation that are tried in the chain
CHAIN_CONTEXT = 384  # tokens of each row in it

Timed = list[tuple[float, LinearPlan]]  # microseconds, fastest first
Plans = dict[LinearShape, LinearPlan]


def jobs_for(models: list[str], row_counts: list[int], kinds: list[str]) -> list[tuple[LinearShape, int]]:
    """The distinct operations of the models with each number of rows; lm_head last, being the largest."""
    shapes: dict[LinearShape, None] = {}
    for name in models:
        model = MODELS[name]
        groups = {"parts": model.in_parts, "alone": (model.alone,), "layer": model.layer, "head": (model.lm_head,)}
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
    """Large enough for every shape, up to that many outputs."""
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


def chosen_candidates(shape: LinearShape, rows: int, kernels: set[str]) -> list[LinearPlan]:
    """The plans to be timed: all, or those of some kernels beside the library's and the one that the table has now."""
    has_norm, has_silu, in_parts = (name in shape.fusion for name in ("norm", "silu", "parts"))
    key = operation_key(shape.outputs, shape.inputs, has_silu, has_norm, in_parts)
    known = (LIBRARY, measured_plan(torch.device("cuda"), DTYPE, rows, key))
    plans = [plan for plan in candidates(shape, rows) if not kernels or plan.kernel in kernels or plan in known]
    return plans if known[1] is None or known[1] in plans else [*plans, known[1]]


def compile_all(jobs: list[tuple[LinearShape, int]], process_count: int, ahead: bool, kernels: set[str]) -> None:
    """Fill Triton's cache. One representative number of rows is enough for kernels that do not depend on it."""
    work = {}
    for shape, rows in jobs:
        for plan in chosen_candidates(shape, rows, kernels):
            if plan != LIBRARY:
                row_class = {"resident": 0, "warps": 8 if rows <= 8 else 16}.get(plan.kernel, rows)
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


def tune(shape: LinearShape, rows: int, workspace: Workspace, ahead: bool, kernels: set[str]) -> Timed:
    """Time the candidates, the fastest first."""
    copies = [make_item(shape, rows) for _ in range(copies_to_exceed_l2(shape.weight_bytes, at_most=32))]
    timed: Timed = []
    for plan in chosen_candidates(shape, rows, kernels):
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
    best_us, library_us = timed[0][0], us_of(LIBRARY, timed)
    runners_up = "  ".join(f"{us:.2f}:{short_name(plan)}" for us, plan in timed[:4])
    print(f"{shape.name:8} rows {rows:3} best {best_us:7.2f} us {shape.weight_bytes / best_us / 1e6:5.2f} TB/s  "
          f"library {library_us:7.2f}  {runners_up}", flush=True)  # fmt: skip
    return timed


def us_of(plan: LinearPlan, timed: Timed) -> float:
    """A plan's time among those measured."""
    return next(us for us, other in timed if other == plan)


def entry_of(plan: LinearPlan, timed: Timed) -> dict:
    """A line of the table."""
    return {
        "plan": asdict(plan), "us": round(us_of(plan, timed), 2), "library_us": round(us_of(LIBRARY, timed), 2)
    }  # fmt: skip


def best_in_chain(
    name: str, layer: tuple[LinearShape, ...], timed: dict[LinearShape, Timed], chain_us: Callable[[Plans], float]
) -> Plans:
    """The plans that make a chain of layers fastest, exchanged one operation at a time among the fastest few alone."""
    chosen = {shape: timed[shape][0][1] for shape in layer}
    first_us = best_us = chain_us(chosen)
    for _ in range(2):
        for shape in layer:
            for _, plan in timed[shape][:CHAIN_CHOICES]:
                us = chain_us(chosen | {shape: plan}) if plan != chosen[shape] else best_us
                if us < best_us * 0.997:
                    best_us, chosen = us, chosen | {shape: plan}
    names = "  ".join(f"{shape.name} {short_name(plan)}" for shape, plan in chosen.items())
    print(f"{name} chain best {best_us:.2f} us a layer, of {first_us:.2f}: {names}", flush=True)
    return chosen


def chain_in_parts(model: ModelShape, rows: int, workspace: Workspace) -> Callable[[Plans], float]:
    """Times layers whose products leave parts, with their readers."""
    layer = model.in_parts
    layer_bytes = sum(shape.weight_bytes for shape in layer)
    items = [(shape, make_item(shape, rows)) for _ in range(max(3, (256 << 20) // layer_bytes)) for shape in layer]

    def chain_us(plans: Plans) -> float:
        def chain() -> None:
            for shape, item in items:
                run_candidate(plans[shape], shape, item, workspace)

        return time_us([chain], inner=2, replays=9) / len(items) * len(layer)

    return chain_us


def chain_with_attention(model: ModelShape, rows: int) -> Callable[[Plans], float]:
    """Times layers as decode steps of few rows have them: attention's programs want room beside the products'."""
    sizes = (model.query_heads, model.kv_heads, model.head_dim, model.layer[0].inputs, model.layer[3].inputs)
    layers = max(3, (256 << 20) // sum(shape.weight_bytes for shape in model.layer))
    chain = DecodeChain([CHAIN_CONTEXT] * rows, "auto", ChainShape(layers, *sizes))

    def chain_us(plans: Plans) -> float:
        for shape, plan in plans.items():
            fusion = {"has_norm": "norm" in shape.fusion, "silu_mul": "silu" in shape.fusion}
            chain.workspace.plans[plan_key(rows, shape.outputs, shape.inputs, **fusion)] = plan
        return time_us([lambda: chain.run(few_rows)], inner=2, replays=9) / layers

    return chain_us


def merge(table: dict, entries: dict[tuple[LinearShape, int], dict]) -> dict:
    """The table with this card's entries replaced."""
    operations = table.setdefault(device_name(), {}).setdefault(str(DTYPE).removeprefix("torch."), {})
    for (shape, rows), entry in entries.items():
        fusion = ("silu" in shape.fusion, "norm" in shape.fusion, "parts" in shape.fusion)
        key = operation_key(shape.outputs, shape.inputs, *fusion)
        operations.setdefault(key, {})[str(rows)] = entry
    return table


def main() -> None:
    """Tune the shapes of the models named, and put the plans into the table."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--models", default="qwen3-0.6b,llama-3.1-8b,smollm2-135m")
    parser.add_argument("--rows", default=",".join(map(str, ROW_BUCKETS)))
    parser.add_argument("--kinds", default="layer,head,alone,parts", help="products: which of them")
    what = "time only plans of these, beside the library's and those of the table"
    parser.add_argument("--kernels", default="", metavar="KERNEL,...", help=what)
    parser.add_argument("--prefetch", action="store_true", help="each launch prefetches the next one's weight")
    parser.add_argument("--table", type=Path, default=TABLE_PATH)
    options = parser.parse_args()
    row_counts = [int(rows) for rows in options.rows.split(",")]
    jobs = jobs_for(options.models.split(","), row_counts, options.kinds.split(","))
    start_s = time.perf_counter()
    kernels = {name for name in options.kernels.split(",") if name}
    compile_all(jobs, min(16, granted_threads()), options.prefetch, kernels)
    print(f"compiled in {time.perf_counter() - start_s:.0f} s", flush=True)
    workspace = make_workspace(151_936)
    timed = {(shape, rows): tune(shape, rows, workspace, options.prefetch, kernels) for shape, rows in jobs}
    entries = {key: entry_of(plans[0][1], plans) for key, plans in timed.items()}
    for model in (MODELS[name] for name in options.models.split(",")):
        layers = {"layer": model.layer, "parts": model.in_parts}
        for kind, rows in product((kind for kind in layers if kind in options.kinds), row_counts):
            if kind == "layer" and rows > MOST_FUSED_ROWS:
                continue
            of_rows = {shape: timed[shape, rows] for shape in layers[kind]}
            in_parts = kind == "parts"
            chain_us = chain_in_parts(model, rows, workspace) if in_parts else chain_with_attention(model, rows)
            chosen = best_in_chain(f"{model.name} {kind} rows {rows:3}", layers[kind], of_rows, chain_us)
            entries |= {(shape, rows): entry_of(plan, of_rows[shape]) for shape, plan in chosen.items()}
    table = json.loads(options.table.read_text()) if options.table.exists() else {}
    options.table.write_text(json.dumps(merge(table, entries), indent=1) + "\n")


if __name__ == "__main__":
    main()
