"""Decode attention: bytes a second against the read limit of the same run, inputs cold in the L2 cache.

python -m benchmarks.kernels.bench_decode_attention --output benchmarks/results/decode_attention.jsonl
python -m benchmarks.kernels.bench_decode_attention --early    # before the call ahead has ended, as in an engine
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from benchmarks.kernels import harness
from benchmarks.kernels.decode_chain import is_specialised
from benchmarks.kernels.paged_inputs import cache_dtype_of, device_and_dtype, make_inputs, multiprocessor_count
from benchmarks.kernels.shapes import DECODE_SHAPES, SMOKE_DECODE_SHAPES, AttentionShape
from kernels import interpreter

if TYPE_CHECKING:
    from kernels.decode_attention import DecodePlan


def plan_of(shape: AttentionShape) -> DecodePlan:
    """The plan that the worker would make for the shape as a bucket."""
    from kernels.decode_attention import launch_plan
    from kernels.paged_kv import HeadShape

    quantised, sizes = shape.cache != "auto", (shape.query_heads, shape.kv_heads, shape.head_dim)
    specialised = is_specialised(HeadShape(*sizes, shape.block_size), quantised)
    return launch_plan(shape.batch, *sizes, multiprocessor_count(), quantised=quantised, specialised=specialised)


def kernel_calls(shape: AttentionShape, plan: DecodePlan, early: bool = False) -> list[Callable[[], None]]:
    """Calls of the kernel on as many input sets as it takes to leave the L2 cache; `early`: each by early launch."""
    from kernels.decode_attention import decode_attention

    device, _ = device_and_dtype()
    partials = torch.empty(plan.workspace_floats, device=device)
    counters = torch.zeros(plan.counter_count, dtype=torch.int32, device=device)
    scale = shape.head_dim**-0.5

    def call_on(inputs) -> Callable[[], None]:
        output, options = torch.empty_like(inputs.query), {"scale": scale, "pdl": early, **inputs.scales}
        return lambda: decode_attention(output, *inputs.decode_inputs, partials, counters, plan, **options)

    return [call_on(make_inputs(shape)) for _ in range(harness.copies_to_exceed_l2(bytes_of(shape)))]


def bytes_of(shape: AttentionShape) -> int:
    """Bytes that a call over the shape must move."""
    from kernels.decode_attention import bytes_moved

    heads = (shape.query_heads, shape.kv_heads, shape.head_dim)
    return bytes_moved([shape.context] * shape.batch, *heads, device_and_dtype()[1].itemsize, cache_dtype_of(shape))


def main() -> None:
    """Measure the shapes that `--only` names, all by default, and write a line for each."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--early", action="store_true", help="launch early, where the engine does so")
    arguments = parser.parse_args()
    report = harness.Report("decode")
    for shape in SMOKE_DECODE_SHAPES if arguments.smoke else DECODE_SHAPES:
        if arguments.only in shape.name:
            plan = plan_of(shape)
            early = arguments.early and plan.specialised
            kernel = "hopper" if plan.specialised else "plain"
            options = {"block_size": shape.block_size, "kernel": kernel, "early": early}
            runs_us = harness.time_runs_us(kernel_calls(shape, plan, early))
            report.add(shape.name, runs_us, bytes_moved=bytes_of(shape), options=options)
    report.write(arguments.output)


if __name__ == "__main__":
    if not harness.has_cuda():
        interpreter.enable()
    main()
