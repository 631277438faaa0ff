"""Traces of a running process over some steps: from the start with `--profile`, later on the supervisor's order.

Each process has one `StepTraces` and reports every step to it: the scheduler each plan, a worker each step it ran, the
frontend each message with tokens. Writing a trace can keep the process busy for seconds, so the supervisor is told
first. Called from the process's main thread only.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from common.config import ProfilingOptions
from common.messages import Profile
from common.tracing import Tracer, new_tracer

STEP_LIMIT = 1000
"""Steps that a trace holds at most: it is kept in memory, and nobody can look at more."""
TRACING = "tracing"
"""The state of a process that is traced, in its heartbeats."""
TRACING_TIMEOUT_S = 60.0
"""How long it may miss them: writing a trace can keep the interpreter to itself for seconds."""

logger = logging.getLogger(__name__)


class Link(Protocol):
    """The part of a SupervisorLink that is needed here."""

    def set_state(self, state: str) -> None:
        """Tell the supervisor at once."""


class StepTraces:
    """Starts, counts and writes the traces of one process.

    Args:
        process: its name, such as `scheduler` or `worker-0`.
        options: the folder, and whether to begin at once.
        link: to the supervisor.
        make_tracer: called for each trace.

    Attributes:
        path: of the trace that runs or was last written; None before the first.
    """

    def __init__(
        self, process: str, options: ProfilingOptions, link: Link, make_tracer: Callable[[], Tracer] = new_tracer
    ) -> None:
        self.path: Path | None = None
        self._process = process
        self._folder = options.folder
        self._link = link
        self._make_tracer = make_tracer
        self._tracer: Tracer | None = None
        self._steps_left = 0
        if options.profile and process.startswith(options.profile):
            self._start(options.profile_steps)

    def order(self, order: Profile) -> None:
        """Start a trace, or end it; without a folder, or if one runs already, nothing happens."""
        if not order.step_count:
            self.stop()
        elif self._folder and self._tracer is None:
            self._start(order.step_count)

    def step(self) -> None:
        """A step has been done."""
        if self._tracer is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.stop()

    def stop(self) -> None:
        """Write the trace that runs, if one does."""
        if self._tracer is None or self.path is None:
            return
        tracer, self._tracer = self._tracer, None
        try:
            tracer.stop(self.path)
            logger.info("trace written: %s", self.path)
        except OSError as error:
            logger.error("cannot write the trace %s: %s", self.path, error.strerror)
        self._link.set_state("serving")

    def _start(self, step_count: int) -> None:
        self._steps_left = min(step_count, STEP_LIMIT)
        self.path = Path(self._folder) / f"{self._process}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        logger.info("tracing %d steps", self._steps_left)
        self._link.set_state(TRACING)
        self._tracer = self._make_tracer()
        self._tracer.start()
