"""A process that compiles kernels side by side, and its parent's end of it. Never touches the GPU.

Half of Triton's compiler is Python, so threads would wait for the interpreter's lock, and a process for each core would
import torch again each time, which takes as long as the longest compilation. So one process, started as
`python -m kernels.compile_process WIDTH BYTECODE_FOLDER`, imports once what kernels need and forks for each kernel,
WIDTH of them at a time for each order. The compiled kernels are left in Triton's folder on disk.

    parent                                        process
    [is_awaited, [[number, job], ...]]     ->     compiles in this order, beside earlier orders and behind the first;
    as a line of JSON                             what nobody waits for behind everything else that the machine does
                                           <-     a line for each job that has ended: its number, counted from the
                                                  first order's first job, and 1 if its kernel is on disk now, else 0

Importing this module takes neither torch nor Triton: a worker starts the process before it imports them itself. The
process ends when its input does; on Linux also at once when its parent dies, and with it what it has forked. Called by
`kernels.compile_ahead` and the GPU worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from kernels.import_torch import hash_triton, import_torch, mend_bytecode

_ROOT = Path(__file__).resolve().parent.parent
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""A process with threads must not fork, and numpy's library starts some when it is imported."""
_FOLDERS = ("TRITON_CACHE_DIR", "TRITON_HOME")
"""What may name a folder from where the parent is: the process is started in another one."""
_PR_SET_PDEATHSIG = 1
_LATER_NICENESS = 10
"""Of what is ordered later: a core that has two processes gives the first order's nine tenths of its time."""

_LOWEST_NICENESS = 19
_SHARE_OF_UNAWAITED = 2
"""What nobody waits for has one in so many of the cores: the engine serves beside it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One kernel to compile.

    Attributes:
        module, name: where the function is.
        specialization: what Triton says to specialise it for, as JSON.
        target: backend, architecture and warp size, as of Triton's `GPUTarget`.
        with_launcher: also build the C function that passes a launch's arguments on.
    """

    module: str
    name: str
    specialization: str
    target: tuple[str, int | str, int]
    with_launcher: bool


class CompileProcess:
    """The parent's end. The process is started by `start`, or when the first job comes; one that is lost is missed by
    nobody: `finished` ends early, and what is left has to be compiled where it is needed.

    Args:
        width: how many kernels are compiled at a time; 0: never start a process.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._process: subprocess.Popen[str] | None = None
        self._writer: threading.Thread | None = None
        self._ordered, self._answered = 0, 0

    @property
    def started(self) -> bool:
        """Whether there is a process that has begun to import, or has done so."""
        return self._process is not None

    def start(self) -> None:
        """Start the process if it does not run; returns at once."""
        if self._process is not None or not self._width:
            return
        own = "" if sys.dont_write_bytecode else sys.pycache_prefix or ""
        command = [sys.executable, "-m", "kernels.compile_process", str(self._width), own]
        folders = {name: os.path.abspath(os.environ[name]) for name in _FOLDERS if name in os.environ}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT,
                env=os.environ | _ONE_THREAD | folders,
            )  # fmt: skip
        except OSError as error:
            logger.warning("no process that compiles kernels ahead could be started: %s", error)
            self._width = 0

    def order(self, jobs: Sequence[Job], *, is_awaited: bool = True) -> None:
        """Have these compiled, the first ones first; returns at once. What is not awaited has a part of the cores."""
        self.start()
        if self._process is not None:
            numbered = list(enumerate(map(asdict, jobs), self._ordered))
            self._ordered += len(numbered)
            arguments = (self._process.stdin, json.dumps([is_awaited, numbered]) + "\n", self._writer)
            self._writer = threading.Thread(target=_write, args=arguments, name="compile-order", daemon=True)
            self._writer.start()

    def finished(self) -> Iterator[tuple[int, bool]]:
        """The numbers of all jobs as they end, counted from the first order's first, and whether the kernel is on disk;
        waits for them. Each once."""
        while self._process is not None and self._answered < self._ordered:
            line = self._process.stdout.readline()
            if not line:
                left = self._ordered - self._answered
                logger.warning("the process that compiles kernels ahead was lost, with %d kernels left", left)
                return
            self._answered += 1
            number, is_compiled = line.split()
            yield int(number), is_compiled == "1"

    def close(self) -> None:
        """End the process. A kernel that it is compiling is given up, or finished and left on disk."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        if self._writer is not None:
            self._writer.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # the rest of an order cannot be written any more
                pipe.close()
        self._process = None


def _write(pipe: IO[str], line: str, before: threading.Thread | None) -> None:
    """In a thread, since a process that still imports does not read, and a pipe holds less than a usual order; behind
    the thread that writes the order before."""
    if before is not None:
        before.join()
    try:
        pipe.write(line)
        pipe.flush()
    except OSError as error:
        logger.warning("the process that compiles kernels ahead was lost: %s", error)


def main() -> None:
    """Compile what each line of the input asks for, so many kernels at a time; bytecode in a folder, if it is named."""
    parent, width, own = os.getppid(), int(sys.argv[1]), sys.argv[2]
    end_with(parent)
    if own:  # from the environment Python itself would start with what is there, cut off or not
        sys.pycache_prefix, sys.dont_write_bytecode = own, False
        mend_bytecode()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for whatever a compiler prints
    utilities = _fork_utilities()
    _import_kernels()
    os.waitpid(utilities, 0)
    signal.signal(signal.SIGCHLD, _end_with_a_lost_order)
    for orders_before, line in enumerate(sys.stdin):
        is_awaited, numbered = json.loads(line)
        order = {number: Job(**job) for number, job in numbered}
        if is_awaited:
            _carry_out(order, width, answers, _LATER_NICENESS if orders_before else 0)
        else:
            _carry_out(order, max(1, width // _SHARE_OF_UNAWAITED), answers, _LOWEST_NICENESS)
    with contextlib.suppress(ChildProcessError):
        while os.wait():
            pass


def _end_with_a_lost_order(*_: object) -> None:
    """A process that did not carry out its order leaves kernels that nobody answers for: end, so that the parent reads
    on to the end of the answers and does not wait for ever."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[1]:
                os._exit(1)


def _carry_out(order: dict[int, Job], width: int, answers: IO[str], niceness: int) -> None:
    """Fork for an order, so that the next one need not wait for its end."""
    forking = os.getpid()
    if os.fork():
        return
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with(forking)
        os.nice(niceness)
        numbers = list(order)
        for index, is_compiled in _compile_all(list(order.values()), width, forking):
            print(numbers[index], int(is_compiled), file=answers)
        code = 0
    finally:
        os._exit(code)


def _fork_utilities() -> int:
    """Build what Triton loads beside any kernel, while the kernels are being imported."""
    forking = os.getpid()
    if pid := os.fork():
        return pid
    try:
        end_with(forking)
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()
    finally:  # where CUDA is not installed this fails, and the first launch would say so
        os._exit(0)


def _import_kernels() -> None:
    """What every job takes from here as it is: modules, and Triton's hash of its own files. No job lives long enough to
    collect garbage, and a collection would make it copy what it has in common with this process."""
    gc.disable()
    import kernels

    hashing = hash_triton()
    import_torch()
    for module in pkgutil.iter_modules(kernels.__path__):
        with contextlib.suppress(ImportError):  # some need a newer Triton than there is, and then nobody launches them
            importlib.import_module(f"kernels.{module.name}")
    if hashing is not None:
        hashing.join()  # before anything is forked


def _compile_all(jobs: list[Job], width: int, parent: int) -> Iterator[tuple[int, bool]]:
    """Fork for each job; the number of each that has ended, and whether it was compiled. Gives up between two jobs once
    the parent is gone."""
    forking, running = os.getpid(), dict[int, int]()
    for number, job in enumerate(jobs):
        if len(running) == width:
            yield _ended(running)
        if os.getppid() != parent:
            return
        if pid := os.fork():
            running[pid] = number
        else:
            end_with(forking)
            _compile(job)
    while running:
        yield _ended(running)


def _ended(running: dict[int, int]) -> tuple[int, bool]:
    """The number of the next job to end, and whether its kernel was compiled."""
    process, status = os.wait()
    return running.pop(process), status == 0


def end_with(parent: int) -> None:
    """Have Linux end this process with its parent, also in the middle of what takes long."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def _compile(job: Job) -> NoReturn:
    """Carry out a job and end. What fails is met again, and reported, by the process that needs the kernel; here the
    code is 1."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from kernels.compile_ahead import NoDevice, build_launcher, hash_parts

    code = 1
    try:
        driver.set_active(NoDevice(GPUTarget(*job.target)))
        function = getattr(importlib.import_module(job.module), job.name)
        hash_parts(function)
        if job.with_launcher:
            _build_launcher_beside(function)
        kernel = function.preload(job.specialization)
        if job.with_launcher:
            build_launcher(kernel.src, kernel.metadata)  # finds it on disk
        code = 0
    finally:
        os._exit(code)


def _build_launcher_beside(function: Any) -> None:
    """From here on, a process of its own builds the C function while this one compiles the kernel: that takes a fifth
    as long as the longest kernel. It begins once Triton's own passes have said what the function needs to know."""
    from triton.backends.nvidia.compiler import CUDABackend

    from kernels.compile_ahead import build_launcher

    _ = function.device_caches[0]  # sets what is replaced below
    compile_kernel, make_llir = function.compile, CUDABackend.make_llir

    def compile_beside(source: Any, *arguments: Any, **options: Any) -> Any:
        """The kernel of `source`, as Triton's own `compile` gives it, with its launcher on disk."""
        builders: list[int] = []

        def make_llir_beside(backend: Any, module: Any, metadata: dict[str, Any], *others: Any) -> Any:
            forking = os.getpid()
            builders.append(os.fork())
            if not builders[-1]:
                try:
                    end_with(forking)
                    build_launcher(source, SimpleNamespace(**metadata))
                finally:
                    os._exit(0)
            return make_llir(backend, module, metadata, *others)

        CUDABackend.make_llir = make_llir_beside
        kernel = compile_kernel(source, *arguments, **options)
        for builder in builders:
            os.waitpid(builder, 0)
        return kernel

    function.compile = compile_beside


if __name__ == "__main__":
    main()
