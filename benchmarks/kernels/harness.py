"""What every kernel benchmark shares: the card's limits, timing by graph replay, result lines, the command line.

A benchmark builds callables that launch its kernel on tensors it made, hands them to `time_us`, and reports through
`Report.add`, which sets the figure beside the limit measured in the same run, prints a table row and keeps one JSON
line in the form of benchmarks/results/*.jsonl. Knows nothing of any kernel. Called by benchmarks/kernels/bench_*.py.

Timing: the calls are captured in one CUDA graph, `inner` of them in a row and taken in turn from the callables given;
the graph is replayed and each replay is timed with events. So the figure is GPU time without launch overhead, and with
several callables on different tensors the inputs come from device memory and not from the L2 cache. Without a CUDA
device (the smoke runs of the test suite) the calls are timed with the clock.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

REPLAY_COUNT = 20
INNER_CALL_COUNT = 10
L2_BYTES_TO_EXCEED = 256 << 20


@dataclass(frozen=True)
class Limits:
    """Ceilings of the device, measured in this process. `copy` counts bytes read plus bytes written."""

    copy_tb_per_s: float
    read_tb_per_s: float
    bf16_tflop_per_s: float


def has_cuda() -> bool:
    """Whether there is a GPU; else kernels run in the interpreter."""
    return torch.cuda.is_available()


@cache
def device_name() -> str:
    """The card's name, or the processor's and its core count."""
    if has_cuda():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()} x{os.cpu_count()}"


@cache
def limits() -> Limits:
    """Measure the ceilings once a process: a large copy, a large reduction, an 8192^3 bf16 product on random data."""
    if not has_cuda():
        return Limits(copy_tb_per_s=0.0, read_tb_per_s=0.0, bf16_tflop_per_s=0.0)
    byte_count = 1 << 31
    source = torch.rand(2048, byte_count // 4 // 2048, device="cuda")
    target = torch.empty_like(source)
    copy_us = time_us([lambda: torch.neg(source, out=target)], inner=2)
    sums = torch.empty(2048, device="cuda")
    read_us = time_us([lambda: torch.sum(source, dim=1, out=sums)], inner=2)
    left, right, product = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    matmul_us = time_us([lambda: torch.mm(left, right, out=product)], inner=2)
    return Limits(
        copy_tb_per_s=2 * byte_count / copy_us / 1e6,
        read_tb_per_s=byte_count / read_us / 1e6,
        bf16_tflop_per_s=2 * 8192**3 / matmul_us / 1e6,
    )


def time_us(calls: Sequence[Callable[[], Any]], inner: int = INNER_CALL_COUNT, replays: int = REPLAY_COUNT) -> float:
    """Median microseconds of one call; the calls are taken in turn (see `time_runs_us`)."""
    return statistics.median(time_runs_us(calls, inner, replays))


def time_runs_us(
    calls: Sequence[Callable[[], Any]], inner: int = INNER_CALL_COUNT, replays: int = REPLAY_COUNT
) -> list[float]:
    """Microseconds a call, one figure a replay, sorted. `inner` is raised so that every callable is used.

    The callables must be capturable: no allocation that outlives the call, no synchronisation. On a machine without
    CUDA each is called `inner` times under the clock.
    """
    return time_in_turn_us([calls], inner, replays)[0]


def time_in_turn_us(
    ways: Sequence[Sequence[Callable[[], Any]]], inner: int = INNER_CALL_COUNT, replays: int = REPLAY_COUNT
) -> list[list[float]]:
    """As `time_runs_us` for each way, a graph each, replayed one after the other again and again: what the card does to
    one of them as it grows warm it does to all."""
    if not has_cuda():
        return [_clock_runs_us(calls, max(inner, len(calls)), replays=min(replays, 3)) for calls in ways]
    counts = [max(inner, len(calls)) for calls in ways]
    graphs = [_capture(calls, count) for calls, count in zip(ways, counts, strict=True)]
    for graph in graphs * 3:
        graph.replay()
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in ways]
    for _ in range(replays):
        for graph, pairs in zip(graphs, events, strict=True):
            pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            pairs[-1][0].record()
            graph.replay()
            pairs[-1][1].record()
    torch.cuda.synchronize()
    return [
        sorted(start.elapsed_time(end) * 1e3 / count for start, end in pairs)
        for pairs, count in zip(events, counts, strict=True)
    ]


def _capture(calls: Sequence[Callable[[], Any]], inner: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(inner):
            calls[index % len(calls)]()
    return graph


def _clock_runs_us(calls: Sequence[Callable[[], Any]], inner: int, replays: int) -> list[float]:
    runs = []
    for _ in range(replays):
        start_s = time.perf_counter()
        for index in range(inner):
            calls[index % len(calls)]()
        runs.append((time.perf_counter() - start_s) * 1e6 / inner)
    return sorted(runs)


def copies_to_exceed_l2(bytes_per_call: int, at_most: int = 64) -> int:
    """How many input sets to take in turn so that none is still in the L2 cache when its turn comes again."""
    return max(1, min(at_most, -(-L2_BYTES_TO_EXCEED // max(1, bytes_per_call))))


@dataclass
class Report:
    """Collects one benchmark's figures; prints a row for each and appends JSON lines to a file at the end."""

    operation: str
    engine: str = "trireme"
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        workload: str,
        runs_us: Sequence[float],
        *,
        bytes_moved: int | None = None,
        flops: int | None = None,
        engine: str | None = None,
        model: str = "kernel",
        options: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Record one shape. The limit is the larger of the times that the bytes and the operations need."""
        median_us = statistics.median(runs_us)
        metrics: dict[str, Any] = {
            "us": round(median_us, 3),
            "runs": [round(run, 3) for run in runs_us[:: max(1, len(runs_us) // 5)]],
        }
        if bytes_moved is not None:
            metrics["tb_per_s"] = round(bytes_moved / median_us / 1e6, 4)
        if flops is not None:
            metrics["tflop_per_s"] = round(flops / median_us / 1e6, 2)
        line = {
            "benchmark": "kernel",
            "engine": engine or self.engine,
            "workload": f"{self.operation}_{workload}",
            "model": model,
            "weights": "random",
            "device": device_name(),
            "options": options or {},
            "metrics": metrics | (extra or {}),
            "limit": limit_of(median_us, bytes_moved, flops),
            **provenance(),
        }
        self.lines.append(line)
        print(row_of(line), flush=True)
        return line

    def write(self, path: Path | None) -> None:
        """Append the lines to `path`; None keeps nothing."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.lines)


def limit_of(median_us: float, bytes_moved: int | None, flops: int | None) -> dict[str, float]:
    """The bound in microseconds from this run's ceilings, and the share of it that was reached."""
    ceilings = limits()
    if not ceilings.read_tb_per_s:
        return {}
    read_us = (bytes_moved or 0) / ceilings.read_tb_per_s / 1e6
    matmul_us = (flops or 0) / ceilings.bf16_tflop_per_s / 1e6
    bound_us = max(read_us, matmul_us)
    return {
        "bound_us": round(bound_us, 3),
        "ratio": round(bound_us / median_us, 4),
        "read_tb_per_s": round(ceilings.read_tb_per_s, 3),
        "copy_tb_per_s": round(ceilings.copy_tb_per_s, 3),
        "bf16_tflop_per_s": round(ceilings.bf16_tflop_per_s, 1),
    }


def row_of(line: dict[str, Any]) -> str:
    """One line of the printed table."""
    metrics, limit = line["metrics"], line["limit"]
    parts = [f"{line['engine']:<10} {line['workload']:<48} {metrics['us']:>10.2f} us"]
    if "tb_per_s" in metrics:
        parts.append(f"{metrics['tb_per_s']:>7.3f} TB/s")
    if "tflop_per_s" in metrics:
        parts.append(f"{metrics['tflop_per_s']:>8.1f} TFLOP/s")
    if limit:
        parts.append(f"{100 * limit['ratio']:>5.1f} % of the limit")
    return "  ".join(parts)


@cache
def provenance() -> dict[str, Any]:
    """Versions, commit, command and date: what it takes to repeat a figure."""
    return {
        "versions": {"torch": torch.__version__, "triton": _triton_version(), "python": platform.python_version()},
        "commit": os.environ.get("TRIREME_COMMIT") or _git_commit(),
        "command": " ".join(["python", *_command()]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _command() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name, *sys.argv[1:]] if spec else sys.argv


def _git_commit() -> str:
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


def argument_parser(description: str) -> argparse.ArgumentParser:
    """`--smoke` (tiny shapes, for the test suite), `--output FILE` (JSON lines appended), `--only TEXT` (a filter)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see that the benchmark runs")
    parser.add_argument("--output", type=Path, default=None, help="append JSON lines to this file")
    parser.add_argument("--only", default="", help="run the workloads whose name contains this")
    return parser
