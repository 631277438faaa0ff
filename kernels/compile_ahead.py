"""Compiles kernels in parallel before they are needed, which is most of the time of a first start on a machine.

Triton compiles a kernel when a launch first needs it, one after another. Here the launches are rehearsed without being
made, which tells which kernels they need (`launches_left_out`), and all of them are compiled at once (`compile_all`).
Half of the compiler is Python, so threads would wait for the interpreter's lock. The work goes to processes instead,
started as `python -m kernels.compile_ahead`. They leave the compiled kernels in Triton's folder on disk, end when their
input ends, also if that is because their parent died, and never touch the GPU. If the kernels are on disk already, no
process is started.

Uses Triton's hook for launches that are about to compile (`triton.knobs.runtime.jit_cache_hook`) and
`JITFunction.preload`. Called by the GPU worker's start.
"""

import contextlib
import importlib
import json
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

ON_DISK_S = 0.1
"""A kernel that takes longer than this was not on disk; the very first takes longer anyway."""

_ROOT = Path(__file__).resolve().parent.parent

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NeededKernel:
    """A variant of a kernel: the function, and what Triton says to specialise it for, as JSON."""

    function: Any
    specialization: str

    def load(self) -> None:
        """Make it ready in this process: from disk, or by compiling it."""
        self.function.preload(self.specialization)


@contextmanager
def launches_left_out() -> Iterator[list[NeededKernel]]:
    """While open, a launch whose kernel is not compiled is left out and its kernel noted; others are made."""
    needed: list[NeededKernel] = []
    seen: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **_: Any) -> bool:
        if is_manual_warmup:
            return False
        if (fn.name, key) not in seen:
            seen.add((fn.name, key))
            needed.append(NeededKernel(fn.jit_function, compile["specialization_data"]))
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield needed
    finally:
        knobs.runtime.jit_cache_hook = before


def compile_all(needed: list[NeededKernel], processes: int) -> None:
    """Make what was noted ready; once a kernel is found not on disk, the others are compiled by so many processes."""
    for number, kernel in enumerate(needed):
        start = time.monotonic()
        kernel.load()
        if number > 0 and processes > 0 and time.monotonic() - start > ON_DISK_S:
            _compile_elsewhere(needed[number + 1 :], processes)
            processes = 0


def _compile_elsewhere(needed: list[NeededKernel], processes: int) -> None:
    """What a process fails to compile is left to `load`, which then says why."""
    jobs: queue.SimpleQueue[NeededKernel] = queue.SimpleQueue()
    for kernel in needed:
        jobs.put(kernel)
    target = driver.active.get_current_target()
    threads = [threading.Thread(target=_feed, args=(jobs, target)) for _ in range(min(processes, len(needed)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _feed(jobs: "queue.SimpleQueue[NeededKernel]", target: GPUTarget) -> None:
    """Give one process a kernel after the other until there are none, or until the process is lost."""
    command = [sys.executable, "-m", "kernels.compile_ahead"]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
            assert process.stdin is not None and process.stdout is not None
            while _compiled_by(process.stdin, process.stdout, jobs, target):
                pass
    except OSError as error:  # it could not be started, or has died, which closing its input shows once more
        logger.warning("a process that compiles kernels ahead was lost: %s", error)


def _compiled_by(
    job_stream: IO[str], answers: IO[str], jobs: "queue.SimpleQueue[NeededKernel]", target: GPUTarget
) -> bool:
    """Give a process the next kernel, if there is one, and wait for its answer; whether it can take another."""
    try:
        kernel = jobs.get_nowait()
    except queue.Empty:
        return False
    function = kernel.function.fn
    job = [function.__module__, function.__name__, kernel.specialization]
    job_stream.write(json.dumps([*job, [target.backend, target.arch, target.warp_size]]) + "\n")
    job_stream.flush()
    return bool(answers.readline())


class NoDevice:
    """Stands for Triton's driver in a process that compiles for a GPU without using it."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        """The kernels' device; all are compiled alike."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self._target


def _build_launcher(kernel: CompiledKernel) -> None:
    """The C function that passes a launch's arguments on is compiled at the first launch, and kept on disk as well."""
    with contextlib.suppress(Exception):  # where CUDA is not installed; the launch would say so
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


def main() -> None:
    """Compile what each line of the input asks for, and answer each with a line."""
    for line in sys.stdin:
        module, name, specialization, target = json.loads(line)
        driver.set_active(NoDevice(GPUTarget(*target)))
        answer = "compiled"
        try:
            _build_launcher(getattr(importlib.import_module(module), name).preload(specialization))
        except Exception as error:  # the process that needs the kernel will meet it again, and report it
            answer = f"failed: {type(error).__name__}"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
