"""Times the GPU worker's steps without the other processes: plans are made here, results are read from the reporter.

    python -m benchmarks.gpu_step --model benchmarks/models/qwen3-0.6b --decode 1x512 64x256 --chunk 1x128 2x4000
    python -m benchmarks.gpu_step ... --profile profile.txt

`--decode BxC` times decode steps of B rows with C tokens of context each, issued back to back as with run-ahead;
`--chunk BxC` times steps that compute B whole prompts of C tokens. For each: wall time, device time and main-thread
time per step. `--profile` adds a table of kernel times, overlaps taken apart, and counts of operations that a step must
not contain. Random weights. Prints a table and ends with one JSON line.
"""

import argparse
import json
import queue
import statistics
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from common.config import CacheOptions, EngineConfig, ModelOptions, SchedulerOptions, WorkerOptions, step_limits
from common.messages import NewSlots, SlotInit, SlotSampling, StepPlan
from worker_proc.cuda.engine import cuda_runner
from worker_proc.kv_cache import cache_specs
from worker_proc.loader import load_model, resolve_dtype

STEPS = 64
FORBIDDEN = ("aten::_local_scalar_dense", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMalloc")


class StepBench:
    """A runner over random weights, and a scheduler's part made by hand.

    Args:
        model_dir: holds config.json.
        options: of the engine's configuration groups.
    """

    def __init__(
        self, model_dir: str, max_num_seqs: int, max_num_batched_tokens: int, eager: bool, deterministic: bool = False,
        kv_cache_dtype: str = "auto",
    ) -> None:  # fmt: skip
        config = EngineConfig(
            model=ModelOptions(model=model_dir, load_format="dummy", max_model_len=0),
            cache=CacheOptions(kv_cache_dtype=kv_cache_dtype),
            scheduler=SchedulerOptions(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            worker=WorkerOptions(enforce_eager=eager, deterministic=deterministic),
        )
        device = torch.device("cuda:0")
        start = time.perf_counter()
        from worker_proc.model_config import read_model_config

        model_config = read_model_config(Path(model_dir))
        dtype = resolve_dtype("auto", model_config, device)
        model = load_model(Path(model_dir), device=device, dtype=dtype, load_format="dummy")
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - start
        specs = cache_specs(model_config, dtype, kv_cache_dtype)
        limits = step_limits(config.scheduler, "H200")
        self.runner, self.size = cuda_runner(config, limits, model, specs, model_config.vocab_size)
        self.ready_s = time.perf_counter() - start
        while self.runner.prepare_next():  # what an engine captures in its pauses
            pass
        self.block_size = config.cache.block_size
        self._pending: queue.SimpleQueue = queue.SimpleQueue()
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._read_results, daemon=True).start()
        self._step_id = 0
        self._used: list[int] = []

    def start_rows(self, batch: int, length: int, room: int) -> StepPlan:
        """A plan that gives `batch` slots prompts of `length` tokens, blocks for `room` more, and computes them."""
        blocks = -(-(length + room) // self.block_size)
        inits = tuple(
            SlotInit(
                slot=slot, token_ids=array("i", [(7 * i + slot) % 10_000 for i in range(length)]), prompt_count=length,
                computed_count=0, block_ids=array("i", range(slot * blocks, (slot + 1) * blocks)),
                sampling=SlotSampling(temperature=0.6, seed=slot),
            )
            for slot in range(batch)
        )  # fmt: skip
        self._used = list(range(batch))
        return self._plan(
            new_slots=NewSlots.of(*inits), chunk_slots=array("H", range(batch)),
            chunk_token_counts=array("i", [length] * batch), chunk_samples=array("B", [1] * batch),
            chunk_block_counts=array("i", [0] * batch),
        )  # fmt: skip

    def fill_rows(self, batch: int, length: int, room: int) -> None:
        """As `start_rows`, but the prompts count as computed already, but for their last token."""
        plan = self.start_rows(batch, length, room)
        inits = []
        for init in plan.new_slots:
            values = {name: getattr(init, name) for name in init.__dataclass_fields__}
            inits.append(SlotInit(**values | {"computed_count": length - 1}))
        self.run([self._plan(
            new_slots=NewSlots.of(*inits), chunk_slots=plan.chunk_slots, chunk_token_counts=array("i", [1] * batch),
            chunk_samples=plan.chunk_samples, chunk_block_counts=plan.chunk_block_counts,
        )])  # fmt: skip

    def decode_plan(self, batch: int) -> StepPlan:
        """One token for each row."""
        return self._plan(decode_slots=array("H", range(batch)))

    def clear(self) -> None:
        """Free the slots in use."""
        self.run([self._plan(cleared_slots=array("H", self._used))])
        self._used = []

    def run(self, plans: list[StepPlan]) -> tuple[float, float, float, list]:
        """Issue plans back to back; wall ms a step, device ms a step, main thread's ms a step, results."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        busy = 0.0
        for plan in plans:
            begin = time.perf_counter()
            self._pending.put(self.runner.execute(plan))
            busy += time.perf_counter() - begin
        results = [self._results.get(timeout=120) for _ in plans]
        wall = time.perf_counter() - start
        device_us = statistics.median(result.parts_us[1] for result in results)
        input_us = statistics.median(result.parts_us[0] for result in results)
        return wall * 1e3 / len(plans), device_us / 1e3, input_us / 1e3, results

    def decode(self, batch: int, context: int, steps: int = STEPS) -> dict[str, float]:
        """Time decode steps."""
        self.fill_rows(batch, context, 4 * steps + 16)
        self.run([self.decode_plan(batch) for _ in range(4)])
        wall, device, prepare, _ = self.run([self.decode_plan(batch) for _ in range(steps)])
        self.clear()
        return {"wall_ms": wall, "device_ms": device, "input_ms": prepare, "tokens_per_s": batch * 1e3 / wall}

    def chunk(self, batch: int, length: int, repeats: int = 8) -> dict[str, float]:
        """Time whole prompts, alone, one step after another."""
        walls, devices, inputs = [], [], []
        for _ in range(repeats + 2):
            wall, device, prepare, _ = self.run([self.start_rows(batch, length, 0)])
            walls.append(wall)
            devices.append(device)
            inputs.append(prepare)
            self.clear()
        wall = statistics.median(walls[2:])
        return {
            "wall_ms": wall, "device_ms": statistics.median(devices[2:]), "input_ms": statistics.median(inputs[2:]),
            "tokens_per_s": batch * length * 1e3 / wall,
        }  # fmt: skip

    def profile(self, kind: str, batch: int, length: int, steps: int = 50) -> dict[str, Any]:
        """Kernel times over `steps` steps, and how often each forbidden call was made."""
        from torch.profiler import ProfilerActivity, profile

        if kind == "decode":
            self.fill_rows(batch, length, 3 * steps)
            plans = [self.decode_plan(batch) for _ in range(steps)]
        else:
            plans = [self.start_rows(batch, length, 0)]
        if kind == "decode":
            self.run(plans[:2])
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            self.run(plans if kind != "decode" else plans[2:])
        self.clear()
        events = profiled.key_averages()
        count = len(plans) - (2 if kind == "decode" else 0)
        return {
            "case": f"{kind} {batch}x{length}",
            "kernels": [
                (name, *(value / count for value in values)) for name, values in kernel_times(profiled.events())
            ],
            "forbidden": {name: sum(e.count for e in events if e.key == name) for name in FORBIDDEN},
        }

    def _plan(self, **values: Any) -> StepPlan:
        self._step_id += 1
        return StepPlan(step_id=self._step_id, **values)

    def _read_results(self) -> None:
        """What the worker's reporter does."""
        while True:
            self._results.put(self._pending.get().result())


def kernel_times(events: Any) -> list[tuple[str, tuple[int, float, float]]]:
    """Of each kernel: launches, their microseconds in all, and of these what each ended later than what came before it.

    Kernels overlap: one that is launched early waits for the one ahead. The last figures add up to the time from the
    first kernel's start to the last one's end, so they say where it goes; largest first.
    """
    on_device = torch.autograd.DeviceType.CUDA
    spans = [(e.time_range.end, e.time_range.start, e.name) for e in events if e.device_type == on_device]
    found: dict[str, tuple[int, float, float]] = {}
    reached = min((start for _, start, _ in spans), default=0.0)
    for end, start, name in sorted(spans):
        launches, whole, added = found.get(name, (0, 0.0, 0.0))
        found[name] = (launches + 1, whole + end - start, added + max(end - reached, 0.0))
        reached = max(reached, end)
    return sorted(found.items(), key=lambda item: -item[1][2])


def profile_text(profile: dict[str, Any], limit: int = 24) -> str:
    """A profile as a table, each figure a step: launches, microseconds, and those not overlapped by earlier kernels."""
    whole = sum(added for *_, added in profile["kernels"])
    lines = [f"== {profile['case']}: {whole:.0f} us a step; {profile['forbidden']}", "  launches  all us  added us"]
    lines += [f"{n:10.1f} {us:7.1f} {added:9.1f}  {name[:70]}" for name, n, us, added in profile["kernels"][:limit]]
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="benchmarks/models/qwen3-0.6b")
    parser.add_argument("--decode", nargs="*", default=["1x640", "8x256", "64x256", "256x256"])
    parser.add_argument("--chunk", nargs="*", default=["1x128", "2x4000"])
    parser.add_argument("--profile", default="", help="write kernel tables of the same cases to this file")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="the batch-invariant pass, to see what it costs")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8", "fp8"))
    parser.add_argument("--output", default=str(records.RESULTS_DIR / "gpu_step.jsonl"), help="'' keeps nothing")
    args = parser.parse_args()
    bench = StepBench(
        args.model, args.max_num_seqs, args.max_num_batched_tokens, args.enforce_eager, args.deterministic,
        args.kv_cache_dtype,
    )  # fmt: skip
    options = {"deterministic": True} if args.deterministic else {}
    options |= {"kv_cache_dtype": args.kv_cache_dtype} if args.kv_cache_dtype != "auto" else {}
    print(f"loaded in {bench.load_s:.1f} s, ready in {bench.ready_s:.1f} s", bench.size, flush=True)
    cases = [(kind, *map(int, case.split("x"))) for kind in ("decode", "chunk") for case in getattr(args, kind)]
    entries = []
    for kind, batch, length in cases:
        metrics = bench.decode(batch, length) if kind == "decode" else bench.chunk(batch, length)
        print(f"{kind} {batch}x{length}: " + "  ".join(f"{k} {v:.3f}" for k, v in metrics.items()), flush=True)
        entries.append(records.record(
            benchmark="gpu_step", workload=f"{kind}_{batch}x{length}", model=Path(args.model).name, weights="random",
            metrics={k: round(v, 4) for k, v in metrics.items()}, options=options,
        ))  # fmt: skip
    if args.profile:
        text = "\n".join(profile_text(bench.profile(*case)) for case in cases)
        Path(args.profile).write_text(text)
        print(text)
    if args.output:
        records.save(entries, args.output)
    print(json.dumps([{entry["workload"]: entry["metrics"]} for entry in entries]))


if __name__ == "__main__":
    main()
