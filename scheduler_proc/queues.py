"""The order in which waiting sequences run, and who gives way first.

A *rank* is set once, when a sequence is queued; the lower runs first, and the highest rank among those at hand is the
victim when blocks run out. Knows nothing of blocks or steps. Called by the planner and by whatever ends a sequence.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from scheduler_proc.sequence import Sequence


class WaitingQueue(Protocol):
    """Sequences that never had a slot, in the policy's order."""

    def __len__(self) -> int: ...

    def push(self, sequence: Sequence) -> None:
        """Queue a new sequence and set its rank."""

    def remove(self, sequence: Sequence) -> None:
        """Take a queued sequence out."""

    def in_order(self) -> Iterator[Sequence]:
        """The queued sequences, next first; the queue must not change meanwhile."""


class FirstComeQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[Sequence, None] = OrderedDict()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def push(self, sequence: Sequence) -> None:
        """Queue a new sequence at the end."""
        self._arrivals += 1
        sequence.rank = (0.0, self._arrivals)
        self._sequences[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Take a queued sequence out."""
        del self._sequences[sequence]

    def in_order(self) -> Iterator[Sequence]:
        """The queued sequences by arrival."""
        return iter(self._sequences)


def make_waiting_queue(policy: str) -> WaitingQueue:
    """The queue that `--policy` names."""
    assert policy == "fcfs", f"unknown policy {policy!r}"
    return FirstComeQueue()
