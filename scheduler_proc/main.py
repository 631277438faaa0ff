"""The scheduler process: sockets, clocks and the supervisor's orders around the core.

Start: bind the sockets (`transport`), wait for the worker's WorkerReady, build the core, send EngineReady, report ready
to the supervisor. Run: take in what has come, plan while fewer than run_ahead + 1 plans are in flight, and block when
there is nothing to plan. Stop: refuse new requests, finish those in flight within the grace period, end the rest with
an error, exit 0.

When another process is lost, the supervisor says so, and every request ends with that error. With `--restart` a lost
frontend is started again: this process drops the old one's requests and goes on with the new one. (A lost worker takes
the scheduler with it: both are started again.) When the supervisor is gone, this process ends at once (`common.child`).
"""

import gc
import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from common import recording
from common.child import SupervisorLink
from common.config import EngineConfig, step_limits
from common.messages import (
    AddRequest,
    EngineReady,
    EngineStats,
    ForFrontend,
    ForScheduler,
    NewSession,
    PeerFailed,
    RequestFailed,
    StepPlan,
    StepResult,
    Stop,
    Unprepared,
    WorkerReady,
)
from common.profiling import StepTraces
from common.recording import reading, recorder_for
from scheduler_proc.core import SchedulerCore
from scheduler_proc.grammar import Compilation, Grammars
from scheduler_proc.pacing import IDLE_INTAKE, Pacing
from scheduler_proc.state import Limits
from scheduler_proc.transport import SocketTransport, Transport

STATS_INTERVAL_S = 0.1
COMPILATION_INTERVAL_S = 0.001
"""How often a request that waits for its grammar is looked after."""
CPU_TOKEN_S = 0.004
"""What a prompt token may take on a CPU: the first prompt of all is cut by this, the others by what it took."""
SIZE_CLASSES = 20
"""Of steps by their tokens: up to 1, 2, 4, ... 524,288."""

logger = logging.getLogger(__name__)


class StatusLink(Protocol):
    """What the loop tells the supervisor: a `SupervisorLink`, or what stands for it in a replay."""

    progress: int
    state: str

    def ready(self, detail: str) -> None:
        """This process can serve."""

    def set_state(self, state: str) -> None:
        """This process's state has changed."""


def as_it_is(count: Callable[[], float]) -> Callable[[], float]:
    """A count that nobody records."""
    return count


@dataclass(frozen=True)
class Clocks:
    """What of the world outside decides what the loop does.

    Attributes:
        wall: seconds since the epoch.
        monotonic: seconds that never go back.
        compiled: wraps the count of grammars that are ready, which depends on another thread.
    """

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    compiled: Callable[[Callable[[], float]], Callable[[], float]] = as_it_is


def main(config: EngineConfig, link: SupervisorLink, rank: int) -> int:
    """Run the scheduler until it is told to stop; the exit code."""
    recorder = recorder_for(config, "scheduler")
    transport = SocketTransport(config, link, recorder)
    clocks = Clocks(
        reading(recorder, recording.Link.WALL_CLOCK, time.time),
        reading(recorder, recording.Link.MONOTONIC_CLOCK, time.monotonic),
        lambda count: reading(recorder, recording.Link.COMPILED, count),
    )
    try:
        serve(config, transport, link, clocks)
        return 0
    finally:
        transport.close()
        if recorder is not None:
            recorder.close()


def serve(config: EngineConfig, transport: Transport, link: StatusLink, clocks: Clocks) -> None:
    """Wait for the worker, then plan until an order ends it."""
    ready = wait_for_worker(transport, link)
    if ready is None:
        return
    limits = limits_of(config, ready)
    if limits.preemption != "recompute" and not limits.host_block_count:
        logger.warning("--preemption %s: the worker has no host blocks, so it is recompute", limits.preemption)
    grammars = Grammars(Path(config.tokenizer_dir or config.model_dir) / "tokenizer.json", ready.vocab_size)
    core = SchedulerCore(limits, clocks.wall, grammars, clocks.monotonic)
    traces = StepTraces("scheduler", config.profiling, link)
    compilation = Compilation(grammars, link.set_state, clocks.compiled)
    announcement = engine_ready(limits, ready)
    loop = Loop(core, compilation, transport, link, clocks, traces, announcement, ready.unprepared_count)
    loop.announce()
    link.ready(f"{limits.block_count} KV blocks of {limits.block_size} tokens, {limits.max_num_seqs} sequences")
    gc.freeze()  # nothing made so far is garbage, and requests leave no cycles: the collector rarely need look
    gc.set_threshold(100_000, 50, 100)
    loop.run()
    traces.stop()


def wait_for_worker(transport: Transport, link: StatusLink) -> WorkerReady | None:
    """The worker's first message; None if the supervisor ends the run before."""
    link.state = "waiting for the worker"
    while True:
        if transport.wait(None) and transport.orders():
            return None
        for message in transport.results():
            if isinstance(message, WorkerReady):
                return message


def limits_of(config: EngineConfig, ready: WorkerReady) -> Limits:
    """The core's limits, from the options and what the worker found."""
    options = config.scheduler
    step = step_limits(options, ready.device_name)
    return Limits(
        max_model_len=ready.max_model_len,
        max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=step.max_num_batched_tokens,
        block_size=ready.block_size,
        block_count=ready.block_count,
        host_block_count=ready.host_block_count,
        run_ahead=options.run_ahead,
        max_queued=options.max_num_queued_reqs,
        max_queued_tokens=options.max_num_queued_tokens,
        target_itl_s=options.target_itl_ms / 1000,
        token_s=CPU_TOKEN_S if ready.device_name == "cpu" else 0.0,
        prefix_cache=config.cache.prefix_cache,
        policy=options.policy,
        preemption=options.preemption,
        block_bytes=ready.block_bytes,
        link_bytes_per_s=ready.link_bytes_per_s or Limits.link_bytes_per_s,
        namespace=config.model_dir,
    )


def engine_ready(limits: Limits, ready: WorkerReady) -> EngineReady:
    """What the frontend is told at the start."""
    return EngineReady(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        block_size=limits.block_size,
        block_count=limits.block_count,
        vocab_size=ready.vocab_size,
    )


class StepFigures:
    """The steps planned since the last report: the mean times of their parts, in microseconds, and their sizes.

    A result may come when no step is planned any more. What its parts took, and what of a sum is no whole microsecond
    of a step, goes into the next means, so that means times steps add up to all that was taken.
    """

    def __init__(self) -> None:
        self._sums = [0] * 6
        self._sizes = array("i", [0] * SIZE_CLASSES)

    def add_plan(self, token_count: int, plan_us: int, wire_us: int) -> None:
        """How many tokens one step computes, and what planning and sending it took here."""
        self._sums[0] += plan_us
        self._sums[1] += wire_us
        self._sizes[min(max(token_count - 1, 0).bit_length(), SIZE_CLASSES - 1)] += 1

    def add_result(self, parts_us: "array[int]") -> None:
        """What the worker says its parts took."""
        for index, part_us in enumerate(parts_us[:4]):
            self._sums[2 + index] += part_us

    def add_to(self, stats: EngineStats) -> EngineStats:
        """The figures with these; starts anew, from what no step here stands for."""
        steps = sum(self._sizes)
        means = array("i", [min(total // steps, 2**31 - 1) if steps else 0 for total in self._sums])
        complete = replace(stats, parts_us=means, step_sizes=self._sizes)
        self._sums = [total - mean * steps for total, mean in zip(self._sums, means, strict=True)]
        self._sizes = array("i", [0] * SIZE_CLASSES)
        return complete


class Loop:
    """The process's main loop: waits, drains, plans, reports.

    Args:
        core: decides.
        compilation: where requests with a grammar wait for it.
        transport: the sockets.
        link: hears how far the process is.
        clocks: the process's.
        traces: counts the plans.
        announcement: what a frontend is told first, behind the figures.
        unprepared_count: what the worker said first of that.
    """

    def __init__(
        self,
        core: SchedulerCore,
        compilation: Compilation,
        transport: Transport,
        link: StatusLink,
        clocks: Clocks,
        traces: StepTraces,
        announcement: EngineReady,
        unprepared_count: int = 0,
    ) -> None:
        self._core = core
        self._compilation = compilation
        self._transport = transport
        self._link = link
        self._clocks = clocks
        self._traces = traces
        self._announcement = announcement
        self._unprepared_count = unprepared_count
        self._figures = StepFigures()
        self._pacing = Pacing(core, clocks.monotonic)
        self._outbox: list[ForFrontend] = []
        self._arrived_ids: list[int] = []
        self._changed = False
        self._stats_due_s = 0.0
        self._wire_us = 0  # of the last plan
        self._stop_at_s: float | None = None  # monotonic; set once the run is ending
        self._failure: PeerFailed | None = None

    def announce(self) -> None:
        """Tell a frontend that requests may come; the figures first, so that it never has wrong ones."""
        self._send_stats()
        self._transport.send_out(self._announcement)

    def run(self) -> None:
        """Until an order ends it and every request has its terminal message."""
        while not self._is_over():
            if self._transport.wait(self._timeout_ms()):
                self._take_orders()
            self._take_results()
            self._take_requests()
            self._outbox += self._core.tick()
            self._plan()
            self._tell_of_queue()
            self._send_outbox()
            self._report()
        self._end_rest()

    def _is_over(self) -> bool:
        if self._failure is not None:
            return True
        if self._stop_at_s is None:
            return False
        return (self._core.is_idle and self._compilation.is_idle) or self._clocks.monotonic() >= self._stop_at_s

    def _timeout_ms(self) -> float | None:
        """Milliseconds until something is due without a message; None for never."""
        waits = [] if self._compilation.is_idle else [COMPILATION_INTERVAL_S]
        deadline_s = self._core.next_deadline_s()
        if deadline_s is not None:
            waits.append(deadline_s - self._clocks.wall())
        if self._changed:
            waits.append(self._stats_due_s - self._clocks.monotonic())
        if self._stop_at_s is not None:
            waits.append(self._stop_at_s - self._clocks.monotonic())
        if (wait_s := self._pacing.wait_s()) is not None:
            waits.append(wait_s)
        return max(0.0, min(waits) * 1000) if waits else None

    def _take_orders(self) -> None:
        for order in self._transport.orders():
            if isinstance(order, Stop):
                at_s = self._clocks.monotonic() + order.grace_ms / 1000
                self._stop_at_s = at_s if self._stop_at_s is None else min(at_s, self._stop_at_s)
                self._link.state = "stopping"
            elif isinstance(order, PeerFailed):
                self._failure = order
            elif isinstance(order, NewSession):
                self._serve_new_frontend(order)
            else:
                self._traces.order(order)

    def _serve_new_frontend(self, order: NewSession) -> None:
        """Nobody wants the old one's requests any more, nor what was to be said of them."""
        logger.info("%s; dropping its requests (%d)", order.message, len(self._core.state.requests))
        self._core.fail_all("engine_dead", order.message)
        self._compilation.forget_all()
        self._outbox.clear()
        self._transport.reopen(order.session)
        self.announce()

    def _take_results(self) -> None:
        for message in self._transport.results():
            if isinstance(message, StepResult):
                self._changed = True
                self._pacing.note_result()
                self._figures.add_result(message.parts_us)
                self._outbox += self._core.handle_result(message)
            elif isinstance(message, Unprepared):
                self._changed = True
                self._unprepared_count = message.count

    def _take_requests(self) -> None:
        self._pacing.begin_intake()
        for count, message in enumerate(self._transport.requests(IDLE_INTAKE), 1):
            self._link.progress += 1
            self._changed = True
            if self._stop_at_s is not None and isinstance(message, AddRequest):
                text = "the engine is shutting down"
                self._outbox.append(RequestFailed(message.request_id, "shutting_down", text, status=503))
            elif not self._pacing.note_message(message) and self._compilation.pass_on(message):
                self._handle(message)
            if self._pacing.intake_ends(count):
                break
        for compiled in self._compilation.ready():
            self._handle(compiled)

    def _handle(self, message: ForScheduler) -> None:
        if isinstance(message, AddRequest):
            self._arrived_ids.append(message.request_id)
        self._outbox += self._core.handle(message)

    def _plan(self) -> None:
        while not self._pacing.holds():
            started_ns = time.perf_counter_ns()
            plan = self._core.plan_step(self._send_plan)
            if plan is None:
                return
            plan_us = (time.perf_counter_ns() - started_ns) // 1000 - self._wire_us
            self._figures.add_plan(plan.token_count, plan_us, self._wire_us)
            self._link.progress += 1
            self._changed = True
            self._traces.step()
            self._pacing.note_plan(plan)

    def _tell_of_queue(self) -> None:
        """Who has begun; and who waits, unless that is only for others that arrive."""
        arrived_ids: list[int] = []
        if not self._pacing.is_holding:
            arrived_ids, self._arrived_ids = self._arrived_ids, arrived_ids
        self._outbox += self._core.queue_news(arrived_ids)

    def _send_plan(self, plan: StepPlan) -> None:
        started_ns = time.perf_counter_ns()
        self._transport.send_plan(plan)
        self._wire_us = (time.perf_counter_ns() - started_ns) // 1000

    def _report(self) -> None:
        if not self._changed or self._clocks.monotonic() < self._stats_due_s:
            return
        if self._core.is_idle:
            self._check_idle()
        self._stats_due_s = self._clocks.monotonic() + STATS_INTERVAL_S
        self._changed = False
        self._send_stats()

    def _send_stats(self) -> None:
        stats = replace(self._core.stats(), unprepared_count=self._unprepared_count)
        self._transport.send_out(self._figures.add_to(stats))

    def _check_idle(self) -> None:
        """A leak is an error of ours, but no reason to take the engine down."""
        try:
            self._core.check_idle()
        except AssertionError as error:
            logger.error("the scheduler leaks: %s", error)

    def _end_rest(self) -> None:
        """A terminal message for whoever is still waiting for one."""
        if self._failure is None:
            code, text = "shutting_down", "the engine is shutting down"
        else:
            code, text = "engine_dead", self._failure.message  # which names the process
        self._outbox += self._core.fail_all(code, text)
        self._outbox += self._compilation.fail_all(code, text)
        self._send_outbox()

    def _send_outbox(self) -> None:
        """The frontend hears after the worker has its next plan."""
        for message in self._outbox:
            self._changed = True
            self._transport.send_out(message)
        self._outbox.clear()
