"""Processes that answer requests, one JSON line for another, each within its time: lost ones are replaced.

Knows neither requests nor answers, but that `{"failed": "why"}` stands for an answer that did not come, `"lost": true`
beside it says that the process is gone, and `"last": true` in an answer that the process ends with it. Called by
tune_attention.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

Answer = dict[str, Any]

_ROOT = Path(__file__).resolve().parents[2]


class WorkerProcess:
    """A process that is started with the first request, and again after it was lost. For one thread at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    @staticmethod
    def of_module(name: str) -> WorkerProcess:
        """One that runs `python -m name`."""
        return WorkerProcess([sys.executable, "-m", name])

    def ask(self, request: dict[str, Any], timeout_s: float) -> Answer:
        """Its answer; a process that gives none in time is killed."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            return {"failed": f"no answer within {timeout_s:g} s", "lost": True}
        except OSError:
            line = ""
        try:
            answer = dict(json.loads(line))
        except ValueError:
            code = self.close()
            reason = f"no answer but {line.strip()[:80]!r}" if line else f"the process ended with {code}"
            return {"failed": reason, "lost": True}
        if answer.get("last"):
            self.close()
        return answer

    def _start(self) -> None:
        self._lines = queue.SimpleQueue()
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=env
        )
        threading.Thread(target=_pass_on, args=(self._process, self._lines), daemon=True).start()

    def close(self) -> int | None:
        """End the process, if there is one; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        if process.poll() is None:
            process.kill()
        code = process.wait()
        with contextlib.suppress(OSError):  # what it was not able to read any more
            process.stdin.close()
        return code

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _pass_on(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put("")


def ask_all(
    make_worker: Callable[[], WorkerProcess],
    requests: Sequence[dict[str, Any]],
    processes: int,
    timeout_s: float,
) -> list[Answer]:
    """The answers to all requests, in their order, by so many processes."""
    workers = [make_worker() for _ in range(min(processes, len(requests)))]
    free: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def answered(request: dict[str, Any]) -> Answer:
        worker = free.get()
        try:
            return worker.ask(request, timeout_s)
        finally:
            free.put(worker)

    try:
        with ThreadPoolExecutor(max(1, len(workers))) as threads:
            return list(threads.map(answered, requests))
    finally:
        for worker in workers:
            worker.close()
