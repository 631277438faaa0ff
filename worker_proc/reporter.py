"""Sends step results to the scheduler: directly if they are there at once (CPU), else from a thread (GPU).

The thread waits for the GPU's copies, so that the thread that issues steps never has to. From then on it alone uses the
results socket, also for messages that are no results (`tell`). If a step fails in the thread, `wake` wakes the issuing
thread, and `report` raises the error there.
"""

import queue
import threading
import time
from collections.abc import Callable

from worker_proc.pending import PendingStep
from worker_proc.spans import span

STEP_TIMEOUT_S = 60
"""How long a step may be under way on a device, where the longest take seconds; then the device is taken to hang."""


class InlineReporter:
    """Sends each result before the next step.

    Args:
        send: takes a result's bytes.
    """

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self._send = send
        self._report_us = 0

    def report(self, step: PendingStep) -> None:
        """Send the step's result; the time that takes is reported with the next one."""
        result = step.result(self._report_us)
        start = time.perf_counter_ns()
        with span("report"):
            self._send(result.to_wire())
        self._report_us = (time.perf_counter_ns() - start) // 1000

    def tell(self, message: bytes) -> None:
        """Send a message that is no result."""
        self._send(message)

    @property
    def is_idle(self) -> bool:
        """Whether every step handed over has been sent."""
        return True

    def check(self) -> None:
        """Nothing to check: errors are raised at once."""

    def note_quiet(self, milliseconds: int) -> None:
        """Nothing is ever on its way."""

    def close(self) -> None:
        """Nothing is left to send."""


class ThreadReporter:
    """Sends results from a thread, in order, as the GPU finishes them.

    Args:
        send: takes a result's bytes; called from the thread alone.
        wake: called from the thread after an error, to get the issuing thread out of its wait.
        on_idle: called from the thread when every step handed over has been sent.
    """

    def __init__(
        self,
        send: Callable[[bytes], object],
        wake: Callable[[str], None],
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._inner = InlineReporter(send)
        self._wake, self._on_idle = wake, on_idle
        self._steps: queue.SimpleQueue[PendingStep | bytes | None] = queue.SimpleQueue()
        self._handed_count = self._sent_count = 0
        self._error: Exception | None = None
        self._quiet_ms = self._sent_before_quiet = 0
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)
        self._thread.start()

    def report(self, step: PendingStep) -> None:
        """Hand over a step; raises the error of an earlier one, if it failed."""
        self.check()
        self._handed_count += 1
        self._steps.put(step)

    def tell(self, message: bytes) -> None:
        """Have a message that is no result sent, behind the steps handed over before."""
        self._steps.put(message)

    @property
    def is_idle(self) -> bool:
        """Whether every step handed over has been sent."""
        return self._sent_count == self._handed_count

    def check(self) -> None:
        """Raise the error of a step that failed, if one did."""
        if self._error is not None:
            raise self._error

    def note_quiet(self, milliseconds: int) -> None:
        """Nothing came in for so long while steps are on their way. Counted, not timed: the machine may be paused.

        Raises:
            RuntimeError: no step has arrived for STEP_TIMEOUT_S.
        """
        if self._sent_count != self._sent_before_quiet:
            self._sent_before_quiet, self._quiet_ms = self._sent_count, 0
        self._quiet_ms += milliseconds
        if self._quiet_ms >= STEP_TIMEOUT_S * 1000:
            raise RuntimeError(f"the device does not respond: no step has come back for {STEP_TIMEOUT_S} s")

    def close(self) -> None:
        """End the thread once it has reported its steps; do not wait for a GPU that hangs."""
        self._steps.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            while (step := self._steps.get()) is not None:
                if isinstance(step, bytes):
                    self._inner.tell(step)
                    continue
                self._inner.report(step)
                self._sent_count += 1
                if self.is_idle:
                    self._on_idle()
        except Exception as error:
            self._error = error
            self._wake(f"{type(error).__name__}: {error}")
