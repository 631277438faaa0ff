"""How long the kernels of a first start take to compile, for a card that need not be there: each, and side by side.

    python -m benchmarks.kernels.compile_times [--model FOLDER] [--kv-cache-dtype int8] [--only decode] [--cores 2 16]

Every kernel that the worker has compiled at start (`worker_proc/cuda/engine.py`) is compiled once in this process,
into an empty folder, longest first. Seconds are processor time, so that other programs count little: of Triton's front
end and passes, of LLVM, of NVIDIA's assembler, and in all. At the end, when all of them would be ready on so many free
cores if each takes the next one in the order of `KernelsAhead`, that is, the longest chain of what waits for one
another. Not in it: importing, which the compiling process does before, and the C functions that launch kernels.
"""

from __future__ import annotations

import argparse
import heapq
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.cache import triton_key

from benchmarks.kernels.kernel_report import MODEL, shipped_kernels
from benchmarks.kernels.pretended_gpu import Card
from kernels.compile_ahead import NeededKernel, largest_first

STAGES = {"ttir": "triton", "ttgir": "triton", "llir": "llvm", "ptx": "llvm", "cubin": "ptxas"}
"""What Triton calls its stages; that to `llir` ends with LLVM's own passes."""


def cpu_s() -> float:
    """Processor time of this process and of those that it has started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def compile_time(kernel: NeededKernel) -> dict[str, float]:
    """Seconds of processor time, by part: `front` is what comes before Triton's own passes."""
    spent = dict.fromkeys(("front", *dict.fromkeys(STAGES.values()), "all"), 0.0)
    with tempfile.TemporaryDirectory() as folder, _stages_timed(spent), mock.patch.object(knobs.cache, "dir", folder):
        start_s = cpu_s()
        assert not kernel.load(), "the folder is empty"
        spent["all"] = cpu_s() - start_s
    spent["front"] = spent["all"] - sum(spent[part] for part in set(STAGES.values()))
    return spent


@contextmanager
def _stages_timed(spent: dict[str, float]) -> Iterator[None]:
    add_stages = CUDABackend.add_stages

    def timed(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def stage(*arguments: Any) -> Any:
            start_s = cpu_s()
            try:
                return run(*arguments)
            finally:
                spent[part] += cpu_s() - start_s

        return stage

    def add_timed(self: CUDABackend, stages: dict[str, Any], *arguments: Any) -> None:
        add_stages(self, stages, *arguments)
        stages |= {name: timed(STAGES.get(name, "triton"), run) for name, run in stages.items()}

    with mock.patch.object(CUDABackend, "add_stages", add_timed):
        yield


def all_ready_s(durations_s: Sequence[float], cores: int) -> float:
    """When the last of these jobs ends, if each of the cores takes the next one as soon as it is free."""
    free_at_s = [0.0] * cores
    for duration_s in durations_s:
        heapq.heappush(free_at_s, heapq.heappop(free_at_s) + duration_s)
    return max(free_at_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each kernel, then how long they take side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="a folder with config.json")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8", "fp8"))
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 4, 8, 16])
    args = parser.parse_args(arguments)
    needed = [
        kernel
        for kernel in largest_first(shipped_kernels(args.model, args.kv_cache_dtype, Card()))
        if args.only in kernel.function.fn.__name__
    ]
    triton_key()  # takes its time once a process
    durations_s = []
    for number, kernel in enumerate(needed):
        spent = compile_time(kernel)
        durations_s.append(spent["all"])
        if number == 0:
            print(f"{'kernel, seconds of':<32}" + "".join(f"{part:>8}" for part in spent))
        print(f"{kernel.function.fn.__name__:<32}" + "".join(f"{part_s:8.2f}" for part_s in spent.values()), flush=True)
    print(f"{len(needed)} kernels, {sum(durations_s):.1f} s in all; ready on")
    for cores in args.cores:
        print(f"{cores:4} cores after {all_ready_s(durations_s, cores):.1f} s")


if __name__ == "__main__":
    main()
