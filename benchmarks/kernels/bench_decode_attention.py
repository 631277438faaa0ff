"""Decode attention: bytes a second against the read limit of the same run, inputs cold in the L2 cache.

python -m benchmarks.kernels.bench_decode_attention --output benchmarks/results/decode_attention.jsonl
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.kernels import harness
from benchmarks.kernels.paged_inputs import cache_dtype_of, device_and_dtype, make_inputs, multiprocessor_count
from benchmarks.kernels.shapes import DECODE_SHAPES, SMOKE_DECODE_SHAPES, AttentionShape
from kernels import interpreter


def kernel_calls(shape: AttentionShape) -> list[Callable[[], None]]:
    """Calls of the kernel on as many input sets as it takes to leave the L2 cache."""
    from kernels.decode_attention import decode_attention, launch_plan

    plan = launch_plan(
        shape.batch, shape.query_heads, shape.kv_heads, shape.head_dim, multiprocessor_count(),
        quantised=shape.cache != "auto",
    )  # fmt: skip
    device, _ = device_and_dtype()
    partials = torch.empty(plan.workspace_floats, device=device)
    counters = torch.zeros(plan.counter_count, dtype=torch.int32, device=device)
    scale = shape.head_dim**-0.5

    def call_on(inputs) -> Callable[[], None]:
        output, options = torch.empty_like(inputs.query), {"scale": scale, **inputs.scales}
        return lambda: decode_attention(output, *inputs.decode_inputs, partials, counters, plan, **options)

    return [call_on(make_inputs(shape)) for _ in range(harness.copies_to_exceed_l2(bytes_of(shape)))]


def bytes_of(shape: AttentionShape) -> int:
    """Bytes that a call over the shape must move."""
    from kernels.decode_attention import bytes_moved

    heads = (shape.query_heads, shape.kv_heads, shape.head_dim)
    return bytes_moved([shape.context] * shape.batch, *heads, device_and_dtype()[1].itemsize, cache_dtype_of(shape))


def main() -> None:
    """Measure the shapes that `--only` names, all by default, and write a line for each."""
    arguments = harness.argument_parser(__doc__).parse_args()
    report = harness.Report("decode")
    for shape in SMOKE_DECODE_SHAPES if arguments.smoke else DECODE_SHAPES:
        if arguments.only in shape.name:
            runs_us = harness.time_runs_us(kernel_calls(shape))
            report.add(shape.name, runs_us, bytes_moved=bytes_of(shape), options={"block_size": shape.block_size})
    report.write(arguments.output)


if __name__ == "__main__":
    if not harness.has_cuda():
        interpreter.enable()
    main()
