"""Prefill attention: operations a second against the matrix limit of the same run, beside torch's own attention.

    python -m benchmarks.kernels.bench_prefill_attention --output benchmarks/results/prefill_attention.jsonl

Only causal pairs count as work. torch's scaled_dot_product_attention reads contiguous tensors and no cache; it is
measured where all of a row's tokens are new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from benchmarks.kernels import harness
from benchmarks.kernels.paged_inputs import PagedInputs, card_major, device_and_dtype, make_inputs, multiprocessor_count
from benchmarks.kernels.shapes import PREFILL_SHAPES, SMOKE_PREFILL_SHAPES, AttentionShape
from kernels import interpreter

if TYPE_CHECKING:
    from kernels.prefill_plans import PrefillPlan
    from worker_proc.cuda.buckets import Bucket


def bucket_for(shape: AttentionShape) -> Bucket:
    """The worker's bucket for the shape."""
    from worker_proc.cuda.buckets import bucket_of

    token_count = shape.batch * shape.query_tokens
    return bucket_of(0, shape.batch, token_count, max_rows=256, max_tokens=max(token_count, 8192))


def is_specialised(shape: AttentionShape) -> bool:
    """Whether the worker would take the Hopper kernel for the shape as a bucket."""
    from kernels.paged_kv import HeadShape
    from kernels.prefill_plans import can_specialise, is_specialised_size

    heads = HeadShape(shape.query_heads, shape.kv_heads, shape.head_dim, shape.block_size)
    quantised = shape.cache != "auto"
    dtype, major = device_and_dtype()[1], card_major()
    is_possible = can_specialise(heads, dtype, quantised=quantised, capability_major=major)
    bucket = bucket_for(shape)
    return is_possible and is_specialised_size(bucket.tokens, bucket.rows, shape.query_heads)


def plan_of(shape: AttentionShape) -> PrefillPlan:
    """The plan that the worker would make for the shape as a bucket."""
    from kernels.prefill_plans import launch_plan

    return launch_plan(
        shape.batch * shape.query_tokens,
        shape.batch,
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        multiprocessor_count(),
        specialised=is_specialised(shape),
        quantised=shape.cache != "auto",
        chunk_rows=bucket_for(shape).rows,
    )


def kernel_call(shape: AttentionShape, inputs: PagedInputs, plan: PrefillPlan) -> Callable[[], None]:
    """A call of the plan over these inputs, with an output and counters of its own."""
    from kernels.prefill_attention import COUNTER_COUNT, prefill_attention

    counters = torch.zeros(COUNTER_COUNT, dtype=torch.int32, device=device_and_dtype()[0])
    output = torch.empty_like(inputs.query)
    options = {"scale": shape.head_dim**-0.5, **inputs.scales}
    fresh = inputs.fresh() if plan.fresh else None
    return lambda: prefill_attention(output, *inputs.prefill_inputs, counters, plan, fresh=fresh, **options)


def torch_call(shape: AttentionShape) -> Callable[[], torch.Tensor]:
    """Batched attention of torch on contiguous [batch, heads, tokens, head_dim]."""
    device, dtype = device_and_dtype()
    query, key, value = (
        torch.randn(shape.batch, heads, shape.context, shape.head_dim, device=device, dtype=dtype)
        for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    )
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(query, key, value, is_causal=True, enable_gqa=True)


def flops_of(shape: AttentionShape) -> int:
    """Floating-point operations of a call over the shape."""
    from kernels.prefill_attention import flops

    rows = [shape.query_tokens] * shape.batch, [shape.context] * shape.batch
    return flops(*rows, shape.query_heads, shape.head_dim)


def main() -> None:
    """Measure the shapes that `--only` names, all by default, beside torch's attention where that computes the same."""
    arguments = harness.argument_parser(__doc__).parse_args()
    report = harness.Report("prefill")
    for shape in SMOKE_PREFILL_SHAPES if arguments.smoke else PREFILL_SHAPES:
        if arguments.only not in shape.name:
            continue
        plan = plan_of(shape)
        kernel = "hopper" if plan.specialised else "plain"
        options = {"block_size": shape.block_size, "kernel": kernel, "fresh": plan.fresh}
        runs_us = harness.time_runs_us([kernel_call(shape, make_inputs(shape), plan)])
        report.add(shape.name, runs_us, flops=flops_of(shape), options=options)
        if shape.query_tokens == shape.context and shape.cache == "auto":
            runs_us = harness.time_runs_us([torch_call(shape)])
            report.add(shape.name, runs_us, flops=flops_of(shape), engine="torch")
    report.write(arguments.output)


if __name__ == "__main__":
    if not harness.has_cuda():
        interpreter.enable()
    main()
