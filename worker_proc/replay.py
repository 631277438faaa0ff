"""`python -m worker_proc.replay DIR`: runs the worker alone, on the plans that a recording says it received.

Loads the model as the recorded worker did, with a cache of the same size, and runs the plans in order, as far ahead of
their results as they were. What it sends must be equal except for what was measured: the times of the steps, and how
fast blocks move to the host and back. The same machine computes the same tokens. Nothing is prepared in pauses, since
there are none: what the worker said of that is left out.
"""

import logging
import sys
import time
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from common import log, replaying
from common.config import EngineConfig, with_changes
from common.errors import RecordingError, WireError
from common.messages import WORKER_PARTS, StepResult, Unprepared, WorkerReady, decode_for_worker, decode_from_worker
from common.recording import Direction, Link, Record, Recording
from common.replaying import Comparison, Outcome, quantiles_us
from common.tracing import traced
from worker_proc.main import limit_spinning


def readable(link: int, data: bytes) -> object:
    """A sent message without what was measured: the times that its step took, or the speed of the swap pool's link."""
    message = decode_from_worker(data)
    if isinstance(message, WorkerReady):
        return replace(message, link_bytes_per_s=0)
    return replace(message, parts_us=array("i")) if isinstance(message, StepResult) else message


def config_of(recording: Recording) -> EngineConfig:
    """The recorded configuration, with the cache's size as it was found then.

    Raises:
        RecordingError: the worker never became ready.
    """
    config = recording.config
    for record in recording.records:
        if record.link == Link.RESULTS:
            ready = decode_from_worker(record.data)
            if isinstance(ready, WorkerReady):
                cache = replace(config.cache, num_kv_blocks=ready.block_count)
                model = replace(config.model, max_model_len=ready.max_model_len)
                return with_changes(config, cache=cache, model=model)
    raise RecordingError(f"{recording.path}: the worker ended before it was ready; there is nothing to replay")


def is_of_pauses(record: Record) -> bool:
    """Whether the worker said there what it had yet to prepare."""
    try:
        return record.link == Link.RESULTS and isinstance(decode_from_worker(record.data), Unprepared)
    except WireError:  # a changed recording can hold anything
        return False


class Replay:
    """Plans in, results out, in the recorded order.

    Args:
        rank: which worker this is.
    """

    def __init__(self, recording: Recording, rank: int) -> None:
        from worker_proc.engine import load_engine
        from worker_proc.pending import PendingStep
        from worker_proc.worker import ready_message

        self._records = [record for record in recording.records if not is_of_pauses(record)]
        self.comparison = Comparison(self._records, readable, breaks_off=recording.breaks_off)
        self.step_ns: list[int] = []
        self.parts_us: list[Sequence[int]] = []
        self._pending: deque[PendingStep] = deque()
        config = config_of(recording)
        self._runner = (engine := load_engine(config)).runner
        self.comparison.sent(Link.RESULTS, ready_message(config, engine, rank).to_wire())

    def run(self) -> None:
        """All plans; those whose result was never recorded are left out."""
        results = sum(record.link == Link.RESULTS for record in self._records) - 1
        start_ns = time.perf_counter_ns()
        for record in self._records:
            if record.link == Link.PLANS and len(self.step_ns) + len(self._pending) < results:
                self._execute(record.data)
            elif record.link == Link.RESULTS and record.direction == Direction.OUT and self._pending:
                self._report()
                now_ns = time.perf_counter_ns()
                self.step_ns.append(now_ns - start_ns)
                start_ns = now_ns

    def _execute(self, data: bytes) -> None:
        self._pending.append(self._runner.execute(decode_for_worker(data)))

    def _report(self) -> None:
        result = self._pending.popleft().result()
        self.parts_us.append(result.parts_us)
        self.comparison.sent(Link.RESULTS, result.to_wire())


def replay(recording: Recording, arguments: Namespace) -> Outcome:
    """Run the worker on a recording.

    Raises:
        RecordingError: there is no step in it.
        ConfigError: the model is not there any more, or does not fit.
    """
    limit_spinning()
    from worker_proc.tracing import TorchTracer

    work = Replay(recording, arguments.rank)
    started_s = time.thread_time()
    with traced(arguments.profile, TorchTracer):
        work.run()
    cpu_s = time.thread_time() - started_s
    work.comparison.finish()
    parts = {
        name: quantiles_us([part_us * 1000 for part_us in column])
        for name, column in zip(WORKER_PARTS, zip(*work.parts_us, strict=True), strict=False)
        if name != "report"
    }
    return Outcome(work.comparison, len(work.step_ns), cpu_s, work.step_ns, "step", {"parts_us": parts})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parsed = replaying.parse("worker_proc", "worker", arguments)
    log.set_up("replay", "warning", "text")
    logging.captureWarnings(True)
    return replaying.run(f"worker-{parsed.rank}", parsed, replay)


if __name__ == "__main__":
    sys.exit(main())
