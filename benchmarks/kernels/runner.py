"""The main of a small kernel's benchmark: its cases one after another, each beside a library where one is named.

A case says what to time and how many bytes it must move; the benchmark's module makes the cases. The interpreter is
switched on before any kernel is imported, so benchmarks import kernels inside their functions. Called by bench_*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernels import harness
from kernels import interpreter

Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """One figure: calls on inputs that are taken in turn, and the same by a library (`engine` names it).

    Calls on large inputs are given as a function that makes them, called only if the case runs.
    """

    name: str
    bytes_moved: int
    calls: Calls | Callable[[], Calls]
    library_calls: Calls | Callable[[], Calls] = ()
    engine: str = "torch"
    inner: int = harness.INNER_CALL_COUNT


def device_and_dtype() -> tuple[str, torch.dtype]:
    """bf16 on the GPU; float32 in the interpreter, which computes bf16 products wrongly."""
    return ("cuda", torch.bfloat16) if harness.has_cuda() else ("cpu", torch.float32)


def run(description: str | None, operation: str, cases: Callable[[bool], Iterator[Case]]) -> None:
    """Parse the command line, time the cases (`cases(smoke)`), print and keep the figures."""
    arguments = harness.argument_parser(description or operation).parse_args()
    if not harness.has_cuda():
        interpreter.enable()
    report = harness.Report(operation)
    for case in cases(arguments.smoke):
        if arguments.only not in case.name:
            continue
        for engine, calls in ((report.engine, case.calls), (case.engine, case.library_calls)):
            made = calls() if callable(calls) else calls
            if made:
                runs_us = harness.time_runs_us(made, case.inner)
                report.add(case.name, runs_us, bytes_moved=case.bytes_moved, engine=engine)
    report.write(arguments.output)
