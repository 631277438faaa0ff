"""The real scheduler against a simulated worker on a virtual clock: fixed runs, and the replay of a request trace.

    python -m benchmarks.scheduler_sim --fixed
    python -m benchmarks.scheduler_sim --trace FILE [--requests N] [--blocks N|unlimited] [--policy fcfs|priority|fair]
        [--prefix-cache hash|radix|off] [--machine h200|8xh200] [--stretch X] [--plot DIR]

A trace holds one JSON object a line: timestamp (ms), input_length, output_length, hash_ids (one per 512 prompt tokens).
Progress goes to stderr; the last line on stdout is one JSON object.
"""

import argparse
import gzip
import json
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import records
from benchmarks.step_cost import MACHINES, StepCost
from benchmarks.svg_plot import line_plot
from common.messages import AddRequest, StepPlan, StepResult, TokensOut
from common.sampling_params import SamplingParams
from scheduler_proc.core import SchedulerCore
from scheduler_proc.simulation import SimulatedEngine, expected_outputs, simple_request
from scheduler_proc.state import Limits

TRACE_BLOCK = 512
"""Prompt tokens that one hash id of a trace stands for."""
OPTIONS = (
    "machine", "policy", "prefix_cache", "block_size", "max_num_batched_tokens", "max_num_seqs", "run_ahead",
    "target_itl_ms", "stretch",
)  # fmt: skip
"""Of a replay, as its result names them."""


# ---- fixed runs


@dataclass(frozen=True)
class FixedRun:
    """A small run whose outcome is known; every request gives 4 tokens."""

    name: str
    budget: int
    block_count: int
    prompt_lengths: tuple[int, ...]


FIXED_RUNS = (
    FixedRun("mixed", 8, 24, (3, 4, 5, 6, 7, 8)),
    FixedRun("tight", 6, 7, (3, 4, 5, 6, 7, 8)),
    FixedRun("fairness", 4, 12, (1,) * 12),
    FixedRun("pressure", 12, 4, (2,) * 8),
)
FIXED_BLOCK_SIZE = 4
FIXED_OUTPUT = 4


def run_fixed(run: FixedRun, run_ahead: int = 0) -> dict[str, int | str]:
    """The figures of one fixed run; fails if an output is wrong or a block is lost."""
    limits = Limits(
        max_model_len=64,
        max_num_seqs=len(run.prompt_lengths),
        max_num_batched_tokens=run.budget,
        block_size=FIXED_BLOCK_SIZE,
        block_count=run.block_count,
        run_ahead=run_ahead,
    )
    engine = SimulatedEngine(limits)
    messages = [
        simple_request(i, range(100 * i, 100 * i + length), FIXED_OUTPUT) for i, length in enumerate(run.prompt_lengths)
    ]
    for message in messages:
        engine.send(message)
    peak_blocks = 0
    gaps = ServiceGaps()
    while not engine.core.is_idle:
        while engine.plan() is not None:
            peak_blocks = max(peak_blocks, engine.core.state.pool.held_count)
            gaps.note(engine)
        assert engine.deliver(), f"{run.name}: stuck"
    engine.core.check()
    assert engine.outputs == expected_outputs(messages), f"{run.name}: wrong tokens"
    up_front = sum(-(-(length + FIXED_OUTPUT) // FIXED_BLOCK_SIZE) for length in run.prompt_lengths)
    return {
        "name": run.name,
        "rounds": engine.plans,
        "preemptions": engine.core.state.counters.preemptions,
        "peak_blocks": peak_blocks,
        "peak_blocks_up_front": up_front,
        "leaked_blocks": engine.core.state.pool.held_count,
        "max_service_gap": gaps.longest,
    }


class ServiceGaps:
    """How long a running sequence goes without a row: 1 means served in every round.

    Attributes:
        longest: rounds from one row to the next, at most.
    """

    def __init__(self) -> None:
        self.longest = 0
        self._round = 0
        self._last: dict[int, int] = {}

    def note(self, engine: SimulatedEngine) -> None:
        """A step has been planned."""
        self._round += 1
        state = engine.core.state
        running = {sequence.request_id for sequence in state.decoding + state.prefilling}
        flight = state.in_flight[-1]
        served = {s.request_id for s in [*flight.sampled, *flight.chunk_sequences.values()]}
        for request_id in served:
            if request_id in self._last:
                self.longest = max(self.longest, self._round - self._last[request_id])
        self._last = {i: r for i, r in self._last.items() if i in running} | dict.fromkeys(
            served & running, self._round
        )


# ---- trace


def read_trace(path: Path, limit: int | None = None, stretch: float = 1.0) -> list[dict[str, object]]:
    """The trace's requests, in order; they come `stretch` times as far apart as they did."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        entries = [json.loads(line) for _, line in zip(range(limit or sys.maxsize), file, strict=False)]
    for entry in entries:
        entry["timestamp"] *= stretch
    return sorted(entries, key=lambda entry: entry["timestamp"])


def prompt_tokens(entry: dict[str, object]) -> "array[int]":
    """Tokens that are equal exactly where the trace's prompts are: each hash id, repeated over its block."""
    tokens = array("i")
    for hash_id in entry["hash_ids"]:
        tokens.extend(array("i", [hash_id]) * TRACE_BLOCK)
    del tokens[entry["input_length"] :]
    return tokens


@dataclass
class Figures:
    """What a replay measures; times in virtual seconds."""

    arrival_s: dict[int, float] = field(default_factory=dict)
    last_token_s: dict[int, float] = field(default_factory=dict)
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    itl_s: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_blocks: int = 0
    hit_blocks: int = 0
    output_tokens: int = 0


class Replay:
    """One trace through the scheduler.

    A step starts when it has been planned and the step before it has ended; planning itself takes no time.

    Args:
        entries: the trace.
        limits: the scheduler's.
        cost: the machine.
    """

    def __init__(self, entries: list[dict[str, object]], limits: Limits, cost: StepCost) -> None:
        self.core = SchedulerCore(limits, lambda: self.now_s)
        self.now_s = 0.0
        self.figures = Figures()
        self.ended = 0
        self._entries = entries
        self._cost = cost
        self._next_entry = 0
        self._worker_free_s = 0.0
        self._steps: deque[tuple[float, StepPlan]] = deque()

    def run(self) -> Iterator[int]:
        """Requests that have ended so far, now and then."""
        while self._next_entry < len(self._entries) or not self.core.is_idle:
            self._arrive()
            while (plan := self.core.plan_step()) is not None:
                start_s = max(self._worker_free_s, self.now_s)
                self._worker_free_s = start_s + self._cost.of_plan(self.core, plan)
                self._steps.append((self._worker_free_s, plan))
            self._advance()
            if self.core.state.counters.steps % 256 == 0:
                yield self.ended

    def _advance(self) -> None:
        """To the next result or arrival, whichever is first."""
        result_s = self._steps[0][0] if self._steps else float("inf")
        more = self._next_entry < len(self._entries)
        arrival_s = self._entries[self._next_entry]["timestamp"] / 1000 if more else float("inf")
        self.now_s = max(self.now_s, min(result_s, arrival_s))
        assert self.now_s < float("inf"), "stuck: live requests, but no step and no arrival"
        if result_s <= arrival_s:
            plan = self._steps.popleft()[1]
            sampled_count = len(plan.decode_slots) + sum(plan.chunk_samples)
            result = StepResult(step_id=plan.step_id, token_ids=array("i", [1]) * sampled_count)
            for out in self.core.handle_result(result):
                self._hear(out)

    def _arrive(self) -> None:
        while self._next_entry < len(self._entries):
            entry = self._entries[self._next_entry]
            if entry["timestamp"] / 1000 > self.now_s:
                return
            request_id = self._next_entry
            self._next_entry += 1
            self.figures.arrival_s[request_id] = entry["timestamp"] / 1000
            refusals = self.core.handle(trace_request(request_id, entry))
            assert not refusals, f"request {request_id} is refused: {refusals[0].message}"

    def _hear(self, out: TokensOut) -> None:
        figures, now_s, last = self.figures, self.now_s, self.figures.last_token_s
        figures.output_tokens += len(out.token_ids)
        for request_id in out.request_ids:
            before = last.get(request_id)
            if before is not None:
                figures.itl_s.append(now_s - before)
            last[request_id] = now_s
        for request_id, cached in zip(out.request_ids, out.cached_counts, strict=False):
            if cached >= 0:
                self._first(request_id, cached)
        for finish in out.finishes:
            self.ended += 1
            del last[out.request_ids[finish.row_index]]

    def _first(self, request_id: int, cached: int) -> None:
        length = self._entries[request_id]["input_length"]
        self.figures.ttft_s.append(self.now_s - self.figures.arrival_s.pop(request_id))
        self.figures.prompt_blocks += -(-length // TRACE_BLOCK)
        # the last, partial block of 512 counts as found if all of it is that this cache can find
        found_all = cached >= (length - 1) // self.core.limits.block_size * self.core.limits.block_size
        self.figures.hit_blocks += -(-length // TRACE_BLOCK) if found_all else cached // TRACE_BLOCK


def trace_request(request_id: int, entry: dict[str, object]) -> AddRequest:
    """The trace's request as a message; requests of one conversation count as one client."""
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt_tokens(entry),
        params=SamplingParams(max_tokens=entry["output_length"], ignore_eos=True),
        client_key=str(request_id % 16),
        priority=request_id % 3 - 1,
        arrived_at_s=entry["timestamp"] / 1000,
    )


def percentile(ordered: "list[float] | array[float]", fraction: float) -> float:
    """The value below which that fraction of the ordered values lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))] if ordered else 0.0


def summary(replay: Replay, wall_s: float, cpu_s: float) -> dict[str, object]:
    """A replay's figures, in milliseconds and tokens per second; what it took on the wall's clock and of this core."""
    figures = replay.figures
    ttft, itl = sorted(figures.ttft_s), sorted(figures.itl_s)
    counters = replay.core.state.counters
    return {
        "requests": replay.ended,
        "steps": counters.steps,
        "hit_fraction_512": round(figures.hit_blocks / max(figures.prompt_blocks, 1), 4),
        "hit_fraction_tokens": round(counters.prefix_hit_tokens / max(counters.prefix_query_tokens, 1), 4),
        "preemptions": counters.preemptions,
        "evictions": replay.core.state.pool.evictions,
        "leaked_blocks": replay.core.state.pool.held_count,
        **{f"ttft_ms_p{p}": round(percentile(ttft, p / 100) * 1e3, 2) for p in (50, 90, 99)},
        **{f"itl_ms_p{p}": round(percentile(itl, p / 100) * 1e3, 3) for p in (50, 90, 99)},
        "output_tokens": figures.output_tokens,
        "output_tokens_per_s": round(figures.output_tokens / max(replay.now_s, 1e-9), 1),
        "simulated_s": round(replay.now_s, 1),
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
    }


def trace_limits(args: argparse.Namespace, entries: list[dict[str, object]], cost: StepCost) -> Limits:
    """The scheduler's limits for a replay."""
    longest = max(entry["input_length"] + entry["output_length"] for entry in entries)
    if args.blocks == "unlimited":
        total = sum(entry["input_length"] + entry["output_length"] for entry in entries)
        block_count = total // args.block_size + 2 * len(entries) + 1
    else:
        block_count = int(args.blocks) if args.blocks else cost.cache_tokens // args.block_size
    return Limits(
        max_model_len=longest + 1,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        block_count=block_count,
        run_ahead=args.run_ahead,
        max_queued=len(entries),
        prefix_cache=args.prefix_cache,
        policy=args.policy,
        target_itl_s=args.target_itl_ms / 1000,
    )


def run_trace(args: argparse.Namespace) -> dict[str, object]:
    """Replay, show progress, and give the figures."""
    entries = read_trace(Path(args.trace), args.requests, args.stretch)
    cost = MACHINES[args.machine]
    limits = trace_limits(args, entries, cost)
    started, cpu_started = time.perf_counter(), time.process_time()
    replay = Replay(entries, limits, cost)
    for ended in replay.run():
        show_progress(ended, len(entries), started)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    print(file=sys.stderr)
    replay.core.check_idle()
    if args.plot:
        plot(replay, Path(args.plot))
    return {
        **{name: getattr(args, name) for name in OPTIONS},
        "block_count": limits.block_count,
        **summary(replay, wall_s, cpu_s),
    }


def show_progress(done: int, total: int, started: float) -> None:
    """One line on stderr, written over itself."""
    if sys.stderr.isatty() or done == total:
        bar = "#" * (40 * done // total)
        print(f"\r[{bar:<40}] {done}/{total} {time.perf_counter() - started:5.0f} s", end="", file=sys.stderr)


def plot(replay: Replay, folder: Path) -> None:
    """Distributions of time to first token and of time between tokens, as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("ttft", replay.figures.ttft_s), ("itl", replay.figures.itl_s)):
        ordered = sorted(values)
        points = [(percentile(ordered, i / 200) * 1e3, i / 2) for i in range(200)]
        title = {"ttft": "Time to first token", "itl": "Time between tokens"}[name]
        (folder / f"{name}.svg").write_text(
            line_plot(title, "ms", "per cent of all below", {replay.core.limits.policy: points})
        )


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--fixed", "--smoke", action="store_true", help="the four fixed runs; they take a second")
    what.add_argument("--trace", help="file of requests to replay (.jsonl or .jsonl.gz)")
    parser.add_argument("--requests", type=int, help="only the first N requests of the trace")
    parser.add_argument("--blocks", default="", help="KV blocks, or unlimited; what the machine holds by default")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--policy", default="fcfs", choices=("fcfs", "priority", "fair"))
    parser.add_argument("--prefix-cache", default="hash", choices=("hash", "radix", "off"))
    parser.add_argument("--machine", default="h200", choices=tuple(MACHINES))
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--run-ahead", type=int, default=2, choices=(0, 1, 2))
    parser.add_argument("--target-itl-ms", type=float, default=0.0)
    parser.add_argument("--stretch", type=float, default=1.0, metavar="X", help="requests come X times as far apart")
    parser.add_argument("--output", help="file to append the result to")
    parser.add_argument("--plot", help="folder for plots")
    args = parser.parse_args()
    result = {"runs": [run_fixed(run) for run in FIXED_RUNS]} if args.fixed else run_trace(args)
    if args.output:
        entry = records.record(
            benchmark="scheduler_sim",
            workload="fixed" if args.fixed else Path(args.trace).name,
            options={name: value for name, value in result.items() if name in OPTIONS},
            metrics={name: value for name, value in result.items() if name not in OPTIONS},
            device=f"one core of {records.processor_name()}",
        )
        records.save([entry], args.output)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
