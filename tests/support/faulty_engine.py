"""The real engine with faults to order: a signal makes a process fail as a broken device or an empty memory would.

    python -m tests.support.faulty_engine serve ...            as launch.py, with the processes below
    python -m tests.support.faulty_engine ROOM --config FILE   one of them: worker, scheduler or frontend

    worker      SIGUSR1   an illegal memory access: the step under way never arrives, the next one raises, and the
                          interpreter's shutdown would wait for ever
    worker      SIGUSR2   no memory for the next step
    scheduler   SIGUSR1   no memory while it plans the next step
    frontend    SIGUSR1   no memory while it decodes the next message of the scheduler

Until then they are as they always are, but for two things that a test would otherwise have to be in time for: while
there is a gate (`Gate`), the worker stands still; and a dead engine waits until somebody has asked for its health.
Started by `tests.support.server.Server` with `faulty=True`.
"""

import asyncio
import atexit
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB"
GATE_VARIABLE = "TRIREME_TEST_GATE"
"""Environment variable that names the gate's file."""
PATIENCE_S = 60.0
LOOK_S = 0.005


class Order:
    """Whether a signal has come; forgotten once it is taken."""

    def __init__(self, number: int) -> None:
        self._come = False
        signal.signal(number, self._note)

    def take(self) -> bool:
        """Whether it has come since the last call."""
        come, self._come = self._come, False
        return come

    def _note(self, *_: object) -> None:
        self._come = True


class Gate:
    """A file that has the worker stand still: it takes as many steps as the file says; one that starts waits for the
    file to be gone."""

    def __init__(self) -> None:
        self._path = Path(os.environ[GATE_VARIABLE])
        self._step_count = 0
        while self._limit() is not None:
            select.select([], [], [], LOOK_S)

    def step(self) -> None:
        """Wait until a step may be taken."""
        while (limit := self._limit()) is not None and self._step_count >= limit:
            select.select([], [], [], LOOK_S)
        self._step_count += 1

    def _limit(self) -> int | None:
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            self._step_count = 0
            return None


def wait_for_ever(*_: object) -> Any:
    """What reading from a broken device may do."""
    threading.Event().wait()


def break_worker() -> Callable[..., int]:
    """The worker's main with a runner that can fail; results go out from a thread, as on a GPU."""
    import torch

    from worker_proc import main, runner, worker
    from worker_proc.reporter import ThreadReporter

    gate, execute = Gate(), runner.CpuRunner.execute
    access, memory = Order(signal.SIGUSR1), Order(signal.SIGUSR2)
    broken = False

    def use_device() -> None:
        if broken:
            raise torch.AcceleratorError(f"{ILLEGAL_ACCESS}\nCompile with `TORCH_USE_CUDA_DSA` for more")

    class Reporter(ThreadReporter):
        """One that finds out too, where no further step is planned."""

        def note_quiet(self, milliseconds: int) -> None:
            """Nothing came in for so long."""
            use_device()
            super().note_quiet(milliseconds)

    def execute_or_fail(self: Any, plan: Any) -> Any:
        nonlocal broken
        gate.step()
        use_device()
        if memory.take():
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        step = execute(self, plan)
        if access.take():
            broken = True
            atexit.register(wait_for_ever)
            step = step._replace(arrive=wait_for_ever)
        return step

    runner.CpuRunner.execute = execute_or_fail
    worker.Worker._make_reporter = lambda self, _: Reporter(self._send_result, lambda _: None)
    return main.main


def break_scheduler() -> Callable[..., int]:
    """The scheduler's main with a core that can run out of memory."""
    from scheduler_proc import core, main

    plan_step = core.SchedulerCore.plan_step
    memory = Order(signal.SIGUSR1)

    def plan_or_fail(self: Any, *arguments: Any) -> Any:
        plan = plan_step(self, *arguments)
        if plan is not None and memory.take():
            raise MemoryError
        return plan

    core.SchedulerCore.plan_step = plan_or_fail
    return main.main


def break_frontend() -> Callable[..., int]:
    """The frontend's main with a decoder that can run out of memory, and an end that waits to be asked for health."""
    from frontend import main
    from frontend.http import utilities

    decode, health, finish = main.decode_for_frontend, utilities.health, main.Frontend._finish
    memory = Order(signal.SIGUSR1)
    has_told = False

    def decode_or_fail(data: bytes) -> Any:
        if memory.take():
            raise MemoryError
        return decode(data)

    async def tell(request: Any) -> Any:
        nonlocal has_told
        has_told = has_told or request.app.state.engine.health().state == "dead"
        return await health(request)

    async def finish_when_told(self: Any, *arguments: Any) -> None:
        while self._failed and not has_told:
            await asyncio.sleep(LOOK_S)
        await finish(self, *arguments)

    main.decode_for_frontend = decode_or_fail
    utilities.health, main.Frontend._finish = tell, finish_when_told
    return main.main


BROKEN = {"worker": break_worker, "scheduler": break_scheduler, "frontend": break_frontend}


def run() -> int:
    """A process of the engine, or the supervisor of such processes."""
    if sys.argv[1] in BROKEN:
        from common.child import run_child

        room = sys.argv.pop(1)

        def main(*arguments: Any) -> int:
            """As the real one, torch is not loaded before."""
            return BROKEN[room]()(*arguments)

        run_child(room, main)
    import launch
    from launcher import supervisor

    rooms = {"worker-0": "worker", "frontend": "frontend", "scheduler": "scheduler"}
    module = "tests.support.faulty_engine"
    supervisor.FAILURE_NOTICE_S = supervisor.EXIT_TIMEOUT_S = PATIENCE_S
    supervisor.engine_rooms = lambda _: {name: ["-m", module, room] for name, room in rooms.items()}
    return launch.main()


if __name__ == "__main__":
    sys.exit(run())
