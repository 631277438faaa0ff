"""What Python does on the way of one short request, stage by stage, in one process: no sockets, nobody waits.

    python -m benchmarks.request_path [--requests 1000] [--profile STAGE] [--output FILE] [--smoke]

The request is that of `benchmarks.hops`: 128 prompt ids in, one token out. Each stage begins with the bytes of a
message and ends with those of the next; client, frontend and scheduler are the real objects behind their sockets, and
the worker only reads plans and writes results (for the rest of a GPU's host part see `benchmarks.worker_host`). What a
stage does after its message could be sent is not counted. Microseconds, medians: `warm` in a loop; `cold` after 4 MiB
of other memory were read, somewhat as a process finds its caches when it runs once a millisecond; `least`: the fastest
warm ones, which other programs disturb least. `--profile` shows the calls of one stage instead. Ends with one JSON
line.
"""

import argparse
import asyncio
import cProfile
import gc
import os
import pstats
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import zmq

from benchmarks import records
from common import client_messages as wire
from common.config import EngineConfig, ProfilingOptions
from common.messages import (
    EngineReady,
    ForChild,
    ForScheduler,
    FromWorker,
    TokensOut,
    decode_for_frontend,
    decode_for_scheduler,
    decode_for_worker,
)
from common.model_cache import default_model_dir
from common.profiling import StepTraces
from common.sampling_params import SamplingParams
from frontend.client_requests import encoded, generate_message
from frontend.client_server import ClientServer
from frontend.client_state import ClientState, Inbox
from frontend.engine import Engine
from frontend.tokenizer import Tokenizer
from scheduler_proc.core import SchedulerCore
from scheduler_proc.grammar import Compilation, Grammars
from scheduler_proc.main import Clocks, Loop
from scheduler_proc.state import Limits
from scheduler_proc.transport import Message, read_result
from worker_proc.pending import Arrived, PendingStep

PROMPT_TOKENS = 128
TOKEN_IDS = 40_000
WARM_UP = 50
SWEPT_BYTES = 4 << 20
LIMITS = Limits(max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192, block_size=16, block_count=4096)
READY = EngineReady(max_model_len=8192, max_num_seqs=256, block_size=16, block_count=4096, vocab_size=49_152)
PARAMS = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1, detokenize=False)
STAGES = (
    "client, request", "frontend, request", "scheduler, request", "worker, plan", "worker, result", "scheduler, result",
    "frontend, tokens", "client, result",
)  # fmt: skip


class Clock:
    """Times the stages of each request.

    Args:
        sweeps: empty the caches before each stage.
        profiled: the stage whose calls are kept in `profile`.
    """

    def __init__(self, *, sweeps: bool = False, profiled: str = "") -> None:
        self.times_us: dict[str, list[float]] = {stage: [] for stage in STAGES}
        self.profile = cProfile.Profile()
        self._swept = bytes(SWEPT_BYTES) if sweeps else b""
        self._profiled = profiled
        self._started_ns = 0

    def start(self, stage: str) -> None:
        """The stage begins."""
        bytearray(self._swept)
        if stage == self._profiled:
            self.profile.enable()
        self._started_ns = time.perf_counter_ns()

    def stop(self, stage: str) -> None:
        """Its message could be sent now."""
        self.times_us[stage].append((time.perf_counter_ns() - self._started_ns) / 1e3)
        self.profile.disable()


class NoSocket:
    """Stands for the client socket and its monitor: keeps what is sent, and nothing comes."""

    def __init__(self) -> None:
        self.on_send: Callable[[bytes], object] = lambda data: None
        self._fd = os.eventfd(0)

    def get(self, option: int) -> int:
        """No event; a descriptor that is never readable."""
        return self._fd if option == zmq.FD else 0

    def get_string(self, _: int) -> str:
        """The endpoint."""
        return "ipc://nowhere"

    def get_monitor_socket(self, _: int) -> "NoSocket":
        """Its events."""
        return NoSocket()

    def recv_multipart(self, *_: Any) -> list[bytes]:
        """Nothing."""
        raise zmq.Again

    def send(self, data: bytes, _: int) -> None:
        """Keep it."""
        self.on_send(data)

    def disable_monitor(self) -> None:
        """Nothing."""

    def close(self, **_: Any) -> None:
        """Close the descriptor."""
        os.close(self._fd)


class NoLink:
    """Stands for the supervisor."""

    progress = 0
    state = ""

    def ready(self, detail: str) -> None:
        """Nothing."""

    def set_state(self, state: str) -> None:
        """Nothing."""


class AllDone(Exception):
    """The last request has been answered."""


class Path:
    """All stages of requests, one request after another, as the scheduler's transport: its loop drives the rest.

    Args:
        config: the frontend's.
        count: how many requests.
        clock: times them.
    """

    def __init__(self, config: EngineConfig, count: int, clock: Clock) -> None:
        self._clock = clock
        random = Random(1)
        self._prompts = [[random.randrange(TOKEN_IDS) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
        self._client, self._inbox = ClientState(), Inbox("")
        self._socket = NoSocket()
        self._engine = Engine(config, Tokenizer.load(config.model_dir), self._on_request)
        self._engine.core.later = self._later
        self._engine.core.handle(READY)
        self._server = ClientServer(self._engine, self._socket)  # type: ignore[arg-type]
        self._request = self._plan = self._result = self._tokens = b""
        self._afterwards: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._stage = ""

    def wait(self, _: float | None) -> bool:
        """The next message for the scheduler: a result, or else a request from a client."""
        if self._tokens:
            self._answer()
        if self._plan:
            self._run_step()
        else:
            self._ask()
        return False

    def _ask(self) -> None:
        """A client's request goes to the frontend, and that to the scheduler."""
        if not self._prompts:
            raise AllDone
        prompt = self._prompts.pop()
        self._clock.start("client, request")
        self._inbox = self._client.open()
        data = encoded(generate_message(self._inbox.request_id, prompt, PARAMS, stream=False, options={}))
        self._clock.stop("client, request")
        self._clock.start("frontend, request")
        self._server.on_frames([b"12345", data])
        self._server.flush()
        self._clock.start("scheduler, request")

    def _on_request(self, data: bytes, more: bool = False) -> None:
        self._clock.stop("frontend, request")
        self._request = data

    def _run_step(self) -> None:
        data, self._plan = self._plan, b""
        self._clock.start("worker, plan")
        plan = decode_for_worker(data)
        self._clock.stop("worker, plan")
        self._clock.start("worker, result")
        step = PendingStep(plan.step_id, lambda: Arrived(array("i", [1]), 0, 0, 0))
        self._result = step.result(9).to_wire()
        self._clock.stop("worker, result")
        self._clock.start("scheduler, result")

    def _answer(self) -> None:
        """The tokens go to the frontend, and the answer to the client."""
        data, self._tokens = self._tokens, b""
        finals: list[bytes] = []

        def on_send(sent: bytes) -> None:
            finals.append(sent)
            if len(finals) == 2:  # behind the identity
                self._clock.stop("frontend, tokens")

        self._socket.on_send = on_send
        self._clock.start("frontend, tokens")
        self._engine.core.handle(decode_for_frontend(data))
        self._server.flush()
        self._clock.start("client, result")
        self._client.take(finals[1])
        final = self._inbox.take()
        self._clock.stop("client, result")
        assert isinstance(final, wire.Final) and len(final.samples[0].token_ids) == 1, f"a wrong answer: {final}"
        for act, arguments in self._afterwards:
            act(*arguments)
        self._afterwards.clear()

    def _later(self, act: Callable[..., object], *arguments: Any) -> None:
        self._afterwards.append((act, arguments))

    # -- the scheduler's transport -------------------------------------------------------------------------------------

    def orders(self) -> Sequence[ForChild]:
        """None."""
        return ()

    def requests(self, _: int) -> Iterator[ForScheduler]:
        """The one that has just come."""
        data, self._request = self._request, b""
        if data:
            yield decode_for_scheduler(data)

    def results(self, _: int = 64) -> Iterator[FromWorker]:
        """The one that has just come."""
        data, self._result = self._result, b""
        if data:
            yield read_result(data)

    def send_plan(self, message: Message) -> None:
        """The scheduler has planned."""
        self._plan = message.to_wire()
        self._clock.stop("scheduler, request")

    def send_out(self, message: Message) -> None:
        """The scheduler has taken the result in; everything else it says is of no matter here."""
        data = message.to_wire()
        if isinstance(message, TokensOut):
            self._clock.stop("scheduler, result")
            self._tokens = data

    def reopen(self, session: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """End the frontend's part."""
        self._server.close()
        self._engine.close()


def run(config: EngineConfig, count: int, clock: Clock) -> None:
    """Send so many requests along the path."""
    path = Path(config, count, clock)
    clocks = Clocks()
    core = SchedulerCore(LIMITS, clocks.wall, None, clocks.monotonic)
    traces = StepTraces("scheduler", ProfilingOptions(), NoLink())  # type: ignore[arg-type]
    compilation = Compilation(Grammars(default_model_dir() / "tokenizer.json", READY.vocab_size))
    gc.collect()
    gc.freeze()
    try:
        Loop(core, compilation, path, NoLink(), clocks, traces, READY).run()
    except AllDone:
        pass
    finally:
        path.close()
        gc.unfreeze()


async def measure(count: int) -> dict[str, float]:
    """Microseconds of each stage and of all, warm and cold."""
    config = EngineConfig(model_dir=str(default_model_dir()), run_dir="/nowhere")
    warm, cold = Clock(), Clock(sweeps=True)
    for clock in (warm, cold):
        run(config, count + WARM_UP, clock)
    metrics: dict[str, float] = {}
    for stage in STAGES:
        metrics |= {
            f"{stage}: warm_us": round(statistics.median(warm.times_us[stage][WARM_UP:]), 1),
            f"{stage}: cold_us": round(statistics.median(cold.times_us[stage][WARM_UP:]), 1),
            f"{stage}: least_us": round(min(warm.times_us[stage]), 1),
        }
    for kind in ("warm_us", "cold_us", "least_us"):
        metrics[f"all: {kind}"] = round(sum(metrics[f"{stage}: {kind}"] for stage in STAGES), 1)
    return metrics


async def show_calls(count: int, stage: str) -> None:
    """Print which functions a stage spends its time in."""
    clock = Clock(profiled=stage)
    run(EngineConfig(model_dir=str(default_model_dir()), run_dir="/nowhere"), count, clock)
    pstats.Stats(clock.profile).sort_stats("tottime").print_stats(32)


def main() -> None:
    """Parse, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--profile", choices=STAGES, help="show the calls of this stage instead")
    parser.add_argument("--output", default="", help="append the result line to this file")
    parser.add_argument("--smoke", action="store_true", help="a few requests only")
    args = parser.parse_args()
    count = 5 if args.smoke else args.requests
    if args.profile:
        asyncio.run(show_calls(count, args.profile))
        return
    metrics = asyncio.run(measure(count))
    for stage in (*STAGES, "all"):
        print(f"{stage:20}", "  ".join(f"{kind} {metrics[f'{stage}: {kind}_us']:6.1f}" for kind in
                                       ("warm", "cold", "least")), flush=True)  # fmt: skip
    entry = records.record(
        benchmark="request_path", workload=f"1 request, {PROMPT_TOKENS} in, 1 out", device=records.host_name(),
        options={"requests": count}, metrics=metrics,
    )  # fmt: skip
    records.finish(entry, args.output)


if __name__ == "__main__":
    main()
