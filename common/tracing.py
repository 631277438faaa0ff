"""Traces of a process's Python code, as JSON for Perfetto (ui.perfetto.dev) and chrome://tracing.

A trace has every call of the thread that started it, with its time. With viztracer installed a call
costs a tenth of a microsecond more than usual, and other threads are traced too; without it, `CallTracer` does the same
at about a microsecond per call. Used by the scheduler and the frontend; the worker uses torch's profiler.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

EVENT_LIMIT = 1_000_000
"""Calls and returns in one trace at most; what comes after them is left out."""

Event = tuple[int, bool, CodeType | str]
"""Nanoseconds, whether a call begins, and what is called."""


class Tracer(Protocol):
    """Something that watches a thread's calls."""

    def start(self) -> None:
        """Watch this thread from here on."""

    def stop(self, path: Path) -> None:
        """Watch no more, and write what was seen."""


class CallTracer:
    """Every call, by Python's own means."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def start(self) -> None:
        """Watch this thread from here on."""
        sys.setprofile(self._note)

    def stop(self, path: Path) -> None:
        """Watch no more, and write what was seen."""
        sys.setprofile(None)
        write_trace(path, slices_of(self._events))

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        if len(self._events) >= EVENT_LIMIT:
            return
        what = getattr(called, "__qualname__", "?") if event.startswith("c_") else frame.f_code
        self._events.append((time.perf_counter_ns(), event.endswith("call"), what))


class EveryCall:
    """Every call, by viztracer."""

    def __init__(self) -> None:
        from viztracer import VizTracer

        self._tracer = VizTracer(verbose=0, tracer_entries=EVENT_LIMIT // 2)

    def start(self) -> None:
        """Watch from here on."""
        self._tracer.start()

    def stop(self, path: Path) -> None:
        """Watch no more, and write what was seen."""
        self._tracer.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._tracer.save(str(path))
        self._tracer.clear()


def new_tracer() -> Tracer:
    """viztracer where it is installed, else our own."""
    with contextlib.suppress(ImportError):
        return EveryCall()
    return CallTracer()


@contextlib.contextmanager
def traced(path: Path | None, make_tracer: Callable[[], Tracer] | None = None) -> Iterator[None]:
    """Trace what happens inside, if there is a file to write it to; by `new_tracer` unless another way is given."""
    if path is None:
        yield
        return
    tracer = (make_tracer or new_tracer)()
    tracer.start()
    try:
        yield
    finally:
        tracer.stop(path)


def slices_of(events: list[Event]) -> list[dict[str, Any]]:
    """Chrome trace events: one slice per call, in the order in which they end.

    Calls that have not returned end with the last event; returns of calls that began before the trace are left out.
    """
    slices = []
    open_calls: list[tuple[int, CodeType | str]] = []
    for time_ns, begins, what in events:
        if begins:
            open_calls.append((time_ns, what))
        elif open_calls:
            slices.append(_slice(*open_calls.pop(), time_ns))
    while open_calls:
        slices.append(_slice(*open_calls.pop(), events[-1][0]))
    return slices


def _slice(start_ns: int, what: CodeType | str, end_ns: int) -> dict[str, Any]:
    if not isinstance(what, str):
        what = f"{what.co_qualname} ({what.co_filename}:{what.co_firstlineno})"
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"name": what, "ph": "X", "pid": os.getpid(), "tid": threading.get_native_id(), **times}


def write_trace(path: Path, events: list[dict[str, Any]]) -> None:
    """Write a Chrome trace; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
