"""Measures what an idle engine costs: the CPU time of each of its processes, after one request.

    python -m benchmarks.idle                   # the embedded model
    python -m benchmarks.idle --model tiny      # a tiny random one (from a checkout)

For the supervisor, the frontend, the scheduler and the worker, and how often each is woken. Prints one JSON line and
appends it to --output; exits with 1 if a process uses 1 % of a core or more (the smoke size is too short to tell).
"""

import argparse
import sys
import time
from typing import Any

from benchmarks import records
from benchmarks.process_watch import Activity, activity, engine_processes
from benchmarks.soak import Engine
from frontend import Client

LIMIT_PERCENT = 1.0
SETTLING_S = 3.0
"""After a request: the last figures are sent, warm-ups end, and what was freed is given back."""


def usage(before: Activity, after: Activity, seconds: float) -> dict[str, float]:
    """What a process used in so many seconds: percent of one core, and how often a second one of its threads woke."""
    return {
        "cpu_percent": round(100 * (after.cpu_s - before.cpu_s) / seconds, 3),
        "wakes_per_s": round((after.wakes - before.wakes) / seconds, 1),
    }


def watch(supervisor_pid: int, seconds: float) -> dict[str, dict[str, float]]:
    """The usage of an engine's processes from now on, by name."""
    pids = engine_processes(supervisor_pid)
    began_s = time.monotonic()
    before = {name: activity(pid) for name, pid in pids.items()}
    time.sleep(seconds)
    lasted_s = time.monotonic() - began_s
    return {name: usage(before[name], activity(pid), lasted_s) for name, pid in pids.items()}


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="as launch.py takes it, or 'tiny'")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--output", default=str(records.RESULTS_DIR / "idle.jsonl"))
    parser.add_argument("--smoke", action="store_true", help="two seconds with the tiny model, nothing kept")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.seconds = "tiny", 2.0
    with Engine(arguments.model, ()) as engine:
        with Client(engine.ready["client_endpoint"]) as client:
            client.generate("The sea", {"max_tokens": 16, "ignore_eos": True})
        time.sleep(SETTLING_S)
        processes = watch(engine.process.pid, arguments.seconds)
    metrics: dict[str, Any] = processes | {"most_percent": max(each["cpu_percent"] for each in processes.values())}
    entry = records.record(
        benchmark="idle", workload=f"{arguments.seconds:g} s after one request", metrics=metrics,
        device=records.processor_name(), limit={"most_percent": LIMIT_PERCENT},
        model=records.model_label(arguments.model), weights="random" if arguments.model == "tiny" else "real",
    )  # fmt: skip
    records.finish(entry, "" if arguments.smoke else arguments.output)
    return 0 if arguments.smoke or metrics["most_percent"] < LIMIT_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
