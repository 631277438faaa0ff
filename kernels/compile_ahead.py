"""Compiles kernels in parallel before they are needed, which is most of the time of a first start on a machine.

Triton compiles a kernel when a launch first needs it, one after another. Here the launches are rehearsed without being
made, which tells which kernels they need (`launches_left_out`), and all of them are compiled at once (`KernelsAhead`),
by a process of its own (`kernels.compile_process`), while the caller does something else. If they are on disk already,
no process is started.

What a start does not wait for is compiled while the engine serves already (`KernelsBehind`). Where a note says that all
is on disk, no list is made: steps are rehearsed as they are, and `from_disk_only` ends that if the note is wrong.

Uses Triton's hooks for launches that are about to compile (`triton.knobs.runtime.jit_cache_hook`) and for what has been
compiled or found on disk (`triton.knobs.compilation.listener`), and `JITFunction.preload`. Called by the GPU worker's
start.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver, jit

from kernels.compile_process import CompileProcess, Job

_CALLED = getattr(jit, "JITCallable", jit.JITFunction)
"""What kernels call; Triton 3.4 has one kind of function."""


@dataclass(frozen=True)
class NeededKernel:
    """A variant of a kernel: the function, and what Triton says to specialise it for, as JSON."""

    function: Any
    specialization: str

    def load(self) -> bool:
        """Make it ready in this process: from disk, or by compiling it. Whether it was on disk."""
        hash_parts(self.function)
        hits: list[bool] = []
        before = knobs.compilation.listener
        knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        try:
            self.function.preload(self.specialization)
        finally:
            knobs.compilation.listener = before
        return all(hits)


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


class KernelMissing(Exception):
    """A kernel that is neither in this process nor on disk."""


@contextmanager
def from_disk_only() -> Iterator[None]:
    """While open, a launch whose kernel would have to be compiled raises KernelMissing instead. If that ends it, all
    that has been loaded meanwhile is dropped: in a rehearsal of which some launches are left out, none may be made."""
    from triton.backends.nvidia.compiler import CUDABackend

    loaded: list[Any] = []
    before, add_stages = knobs.runtime.jit_cache_hook, CUDABackend.add_stages

    def note(*, fn: Any, **details: Any) -> Any:
        loaded.append(fn.jit_function)
        return before(fn=fn, **details) if before is not None else False

    def missing(*_: object, **__: object) -> None:
        raise KernelMissing

    knobs.runtime.jit_cache_hook = note
    CUDABackend.add_stages = missing  # which Triton calls once it has not found a kernel on disk
    try:
        yield
    except KernelMissing:
        for function in loaded:
            function.device_caches.clear()
        raise
    finally:
        knobs.runtime.jit_cache_hook, CUDABackend.add_stages = before, add_stages


class KernelsAhead:
    """Makes kernels ready in two parts: `begin` has them compiled, `finish` waits for them.

    Args:
        compiler: if it has been started, none of the kernels are expected on disk. Otherwise they are loaded from
            there one after the other, and it is started for the rest once one is missing.
    """

    def __init__(self, compiler: CompileProcess) -> None:
        self._compiler = compiler
        self._ordered: list[NeededKernel] = []
        self._signatures: set[str] = set()

    def begin_early(self, needed: list[NeededKernel]) -> None:
        """Before it is known what `begin` will be given: order some of it. Not if kernels are expected on disk."""
        self._order(largest_first(needed))

    def begin(self, needed: list[NeededKernel]) -> None:
        """Load what is on disk, or order all that may be missing: the largest first, since they take longest. Once."""
        left = largest_first([kernel for kernel in needed if kernel not in self._ordered])
        while left and not self._compiler.started:
            if not left.pop().load() and left:
                self._compiler.start()
        self._order(left)

    def jobs_left(self, needed: list[NeededKernel]) -> list[Job]:
        """What of these has not been ordered or loaded, as an order for later."""
        left = largest_first([kernel for kernel in needed if kernel not in self._ordered])
        return _jobs(left, self._signatures) if left else []

    def finish(self) -> None:
        """Load each ordered kernel once it is compiled; one that never was is compiled here, which says why."""
        left = dict(enumerate(self._ordered))
        for number, _ in self._compiler.finished():
            left.pop(number).load()
        for kernel in left.values():
            kernel.load()

    def _order(self, kernels: list[NeededKernel]) -> None:
        if kernels:
            self._ordered += kernels
            self._compiler.order(_jobs(kernels, self._signatures))


class KernelsBehind:
    """Kernels that are compiled while the engine serves already, into Triton's folder. Closes the process at its end.

    Args:
        jobs: all that may be missing on disk.
        on_ended: called once all of them have ended, in another thread, with those that could not be compiled.
    """

    def __init__(self, compiler: CompileProcess, jobs: list[Job], on_ended: Callable[[list[Job]], object]) -> None:
        self._compiler, self._jobs, self._on_ended = compiler, jobs, on_ended
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        if not jobs:
            self._ended.set()
            compiler.close()

    def begin(self) -> None:
        """Order them, if that has not been done; returns at once."""
        if self._thread is None and not self._ended.is_set():
            self._compiler.order(self._jobs, is_awaited=False)
            self._thread = threading.Thread(target=self._wait, name="kernels-behind", daemon=True)
            self._thread.start()

    def ready(self) -> bool:
        """Whether no kernel is waited for any more: all that can be compiled are on disk, or what compiles them was
        lost. Never waits."""
        self.begin()
        return self._ended.is_set()

    def _wait(self) -> None:
        ended = sorted(self._compiler.finished())
        if len(ended) == len(self._jobs):
            self._on_ended([job for job, (_, is_compiled) in zip(self._jobs, ended, strict=True) if not is_compiled])
        self._compiler.close()
        self._ended.set()


def compile_all(needed: list[NeededKernel], processes: int) -> None:
    """Make what was noted ready, so many at a time where they are not on disk."""
    compiler = CompileProcess(processes)
    try:
        ahead = KernelsAhead(compiler)
        ahead.begin(needed)
        ahead.finish()
    finally:
        compiler.close()


def parts_of(function: Any) -> list[Any]:
    """A kernel and all functions that it calls, each behind those that it calls itself."""
    found: list[Any] = []

    def add(called: Any) -> None:
        scope = called.fn.__globals__
        for name in called.fn.__code__.co_names:
            if isinstance(scope.get(name), _CALLED) and all(scope[name] is not part for part in found):
                add(scope[name])
        found.append(called)

    add(function)
    return found


def hash_parts(function: Any) -> None:
    """Give a kernel the same name on disk in every process.

    Triton 3.6 takes constants of a called function into a kernel's hash if that function has been hashed before, and
    else leaves them out. So the name depends on which kernels came earlier in the process, and one that another process
    had compiled was compiled again.
    """
    for part in parts_of(function):
        _ = part.cache_key


def name_alike() -> None:
    """From here on, what this process compiles at a first launch has the same name on disk as in any other process."""
    knobs.runtime.jit_cache_hook = lambda *, fn, **_: hash_parts(fn.jit_function)


def largest_first(needed: list[NeededKernel]) -> list[NeededKernel]:
    """In the order in which kernels are compiled: those that take longest first, by the size of their code."""
    return sorted(needed, key=lambda kernel: -code_size(kernel.function))


def code_size(function: Any) -> int:
    """Bytes of the Python code of a kernel and of all that it calls: of two kernels the larger compiles longer."""
    return sum(len(part.fn.__code__.co_code) for part in parts_of(function))


def _jobs(needed: list[NeededKernel], signatures: set[str]) -> list[Job]:
    """Kernels that take the same types of arguments share the C function that passes them on: one job builds it, if it
    is not among those ordered before, to which these are added."""
    found, jobs = driver.active.get_current_target(), []
    target = (found.backend, found.arch, found.warp_size)
    for kernel in needed:
        function, signature = kernel.function.fn, json.dumps(json.loads(kernel.specialization).get("signature"))
        is_first = signature not in signatures
        signatures.add(signature)
        jobs.append(Job(function.__module__, function.__name__, kernel.specialization, target, is_first))
    return jobs


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


def build_launcher(source: ASTSource, metadata: Any) -> None:
    """The C function that passes a launch's arguments on is compiled at the first launch, and kept on disk as well."""
    with contextlib.suppress(Exception):  # where CUDA is not installed; the launch would say so
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(source, metadata)
