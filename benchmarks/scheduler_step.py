"""The cost of the scheduler: planning and encoding a step, taking in a result, finding a long prefix, memory.

    python -m benchmarks.scheduler_step [--output FILE] [--smoke]

Steps are pure decode, after every prompt has been computed; run-ahead is 2. `cold` means the first lookup of a prompt,
with the computation of its keys. `prompts_N` is the step of N prompts of 128 tokens that have come together: reading
their messages, queueing them, planning until the plan's bytes could be sent, and what is left after that; in a loop,
and with caches that other memory has filled. The last line is one JSON object.
"""

import argparse
import gc
import itertools
import statistics
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks import records
from benchmarks.cold_caches import Sweep
from common.messages import StepPlan, StepResult, decode_for_scheduler
from scheduler_proc.block_pool import BlockPool
from scheduler_proc.core import SchedulerCore
from scheduler_proc.simulation import simple_request
from scheduler_proc.state import Limits, make_prefix_cache

BLOCK_SIZE = 16
TARGETS = {
    "plan_and_encode_us_p50_256": 300, "plan_bytes_256": 2048, "lookup_100k_ms": 8, "bytes_per_cached_block": 200
}  # fmt: skip
GPU_HOST_TARGETS = {**TARGETS, "plan_and_encode_us_p50_256": 150}
"""There a step of a small model takes a millisecond or less."""
PROMPT_TOKENS = 128
PROMPT_PARTS = ("read", "queue", "plan", "after")
ROOT = Path(__file__).parents[1]


class Driver:
    """A core with so many decoding requests, and a worker that answers at once.

    Args:
        count: requests.
        steps: how many decode steps will be timed.
    """

    def __init__(self, count: int, steps: int) -> None:
        blocks = count * (300 + steps) // BLOCK_SIZE + count
        self.core = SchedulerCore(
            Limits(
                max_model_len=1 << 20,
                max_num_seqs=count,
                max_num_batched_tokens=1 << 16,
                block_size=BLOCK_SIZE,
                block_count=blocks,
            ),
            lambda: 0.0,
        )
        random = Random(count)
        for request_id in range(count):
            prompt = [random.randrange(30_000) for _ in range(random.randrange(100, 300))]
            self.core.handle(simple_request(request_id, prompt, max_tokens=1 << 18, end=[0]))
        self._plans: deque[StepPlan] = deque()

    def time_steps(self, count: int) -> dict[str, list[int]]:
        """Nanoseconds of each part of each pure decode step, and bytes of its plan."""
        times: dict[str, list[int]] = {"plan": [], "encode": [], "result": [], "report": [], "bytes": []}
        while len(times["plan"]) < count:
            self._plan(times)
            plan = self._plans.popleft()
            sampled_count = len(plan.decode_slots) + sum(plan.chunk_samples)
            result = StepResult(step_id=plan.step_id, token_ids=array("i", [1]) * sampled_count)
            start_ns = time.perf_counter_ns()
            messages = self.core.handle_result(result)
            done_ns = time.perf_counter_ns()
            for message in messages:
                message.to_wire()
            if not plan.chunk_slots:
                times["result"].append(done_ns - start_ns)
                times["report"].append(time.perf_counter_ns() - done_ns)
        return times

    def _plan(self, times: dict[str, list[int]]) -> None:
        while True:
            start_ns = time.perf_counter_ns()
            plan = self.core.plan_step()
            if plan is None:
                return
            planned_ns = time.perf_counter_ns()
            data = plan.to_wire()
            encoded_ns = time.perf_counter_ns()
            self._plans.append(plan)
            if not plan.chunk_slots:
                times["plan"].append(planned_ns - start_ns)
                times["encode"].append(encoded_ns - planned_ns)
                times["bytes"].append(len(data))


def time_step(count: int, steps: int) -> dict[str, float]:
    """Percentiles of the parts, in microseconds, with so many requests decoding."""
    gc.collect()
    times = Driver(count, steps).time_steps(steps)
    both = [plan + encode for plan, encode in zip(times["plan"], times["encode"], strict=True)]
    figures = {f"{name}_us_p50": _percentile(times[name], 0.5) / 1e3 for name in ("plan", "encode", "result", "report")}
    figures["plan_and_encode_us_p50"] = _percentile(both, 0.5) / 1e3
    figures["plan_and_encode_us_p99"] = _percentile(both, 0.99) / 1e3
    figures["plan_bytes_max"] = max(times["bytes"])
    return {name: round(value, 1) for name, value in figures.items()}


class PromptDriver:
    """A core that gets prompts of PROMPT_TOKENS, so many at a time, and a worker that answers at once.

    Args:
        count: requests of a step; each ends with its first token.
    """

    def __init__(self, count: int) -> None:
        self._count, self._random = count, Random(count)
        self._core = SchedulerCore(
            Limits(
                max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192, block_size=BLOCK_SIZE,
                block_count=16_384,
            ),
            lambda: 0.0,
        )  # fmt: skip
        self._next_id = 0

    def _messages(self) -> list[bytes]:
        ids = range(self._next_id, self._next_id + self._count)
        self._next_id += self._count
        prompts = ([self._random.randrange(30_000) for _ in range(PROMPT_TOKENS)] for _ in ids)
        return [
            simple_request(request_id, prompt, max_tokens=1, temperature=0.6, top_p=0.9).to_wire()
            for request_id, prompt in zip(ids, prompts, strict=True)
        ]

    def step(self, before: Callable[[], object]) -> list[float]:
        """Microseconds of PROMPT_PARTS."""
        messages, marks = self._messages(), []
        before()
        marks.append(time.perf_counter_ns())
        requests = [decode_for_scheduler(message) for message in messages]
        marks.append(time.perf_counter_ns())
        for request in requests:
            self._core.handle(request)
        marks.append(time.perf_counter_ns())

        def send(plan: StepPlan) -> None:
            plan.to_wire()
            marks.append(time.perf_counter_ns())

        plan = self._core.plan_step(send)
        marks.append(time.perf_counter_ns())
        assert plan is not None and len(plan.chunk_slots) == self._count
        self._core.handle_result(StepResult(step_id=plan.step_id, token_ids=array("i", [1]) * self._count))
        return [(end - start) / 1e3 for start, end in itertools.pairwise(marks)]


def time_prompts(count: int, steps: int) -> dict[str, float]:
    """Medians of the parts of a step with so many new prompts, in microseconds, warm and cold, and the least."""
    figures: dict[str, float] = {}
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)  # as in the process
    for kind, before in (("warm", int), ("cold", Sweep())):
        driver = PromptDriver(count)
        driver.step(int)
        gc.collect()
        times = [driver.step(before) for _ in range(steps)]
        for part, values in zip(PROMPT_PARTS, zip(*times, strict=True), strict=True):
            figures[f"{kind}_{part}_us"] = round(statistics.median(values), 1)
            if kind == "warm":
                figures[f"least_{part}_us"] = round(min(values), 1)
    gc.set_threshold(*thresholds)
    return figures


def time_lookup(kind: str, token_count: int) -> dict[str, float]:
    """Milliseconds to index a prompt once, and to find it for the first time and again (the shortest of five)."""
    pool = BlockPool(token_count // BLOCK_SIZE + 1)
    cache = make_prefix_cache(kind, pool, BLOCK_SIZE)
    random = Random(1)
    tokens = array("i", [random.randrange(100_000) for _ in range(token_count)])
    blocks = [pool.allocate() for _ in range(token_count // BLOCK_SIZE)]
    start_ns = time.perf_counter_ns()
    cache.insert(cache.chain(""), tokens, blocks, token_count)
    inserted_ns = time.perf_counter_ns()
    cold = []
    for _ in range(5):
        chain = cache.chain("")
        start_lookup_ns = time.perf_counter_ns()
        match = cache.lookup(chain, tokens, token_count - 1)
        cold.append(time.perf_counter_ns() - start_lookup_ns)
        assert match.token_count >= token_count - BLOCK_SIZE
    again = []
    for _ in range(5):
        start_lookup_ns = time.perf_counter_ns()
        cache.lookup(chain, tokens, token_count - 1)
        again.append(time.perf_counter_ns() - start_lookup_ns)
    times_ns = {"insert": inserted_ns - start_ns, "cold": min(cold), "again": min(again)}
    return {f"{name}_ms": round(value / 1e6, 2) for name, value in times_ns.items()}


MEMORY_SCRIPT = """
import os, sys
from array import array
from random import Random
from scheduler_proc.main import Loop
from scheduler_proc.block_pool import BlockPool
from scheduler_proc.state import make_prefix_cache

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

start, count, random = resident(), int(sys.argv[2]), Random(1)
pool = BlockPool(count)
cache = make_prefix_cache(sys.argv[1], pool, 16)
for _ in range(count // 64):
    tokens = array("i", [random.randrange(100000) for _ in range(1024)])
    blocks = [pool.allocate() for _ in range(64)]
    cache.insert(cache.chain(""), tokens, blocks, 1024)
    pool.release(blocks)
print(start, (resident() - start) / (count // 64 * 64))
"""


def measure_memory(kind: str, block_count: int) -> dict[str, float]:
    """Resident memory of a process with the scheduler loaded, and what each cached block adds (pool included)."""
    command = [sys.executable, "-c", MEMORY_SCRIPT, kind, str(block_count)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    start_bytes, block_bytes = run.stdout.split()
    return {
        "start_mb": round(int(start_bytes) / 1e6, 1),
        "bytes_per_cached_block": round(float(block_bytes), 1),
    }


def _percentile(values: list[int], fraction: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * fraction))]


def measure(smoke: bool) -> dict[str, object]:
    """All figures."""
    steps, tokens, blocks = (40, 10_000, 20_000) if smoke else (600, 100_000, 200_000)
    metrics: dict[str, object] = {}
    for count in (1, 16) if smoke else (1, 16, 256, 1024):
        metrics[f"step_{count}"] = time_step(count, steps)
    for count in (1, 2) if smoke else (1, 8, 64):
        metrics[f"prompts_{count}"] = time_prompts(count, 3 if smoke else 60)
    for kind in ("hash", "radix"):
        metrics[f"lookup_{tokens}_{kind}"] = time_lookup(kind, tokens)
        metrics[f"memory_{kind}"] = measure_memory(kind, blocks)
    return metrics


def main() -> None:
    """Parse, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a second, for the test suite")
    parser.add_argument("--output", help="file to append the result to")
    args = parser.parse_args()
    metrics = measure(args.smoke)
    for name, figures in metrics.items():
        print(f"{name:<22} {figures}", file=sys.stderr)
    limit = GPU_HOST_TARGETS if Path("/dev/nvidia0").exists() else TARGETS
    entry = records.record(
        benchmark="scheduler_step", workload="decode", metrics=metrics, device=records.host_name(), limit=limit
    )
    records.finish(entry, args.output)


if __name__ == "__main__":
    main()
