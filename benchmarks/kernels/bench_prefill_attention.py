"""Prefill attention: operations a second against the matrix limit of the same run, beside torch's own attention.

    python -m benchmarks.kernels.bench_prefill_attention --output benchmarks/results/prefill_attention.jsonl

Only causal pairs count as work. torch's scaled_dot_product_attention reads contiguous tensors and no cache; it is
measured where all of a row's tokens are new.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.kernels import harness
from benchmarks.kernels.paged_inputs import PagedInputs, device_and_dtype, make_inputs, multiprocessor_count
from benchmarks.kernels.shapes import PREFILL_SHAPES, SMOKE_PREFILL_SHAPES, AttentionShape
from kernels import interpreter


def kernel_call(shape: AttentionShape, inputs: PagedInputs, **plan_options: int) -> Callable[[], None]:
    from kernels.prefill_attention import COUNTER_COUNT, launch_plan, prefill_attention

    plan = launch_plan(
        len(inputs.query),
        shape.batch,
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        multiprocessor_count(),
        **plan_options,
    )
    counters = torch.zeros(COUNTER_COUNT, dtype=torch.int32, device=device_and_dtype()[0])
    scale = shape.head_dim**-0.5
    return lambda: prefill_attention(*inputs.prefill_arguments, counters, plan, scale=scale)


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
    from kernels.prefill_attention import flops

    rows = [shape.query_tokens] * shape.batch, [shape.context] * shape.batch
    return flops(*rows, shape.query_heads, shape.head_dim)


def main() -> None:
    arguments = harness.argument_parser(__doc__).parse_args()
    report = harness.Report("prefill")
    for shape in SMOKE_PREFILL_SHAPES if arguments.smoke else PREFILL_SHAPES:
        if arguments.only not in shape.name:
            continue
        calls = {"trireme": kernel_call(shape, make_inputs(shape))}
        if shape.query_tokens == shape.context:
            calls["torch"] = torch_call(shape)
        for engine, call in calls.items():
            report.add(shape.name, harness.time_runs_us([call]), flops=flops_of(shape), engine=engine)
    report.write(arguments.output)


if __name__ == "__main__":
    if not harness.has_cuda():
        interpreter.enable()
    main()
