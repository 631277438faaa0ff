"""Where the time of one request goes between the processes: its timeline, hop by hop, compared with ZeroMQ alone.

    python -m benchmarks.hops [--requests 400] [--step-ms 0] [--busy-poll-ms 0 -1 5 20] [--busy-poll-io always]

Client, frontend and scheduler are the real ones, and so is the worker except for its model (benchmarks/stub_worker.py),
whose first step takes `--step-ms`. One request at a time, 128 prompt ids in, one token out. `whole_us` is the time of
`Client.generate_batch`, which `LLM.generate` calls. Its parts come from a second run in which every process records its
messages, and add up to that run's own whole (medians). All of it once for each `--busy-poll-ms` (of the engine and of
the client), side by side. A part named `A to B` begins when A hands the message to ZeroMQ
and ends when B has it; the first and the last contain the client's own work, and the frontend's decoding and encoding.
`cpu_us` is CPU time per request, over all threads. `floor_us` is what the six messages would take in a bare ping-pong
(benchmarks/ping_pong.py), in each way of waiting and over bare Unix sockets, without a pause or after 2 ms of rest.
`decode` is the time between one request's tokens when a step takes half a millisecond: no more than that, if the next
plan is always there. `burst` sends eight requests at once, each of 16 tokens: 16 steps are the least. `load` is the
machine's when it began. The last lines are JSON objects, one for each `--busy-poll-ms`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import ping_pong, records
from common.busy_poll import limit_s_for
from common.config import (
    BUSY_POLL_AUTOMATIC,
    BUSY_POLL_IO,
    CacheOptions,
    EngineConfig,
    LogOptions,
    ProfilingOptions,
    ServerOptions,
)
from common.messages import StepPlan, StepResult, TokensOut
from common.model_cache import default_model_dir
from common.recording import Direction, Link, Record, Recording
from common.sampling_params import SamplingParams
from common.sockets import bind_router, new_context
from common.wire import unpack
from frontend import Client
from frontend.client_requests import generate_message

PROMPT_TOKENS = 128
TOKEN_IDS = 40_000
WARM_UP = 10
START_TIMEOUT_S = 60
DECODE_STEP_MS = 0.5
DECODE_TOKENS = 256
BURST_REQUESTS, BURST_TOKENS = 8, 16
REST_S = 0.002
BUSY_POLL_MS = (0.0, BUSY_POLL_AUTOMATIC, 5.0, 20.0)
ROOMS = {"frontend": "frontend", "scheduler": "scheduler_proc", "worker-0": "benchmarks.stub_worker"}
POINTS: dict[str, tuple[str, Link, Direction, int | None]] = {
    "client to frontend": ("frontend", Link.CALLS, Direction.IN, None),
    "in frontend": ("frontend", Link.REQUESTS, Direction.OUT, None),
    "frontend to scheduler": ("scheduler", Link.REQUESTS, Direction.IN, None),
    "in scheduler": ("scheduler", Link.PLANS, Direction.OUT, StepPlan.CODE),
    "scheduler to worker": ("worker-0", Link.PLANS, Direction.IN, StepPlan.CODE),
    "in worker": ("worker-0", Link.RESULTS, Direction.OUT, StepResult.CODE),
    "worker to scheduler": ("scheduler", Link.RESULTS, Direction.IN, StepResult.CODE),
    "in scheduler, back": ("scheduler", Link.OUTPUTS, Direction.OUT, TokensOut.CODE),
    "scheduler to frontend": ("frontend", Link.OUTPUTS, Direction.IN, TokensOut.CODE),
    "in frontend, back": ("frontend", Link.EVENTS, Direction.OUT, None),
}
"""What ends each part of the timeline: the process, its link, the direction, and the kind of message if there are
several. The client's return ends the last."""
LAST_PART = "frontend to client"
INTERNAL_PARTS = ("frontend to scheduler", "scheduler to worker", "worker to scheduler", "scheduler to frontend")


class Processes:
    """Frontend, scheduler and stub worker, with a client; a context manager."""

    def __init__(
        self,
        folder: Path,
        step_ms: float,
        busy_poll_ms: float = BUSY_POLL_AUTOMATIC,
        record: Path | None = None,
        *,
        busy_poll_io: str = "auto",
        decode_ms: float = DECODE_STEP_MS,
        token_us: float = 0.0,
    ) -> None:
        polling = {"busy_poll_ms": busy_poll_ms, "busy_poll_io": busy_poll_io}
        config = EngineConfig(
            cache=CacheOptions(prefix_cache="off"),
            server=ServerOptions(http=False, client_endpoint=f"ipc://{folder}/client.sock", **polling),
            profiling=ProfilingOptions(record=str(record or "")),
            log=LogOptions(log_level="warning"),
            run_dir=str(folder),
            model_dir=str(default_model_dir()),
        )
        folder.mkdir()
        (folder / "config.json").write_text(config.to_json())
        self._context = new_context()
        self._supervisor = bind_router(self._context, config.endpoint("supervisor", 0))  # hears their last words
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        times = ["--prompt-ms", str(step_ms), "--decode-ms", str(decode_ms), "--token-us", str(token_us)]
        for name, module in ROOMS.items():
            own = times if name == "worker-0" else []
            command = [sys.executable, "-m", module, "--config", str(folder / "config.json"), *own]
            self._processes[name] = subprocess.Popen(command)
        self.client = Client(config.server.client_endpoint, timeout_s=START_TIMEOUT_S, **polling)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.client.status().state != "serving":
            assert time.monotonic() < deadline_s, "the engine did not start"
            assert all(process.poll() is None for process in self._processes.values()), "a process has ended"
            time.sleep(0.05)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait(30)
        self._supervisor.close()
        self._context.term()

    def step_count(self) -> int:
        """Steps so far, as the scheduler reports them ten times a second."""
        time.sleep(0.3)
        return self.client.status().figures["steps"]

    def cpu_ns(self) -> dict[str, int]:
        """Processor time of each process and of the client so far."""
        pids = {"client": os.getpid()} | {name: process.pid for name, process in self._processes.items()}
        return {name: _cpu_ns(pid) for name, pid in pids.items()}


def _cpu_ns(pid: int) -> int:
    """Processor time of all threads that live, in nanoseconds."""
    stats = [(task / "schedstat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(stat.split()[0]) for stat in stats)


@dataclass(frozen=True)
class Run:
    """What one run of many requests showed: start and end of each in ns, processor time, sizes of a request's messages
    with its client."""

    spans_ns: list[tuple[int, int]]
    cpu_us: dict[str, float]
    client_bytes: tuple[int, int]

    @property
    def whole_us(self) -> list[float]:
        """How long each request took."""
        return [(end - start) / 1e3 for start, end in self.spans_ns]


def run_requests(
    processes: Processes, count: int, max_tokens: int = 1, at_once: int = 1, warm_up: int = WARM_UP
) -> Run:
    """One batch of so many requests after another, after a warm-up."""
    random = Random(1)
    batches = [
        [[random.randrange(TOKEN_IDS) for _ in range(PROMPT_TOKENS)] for _ in range(at_once)]
        for _ in range(count + warm_up)
    ]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens, detokenize=False)
    spans_ns, cpu_ns = [], processes.cpu_ns()
    for index, prompts in enumerate(batches):
        if index == warm_up:
            cpu_ns = processes.cpu_ns()
        start_ns = time.monotonic_ns()
        final = processes.client.generate_batch(prompts, params)[-1]
        spans_ns.append((start_ns, time.monotonic_ns()))
    used = processes.cpu_ns()
    cpu_us = {name: round((used[name] - since) / count / 1e3, 1) for name, since in cpu_ns.items()}
    message = generate_message("auto:1", batches[0][0], params, stream=False, options={})
    return Run(spans_ns[warm_up:], cpu_us, (len(message.to_wire()), len(final.to_wire())))


def part_times_us(folder: Path, spans_ns: list[tuple[int, int]]) -> tuple[dict[str, list[float]], dict[str, int]]:
    """How long each part of each request took, and the bytes of the message that ended it."""
    found = {part: list(matching(folder, *point)) for part, point in POINTS.items()}
    times_us: dict[str, list[float]] = {part: [] for part in [*POINTS, LAST_PART]}
    sizes = {}
    for start_ns, end_ns in spans_ns:
        before_ns = start_ns
        for part, candidates in found.items():
            record = candidates[bisect_left(candidates, start_ns, key=lambda record: record.time_ns)]
            times_us[part].append((record.time_ns - before_ns) / 1e3)
            before_ns, sizes[part] = record.time_ns, len(record.data)
        times_us[LAST_PART].append((end_ns - before_ns) / 1e3)
    return times_us, sizes


def matching(folder: Path, process: str, link: Link, direction: Direction, code: int | None) -> Iterator[Record]:
    """A process's records of one link, way and kind."""
    for record in Recording.load(folder, process).records:
        if (record.link, record.direction) == (link, direction) and code in (None, unpack(record.data)[0]):
            yield record


def floor_us(folder: Path, sizes: dict[str, int], client_bytes: tuple[int, int], count: int) -> dict[str, float]:
    """What the six messages of a request take by themselves, in a row and each after a rest: over ZeroMQ in each way of
    waiting, and over bare Unix sockets."""
    internal = [sizes[part] for part in INTERNAL_PARTS]
    zmq_links = {"internal": internal, "client": client_bytes}
    unix_links = {"unix": [*internal, *client_bytes]}
    totals: dict[str, float] = {}
    for rest_s, suffix in ((0.0, ""), (REST_S, "_rested")):
        for name, way, links in (
            ("blocking", "blocking", zmq_links),
            ("spinning", "spinning", zmq_links),
            ("awake", "awake", zmq_links),
            ("unix_blocking", "blocking", unix_links),
            ("unix_spinning", "spinning", unix_links),
        ):
            hops_us: list[float] = []
            for kind, kind_sizes in links.items():
                where = folder / f"{name}{suffix}-{kind}"
                hops_us += ping_pong.hops_us(where, kind, kind_sizes, count, way=way, rest_s=rest_s)
            totals[name + suffix] = round(sum(hops_us), 1)
    return totals


def measure_timeline(
    folder: Path, count: int, step_ms: float, busy_poll_ms: float = BUSY_POLL_AUTOMATIC, *, busy_poll_io: str = "auto"
) -> tuple[dict[str, Any], dict[str, int]]:
    """The figures of a recorded run, and the bytes of the message that ends each part."""
    records_dir = folder / "records"
    with Processes(folder / "recorded", step_ms, busy_poll_ms, records_dir, busy_poll_io=busy_poll_io) as processes:
        recorded = run_requests(processes, count)
    times_us, sizes = part_times_us(records_dir, recorded.spans_ns)
    parts_us = {part: figures(times) for part, times in times_us.items()}
    return {"whole_recorded_us": figures(recorded.whole_us), "parts_us": parts_us}, sizes


def measure_burst(processes: Processes, count: int) -> dict[str, Any]:
    """Requests that are sent at once: how long all of them take, and in how many steps."""
    before = processes.step_count()
    run = run_requests(processes, count, BURST_TOKENS, BURST_REQUESTS)
    steps = (processes.step_count() - before) / (count + WARM_UP)
    return {"whole_us": figures(run.whole_us), "steps": round(steps, 1), "least_steps": BURST_TOKENS}


def measure(
    count: int, step_ms: float, busy_poll_ms: Sequence[float], *, busy_poll_io: str = "auto"
) -> list[dict[str, Any]]:
    """All figures, for each duration of the busy poll."""
    found: list[dict[str, Any]] = []
    for each_ms in busy_poll_ms:
        load = round(os.getloadavg()[0], 1)
        with tempfile.TemporaryDirectory(prefix="hops-") as name:
            folder = Path(name)
            with Processes(folder / "plain", step_ms, each_ms, busy_poll_io=busy_poll_io) as processes:
                plain = run_requests(processes, count)
                decode = run_requests(processes, max(1, count // 40), DECODE_TOKENS, warm_up=1)
                burst = measure_burst(processes, max(1, count // 10))
            timeline, sizes = measure_timeline(folder, count, step_ms, each_ms, busy_poll_io=busy_poll_io)
            floor = found[0]["floor_us"] if found else floor_us(folder, sizes, plain.client_bytes, max(1, count // 4))
        token_us = (statistics.median(decode.whole_us) - statistics.median(plain.whole_us)) / (DECODE_TOKENS - 1)
        found.append({
            "whole_us": figures(plain.whole_us),
            **timeline,
            "cpu_us": plain.cpu_us,
            "floor_us": floor,
            "decode": {"step_us": DECODE_STEP_MS * 1000, "token_us": round(token_us, 1)},
            "burst": burst,
            "load": load,
        })  # fmt: skip
    return found


def print_table(busy_poll_ms: Sequence[float], found: Sequence[dict[str, Any]]) -> None:
    """The medians side by side."""
    rows = {name: [each[name]["p50"] for each in found] for name in ("whole_us", "whole_recorded_us")}
    for part in found[0]["parts_us"]:
        rows[f"  {part}"] = [each["parts_us"][part]["p50"] for each in found]
    for process in found[0]["cpu_us"]:
        rows[f"cpu_us {process}"] = [each["cpu_us"][process] for each in found]
    rows["decode token_us"] = [each["decode"]["token_us"] for each in found]
    rows["burst whole_us"] = [each["burst"]["whole_us"]["p50"] for each in found]
    rows["burst steps"] = [each["burst"]["steps"] for each in found]
    automatic = f"auto ({limit_s_for(BUSY_POLL_AUTOMATIC) * 1000:g})"
    names = [automatic if each_ms == BUSY_POLL_AUTOMATIC else f"{each_ms:g}" for each_ms in busy_poll_ms]
    print(f"{'busy_poll_ms':<24}" + "".join(f"{name:>10}" for name in names), file=sys.stderr)
    for name, values in rows.items():
        print(f"{name:<24}" + "".join(f"{value:>10.1f}" for value in values), file=sys.stderr)
    print(f"floor_us {found[0]['floor_us']}", file=sys.stderr)


def figures(times_us: list[float]) -> dict[str, float]:
    """Median, 99th percentile and minimum."""
    times_us = sorted(times_us)
    return {
        "p50": round(statistics.median(times_us), 1),
        "p99": round(times_us[len(times_us) * 99 // 100], 1),
        "min": round(times_us[0], 1),
    }


def main() -> None:
    """Parse, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=400, help="how many, one after another")
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long the worker's first step takes")
    parser.add_argument("--busy-poll-ms", type=float, nargs="+", help="-1: as the engine chooses")
    parser.add_argument(
        "--busy-poll-io", choices=BUSY_POLL_IO, default="auto", help="whether ZeroMQ's threads are kept awake too"
    )
    parser.add_argument("--smoke", action="store_true", help="a few requests, for the test suite")
    parser.add_argument("--output", help="file to append the results to")
    args = parser.parse_args()
    durations_ms = args.busy_poll_ms or ([BUSY_POLL_AUTOMATIC] if args.smoke else BUSY_POLL_MS)
    count = 10 if args.smoke else args.requests
    found = measure(count, args.step_ms, durations_ms, busy_poll_io=args.busy_poll_io)
    print_table(durations_ms, found)
    for each_ms, metrics in zip(durations_ms, found, strict=True):
        entry = records.record(
            benchmark="hops",
            workload=f"1 request, {PROMPT_TOKENS} in, 1 out, step {args.step_ms:g} ms",
            metrics=metrics,
            device=records.host_name(),
            options={"busy_poll_ms": each_ms, "busy_poll_io": args.busy_poll_io},
        )
        records.finish(entry, args.output)


if __name__ == "__main__":
    main()
