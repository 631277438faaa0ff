"""Measure every way worth trying to launch the attention kernels on this card, against the plans that ship.

    python -m benchmarks.kernels.tune_attention --minutes 25

One command answers what docs/log.md leaves open: tiles, warps, registers, stages, programs a multiprocessor and the
weight of beginnings for decode attention over each type of cache; warps and tiles of the few-row kernel; the overlapped
softmax of the Hopper prefill kernel, and the plain kernel's tiles beside it. `--only TEXT` chooses workloads by a part
of their names, such as `decode`, `few_rows_b8` or `int8`.

Round by round, some at a time: ways are compiled by as many processes as there are cores; one that spills much or
leaves no room for its programs is left out; the rest are checked against float32 and timed by one process, in CUDA
graphs over inputs larger than the level-2 cache. The first round tries each choice by itself, later ones combine those
that helped, most promising first, while there is time. A way that fails, hangs or takes the GPU with it is reported; it
costs itself alone, and one that has lost a process is not tried again over the same type of cache. Last, the fastest
few of each workload, the plan that ships and, where it computes the same, torch are timed in turn. These are what is
kept, a JSON line each, and what the last table shows beside the card's limit.

Plans are not changed by this: whoever reads the table changes `launch_plan`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks import records
from benchmarks.kernels import harness
from benchmarks.kernels.attention_variants import (
    LIBRARY,
    Options,
    Workload,
    aspects,
    combinations,
    described,
    key_of,
    singles,
    smoke_workloads,
    workloads,
)
from benchmarks.kernels.compiled_kernels import resident_programs
from benchmarks.kernels.pretended_gpu import Card
from benchmarks.kernels.worker_processes import Answer, WorkerProcess, ask_all
from common.processors import granted_threads

WORKER = "benchmarks.kernels.attention_worker"
COMPILE_S, TIME_S = 120.0, 45.0  # for one answer
ROUNDS = 3
COMBINATIONS = 6  # of a workload, in a round
FINALISTS = 3
FINALS_SHARE = 0.2
"""Of the time, kept for the last round."""

USUAL_PROGRAMS = {"_decode_kernel": 2}
"""That a multiprocessor must hold at once, of kernels whose programs share the work equally."""

MOST_STACK_BYTES = 512
"""A thread that spills more has no chance."""


@dataclass
class Course:
    """What is known of a workload so far: the median microseconds of each way by `key_of`, and what failed."""

    workload: Workload
    moved: dict[str, int] = field(default_factory=dict)
    us: dict[str, float] = field(default_factory=dict)
    ways: dict[str, Options] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    final: dict[str, list[float]] = field(default_factory=dict)

    def ratios(self) -> dict[str, float]:
        """Of the ways tried, their time divided by that of the plan that ships; inf for what failed."""
        ships_us = self.us.get(key_of({}), 0.0)
        return {key: us / ships_us for key, us in self.us.items() if ships_us} | dict.fromkeys(
            self.failed, float("inf")
        )

    def fastest(self, count: int) -> list[Options]:
        """So many ways, the plan that ships among them."""
        keys = sorted(self.us, key=lambda key: self.us[key])[:count]
        ships = key_of({})
        return [self.ways[key] for key in dict.fromkeys([ships, *keys]) if key in self.us]


class Asked(Protocol):
    """What answers a request: a `WorkerProcess`."""

    def ask(self, request: dict[str, Any], timeout_s: float) -> Answer:
        """An answer in any case."""


class Sweep:
    """All courses, and how far they have come.

    Args:
        timer: answers what is to be checked and timed.
        processes: that compile side by side; 0: nothing is compiled ahead, as in the interpreter.
        end_s: of the monotonic clock; no way is begun later.
    """

    def __init__(self, chosen: list[Workload], card: Card, timer: Asked, processes: int, end_s: float) -> None:
        self.courses = [Course(workload) for workload in chosen]
        self._card, self._timer, self._processes, self._end_s = card, timer, processes, end_s
        self._lost: set[tuple[str, str, str]] = set()

    def run(self, rounds: int = ROUNDS, most_choices: int | None = None) -> None:
        """All rounds, or those there is time for; of `most_choices` of each workload, all by default."""
        for number in range(rounds):
            ways = [(course, way) for course in self.courses for way in self._ways(course, number, most_choices)]
            print(f"round {number + 1}: {len(ways)} ways", flush=True)
            size = 8 * self._processes or max(1, len(ways))
            for first in range(0, len(ways), size):
                for course, options in self._possible(ways[first : first + size]):
                    self._try(course, options)

    def _ways(self, course: Course, number: int, most_choices: int | None) -> list[Options]:
        choices = aspects(course.workload, hopper=self._card.capability == 90)
        if number == 0:
            return [{}, *singles(choices)[:most_choices]]
        return combinations(choices, course.ratios(), COMBINATIONS)

    def is_over(self) -> bool:
        """Whether what is left of the time is the finals'."""
        return time.monotonic() > self._end_s

    def _possible(self, ways: list[tuple[Course, Options]]) -> list[tuple[Course, Options]]:
        """Those that compile, and whose programs have room."""
        if not self._processes or self.is_over():
            return ways
        requests = [
            {"do": "compile", "card": asdict(self._card), "workload": course.workload.to_json(), "options": options}
            for course, options in ways
        ]
        answers = ask_all(lambda: WorkerProcess.of_module(WORKER), requests, self._processes, COMPILE_S)
        kept = []
        for (course, options), answer in zip(ways, answers, strict=True):
            reason = answer.get("failed") or why_not(answer["kernels"][0], options, self._card)
            if reason:
                self._fail(course, options, reason)
            else:
                kept.append((course, options))
        return kept

    def _try(self, course: Course, options: Options) -> None:
        if self.is_over():
            return
        workload, key = course.workload, key_of(options)
        kind = (workload.operation, workload.cache, key)
        if kind in self._lost:
            self._fail(course, options, "lost a process before")
            return
        answer = self._timer.ask({"do": "time", "workload": workload.to_json(), "options": options}, TIME_S)
        if answer.get("lost") or answer.get("last"):
            self._lost.add(kind)
        if "failed" in answer:
            self._fail(course, options, answer["failed"])
            return
        course.moved = {name: answer[name] for name in ("bytes_moved", "flops") if name in answer}
        course.us[key], course.ways[key] = statistics.median(answer["us"]), options
        print(f"{course.workload.name:<44} {course.us[key]:>10.2f} us  {described(options)}", flush=True)

    def _fail(self, course: Course, options: Options, reason: str) -> None:
        course.failed[key_of(options)] = reason
        print(f"{course.workload.name:<44} {'failed':>13}  {described(options)}: {reason}", flush=True)

    def finals(self, until_s: float) -> None:
        """The fastest few of each workload in turn, the plan that ships and torch among them."""
        for course in self.courses:
            if not course.us or time.monotonic() > until_s:
                continue
            ways = course.fastest(FINALISTS) + [LIBRARY] * course.workload.has_library
            answer = self._timer.ask({"do": "race", "workload": course.workload.to_json(), "ways": ways}, TIME_S)
            if "failed" in answer:
                self._fail(course, {}, f"in turn: {answer['failed']}")
                continue
            course.final = {key_of(way): runs for way, runs in zip(ways, answer["us"], strict=True)}


def why_not(kernel: dict[str, Any], options: Options, card: Card) -> str | None:
    """What speaks against timing a way whose kernel needs this much; None if nothing does."""
    if kernel["shared_bytes"] > card.shared_memory_per_block_optin:
        return f"{kernel['shared_bytes']} bytes of shared memory, the card has {card.shared_memory_per_block_optin}"
    if kernel["stack_bytes"] > MOST_STACK_BYTES:
        return f"{kernel['stack_bytes']} bytes of stack a thread"
    room = resident_programs(kernel, card.shared_memory_per_block_optin)
    wanted = options.get("programs_per_multiprocessor", USUAL_PROGRAMS.get(kernel["name"], 1))
    return None if wanted <= room else f"a multiprocessor has room for {room} programs, wanted {wanted}"


def report(courses: list[Course], output: Path | None) -> None:
    """Keep a line for each way of the finals; print the fastest of each workload beside the plan that ships."""
    kept = harness.Report("attention")
    rows = []
    for course in courses:
        for key, runs_us in course.final.items():
            way = LIBRARY if key == key_of(LIBRARY) else course.ways[key]
            options = {"way": described(way), "kv_cache_dtype": course.workload.cache, **way}
            engine = "torch" if way == LIBRARY else None
            kept.add(course.workload.name, runs_us, engine=engine, options=options, **course.moved)
        rows.append(summary(course))
    kept.write(output)
    print(f"\n{'workload':<44} {'ships':>9} {'best':>9} {'gain':>6} {'limit':>9} {'torch':>9}  way", flush=True)
    print("\n".join(rows), flush=True)
    print(f"{sum(len(course.us) for course in courses)} ways timed, {sum(len(c.failed) for c in courses)} left out")


def summary(course: Course) -> str:
    """A line of the last table, in microseconds."""
    name = f"{course.workload.name:<44}"
    medians = {key: statistics.median(runs_us) for key, runs_us in course.final.items()}
    library_us = medians.pop(key_of(LIBRARY), None)
    ships_us = medians.get(key_of({}))
    if ships_us is None:
        reason = course.failed.get(key_of({}), "no time was left")
        return f"{name} not timed: {reason}"
    best = min(medians, key=lambda key: medians[key])
    bound_us = harness.limit_of(ships_us, course.moved.get("bytes_moved"), course.moved.get("flops")).get("bound_us")
    gain = f"{100 * (ships_us / medians[best] - 1):>5.1f}%"
    optional = " ".join(f"{'-' if us is None else format(us, '.2f'):>9}" for us in (bound_us, library_us))
    return f"{name} {ships_us:>9.2f} {medians[best]:>9.2f} {gain} {optional}  {described(course.ways[best])}"


def main() -> None:
    """Sweep the workloads that `--only` names, all by default, for so many minutes."""
    parser = harness.argument_parser(__doc__ or "")
    parser.set_defaults(output=records.RESULTS_DIR / "attention_plans.jsonl")
    parser.add_argument("--minutes", type=float, default=25.0, help="the whole run, compiling included")
    parser.add_argument("--processes", type=int, default=granted_threads(), help="that compile side by side")
    arguments = parser.parse_args()
    end_s = time.monotonic() + 60 * arguments.minutes
    if not (arguments.smoke or harness.has_cuda()):
        parser.error("there is no CUDA GPU here; --smoke runs tiny shapes in the interpreter")
    chosen = smoke_workloads() if arguments.smoke else workloads()
    chosen = [workload for workload in chosen if arguments.only in workload.name]
    card = Card.at_hand() if harness.has_cuda() else Card()
    rounds_end_s = end_s - FINALS_SHARE * 60 * arguments.minutes
    with WorkerProcess.of_module(WORKER) as timer:
        sweep = Sweep(chosen, card, timer, arguments.processes * harness.has_cuda(), rounds_end_s)
        sweep.run(*(1, 2) if arguments.smoke else ())
        sweep.finals(end_s)
    report(sweep.courses, None if arguments.smoke else arguments.output)


if __name__ == "__main__":
    main()
