"""`python -m frontend.replay DIR`: runs the frontend's core alone, on what a recording says it was told.

The requests' life cycle and the detokenizers run as they did: submissions, aborts and the scheduler's messages go in,
and the messages to the scheduler and the events for clients must be equal to the recorded ones, to the byte. Left out
are HTTP, the client socket and the encoding of prompts, which happen before and after.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from common import replaying
from common.config import EngineConfig
from common.errors import RecordingError, WireError
from common.messages import MoreFollows, TokensOut, decode_for_frontend, decode_for_scheduler
from common.recording import Direction, Link, Record, Recording
from common.replaying import Comparison, Outcome
from common.tracing import traced
from common.wire import pack, unpack
from frontend.core import Core
from frontend.recording import RecordedCore, repeat_call
from frontend.tokenizer import Tokenizer


def readable(link: int, data: bytes) -> object:
    """A sent message as it can be read."""
    return unpack(data) if link == Link.EVENTS else decode_for_scheduler(data)


def is_hint(record: Record) -> bool:
    """Whether it is a message that depends on what the sockets had when, and not on the core's calls."""
    return record.link == Link.REQUESTS and unpack(record.data)[0] == MoreFollows.CODE


class Replay:
    """Calls and messages in, messages and events out.

    Attributes:
        step_ns: one entry per call or message.
        token_count: tokens that the scheduler's messages held.
    """

    def __init__(self, recording: Recording) -> None:
        self.comparison = Comparison(
            [record for record in recording.records if not is_hint(record)], readable, breaks_off=recording.breaks_off
        )
        self.step_ns: list[int] = []
        self.token_count = 0
        self._inputs = [r for r in recording.records if r.direction == Direction.IN]
        self._now_s = 0.0
        self._events: list[tuple[Any, ...]] = []
        self._core = self._make_core(recording.config)

    def _make_core(self, config: EngineConfig) -> Core:
        tokenizer = Tokenizer.load(config.tokenizer_dir or config.model_dir, config.model.chat_template)
        return RecordedCore(
            self,
            tokenizer,
            lambda data: self.comparison.sent(Link.REQUESTS, data),
            seed=config.model.seed,
            stream_interval=config.server.stream_interval,
            session=config.session,
            held_limit=config.scheduler.max_num_queued_reqs,
            clock=lambda: self._now_s,
            wall_clock=lambda: self._now_s,
        )

    def call(self, *fields: Any) -> None:
        """The core has been called; it was us."""

    def event(self, *fields: Any) -> None:
        """The core has given an event."""
        self._events.append(fields)

    def finish(self) -> None:
        """Compare what came out."""
        for fields in self._events:
            self.comparison.sent(Link.EVENTS, pack(fields))
        self.comparison.finish()

    def run(self) -> None:
        """All inputs.

        Raises:
            WireError: one of them cannot have been received by a frontend.
        """
        for record in self._inputs:
            self._now_s = record.time_ns / 1e9
            start_ns = time.perf_counter_ns()
            self._take(record)
            self.step_ns.append(time.perf_counter_ns() - start_ns)

    def _take(self, record: Record) -> None:
        if record.link == Link.CALLS:
            repeat_call(self._core, record.data)
        elif record.link == Link.OUTPUTS:
            message = decode_for_frontend(record.data)
            if isinstance(message, TokensOut):
                self.token_count += len(message.token_ids)
            self._core.handle(message)


def replay(recording: Recording, arguments: Namespace) -> Outcome:
    """Run the frontend's core on a recording.

    Raises:
        RecordingError: what is recorded cannot have been received by a frontend.
    """
    work = Replay(recording)
    try:
        started_s = time.thread_time()
        with traced(arguments.profile):
            work.run()
        cpu_s = time.thread_time() - started_s
    except WireError as error:
        raise RecordingError(f"{recording.path}: {error}") from None
    work.finish()
    us_per_token = cpu_s * 1e6 / work.token_count if work.token_count else 0.0
    figures = {"tokens": work.token_count, "cpu_us_per_token": round(us_per_token, 2)}
    return Outcome(work.comparison, len(work.step_ns), cpu_s, work.step_ns, "message", figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return replaying.run("frontend", replaying.parse("frontend", "frontend", arguments), replay)


if __name__ == "__main__":
    sys.exit(main())
