"""The order in which waiting sequences run, and in which running ones are preempted.

A *rank* is set once, when a sequence is queued. The lowest rank runs first; when blocks run out, the highest rank among
the candidates is preempted. Knows nothing of blocks or steps. Called by the core, the planner and whatever ends a
sequence.

    fcfs       by arrival
    priority   by priority, where each AGEING_S of waiting lifts a request by one level, so that nobody starves. Two
               requests compare the same at any time, so the rank can be fixed on arrival.
    fair       by client, in turns of tokens: start-time fair queueing (Goyal, Vin, Cheng 1996). In virtual time, a
               request starts when its client's previous one would end, or now; the earliest start runs first. So a
               client with a thousand requests delays another client's first one by no more than what already runs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from scheduler_proc.sequence import Rank, Sequence

AGEING_S = 30.0
"""Waiting this long is worth one priority level."""
EXPECTED_OUTPUT = 256
"""Output tokens that a request counts for at most when clients are compared: few use all they may."""
CLIENT_LIMIT = 4096
"""Clients whose share is remembered at most."""


class Policy(Protocol):
    """Turns a sequence's arrival into the first part of its rank."""

    def place(self, sequence: Sequence, now_s: float) -> float:
        """The sequence arrives; the lower the number, the sooner it runs."""

    def started(self, sequence: Sequence) -> None:
        """The sequence leaves the queue for the first time, to run."""


class FirstCome:
    """First come, first served."""

    def place(self, sequence: Sequence, now_s: float) -> float:
        """The same for all: the order of arrival decides."""
        return 0.0

    def started(self, sequence: Sequence) -> None:
        """Nothing to remember."""


class AgeingPriority:
    """By priority, with ageing."""

    def place(self, sequence: Sequence, now_s: float) -> float:
        """The time of arrival, moved by the priority."""
        return now_s + AGEING_S * sequence.request.message.priority

    def started(self, sequence: Sequence) -> None:
        """Nothing to remember."""


class FairShare:
    """In turns between clients."""

    def __init__(self) -> None:
        self._virtual_time = 0.0
        self._ends: dict[str, float] = {}

    def place(self, sequence: Sequence, now_s: float) -> float:
        """The virtual time at which it starts."""
        client = sequence.request.message.client_key
        start = max(self._virtual_time, self._ends.get(client, 0.0))
        cost = sequence.prompt_count + min(sequence.max_len - sequence.prompt_count, EXPECTED_OUTPUT)
        self._ends[client] = start + cost
        if len(self._ends) > CLIENT_LIMIT:
            self._forget_half()
        return start

    def started(self, sequence: Sequence) -> None:
        """Virtual time moves on to the start of whoever runs."""
        self._virtual_time = max(self._virtual_time, sequence.rank[0])

    def _forget_half(self) -> None:
        """Virtual time moves past the half of the clients that have had least."""
        self._virtual_time = max(self._virtual_time, sorted(self._ends.values())[len(self._ends) // 2])
        self._ends = {name: end for name, end in self._ends.items() if end > self._virtual_time}


class WaitingQueue:
    """Sequences that never had a slot, in the policy's order.

    Args:
        policy: `fcfs`, `priority` or `fair`.

    Attributes:
        request_count: requests of which at least one sample waits.
        token_count: prompt tokens of those requests.
    """

    def __init__(self, policy: str) -> None:
        self._policy = _POLICIES[policy]()
        self._ranks: list[Rank] = []
        self._sequences: list[Sequence] = []
        self._arrivals = 0
        self.request_count = 0
        self.token_count = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def push(self, sequence: Sequence, now_s: float) -> None:
        """Queue a new sequence and set its rank."""
        self._arrivals += 1
        sequence.rank = (self._policy.place(sequence, now_s), self._arrivals)
        place = bisect_left(self._ranks, sequence.rank)
        self._ranks.insert(place, sequence.rank)
        self._sequences.insert(place, sequence)
        sequence.request.waiting_count += 1
        if sequence.request.waiting_count == 1:
            self.request_count += 1
            self.token_count += sequence.prompt_count

    def remove(self, sequence: Sequence) -> None:
        """Take a queued sequence out."""
        place = bisect_left(self._ranks, sequence.rank)
        del self._ranks[place], self._sequences[place]
        sequence.request.waiting_count -= 1
        if sequence.request.waiting_count == 0:
            self.request_count -= 1
            self.token_count -= sequence.prompt_count

    def start(self, sequence: Sequence) -> None:
        """Take a queued sequence out, to run."""
        self.remove(sequence)
        self._policy.started(sequence)

    def in_order(self) -> Iterator[Sequence]:
        """The queued sequences, next first; the queue must not change meanwhile."""
        return iter(self._sequences)


_POLICIES: dict[str, type[FirstCome] | type[AgeingPriority] | type[FairShare]] = {
    "fcfs": FirstCome,
    "priority": AgeingPriority,
    "fair": FairShare,
}


def insert_by_rank(sequences: list[Sequence], sequence: Sequence) -> None:
    """Put the sequence into a list that is sorted by rank."""
    insort(sequences, sequence, key=rank_of)


def rank_of(sequence: Sequence) -> Rank:
    """The sequence's place in the order."""
    return sequence.rank
