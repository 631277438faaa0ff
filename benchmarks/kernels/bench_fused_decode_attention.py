"""What lies between the q/k/v product and the output product of decoding rows, in a chain of layers, in two ways:
one launch for few rows, or two launches. Microseconds a layer and bytes of K/V a second.

python -m benchmarks.kernels.bench_fused_decode_attention --output benchmarks/results/fused_decode_attention.jsonl
"""

from __future__ import annotations

import itertools

import torch

from benchmarks.kernels import decode_chain, harness
from kernels import interpreter

WAYS = {
    "few_rows": decode_chain.few_rows,
    "two_launches": decode_chain.two_launches,
}


def shapes() -> dict[str, list[int]]:
    """Contexts by name; `mixed` are those of `w1_nano256` after 100 decode steps."""
    equal = ((1, 256), (1, 512), (8, 200), (16, 256), (32, 256), (32, 1024), (64, 256), (128, 600), (256, 1024))
    return {f"b{rows}_c{context}": [context] * rows for rows, context in equal} | {
        "mixed": decode_chain.mixed_lengths(100)
    }


def measure(report: harness.Report, name: str, lengths: list[int], cache: str) -> None:
    """One shape with one type of cache."""
    from kernels.fused_decode_attention import MAX_ROWS

    shape = decode_chain.QWEN3_06B if harness.has_cuda() else decode_chain.SMOKE
    chain = decode_chain.DecodeChain(lengths, cache, shape)
    without_us = harness.time_us([lambda: chain.run(None)], inner=1)
    for way, attend in WAYS.items():
        if way == "few_rows" and chain.rows > MAX_ROWS:
            continue
        runs_us = harness.time_runs_us([lambda attend=attend: chain.run(attend)], inner=1)
        share_us = [max(run - without_us, 0.01) / chain.shape.layers for run in runs_us]
        options = {"way": way, "kv_cache_dtype": cache, "products_us": round(without_us / chain.shape.layers, 3)}
        report.add(f"{name}_{cache}_{way}", share_us, bytes_moved=chain.bytes_moved, options=options)


def main() -> None:
    """Measure the shapes and caches that `--only` names, all by default, and write a line for each."""
    arguments = harness.argument_parser(__doc__).parse_args()
    report = harness.Report("fused_decode")
    every = {"smoke": [5, 20]} if arguments.smoke else shapes()
    caches = ("auto",) if arguments.smoke else ("auto", "int8", "fp8")
    for (name, lengths), cache in itertools.product(every.items(), caches):
        if arguments.only in f"{name}_{cache}":
            measure(report, name, lengths, cache)
            if harness.has_cuda():
                torch.cuda.empty_cache()
    report.write(arguments.output)


if __name__ == "__main__":
    if not harness.has_cuda():
        interpreter.enable()
    main()
