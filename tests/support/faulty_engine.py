"""The real engine with faults to order: a signal makes a process fail as a broken device or an empty memory would.

    python -m tests.support.faulty_engine serve ...            as launch.py, with the processes below
    python -m tests.support.faulty_engine ROOM --config FILE   one of them: worker, scheduler or frontend

    worker      SIGUSR1   an illegal memory access: the step under way never arrives, the next one raises, and the
                          interpreter's shutdown would wait for ever
    worker      SIGUSR2   no memory for the next step
    scheduler   SIGUSR1   no memory while it plans the next step
    frontend    SIGUSR1   no memory while it decodes the next message of the scheduler

Until then they are as they always are. Started by `tests.support.server.Server` with `faulty=True`.
"""

import atexit
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB"


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


def wait_for_ever(*_: object) -> Any:
    """What reading from a broken device may do."""
    threading.Event().wait()


def break_worker() -> Callable[..., int]:
    """The worker's main with a runner that can fail; results go out from a thread, as on a GPU."""
    import torch

    from worker_proc import main, runner, worker
    from worker_proc.reporter import ThreadReporter

    execute = runner.CpuRunner.execute
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
    """The frontend's main with a decoder that can run out of memory."""
    from frontend import main

    decode = main.decode_for_frontend
    memory = Order(signal.SIGUSR1)

    def decode_or_fail(data: bytes) -> Any:
        if memory.take():
            raise MemoryError
        return decode(data)

    main.decode_for_frontend = decode_or_fail
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
    supervisor.engine_rooms = lambda _: {name: ["-m", module, room] for name, room in rooms.items()}
    return launch.main()


if __name__ == "__main__":
    sys.exit(run())
