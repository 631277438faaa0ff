"""Many prompts of one `generate` call: when the worker has its first plan, when it has the last prompt, what it idles.

    python -m benchmarks.bursts [--sizes 8 64 256] [--calls 20] [--busy-poll-ms -1] [--output FILE] [--smoke]

The processes are those of `benchmarks.hops`, whose stub worker takes `STEP_MS` for a step and `TOKEN_US` more for each
prompt token, about what an H200 takes for Qwen3-0.6B. Each call has prompts of 128 ids, 16 tokens out of each, and an
idle engine before it. Every process records its messages, which costs some of the time. Milliseconds after the call,
medians: `first_plan` when the worker has its first plan, `last_prompt` when it has the one in which the last prompt
ends, `prompts_done` when it has carried that one out, `idle` how long it had nothing to do before that, `whole`
when the call returns. `steps` are all of a call, 16 at least (mean). Ends with one JSON line for each size.
"""

import argparse
import statistics
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import records
from benchmarks.hops import PROMPT_TOKENS, Processes, matching, run_requests
from common.config import BUSY_POLL_AUTOMATIC
from common.messages import StepPlan, decode_for_worker
from common.recording import Direction, Link

SIZES = (8, 64, 256)
OUTPUT_TOKENS = 16
STEP_MS, TOKEN_US = 0.5, 1.7
WARM_UP = 3
Plans = list[tuple[int, StepPlan]]
"""Plans, each with the time at which the worker had it, in ns."""


def measure(folder: Path, sizes: Sequence[int], calls: int, busy_poll_ms: float) -> Iterator[dict[str, float]]:
    """The figures of each size, one after another in the same processes."""
    recorded = folder / "records"
    with Processes(folder / "run", STEP_MS, busy_poll_ms, recorded, decode_ms=STEP_MS, token_us=TOKEN_US) as processes:
        spans_ns = [run_requests(processes, calls, OUTPUT_TOKENS, size, WARM_UP).spans_ns for size in sizes]
    found = matching(recorded, "worker-0", Link.PLANS, Direction.IN, StepPlan.CODE)
    plans = [(record.time_ns, decode_for_worker(record.data)) for record in found]
    for spans in spans_ns:
        each = [call_figures(start_ns, end_ns, _between(plans, start_ns, end_ns)) for start_ns, end_ns in spans]
        figures = {name: round(statistics.median(call[name] for call in each), 2) for name in each[0]}
        yield figures | {"steps": round(statistics.mean(call["steps"] for call in each), 2)}


def _between(plans: Plans, start_ns: int, end_ns: int) -> Plans:
    first, last = (bisect_left(plans, at_ns, key=lambda plan: plan[0]) for at_ns in (start_ns, end_ns))
    return plans[first:last]


def call_figures(start_ns: int, end_ns: int, plans: Plans) -> dict[str, float]:
    """One call's milliseconds, and its steps.

    Args:
        start_ns, end_ns: when it began and returned.
        plans: what the worker got in between.
    """
    last_index = max(index for index, (_, plan) in enumerate(plans) if plan.chunk_slots)
    free_at_ns, idle_ns = float(start_ns), 0.0
    for at_ns, plan in plans[: last_index + 1]:
        idle_ns += max(0.0, at_ns - free_at_ns)
        free_at_ns = max(free_at_ns, at_ns) + 1e6 * STEP_MS + 1e3 * TOKEN_US * sum(plan.chunk_token_counts)
    return {
        "first_plan_ms": (plans[0][0] - start_ns) / 1e6,
        "last_prompt_ms": (plans[last_index][0] - start_ns) / 1e6,
        "prompts_done_ms": (free_at_ns - start_ns) / 1e6,
        "idle_ms": idle_ns / 1e6,
        "whole_ms": (end_ns - start_ns) / 1e6,
        "prompt_steps": sum(bool(plan.chunk_slots) for _, plan in plans),
        "steps": len(plans),
    }


def main() -> None:
    """Parse, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="prompts of one call")
    parser.add_argument("--calls", type=int, default=20, help="of each size")
    parser.add_argument("--busy-poll-ms", type=float, default=BUSY_POLL_AUTOMATIC, help="-1: as the engine chooses")
    parser.add_argument("--smoke", action="store_true", help="a few calls only")
    parser.add_argument("--output", default="", help="append the result lines to this file")
    args = parser.parse_args()
    calls = 2 if args.smoke else args.calls
    with tempfile.TemporaryDirectory(prefix="bursts-") as name:
        for size, metrics in zip(args.sizes, measure(Path(name), args.sizes, calls, args.busy_poll_ms), strict=True):
            print(f"{size:4}", "  ".join(f"{key} {value:g}" for key, value in metrics.items()), file=sys.stderr)
            entry = records.record(
                benchmark="bursts", workload=f"{size} requests at once, {PROMPT_TOKENS} in, {OUTPUT_TOKENS} out",
                device=records.host_name(), options={"calls": calls, "busy_poll_ms": args.busy_poll_ms},
                metrics=metrics,
            )  # fmt: skip
            records.finish(entry, args.output)


if __name__ == "__main__":
    main()
