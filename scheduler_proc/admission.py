"""Gives out slots: to preempted sequences first, then to waiting ones in the policy's order.

A sequence enters when all its known tokens find blocks beside what is promised to the prompts under way. What need not
be computed is taken from the prefix cache, from another sample of the same request, or from the host. A sequence whose
next block another prompt is about to compute waits for it: it could only compute the same again.

At most two prompts stay unfinished after a step; others enter only if they finish in it. No clock, no sockets. Called
by the planner.
"""

from collections.abc import Iterator
from enum import Enum, auto

from scheduler_proc.draft import ChunkRow, Draft, share_of
from scheduler_proc.prefix_cache import NO_MATCH, Match
from scheduler_proc.sequence import Sequence, Status
from scheduler_proc.state import State

UNFINISHED_LIMIT = 2
"""Prompts that may stay unfinished after a step."""
LOOKAHEAD = 64
"""Waiting sequences that are passed over at most in a step, because they cannot enter now but others behind can."""
WATERMARK_DIVISOR = 100
"""One block in this many stays available to running sequences when another is let in."""


class Outcome(Enum):
    """What came of trying to give a sequence its slot."""

    PLACED = auto()
    LATER = auto()  # not in this step, for its own reasons; those behind it may go ahead
    NO_ROOM = auto()  # the blocks do not suffice; those behind it wait too


class Admission:
    """Fills the rest of a step with sequences that get a slot.

    Args:
        state: the books.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._pool = state.pool
        self._block_size = state.limits.block_size
        self._watermark = state.limits.block_count // WATERMARK_DIVISOR
        self._refused: tuple[Sequence, int] | None = None  # who found no room, with how many blocks available

    def admit(self, draft: Draft) -> None:
        """Give out slots: to preempted sequences first, then in the policy's order."""
        state = self._state
        if draft.decode_rows and not state.step_time.admits():
            return
        promised = sum(self._missing_blocks(sequence) for sequence in state.prefilling)
        passed_over = 0
        admitted: list[ChunkRow] = []
        for sequence in self._candidates():
            if not draft.budget or not state.free_slots or passed_over > LOOKAHEAD:
                break
            outcome = self._try_admit(sequence, draft, promised)
            if outcome is Outcome.NO_ROOM:
                break
            if outcome is Outcome.LATER:
                passed_over += 1
                continue
            promised += self._missing_blocks(sequence)
            admitted.append(draft.chunks[-1])
        for row in admitted:
            self._enter(row)

    def _candidates(self) -> Iterator[Sequence]:
        for sequence in self._state.preempted:
            if sequence.last_step > self._state.completed_step:
                return  # its last tokens are not known yet; nobody overtakes it
            yield sequence
        yield from self._state.waiting.in_order()

    def _missing_blocks(self, sequence: Sequence) -> int:
        return -(-sequence.planned_len // self._block_size) - len(sequence.blocks)

    def _try_admit(self, sequence: Sequence, draft: Draft, promised: int) -> Outcome:
        length = len(sequence.tokens)
        must_finish = self._unfinished_count(draft) >= UNFINISHED_LIMIT
        if must_finish and length > draft.budget:
            return Outcome.LATER
        alone = not (self._state.running_count or self._state.in_flight or draft.chunks)
        if self._refused == (sequence, self._pool.available_count) and not alone:
            return Outcome.NO_ROOM
        match = self._lookup(sequence, draft)
        if match is None or self._under_way(draft, sequence, match.token_count):
            return Outcome.LATER
        fitting = self._fitting(sequence, match, promised, alone)
        if fitting is None:
            self._refused = (sequence, self._pool.available_count)
            return Outcome.NO_ROOM
        self._take_prefix(sequence, fitting, draft)
        if sequence.host_blocks:
            self._swap_in(sequence, draft)
        row = ChunkRow(sequence, sequence.computed_count, 0, is_new=True)
        draft.place(row)
        draft.extend(row, share_of(length - sequence.computed_count, draft.budget, others=True), self._pool)
        sequence.slot = self._state.free_slots.popleft()
        return Outcome.PLACED

    def _unfinished_count(self, draft: Draft) -> int:
        started = sum(sequence.unplanned_count > 0 for sequence in self._state.prefilling)
        return started + sum(row.is_new and not row.samples for row in draft.chunks)

    def _lookup(self, sequence: Sequence, draft: Draft) -> Match | None:
        """What need not be computed: found in the cache or with another sample; None if it soon will be there."""
        if sequence.status is Status.SWAPPED:
            return self._whole_blocks(sequence)
        if sequence.prompt_logprobs is not None:  # every prompt position must be computed to have its logits
            sequence.chain.rewind()
            return NO_MATCH
        match = self._state.cache.lookup(sequence.chain, sequence.tokens, len(sequence.tokens) - 1)
        siblings = sequence.request.sequences
        if len(siblings) == 1:
            return match
        shared_count = min(sequence.prompt_count, len(sequence.tokens) - 1)
        in_this_step = {row.sequence for row in draft.chunks}
        holders = [s for s in siblings if s.blocks and s is not sequence]
        for holder in holders:
            if holder.planned_len > holder.prompt_count <= holder.computed_count and holder not in in_this_step:
                if shared_count <= match.token_count:
                    return match
                return Match(holder.blocks[: -(-shared_count // self._block_size)], shared_count)
        return None if holders else match

    def _whole_blocks(self, sequence: Sequence) -> Match:
        """What a swapped sequence still finds on the device, in whole blocks; the rest comes from the host."""
        match = self._state.cache.lookup(sequence.chain, sequence.tokens, len(sequence.tokens) - 1)
        count = match.token_count // self._block_size
        return Match(match.blocks[:count], count * self._block_size)

    def _under_way(self, draft: Draft, sequence: Sequence, matched: int) -> bool:
        """Whether another prompt computes the block after the match in this step or later; then it can be shared."""
        start = matched - matched % self._block_size
        end = start + self._block_size
        if (
            end > len(sequence.tokens)
            or self._state.limits.prefix_cache == "off"
            or sequence.status is Status.SWAPPED
            or sequence.prompt_logprobs is not None
        ):
            return False
        others = [(row.sequence, row.first) for row in draft.chunks]
        others += [(s, s.computed_count) for s in self._state.prefilling if s.last_step != draft.step_id]
        return any(
            first < end <= len(other.tokens)
            and other.chain.root == sequence.chain.root
            and other.tokens[start:end] == sequence.tokens[start:end]
            and other.tokens[:start] == sequence.tokens[:start]
            for other, first in others
        )

    def _fitting(self, sequence: Sequence, match: Match, promised: int, alone: bool) -> Match | None:
        """The match, or less of it, with which all known tokens find blocks beside what is promised to others."""
        room = self._pool.available_count - promised - (0 if alone else self._watermark)
        total = -(-len(sequence.tokens) // self._block_size)
        held_by_others = sum(1 for block in match.blocks if self._pool.refs(block))
        copies = 1 if match.token_count % self._block_size else 0
        if total - held_by_others + copies <= room:
            return match
        if not copies:
            return None
        # without the copy, the block that would be its source can be given up
        held_by_others -= self._pool.refs(match.blocks[-1]) > 0
        if total - held_by_others > room:
            return None
        blocks = match.blocks[:-1]
        return Match(blocks, len(blocks) * self._block_size)

    def _take_prefix(self, sequence: Sequence, match: Match, draft: Draft) -> None:
        """Share the matched blocks; a block that is only partly matched is copied, since it will be written."""
        for block in match.blocks:
            self._pool.share(block)
        blocks = match.blocks.copy()
        if match.token_count % self._block_size:
            source, blocks[-1] = blocks[-1], self._pool.allocate()
            draft.copies.append((source, blocks[-1]))
        sequence.add_blocks(blocks, self._block_size)
        sequence.computed_count = match.token_count

    def _swap_in(self, sequence: Sequence, draft: Draft) -> None:
        """Bring back from the host what is not on the device any more."""
        host_blocks, present_count = sequence.host_blocks, len(sequence.blocks)
        missing = host_blocks[present_count:]
        new = self._pool.allocate_many(len(missing))
        draft.swap_ins += zip(missing, new, strict=True)
        sequence.add_blocks(new, self._block_size)
        sequence.computed_count = max(sequence.computed_count, sequence.swapped_count)
        draft.released_host.append(host_blocks)
        sequence.host_blocks = []

    def _enter(self, row: ChunkRow) -> None:
        """Move a sequence that got its slot from its queue to the running ones."""
        state, sequence = self._state, row.sequence
        if sequence.status is Status.WAITING:
            state.waiting.start(sequence)
            if sequence.sample_index == 0:  # what the others have from this one is no hit
                sequence.cached_count = row.cached_count
                state.counters.prompt_tokens += sequence.prompt_count
                state.counters.prefix_query_tokens += sequence.prompt_count
                state.counters.prefix_hit_tokens += row.cached_count
        else:
            state.preempted.remove(sequence)
        sequence.status = Status.RUNNING
        state.prefilling.append(sequence)
