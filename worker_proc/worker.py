"""The worker process: loads a model, then turns step plans into results.

Sockets: binds `plans-<rank>` (PULL, from the scheduler), connects `results` (PUSH, to the scheduler).
In: StepPlan. Out: one WorkerReady when the model has run once, then one StepResult per plan, in order, and an
Unprepared whenever that number changes.
Start: sockets, device, weights, cache, a first forward pass, WorkerReady to the scheduler, Ready to the supervisor.
Stop: an order of the supervisor ends the loop between two steps, with exit code 0. Plans that are still queued are
dropped, because the processes that wait for their results are being stopped too. If the scheduler dies, the supervisor
says so, with the same effect. An exception, such as bytes that are not a plan or an error of the device, ends the
process; `run_child` logs it and tells the supervisor.
"""

import logging
import time

import torch
import zmq

from common import busy_poll
from common.child import SupervisorLink
from common.config import EngineConfig
from common.errors import WireError
from common.messages import (
    PROTOCOL_VERSION,
    PeerFailed,
    Profile,
    StepPlan,
    Stop,
    Unprepared,
    WorkerReady,
    decode_for_worker,
)
from common.profiling import StepTraces
from common.recording import Link, receiving, recorder_for, sending
from common.sockets import bind_pull, connect_push, new_context
from kernels.compile_process import CompileProcess
from worker_proc.engine import Engine, StepRunner, load_engine
from worker_proc.reporter import InlineReporter, ThreadReporter
from worker_proc.tracing import TorchTracer

QUIET_MS = 20
"""Without a plan and with no step in flight for this long, no request is running."""

logger = logging.getLogger(__name__)

Reporter = InlineReporter | ThreadReporter


def ready_message(config: EngineConfig, engine: Engine, rank: int) -> WorkerReady:
    """What the scheduler is told of an engine that can run steps."""
    size = engine.size
    return WorkerReady(
        protocol_version=PROTOCOL_VERSION,
        rank=rank,
        max_model_len=size.max_model_len,
        block_size=config.cache.block_size,
        block_count=size.block_count,
        host_block_count=size.host_block_count,
        block_bytes=size.block_bytes,
        vocab_size=engine.vocab_size,
        device_name=engine.device_name,
        link_bytes_per_s=engine.link_bytes_per_s,
        unprepared_count=engine.runner.unprepared_count,
    )


class Worker:
    """One worker process's main loop.

    Args:
        link: to the supervisor.
        rank: which worker this is.
        compiler: what compiles kernels for a GPU, perhaps started already; ended here.
    """

    def __init__(
        self, config: EngineConfig, link: SupervisorLink, rank: int, compiler: CompileProcess | None = None
    ) -> None:
        self._config, self._link, self._rank = config, link, rank
        self._compiler = compiler
        self._context = new_context()
        self._plans = bind_pull(self._context, config.endpoint(f"plans-{rank}"))
        self._results = connect_push(self._context, config.endpoint("results"))
        self._recorder = recorder_for(config, f"worker-{rank}")
        self._receive_plan = receiving(self._recorder, Link.PLANS, self._plans.recv)
        self._send_result = sending(self._recorder, Link.RESULTS, self._results.send)
        self._traces: StepTraces | None = None
        self._unprepared_count = 0  # as the scheduler was told
        self._poller = zmq.Poller()
        self._poller.register(self._plans, zmq.POLLIN)
        self._poller.register(link.wake_fd, zmq.POLLIN)
        self._busy = busy_poll.of_engine(config, self._context)

    def run(self) -> int:
        """Start, serve until told to stop, return the exit code.

        After an error nothing but the recording is closed: a step may still be under way in the reporter's thread, on a
        device that does not answer any more.
        """
        try:
            start = time.monotonic()
            engine = load_engine(self._config, self._compiler)
            if not self._stop_ordered():
                self._announce(engine, time.monotonic() - start)
                self._serve(engine, self._make_reporter(engine))
        finally:
            if self._recorder is not None:
                self._recorder.close()
        self._busy.close()
        self._plans.close(linger=0)
        self._results.close(linger=0)
        self._context.term()
        return 0

    def _announce(self, engine: Engine, seconds: float) -> None:
        size, ready = engine.size, ready_message(self._config, engine, self._rank)
        self._unprepared_count = ready.unprepared_count
        self._send_result(ready.to_wire())
        detail = f"{engine.device_name}, {engine.dtype_name}, {size.block_count} KV blocks, loaded in {seconds:.1f} s"
        self._link.ready(detail)
        logger.debug("ready: %s", detail)

    def _make_reporter(self, engine: Engine) -> Reporter:
        if engine.device_name == "cpu":
            return InlineReporter(self._send_result)
        process = f"worker-{self._rank}"

        def wake(message: str) -> None:
            self._link.order(PeerFailed(process, message))

        if not self._busy.limit_s:
            return ThreadReporter(self._send_result, wake)
        return ThreadReporter(self._send_result, wake, self._link.wake)

    def _serve(self, engine: Engine, reporter: Reporter) -> None:
        traces = self._traces = StepTraces(f"worker-{self._rank}", self._config.profiling, self._link, TorchTracer)
        with torch.inference_mode():  # entered once: that takes as long as a good part of a short step
            while (plan := self._next_plan(engine.runner, reporter)) is not None:
                reporter.report(engine.runner.execute(plan))
                self._tell_unprepared(engine.runner, reporter)
                self._link.progress += 1
                traces.step()
        reporter.check()
        traces.stop()
        reporter.close()

    def _next_plan(self, runner: StepRunner, reporter: Reporter) -> StepPlan | None:
        """The next plan; None once the supervisor wants the end. While nothing is to be done, the runner prepares.

        Polls busily behind the last step only: the next plan is not urgent while steps are on their way, and their
        reporter, which waits for the device without sleeping, has the interpreter for itself.
        """
        quiet_ms: int | None = QUIET_MS
        rests = False
        while True:
            if not rests and reporter.is_idle:
                rests = True
                self._busy.note()
            ready = dict(self._busy.poll(self._poller, quiet_ms) if rests else self._poller.poll(quiet_ms))
            if self._link.wake_fd in ready and self._stop_ordered():
                return None
            if self._plans in ready:
                try:
                    return decode_for_worker(self._receive_plan())
                except WireError as error:  # the requests of a plan that is left out would wait for ever
                    raise WireError(f"a message of the scheduler cannot be read: {error}") from None
            if ready:
                continue
            if not reporter.is_idle:
                reporter.note_quiet(QUIET_MS)
            else:
                quiet_ms = QUIET_MS if runner.prepare_next() else None
                self._tell_unprepared(runner, reporter)

    def _tell_unprepared(self, runner: StepRunner, reporter: Reporter) -> None:
        """What the scheduler does not know yet of the runner's preparations."""
        if (count := runner.unprepared_count) != self._unprepared_count:
            self._unprepared_count = count
            reporter.tell(Unprepared(count).to_wire())

    def _stop_ordered(self) -> bool:
        """Carry out orders; whether one of them means the end."""
        orders = self._link.take_orders()
        for order in orders:
            if isinstance(order, Profile) and self._traces is not None:
                self._traces.order(order)
        return any(isinstance(order, Stop | PeerFailed) for order in orders)
