"""What the rooms' replays have in common: the command line, the comparison of outputs, the figures at the end.

    python -m scheduler_proc.replay DIR [--partial] [--profile FILE]

A replay feeds one process's own code with what a recording says it received, as fast as it goes, and compares what
comes out with what the recording says was sent. It prints what was compared, the first difference in full, and a last
line of JSON. Exit codes: 0 all equal, 1 something differs, 2 no usable recording. Knows nothing of the messages'
meaning.
"""

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import TriremeError, WireError
from common.recording import Direction, Link, Record, Recording

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}

Readable = Callable[[int, bytes], object]
"""A message by its link, without what depends on how long something took: what is compared and shown."""


@dataclass(frozen=True)
class Difference:
    """A message that is not the recorded one; None where there was none at all."""

    link: Link
    number: int
    wanted: object
    got: object

    def __str__(self) -> str:
        return f"message {self.number} on {self.link.name.lower()}\n  recorded: {self.wanted}\n  replayed: {self.got}"


class Comparison:
    """Holds outputs against the recorded ones, link by link, in order, once all have come: it takes no step's time.

    Args:
        records: the recording's.
        readable: what to compare where bytes differ.
        breaks_off: what comes after the last recorded output of a link is no difference.
    """

    def __init__(self, records: Iterable[Record], readable: Readable, *, breaks_off: bool = False) -> None:
        self._breaks_off = breaks_off
        self._wanted: dict[int, deque[bytes]] = {}
        for record in records:
            if record.direction == Direction.OUT:
                self._wanted.setdefault(record.link, deque()).append(record.data)
        self._readable = readable
        self._sent: list[tuple[int, bytes]] = []
        self._counts: dict[int, int] = {}
        self.equal_count = 0
        self.different_count = 0
        self.first: Difference | None = None

    def sent(self, link: int, data: bytes) -> None:
        """An output of the replay."""
        self._sent.append((link, data))

    def finish(self) -> None:
        """Compare; what was recorded and did not come is a difference too."""
        for link, data in self._sent:
            self._compare(link, data)
        for link, wanted in self._wanted.items():
            for number, expected in enumerate(wanted, self._counts.get(link, 0) + 1):
                self._differ(link, number, expected, None)

    def _compare(self, link: int, data: bytes) -> None:
        number = self._counts[link] = self._counts.get(link, 0) + 1
        wanted = self._wanted.get(link)
        expected = wanted.popleft() if wanted else None
        if expected is None and self._breaks_off:
            return
        if expected == data or (expected is not None and self._read(link, expected) == self._read(link, data)):
            self.equal_count += 1
        else:
            self._differ(link, number, expected, data)

    def _differ(self, link: int, number: int, wanted: bytes | None, got: bytes | None) -> None:
        self.different_count += 1
        if self.first is None:
            self.first = Difference(Link(link), number, self._read(link, wanted), self._read(link, got))

    def _read(self, link: int, data: bytes | None) -> object:
        try:
            return None if data is None else self._readable(link, data)
        except WireError:
            return data  # a changed recording can hold anything


@dataclass
class Outcome:
    """What a replay found.

    Attributes:
        received_count: messages that went in.
        cpu_s: seconds of the main thread's CPU time: on a busy machine steadier than the steps' times.
        step_ns: how long each step took; a step is what the process does at once.
        step_name: what a step is, for the reader.
        figures: more for the last line.
    """

    comparison: Comparison
    received_count: int
    cpu_s: float
    step_ns: Sequence[int]
    step_name: str
    figures: dict[str, Any]

    def report(self, recording: Recording) -> int:
        """Print it; the exit code."""
        comparison, seconds = self.comparison, sum(self.step_ns) / 1e9
        quantiles = quantiles_us(self.step_ns)
        span_s = (recording.records[-1].time_ns - recording.records[0].time_ns) / 1e9 if recording.records else 0.0
        print(f"{recording.process}: {self.received_count} messages in, {comparison.equal_count} out as recorded, "
              f"{comparison.different_count} not")  # fmt: skip
        if comparison.first is not None:
            print("first difference:", comparison.first)
        rate = self.received_count / seconds if seconds else 0.0
        print(f"{seconds:.3f} s ({self.cpu_s:.3f} s of CPU) for {span_s:.3f} s recorded: {rate:,.0f} messages/s")
        print(f"{len(self.step_ns)} x {self.step_name}, us: " + ", ".join(f"{k} {v:.1f}" for k, v in quantiles.items()))
        summary = {
            "process": recording.process,
            "received": self.received_count,
            "equal": comparison.equal_count,
            "different": comparison.different_count,
            "seconds": round(seconds, 6),
            "cpu_seconds": round(self.cpu_s, 6),
            "recorded_seconds": round(span_s, 6),
            "messages_per_s": round(rate, 1),
            "step": self.step_name,
            "steps": len(self.step_ns),
            "step_us": {name: round(value, 1) for name, value in quantiles.items()},
            **self.figures,
        }
        print(json.dumps(summary), flush=True)
        return 1 if comparison.different_count else 0


class StepClock:
    """Times the work between inputs.

    Attributes:
        step_ns: one entry for each finished step.
    """

    def __init__(self) -> None:
        self.step_ns: list[int] = []
        self._started_ns = 0

    def start(self) -> None:
        """A step begins; one that was begun ends."""
        now_ns = time.perf_counter_ns()
        if self._started_ns:
            self.step_ns.append(now_ns - self._started_ns)
        self._started_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """The step ends, and none begins."""
        if self._started_ns:
            self.step_ns.append(time.perf_counter_ns() - self._started_ns)
            self._started_ns = 0


def quantiles_us(step_ns: Sequence[int]) -> dict[str, float]:
    """Quantiles of times in nanoseconds, in microseconds; all 0 for no times."""
    ordered = sorted(step_ns) or [0]
    return {name: ordered[min(int(q * len(ordered)), len(ordered) - 1)] / 1000 for name, q in QUANTILES.items()}


def parse(room: str, process: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line of a room's replay."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {room}.replay", description=f"Run the {process} alone on a recording and compare its outputs."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what --record was given")
    parser.add_argument("--partial", action="store_true", help="take a recording that breaks off")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a trace that Perfetto opens")
    if process == "worker":
        parser.add_argument("--rank", type=int, default=0, help="which worker")
    return parser.parse_args(arguments)


def run(process: str, arguments: argparse.Namespace, replay: Callable[[Recording, argparse.Namespace], Outcome]) -> int:
    """Load the recording, replay it, report; the exit code."""
    try:
        recording = Recording.load(arguments.folder, process, partial=arguments.partial)
        return replay(recording, arguments).report(recording)
    except TriremeError as error:
        print(f"trireme: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
