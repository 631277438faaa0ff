"""Traces of a process's Python code, as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

With viztracer installed (`pip install trireme[profile]`) every call is in the trace. Without it, `Sampler` looks at the
main thread's stack a thousand times per second of CPU time: less detail, and next to no cost. Both cover the thread
that starts them, which must be the main one. Used by the scheduler and the frontend; the worker has torch's profiler.
"""

import contextlib
import gc
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

SAMPLE_INTERVAL_S = 0.001
GAP_INTERVALS = 20
"""Calls that were on the stack before and after so long a pause are two: the process slept between them."""


class Tracer(Protocol):
    """Something that watches the main thread."""

    def start(self) -> None:
        """Watch from here on."""

    def stop(self, path: Path) -> None:
        """Watch no more, and write what was seen."""


class Sampler:
    """Samples the main thread's stack on a timer of CPU time, and writes calls as slices."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, list[CodeType]]] = []
        self._handler: Any = None

    def start(self) -> None:
        """Watch from here on."""
        self._handler = signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_INTERVAL_S, SAMPLE_INTERVAL_S)

    def stop(self, path: Path) -> None:
        """Watch no more, and write what was seen."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._handler)
        write_trace(path, slices_of(self._samples))

    def _sample(self, _: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        stack.reverse()
        self._samples.append((time.monotonic_ns(), stack))


class EveryCall:
    """viztracer."""

    def __init__(self) -> None:
        from viztracer import VizTracer

        self._tracer = VizTracer(verbose=0)

    def start(self) -> None:
        """Watch from here on."""
        self._tracer.start()

    def stop(self, path: Path) -> None:
        """Watch no more, and write what was seen."""
        self._tracer.stop()
        self._tracer.save(str(path))
        self._tracer.clear()


def new_tracer() -> Tracer:
    """viztracer where it is installed, else the sampler."""
    with contextlib.suppress(ImportError):
        return EveryCall()
    return Sampler()


@contextlib.contextmanager
def traced(path: Path | None) -> Iterator[None]:
    """Trace what happens inside, if there is a file to write it to."""
    if path is None:
        yield
        return
    tracer = new_tracer()
    gc.collect()
    tracer.start()
    try:
        yield
    finally:
        tracer.stop(path)


def slices_of(samples: list[tuple[int, list[CodeType]]]) -> list[dict[str, Any]]:
    """Chrome trace events of stacks sampled at nanosecond times: a slice for as long as a call stays on the stack."""
    events: list[dict[str, Any]] = []
    open_calls: list[tuple[CodeType, int]] = []
    last_ns = 0

    def close(depth: int, end_ns: int) -> None:
        while len(open_calls) > depth:
            code, start_ns = open_calls.pop()
            events.append(_slice(code, start_ns, end_ns))

    interval_ns = int(SAMPLE_INTERVAL_S * 1e9)
    for time_ns, stack in samples:
        slept = time_ns - last_ns > GAP_INTERVALS * interval_ns
        shared = 0
        if not slept:
            while shared < min(len(stack), len(open_calls)) and stack[shared] is open_calls[shared][0]:
                shared += 1
        close(shared, last_ns + interval_ns if slept else time_ns)
        open_calls += [(code, time_ns) for code in stack[shared:]]
        last_ns = time_ns
    close(0, last_ns + interval_ns)
    return events


def _slice(code: CodeType, start_ns: int, end_ns: int) -> dict[str, Any]:
    return {
        "name": f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})",
        "ph": "X",
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "pid": os.getpid(),
        "tid": os.getpid(),
    }


def write_trace(path: Path, events: list[dict[str, Any]]) -> None:
    """Write events as a Chrome trace; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
