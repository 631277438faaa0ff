"""Runs the same workloads on this engine and on another one, in one go, and prints the ratios.

    python -m benchmarks.compare --engine transformers --workloads b1_128_64 b16_128_64
    python -m benchmarks.compare --engine vllm --model DIR --load-format dummy

The other engine runs first and is closed before ours starts, so that they do not share the machine. With
`--baseline NAME`, the other engine runs only that workload and every ratio is against it (for example a batch of 16
here against a batch of 1 there).
"""

import argparse
import json

from benchmarks import records
from benchmarks.throughput import chosen_workloads, parser, run, workload_name


def main() -> None:
    """Parse, measure both, print the ratios, save."""
    parsed = parser(__doc__.split("\n\n")[0])
    parsed.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    parsed.add_argument("--baseline", type=workload_name, help="the one workload that the other engine runs")
    parsed.add_argument("--other-dtype", default="", help="the other engine's dtype, if it differs")
    args = parsed.parse_args()
    names = chosen_workloads(args)
    records.check_output(args.output)
    other_args = argparse.Namespace(**vars(args))
    other_args.dtype = args.other_dtype or args.dtype
    others = run(args.engine, [args.baseline] if args.baseline else names, other_args)
    ours = run("trireme", names, args)
    ratios = {}
    for index, entry in enumerate(ours):
        other = others[0 if args.baseline else index]
        ratio = entry["metrics"]["output_tokens_per_s"] / other["metrics"]["output_tokens_per_s"]
        ratios[entry["workload"]] = round(ratio, 2)
        print(f"{entry['workload']:<14} {ratio:6.2f} x {args.engine} ({other['workload']})")
    if args.output:
        records.save(others + ours, args.output)
    print(json.dumps({"ratios": ratios, "results": others + ours}))


if __name__ == "__main__":
    main()
