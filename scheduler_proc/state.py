"""The scheduler's state: every sequence, slot and block, and the plans in flight.

Has the transitions that several parts need (end a sequence, preempt it, give back blocks) and recounts itself in
`check`. Decides nothing: the planner decides who runs, the collector applies results, the core takes messages. No
clock, no sockets.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from scheduler_proc.block_pool import BlockPool
from scheduler_proc.prefix_cache import HashPrefixCache, NoPrefixCache, PrefixCache
from scheduler_proc.queues import WaitingQueue, insert_by_rank
from scheduler_proc.radix_cache import RadixPrefixCache
from scheduler_proc.sequence import Request, Sequence, Status
from scheduler_proc.step_time import StepTime


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the scheduler works within; counts of sequences, tokens and blocks.

    Attributes:
        max_model_len: tokens a request may hold.
        max_num_seqs: slots on the worker.
        max_num_batched_tokens: tokens a step may compute.
        block_size, block_count, host_block_count: the KV cache.
        run_ahead: plans that may be in flight beside the one being computed.
        max_queued: requests that may wait.
        max_queued_tokens: their prompt tokens that may wait; 0 sets no limit.
        target_itl_s: time between tokens to aim for by limiting what a step holds; 0 does not.
        token_s: a guess of what a prompt token takes, until one has been computed; 0 for none.
        prefix_cache, policy, preemption: as the options of these names.
        block_bytes: bytes of a block; link_bytes_per_s: between device and host, each way: what the worker measured, or
            what a simulation assumes. For preemption `auto`.
        namespace: model and adapter: prefixes are shared within one namespace.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    block_count: int
    host_block_count: int = 0
    run_ahead: int = 2
    max_queued: int = 4096
    max_queued_tokens: int = 0
    target_itl_s: float = 0.0
    token_s: float = 0.0
    prefix_cache: str = "hash"
    policy: str = "fcfs"
    preemption: str = "recompute"
    block_bytes: int = 0
    link_bytes_per_s: float = 50e9
    namespace: str = ""


@dataclass(slots=True)
class Flight:
    """A plan whose result has not come back.

    Attributes:
        sampled: the sequences of `StepPlan.sampled_slots`, in that order.
        decode_count: how many of them are decode rows; each of the others samples for the first time since it got
            its slot.
        chunk_sequences: slot -> sequence of the chunk rows.
        chunk_tokens: tokens of the chunk rows.
        planned_at_s: when it was planned.
        released, released_host: block tables given up while this was the last plan that uses them.
    """

    step_id: int
    sampled: list[Sequence]
    decode_count: int
    chunk_sequences: dict[int, Sequence]
    chunk_tokens: int = 0
    planned_at_s: float = 0.0
    released: list[list[int]] = field(default_factory=list)
    released_host: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """Counters since start, and the composition of the last step: fields of `EngineStats` by their names there."""

    steps: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    last_decode_rows: int = 0
    last_chunk_tokens: int = 0
    decode_tokens: int = 0
    chunk_tokens: int = 0


class State:
    """The scheduler's state.

    Attributes:
        requests: live requests by id.
        host_pool: the host's blocks for swapped sequences; None if there are none.
        waiting: sequences that never ran; preempted: PREEMPTED and SWAPPED ones, lowest rank first.
        prefilling, decoding: RUNNING sequences, with and without unplanned prompt tokens; `decoding` in the order in
            which they are served next.
        free_slots: slots that a plan may give out, longest unused first.
        cleared_slots: slots that the next plan clears.
        in_flight: plans without result, oldest first; chunk_tokens_in_flight: prompt tokens that they compute.
        pending_count: references to blocks that come back with plans in flight.
        planned_step, completed_step: the last step planned, the last whose result came.
        several_samples_count: live requests with more than one sample, some of which may have ended.
        grammar_count: sequences with a grammar that are not DONE.
        step_time: what steps take.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.block_count)
        self.cache = make_prefix_cache(limits.prefix_cache, self.pool, limits.block_size)
        self.host_pool = BlockPool(limits.host_block_count) if limits.host_block_count else None
        self.requests: dict[int, Request] = {}
        self.waiting = WaitingQueue(limits.policy)
        self.preempted: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.free_slots = deque(range(limits.max_num_seqs))
        self.cleared_slots: list[int] = []
        self.in_flight: deque[Flight] = deque()
        self.chunk_tokens_in_flight = 0
        self.pending_count = 0
        self.planned_step = 0
        self.completed_step = 0
        self.several_samples_count = 0
        self.grammar_count = 0
        self.step_time = StepTime(limits.target_itl_s, limits.token_s)
        self.counters = Counters()

    @property
    def running_count(self) -> int:
        """Sequences with a slot."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has tokens that are not planned yet."""
        return bool(self.decoding or self.prefilling or self.preempted or len(self.waiting))

    @property
    def is_idle(self) -> bool:
        """Nothing to do and nothing in flight."""
        return not self.requests and not self.in_flight

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's slot and blocks; what it has computed stays in the prefix cache until evicted."""
        self._leave_running(sequence)
        self._index_computed(sequence)
        self.give_back_blocks(sequence)
        sequence.status = Status.PREEMPTED
        sequence.computed_count = 0
        insert_by_rank(self.preempted, sequence)
        self._count_preemption(sequence)

    def swap_out(self, sequence: Sequence, step_id: int) -> tuple[list[int], list[int]]:
        """Take a running sequence's slot and move its K/V to the host with the step being planned.

        Returns:
            Its blocks, which are free when that step's result has come, and the host's blocks, aligned.
        """
        assert self.host_pool is not None
        self._leave_running(sequence)
        self._index_computed(sequence)
        blocks, sequence.blocks, sequence.capacity = sequence.blocks, [], 0
        sequence.host_blocks = self.host_pool.allocate_many(len(blocks))
        sequence.swapped_count, sequence.computed_count = sequence.computed_count, 0
        sequence.status = Status.SWAPPED
        sequence.last_step = step_id
        self.pending_count += len(blocks)
        insert_by_rank(self.preempted, sequence)
        self._count_preemption(sequence)
        return blocks, sequence.host_blocks

    def _count_preemption(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        sequence.preemption_count += 1

    def end(self, sequence: Sequence, *, reusable: bool = True) -> None:
        """End a sequence, whatever its status; its request ends with its last sequence.

        Args:
            reusable: whether the prefix cache may keep what it has computed.
        """
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._leave_running(sequence)
        elif sequence.status in (Status.PREEMPTED, Status.SWAPPED):
            self.preempted.remove(sequence)
        if reusable:
            self._index_computed(sequence)
        self.give_back_blocks(sequence)
        sequence.status = Status.DONE
        self.grammar_count -= sequence.grammar is not None
        request = sequence.request
        request.live_count -= 1
        if request.live_count == 0:
            del self.requests[sequence.request_id]
            self.several_samples_count -= request.message.params.n > 1
            request.sequences = []  # no cycle is left: prompts and outputs are freed at once

    def end_request(self, request: Request) -> None:
        """End all of the request's sequences."""
        for sequence in request.sequences:
            if sequence.status is not Status.DONE:
                self.end(sequence)

    def uncache(self, sequences: list[Sequence]) -> None:
        """Remove what these sequences have computed from the prefix cache, except for blocks that others read."""
        read = {block for request in self.requests.values() for s in request.sequences for block in s.blocks}
        for sequence in sequences:
            match = self.cache.lookup(sequence.chain, sequence.tokens, len(sequence.tokens))
            self.cache.drop([block for block in match.blocks if block not in read])

    def free_slot(self, sequence: Sequence) -> None:
        """Give the sequence's slot back: the next plan clears it, and may give it to another sequence."""
        self.cleared_slots.append(sequence.slot)
        self.free_slots.append(sequence.slot)
        sequence.slot = -1

    def give_back_blocks(self, sequence: Sequence) -> None:
        """Give up the block table: now, or when the last plan in flight that uses it has come back."""
        blocks, sequence.blocks, sequence.capacity = sequence.blocks, [], 0
        host_blocks, sequence.host_blocks = sequence.host_blocks, []
        if sequence.last_step <= self.completed_step:
            self.pool.release(blocks)
            if self.host_pool is not None:
                self.host_pool.release(host_blocks)
            return
        flight = self.in_flight[sequence.last_step - self.in_flight[0].step_id]
        flight.released.append(blocks)
        flight.released_host.append(host_blocks)
        self.pending_count += len(blocks)

    def land(self, flight: Flight) -> None:
        """The oldest plan's result has come: free the blocks that were given up while it used them."""
        self.completed_step = flight.step_id
        self.chunk_tokens_in_flight -= flight.chunk_tokens
        for blocks in flight.released:
            self.pool.release(blocks)
            self.pending_count -= len(blocks)
        if self.host_pool is not None:
            for host_blocks in flight.released_host:
                self.host_pool.release(host_blocks)

    def _leave_running(self, sequence: Sequence) -> None:
        (self.decoding if sequence in self.decoding else self.prefilling).remove(sequence)
        self.free_slot(sequence)

    def _index_computed(self, sequence: Sequence) -> None:
        if sequence.blocks:
            known = min(sequence.computed_count, len(sequence.tokens))
            self.cache.insert(sequence.chain, sequence.tokens, sequence.blocks, known)
            self.cache.insert_tail(sequence.chain, sequence.tokens, sequence.blocks, known)

    def check(self) -> None:
        """Recount blocks, slots and sequences.

        Raises:
            AssertionError: an invariant does not hold.
        """
        live = [s for r in self.requests.values() for s in r.sequences if s.status is not Status.DONE]
        self._check_sequences(live)
        tables = [block for s in live for block in s.blocks]
        pending = [block for flight in self.in_flight for blocks in flight.released for block in blocks]
        chunk_tokens = sum(flight.chunk_tokens for flight in self.in_flight)
        assert chunk_tokens == self.chunk_tokens_in_flight, "the prompt tokens in flight are miscounted"
        assert len(pending) == self.pending_count, f"{len(pending)} blocks are pending, counted {self.pending_count}"
        self.pool.check(dict(Counter(tables + pending)))
        self.cache.check()
        if self.host_pool is not None:
            host = [block for s in live for block in s.host_blocks]
            host += [block for flight in self.in_flight for blocks in flight.released_host for block in blocks]
            self.host_pool.check(dict(Counter(host)))
        slots = [s.slot for s in self.prefilling + self.decoding]
        assert sorted([*slots, *self.free_slots]) == list(range(self.limits.max_num_seqs)), "a slot is lost or doubled"
        if self.is_idle:
            self.check_idle()

    def check_idle(self) -> None:
        """What must hold when nothing is live or in flight.

        Raises:
            AssertionError: something is left over.
        """
        left = len(self.waiting) + len(self.preempted) + self.running_count
        left += self.several_samples_count + self.grammar_count
        assert left == 0, f"{left} sequences are left in the queues of an idle scheduler"
        assert len(self.free_slots) == self.limits.max_num_seqs, f"only {len(self.free_slots)} slots are free when idle"
        held = self.pool.held_count + (self.host_pool.held_count if self.host_pool is not None else 0)
        assert held == 0 and self.pending_count == 0, f"{held} blocks are held when idle, {self.pending_count} pending"

    def _check_sequences(self, live: list[Sequence]) -> None:
        by_status: Counter[Status] = Counter(s.status for s in live)
        assert by_status[Status.WAITING] == len(self.waiting), "the waiting queue is miscounted"
        waiting = {s.request_id: s.prompt_count for s in live if s.status is Status.WAITING}
        assert self.waiting.request_count == len(waiting), "the requests that wait are miscounted"
        assert self.waiting.token_count == sum(waiting.values()), "the prompt tokens that wait are miscounted"
        preempted = by_status[Status.PREEMPTED] + by_status[Status.SWAPPED]
        assert preempted == len(self.preempted), "the preempted list is miscounted"
        assert by_status[Status.RUNNING] == self.running_count, "the running lists are miscounted"
        for request in self.requests.values():
            count = sum(s.status is not Status.DONE for s in request.sequences)
            assert count == request.live_count > 0, f"request {request.message.request_id} is miscounted"
        for s in live:
            where = f"request {s.request_id} sample {s.sample_index} ({s.status.name})"
            assert bool(s.host_blocks) <= (s.status is Status.SWAPPED), f"{where}: holds host blocks"
            assert (s.slot >= 0) == (s.status is Status.RUNNING), f"{where}: slot {s.slot}"
            assert s.computed_count <= s.capacity == len(s.blocks) * self.limits.block_size, f"{where}: block table"
            assert len(s.tokens) <= s.planned_len <= s.max_len, (
                f"{where}: {len(s.tokens)}, {s.planned_len}, {s.max_len}"
            )
            assert s.computed_count <= s.planned_len, f"{where}: {s.computed_count} computed of {s.planned_len}"


def make_prefix_cache(kind: str, pool: BlockPool, block_size: int) -> PrefixCache:
    """The implementation that `--prefix-cache` names: `hash`, `radix` or `off`."""
    match kind:
        case "hash":
            return HashPrefixCache(pool, block_size)
        case "radix":
            return RadixPrefixCache(pool, block_size)
        case "off":
            return NoPrefixCache()
    raise ValueError(f"unknown prefix cache {kind!r}")
