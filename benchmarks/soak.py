"""Minutes of mixed and hostile traffic against a real engine, then a check that nothing has leaked.

    python -m benchmarks.soak --minutes 15 --rate 4          # the embedded model
    python -m benchmarks.soak --model tiny --minutes 15      # a tiny random one (from a checkout)

Long and short requests over HTTP and the client socket, grammars, tools, priorities, aborts, disconnects, clients that
vanish, bad input, slow readers; drawn from a seed. After a short warm-up it counts what an idle engine holds, and at
the end it counts again. Prints one JSON line, appends it to --output, and exits with 1 if anything is wrong: an
unexpected outcome, an error in the engine's log, blocks or requests left, more file descriptors, threads or tasks than
before, or memory that grew by more than `GROWTH_LIMIT_MB` from the middle third of the time to the last.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks import records
from benchmarks.process_watch import Holding, course, engine_processes, holding, memory_growth_mb
from benchmarks.soak_traffic import KINDS, Kind, Traffic, every_kind
from frontend import AsyncClient

ROOT = Path(__file__).parents[1]
OPTIONS = (
    "--max-model-len", "1024", "--block-size", "4", "--num-kv-blocks", "288", "--max-num-seqs", "16", "--cpu-threads",
    "1", "--policy", "priority", "--preemption", "auto", "--swap-space-bytes", "4MiB", "--dtype", "float32",
)  # fmt: skip
"""float32: in bfloat16 oneDNN keeps code for each shape of a product, which is growth that is no leak."""
WARM_UP_S = 20.0
WATCH_INTERVAL_S = 2.0
IDLE_TIMEOUT_S = 60.0
SETTLING_S = 5.0
AT_ONCE = 48
GROWTH_LIMIT_MB = 2.0
GROWTH_MINUTES = 5.0
"""A shorter run says nothing of memory: caches still fill."""
THREAD_SLACK = 2
"""Threads of pools that a short warm-up may not have filled."""
KEPT_FAILURES = 20


class Engine:
    """`launch.py serve` with its log in a file; a context manager that stops it.

    Attributes:
        ready: what it said when it was ready.
    """

    def __init__(self, model: str, options: tuple[str, ...]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ts-")
        folder = Path(self._folder.name)
        self.log_path = folder / "log"
        self._log = self.log_path.open("w")
        command = [sys.executable, str(ROOT / "launch.py"), "serve", _model_folder(model, folder), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--ready-file", str(folder / "ready.json"), *options],
            stdout=subprocess.PIPE, stderr=self._log, text=True, env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), f"the engine did not start:\n{self.log_path.read_text()}"
        self.ready: dict[str, Any] = json.loads((folder / "ready.json").read_text())

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()
        self._folder.cleanup()

    def stop(self) -> int:
        """End it; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)

    def complaints(self) -> list[str]:
        """Lines of its log that say that something went wrong inside."""
        lines = self.log_path.read_text().splitlines()
        return [line for line in lines if re.search(r"\bERROR\b|Traceback|scheduler leaks", line)]


def _model_folder(model: str, folder: Path) -> str:
    if model != "tiny":
        return model
    from tests.support import tiny

    return str(tiny.save_model(folder / "tiny", max_position_embeddings=4096))


class Watch:
    """Looks at all processes at intervals."""

    def __init__(self, supervisor_pid: int) -> None:
        self.samples: defaultdict[str, list[Holding]] = defaultdict(list)
        self._supervisor_pid = supervisor_pid

    def look(self) -> dict[str, Holding]:
        """One look, kept."""
        now = {name: holding(pid) for name, pid in engine_processes(self._supervisor_pid).items()}
        for name, found in now.items():
            self.samples[name].append(found)
        return now

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(WATCH_INTERVAL_S)


class Soak:
    """The traffic and what came of it.

    Args:
        engine: running.
        rate: things done a second, on average.
        seed: of all that is drawn.
        kinds: what is done, with weights.

    Attributes:
        counts: how often each kind was done; failures: what was wrong, the first ones in words.
    """

    def __init__(self, engine: Engine, rate: float, seed: int, kinds: dict[Kind, int]) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.failure_count = 0
        self._engine = engine
        self._rate = rate
        self._kinds = kinds
        self._rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float, *, each_first: bool = False) -> None:
        """Traffic for so long; returns when the last request has ended and its clients are gone.

        Args:
            seconds: how long.
            each_first: do everything once before that, one after another.
        """
        endpoint, url = self._engine.ready["client_endpoint"], self._engine.ready["http"]
        kinds, weights = zip(*self._kinds.items(), strict=True)
        async with httpx.AsyncClient(base_url=url, timeout=120) as http, AsyncClient(endpoint, timeout_s=60) as sdk:
            traffic = Traffic(http, sdk, endpoint, self._rng, sdk.welcome.max_model_len)
            for kind in every_kind(kinds) if each_first else ():
                await self._do(kind, traffic)
            ends_s = time.monotonic() + seconds
            while time.monotonic() < ends_s:
                await asyncio.sleep(self._rng.expovariate(self._rate))
                if len(self._tasks) < AT_ONCE:
                    [kind] = self._rng.choices(kinds, weights)
                    task = asyncio.create_task(self._do(kind, traffic))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            await asyncio.gather(*self._tasks)

    async def _do(self, kind: Any, traffic: Traffic) -> None:
        self.counts[kind.__name__] += 1
        try:
            await asyncio.wait_for(kind(traffic), 120)
        except Exception as error:
            self.failure_count += 1
            if len(self.failures) < KEPT_FAILURES:
                self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}"[:300])


async def idle_state(engine: Engine) -> dict[str, int]:
    """What the idle engine has left: the figures that must come back to what they were. Waits until it is idle, and has
    no fewer tasks at the next look: those of the last requests end a little later."""
    deadline_s, before = time.monotonic() + IDLE_TIMEOUT_S, {"tasks": 0}
    async with AsyncClient(engine.ready["client_endpoint"]) as sdk, httpx.AsyncClient(timeout=120) as http:
        while True:
            status = await sdk.status()
            figures = status.figures
            held = figures["total_block_count"] - figures["free_block_count"] - figures["cached_block_count"]
            busy = figures["running_count"] + figures["waiting_count"] + figures["swapped_count"]
            data = (await http.get(engine.ready["http"] + "/dashboard/data")).json()
            left = {"live": status.live_count, "held_blocks": held, "queued": busy, "tasks": data["task_count"]}
            is_idle = not (status.live_count or held or busy)
            if (is_idle and 0 < before["tasks"] <= left["tasks"]) or time.monotonic() > deadline_s:
                return left
            before = left
            await asyncio.sleep(0.2)


async def settled(engine: Engine, watch: Watch) -> dict[str, Any]:
    """What the idle engine holds, once the connections of whoever asked are gone from its sockets too."""
    left = await idle_state(engine)
    async with AsyncClient(engine.ready["client_endpoint"]) as sdk:
        figures = (await sdk.status()).figures
    await asyncio.sleep(SETTLING_S)
    return {"left": left, "figures": figures, "processes": watch.look()}


async def soak(engine: Engine, minutes: float, run: Soak) -> dict[str, Any]:
    """All of it; the metrics of the record."""
    await run.run(min(WARM_UP_S, minutes * 60), each_first=True)
    watch = Watch(engine.process.pid)
    before = await settled(engine, watch)
    watching = asyncio.create_task(watch.run())
    began_s = time.monotonic()
    await run.run(minutes * 60)
    lasted_s = time.monotonic() - began_s
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    samples = {name: list(found) for name, found in watch.samples.items()}
    after = await settled(engine, watch)
    growth = {name: round(memory_growth_mb(found), 2) for name, found in samples.items()}
    faults = leaks(before, after)
    if minutes >= GROWTH_MINUTES:
        faults += [f"{name} grew by {mb} MB" for name, mb in growth.items() if mb > GROWTH_LIMIT_MB]
    faults += run.failures + [f"log: {line}"[:300] for line in engine.complaints()[:KEPT_FAILURES]]
    figures = after["figures"]
    return {
        "ok": not faults and not run.failure_count,
        "faults": faults,
        "failure_count": run.failure_count,
        "seconds": round(lasted_s, 1),
        "done": dict(sorted(run.counts.items())),
        "done_in_all": sum(run.counts.values()),
        "output_tokens": figures["output_tokens"],
        "preemptions": figures["preemptions"],
        "memory_growth_mb": growth,
        "memory_mb": {name: course(found) for name, found in samples.items()},
        "fds": {name: found.fds.total() for name, found in after["processes"].items()},
        "threads": {name: found.threads for name, found in after["processes"].items()},
        "left": after["left"],
    }


def leaks(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What the idle engine holds at the end and did not hold at the start."""
    found = [f"{count} {name} left" for name, count in after["left"].items() if name != "tasks" and count]
    if after["left"]["tasks"] > before["left"]["tasks"]:
        found.append(f"{after['left']['tasks']} tasks, {before['left']['tasks']} before")
    for name, now in after["processes"].items():
        then = before["processes"].get(name)
        if then is None:
            found.append(f"{name} has been started")
            continue
        if more := now.fds - then.fds:
            found.append(
                f"{name} holds {now.fds.total()} file descriptors, {then.fds.total()} before: {dict(more)} more"
            )
        if now.threads > then.threads + THREAD_SLACK:
            found.append(f"{name} has {now.threads} threads, {then.threads} before")
    return found


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="as launch.py takes it, or 'tiny'")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=4.0, help="things done a second, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", help="only these, to find out which one it is")
    parser.add_argument("--output", default=str(records.RESULTS_DIR / "soak.jsonl"))
    parser.add_argument("--smoke", action="store_true", help="a few seconds with the tiny model, nothing kept")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.minutes, arguments.rate = "tiny", 0.15, 12.0
    with Engine(arguments.model, OPTIONS) as engine:
        only = arguments.kinds or [kind.__name__ for kind in KINDS]
        kinds = {kind: weight for kind, weight in KINDS.items() if kind.__name__ in only}
        run = Soak(engine, arguments.rate, arguments.seed, kinds)
        metrics = asyncio.run(soak(engine, arguments.minutes, run))
        exit_code = engine.stop()
    if exit_code:
        metrics["ok"] = False
        metrics["faults"].append(f"the engine ended with {exit_code}")
    options = {"minutes": arguments.minutes, "rate": arguments.rate, "seed": arguments.seed, "engine": list(OPTIONS)}
    entry = records.record(
        benchmark="soak", workload="mixed", metrics=metrics, device=records.processor_name(), options=options,
        model=records.model_label(arguments.model), weights="random" if arguments.model == "tiny" else "real",
    )  # fmt: skip
    records.finish(entry, "" if arguments.smoke else arguments.output)
    return 0 if metrics["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
