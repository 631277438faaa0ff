"""`python -m scheduler_proc.replay DIR`: runs the scheduler alone, on what a recording says it received.

Runs `main.serve` with its loop, decoding, core and encoding; only the sockets and the clocks are replaced by the
recording. Messages and clock readings are handed out turn by turn as they were, so every plan and message must come out
the same, to the byte. Only the times of steps in EngineStats are left out of the comparison.
"""

import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from common import replaying
from common.errors import RecordingError, WireError
from common.messages import (
    EngineStats,
    ForChild,
    ForScheduler,
    FromWorker,
    decode_for_child,
    decode_for_frontend,
    decode_for_scheduler,
    decode_for_worker,
)
from common.messages.fields import empty_i32
from common.recording import Direction, Link, Recording, reading_of
from common.replaying import Comparison, Outcome, StepClock
from common.tracing import traced
from scheduler_proc.main import Clocks, serve
from scheduler_proc.transport import Message, read_result, refusal_of

T = TypeVar("T")


class EndOfRecording(Exception):
    """All turns have been handed out: the recorded process ended here, or was ended."""


class Turn:
    """What one turn of the loop received: messages by link, and the readings of its clocks."""

    def __init__(self) -> None:
        self.messages: dict[int, list[bytes]] = {}
        self.readings: dict[int, deque[float]] = {}


def turns_of(recording: Recording) -> deque[Turn]:
    """The recording, cut where the loop woke up.

    Raises:
        RecordingError: it holds a clock's record without a reading.
    """
    turns = deque([Turn()])
    for record in recording.records:
        if record.link == Link.TURN:
            turns.append(Turn())
        elif record.link in (Link.WALL_CLOCK, Link.MONOTONIC_CLOCK, Link.COMPILED):
            turns[-1].readings.setdefault(record.link, deque()).append(reading_of(record))
        elif record.direction == Direction.IN:
            turns[-1].messages.setdefault(record.link, []).append(record.data)
    return turns


class RecordedTransport:
    """The recorded turns in place of sockets and clocks.

    Attributes:
        steps: times the turns.
        received_count: messages handed out.
    """

    def __init__(self, recording: Recording, comparison: Comparison) -> None:
        self.steps = StepClock()
        self.received_count = 0
        self._turns = turns_of(recording)
        self._turn = self._turns.popleft()
        self._last_readings = {Link.WALL_CLOCK: 0.0, Link.MONOTONIC_CLOCK: 0.0, Link.COMPILED: 0.0}
        self._comparison = comparison

    def now(self, clock: Link) -> float:
        """The turn's next reading of a clock; the last one again when the loop asks more often than it did."""
        readings = self._turn.readings.get(clock)
        if readings:
            self._last_readings[clock] = readings.popleft()
        return self._last_readings[clock]

    def wait(self, timeout_ms: float | None) -> bool:
        """The next turn; raises EndOfRecording after the last."""
        self.steps.stop()
        if not self._turns:
            raise EndOfRecording
        self._turn = self._turns.popleft()
        self.steps.start()
        return Link.ORDERS in self._turn.messages

    def orders(self) -> Sequence[ForChild]:
        """The turn's orders."""
        return list(self._take(Link.ORDERS, decode_for_child))

    def requests(self, limit: int) -> Iterator[ForScheduler]:
        """The turn's requests."""
        for data in self._take(Link.REQUESTS, bytes):
            try:
                message = decode_for_scheduler(data)
            except WireError as error:
                refusal = refusal_of(data, error)
                if refusal is not None:
                    self.send_out(refusal)
                continue
            yield message

    def results(self, limit: int = 64) -> Iterator[FromWorker]:
        """The turn's results."""
        return self._take(Link.RESULTS, read_result)

    def send_out(self, message: Message) -> None:
        """Compare what would go to the frontend."""
        self._comparison.sent(Link.OUTPUTS, message.to_wire())

    def reopen(self, session: int) -> None:
        """There is no frontend, new or old."""

    def send_plan(self, message: Message) -> None:
        """Compare what would go to the workers."""
        self._comparison.sent(Link.PLANS, message.to_wire())

    def _take(self, link: Link, decode: Callable[[bytes], T]) -> Iterator[T]:
        for data in self._turn.messages.pop(link, ()):
            self.received_count += 1
            yield decode(data)


class NoLink:
    """Stands for the supervisor's link."""

    progress = 0
    state = ""

    def ready(self, detail: str) -> None:
        """Nobody waits for it."""

    def set_state(self, state: str) -> None:
        """Nobody wants to know."""


def readable(link: int, data: bytes) -> object:
    """A sent message without the times that steps took."""
    if link == Link.PLANS:
        return decode_for_worker(data)
    message = decode_for_frontend(data)
    return replace(message, parts_us=empty_i32()) if isinstance(message, EngineStats) else message


def replay(recording: Recording, arguments: Namespace) -> Outcome:
    """Run the scheduler on a recording.

    Raises:
        RecordingError: what is recorded cannot have been received by a scheduler.
    """
    comparison = Comparison(recording.records, readable, breaks_off=recording.breaks_off)
    transport = RecordedTransport(recording, comparison)
    clocks = Clocks(
        partial(transport.now, Link.WALL_CLOCK),
        partial(transport.now, Link.MONOTONIC_CLOCK),
        lambda _: partial(transport.now, Link.COMPILED),
    )
    started_s = time.thread_time()
    with traced(arguments.profile):
        try:
            serve(recording.config, transport, NoLink(), clocks)
        except EndOfRecording:
            pass  # the recording of a process that was killed
        except WireError as error:
            raise RecordingError(f"{recording.path}: {error}") from None
    transport.steps.stop()
    cpu_s = time.thread_time() - started_s
    comparison.finish()
    plans = sum(record.link == Link.PLANS for record in recording.records)
    figures = {"plans": plans}
    return Outcome(comparison, transport.received_count, cpu_s, transport.steps.step_ns, "turn", figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return replaying.run("scheduler", replaying.parse("scheduler_proc", "scheduler", arguments), replay)


if __name__ == "__main__":
    sys.exit(main())
