"""The cost of the GPU worker's host part, without a GPU: from a plan's bytes to an issued step and its result's bytes.

    python -m benchmarks.worker_host [--rows 1 8 64 256] [--new 1x128 8x128 64x128] [--cold-steps 40] [--profile]
                                     [--output FILE] [--smoke]

The runner, its slots and its buffers are the worker's own, with tensors on the CPU. The step itself computes nothing,
and there are no events and no launches: what these cost, only a GPU's host can tell (`benchmarks.gpu_step`). `--rows B`
times decode steps of B rows, of which every sixteenth gets a block; `--new BxC` steps that start and compute B prompts
of C tokens, in a loop, and some of them again `cold`, each after 64 MiB of other memory were read. In microseconds,
medians: `decode`, from bytes to a plan; `input`, until the step's copy; `execute`, the whole of issuing it; `report`,
from the step to its result's bytes; `least`, all of these in the fastest step. `--profile` shows where the calls go.
Ends with one JSON line.
"""

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from array import array
from collections.abc import Callable, Iterator

import torch

from benchmarks import records
from benchmarks.cold_caches import Sweep
from common.config import StepLimits
from common.messages import NewSlots, SlotInit, SlotSampling, StepPlan, decode_for_worker
from kernels.sampling import SampledTokens
from worker_proc.cuda.buckets import Bucket
from worker_proc.cuda.runner import CudaRunner
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.kv_cache import KVCache, LayerCacheSpec

BLOCK_SIZE = 16
BLOCK_COUNT = 16_384
MAX_LEN = 1024
VOCABULARY = 151_936
LIMITS = StepLimits(256, 8192)


class NoForward:
    """A model that nobody runs."""

    capturable, fixed_order = False, False
    token_hidden = None


class NoProgram:
    """A step that computes nothing."""

    uses_graphs = True

    def __init__(self) -> None:
        self.sampled = SampledTokens.allocate(LIMITS.max_num_seqs, 1, "cpu")

    def has_graph(self, bucket: Bucket) -> bool:
        """Yes."""
        return True

    def run(self, bucket: Bucket, *, sampling: bool = True) -> None:
        """Nothing."""


def idle_runner() -> CudaRunner:
    """The GPU worker's runner over a cache of one tiny layer."""
    device = torch.device("cpu")
    spec = LayerCacheSpec("full", kv_head_count=1, key_dim=8, value_dim=8, dtype=torch.float16)
    cache = KVCache([spec], block_size=BLOCK_SIZE, block_count=BLOCK_COUNT, host_block_count=0, device=device)
    slots = DeviceSlots(LIMITS.max_num_seqs, MAX_LEN, BLOCK_SIZE, VOCABULARY, device)
    runner = CudaRunner(NoForward(), cache, slots, LIMITS, VOCABULARY, eager=True)
    runner.program, runner.pads_steps = NoProgram(), True
    return runner


def new_slot(slot: int, length: int, block_ids: range) -> SlotInit:
    """A slot with a prompt of so many tokens."""
    return SlotInit(
        slot=slot, token_ids=array("i", range(slot, slot + length)), prompt_count=length, computed_count=0,
        block_ids=array("i", block_ids), sampling=SlotSampling(temperature=0.6, top_p=0.9, seed=slot),
    )  # fmt: skip


def prompt_plan(step_id: int, slots: list[SlotInit], cleared: int = 0) -> StepPlan:
    """A plan that frees the first `cleared` slots, and starts and computes new ones."""
    return StepPlan(
        step_id=step_id, new_slots=NewSlots.of(*slots), cleared_slots=array("H", range(cleared)),
        chunk_slots=array("H", range(len(slots))), chunk_token_counts=array("i", [each.prompt_count for each in slots]),
        chunk_samples=array("B", [1] * len(slots)), chunk_block_counts=array("i", [0] * len(slots)),
    )  # fmt: skip


def prompt_plans(count: int, length: int, steps: int) -> Iterator[StepPlan]:
    """Steps of nothing but new prompts."""
    blocks = -(-(length + 1) // BLOCK_SIZE)
    slots = [new_slot(slot, length, range(slot * blocks, (slot + 1) * blocks)) for slot in range(count)]
    yield from (prompt_plan(step, slots, cleared=count if step > 1 else 0) for step in range(1, steps + 1))


def decode_plans(rows: int, steps: int) -> Iterator[StepPlan]:
    """A prompt for each row, each a token longer than the last, then decode steps."""
    lengths = [17 + row % BLOCK_SIZE for row in range(rows)]
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    ends = [*itertools.accumulate(blocks)]
    yield prompt_plan(1, [
        new_slot(slot, length, range(end - count, end))
        for slot, (length, count, end) in enumerate(zip(lengths, blocks, ends, strict=True))
    ])  # fmt: skip
    slots, next_block = array("H", range(rows)), ends[-1]
    for step in range(2, steps + 1):
        lengths = [length + 1 for length in lengths]
        counts = array("B", [length > count * BLOCK_SIZE for length, count in zip(lengths, blocks, strict=True)])
        blocks = [count + added for count, added in zip(blocks, counts, strict=True)]
        ids = array("i", range(next_block, next_block + sum(counts)))
        next_block += len(ids)
        yield StepPlan(
            step_id=step, decode_slots=slots, decode_block_counts=counts if ids else array("B"), block_ids=ids
        )


@torch.inference_mode()
def time_steps(messages: list[bytes], warm_up: int, before_each: Callable[[], object] = int) -> dict[str, float]:
    """Microseconds of each part of the steps that these plans describe, but for the first `warm_up`."""
    runner = idle_runner()
    times: dict[str, list[float]] = {"decode": [], "input": [], "execute": [], "report": [], "least": []}
    for message in messages:
        before_each()
        marks = [time.perf_counter_ns()]
        plan = decode_for_worker(message)
        marks.append(time.perf_counter_ns())
        step = runner.execute(plan)
        marks.append(time.perf_counter_ns())
        result = step.result()
        result.to_wire()
        marks.append(time.perf_counter_ns())
        parts = [(end - start) / 1e3 for start, end in itertools.pairwise(marks)]
        values = (parts[0], result.parts_us[0], parts[1], parts[2], sum(parts))
        for name, value in zip(times, values, strict=True):
            times[name].append(value)
    timed = {name: values[warm_up:] for name, values in times.items()}
    return {name: round((min if name == "least" else statistics.median)(part), 1) for name, part in timed.items()}


def show_calls(messages: list[bytes]) -> None:
    """Print which functions the steps spend their time in."""
    runner = idle_runner()
    runner.execute(decode_for_worker(messages[0])).result()
    with cProfile.Profile() as profile:
        for message in messages[1:]:
            runner.execute(decode_for_worker(message)).result().to_wire()
    pstats.Stats(profile).sort_stats("tottime").print_stats(32)


def main() -> None:
    """Parse, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--new", nargs="*", default=["1x128", "8x128", "64x128"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--cold-steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true", help="show the calls instead")
    parser.add_argument("--output", default="", help="append the result line to this file")
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    args = parser.parse_args()
    steps, cold_steps = (12, 2) if args.smoke else (args.steps, args.cold_steps)
    sweep = Sweep()
    cases = {f"decode {rows}": list(decode_plans(rows, steps)) for rows in args.rows}
    for case in args.new:
        count, length = map(int, case.split("x"))
        cases[f"new {case}"] = list(prompt_plans(count, length, steps))
    metrics = {}
    for name, plans in cases.items():
        messages = [plan.to_wire() for plan in plans]
        if args.profile:
            print(name)
            show_calls(messages)
            continue
        kinds = {name: time_steps(messages, warm_up=max(2, steps // 10))}
        if name.startswith("new"):
            kinds[f"cold {name}"] = time_steps(messages[: cold_steps + 2], 2, sweep)
        for kind, figures in kinds.items():
            print(f"{kind:15}", "  ".join(f"{part} {us:6.1f}" for part, us in figures.items()), flush=True)
            metrics |= {f"{kind} {part}_us": us for part, us in figures.items()}
    if metrics:
        entry = records.record(
            benchmark="worker_host", workload="decode steps and new prompts", device=records.host_name(),
            options={"steps": steps, "cold_steps": cold_steps}, metrics=metrics,
        )  # fmt: skip
        records.finish(entry, args.output)


if __name__ == "__main__":
    main()
