"""Streams and events of a pretended GPU, over the host's memory: what CUDA promises about their order, and no more.

What is issued runs later. A stream runs its own work in order; which stream goes on is drawn from a seed, and only
events limit it. So a missing wait shows as a wrong value in some order, where a real GPU would show it once in a while.
"""

from collections import deque
from collections.abc import Callable
from random import Random

import pytest
import torch


class PretendedStream:
    """A queue of work, each piece with what it waits for."""

    def __init__(self, gpu: "PretendedGpu") -> None:
        self._gpu = gpu
        self.work: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        gpu.streams.append(self)

    def wait_event(self, event: "PretendedEvent") -> None:
        """What follows waits for the event as recorded last."""
        count = event.recorded
        self.work.append((lambda: event.reached >= count, lambda: None))

    def synchronize(self) -> None:
        """Run until nothing is left here."""
        self._gpu.run(until=lambda: not self.work)


class PretendedEvent:
    """Counts how often it was recorded, and how often streams have come there; knows the clock of the last time."""

    def __init__(self, gpu: "PretendedGpu") -> None:
        self._gpu, self.recorded, self.reached, self.clock = gpu, 0, 0, 0

    def record(self, stream: PretendedStream) -> None:
        """Happens once the stream has come this far."""
        self.recorded += 1
        stream.work.append((lambda: True, self._reach))

    def _reach(self) -> None:
        self.reached, self.clock = self.reached + 1, self._gpu.clock

    def synchronize(self) -> None:
        """Run until the last record has happened."""
        count = self.recorded
        self._gpu.run(until=lambda: self.reached >= count)

    def elapsed_time(self, end: "PretendedEvent") -> float:
        """Ticks from here to there; both must have happened."""
        assert self.reached == self.recorded and end.reached == end.recorded, "an event that has not happened"
        return float(end.clock - self.clock)


class PretendedGpu:
    """Takes the place of torch's streams and events, and of `Tensor.copy_`, until the test ends.

    Attributes:
        streams: the first is the current one at the start.
        clock: ticks; each copy takes as many as `copy_ticks` says of its stream, else none.
    """

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rng = Random(seed)
        self.streams: list[PretendedStream] = []
        self.clock, self.copy_ticks = 0, {}
        self.current = PretendedStream(self)
        copy = torch.Tensor.copy_
        monkeypatch.setattr(torch.cuda, "Stream", lambda: PretendedStream(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: PretendedEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(
            torch.Tensor, "copy_", lambda target, source, non_blocking: self.issue(lambda: copy(target, source))
        )

    def issue(self, work: Callable[[], object]) -> None:
        """Run this on the current stream, later; and a little of what was issued before, now."""
        stream = self.current

        def run() -> None:
            self.clock += self.copy_ticks.get(stream, 0)
            work()

        stream.work.append((lambda: True, run))
        steps = iter(range(self._rng.randrange(6)))
        self.run(until=lambda: next(steps, None) is None, may_stall=True)

    def run(self, until: Callable[[], bool], *, may_stall: bool = False) -> None:
        """Run one piece of work after another, of any stream whose next one waits for nothing."""
        while not until():
            ready = [stream for stream in self.streams if stream.work and stream.work[0][0]()]
            assert ready or may_stall, "waits for what was never issued"
            if not ready:
                return
            self._rng.choice(ready).work.popleft()[1]()
