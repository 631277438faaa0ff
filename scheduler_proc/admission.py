"""Gives slots to sequences that want to run: preempted ones first, then waiting ones in the policy's order.

A sequence is admitted when there are blocks for all its known tokens, besides those promised to the prompts already
under way. Tokens that need not be computed come from the prefix cache, from another sample of the same request, or from
host memory. If another prompt is about to compute the sequence's next block, the sequence waits for that prompt, since
it could only compute the same block again.

At most two prompts stay unfinished after a step; beyond them, new ones are admitted only if they finish in it. Nobody
overtakes a preempted sequence. No clock, no sockets. Called by the planner.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from scheduler_proc.draft import ChunkRow, Draft, chunk_share
from scheduler_proc.leaders import Leaders
from scheduler_proc.prefix_cache import NO_MATCH, Match
from scheduler_proc.sequence import Leader, Sequence, Status
from scheduler_proc.state import State

UNFINISHED_LIMIT = 2
"""Prompts that may stay unfinished after a step."""
LOOKAHEAD = 64
"""At most so many waiting sequences that cannot enter now are passed over in a step, to let those behind them enter."""
LOOKUP_LIMIT = 1 << 18
"""Tokens looked up in a step, about: finding prefixes takes some 30 ns per token, and the step waits for it."""
RETRY_STEPS = 32
"""Steps until a sequence that found too few blocks, or too little of its prompt in the cache, is looked up again."""
WATERMARK_DIVISOR = 100
"""Admission leaves one block in this many free, for running sequences to grow into."""


class Outcome(Enum):
    """The result of trying to admit a sequence."""

    PLACED = auto()
    LATER = auto()  # not in this step, for its own reasons; those behind it may go ahead
    NO_ROOM = auto()  # there are too few blocks; those behind it wait too


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The sequence that last found too few blocks: looking it up again in each step would be costly.

    Attributes:
        sequence: None for nobody.
        needed: blocks that it needs.
        until_step: when to look it up again, since others may have computed its start meanwhile.
    """

    sequence: Sequence | None
    needed: int
    until_step: int

    def still_holds(self, sequence: Sequence, room: int, step_id: int) -> bool:
        """Whether the sequence would find too few blocks again."""
        return sequence is self.sequence and room < self.needed and step_id < self.until_step


class Admission:
    """Admits sequences to a step: gives them slots while there are tokens, slots and blocks for them.

    Args:
        state: the scheduler's.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._pool = state.pool
        self._block_size = state.limits.block_size
        self._watermark = state.limits.block_count // WATERMARK_DIVISOR
        self._looked_up = 0  # tokens looked up in this step
        self._leaders: Leaders | None = None  # of this step, once somebody asked
        self._no_room = NoRoom(None, 0, 0)

    def admit(self, draft: Draft) -> None:
        """Give out slots: to preempted sequences first, then in the policy's order; `enter` has to follow."""
        state = self._state
        if draft.decode_rows and not state.step_time.admits():
            return
        promised = sum(self._missing_blocks(sequence) for sequence in state.prefilling)
        unfinished = self._unfinished_count(draft)
        passed_over = 0
        self._looked_up, self._leaders = 0, None
        for sequence in self._candidates():
            if not draft.budget or not state.free_slots or passed_over > LOOKAHEAD or self._looked_up > LOOKUP_LIMIT:
                break
            outcome = self._try_admit(sequence, draft, promised, unfinished)
            if outcome is Outcome.NO_ROOM or (outcome is Outcome.LATER and sequence.status is not Status.WAITING):
                break  # nobody overtakes a preempted sequence
            if outcome is Outcome.LATER:
                passed_over += 1
                continue
            promised += self._missing_blocks(sequence)
            unfinished += not draft.chunks[-1].samples

    def enter(self, draft: Draft) -> None:
        """Move the sequences that got a slot from their queues to the running ones, once the step has been sent."""
        self._leaders = None  # an engine at rest keeps no step's prompts
        for row in draft.chunks:
            if row.is_new:
                self._enter(row)

    def _candidates(self) -> Iterator[Sequence]:
        for sequence in self._state.preempted:
            if sequence.last_step > self._state.completed_step:
                return  # its last tokens are not known yet; nobody overtakes it
            yield sequence
        yield from self._state.waiting.in_order()

    def _missing_blocks(self, sequence: Sequence) -> int:
        return -(-sequence.planned_len // self._block_size) - len(sequence.blocks)

    def _try_admit(self, sequence: Sequence, draft: Draft, promised: int, unfinished: int) -> Outcome:
        """Place the sequence in the step, or say why not. What is cheap to know is asked before the prefix cache is."""
        most = sequence.max_len  # tokens that may remain to be computed
        if sequence.status is Status.WAITING and unfinished >= UNFINISHED_LIMIT:
            most = draft.budget  # it has to finish in this step
        if _is_ahead(sequence.leader) or (sequence.uncached_count > most and draft.step_id < sequence.retry_step):
            return Outcome.LATER
        # With nothing else running there is nobody to keep blocks for, and nothing whose end is worth waiting for.
        alone = not (self._state.running_count or self._state.in_flight or draft.chunks)
        room = self._pool.available_count - promised - (0 if alone else self._watermark)
        if self._no_room.still_holds(sequence, room, draft.step_id) and not alone:
            return Outcome.NO_ROOM
        # Tokens that another sequence has, or is about to have, need not be computed.
        holder = self._holder(sequence, draft)
        if holder is not None and not _has_prompt(holder, draft):
            sequence.leader = Leader(holder, holder.prompt_count)
            return Outcome.LATER
        match = self._lookup(sequence, holder)
        sequence.leader = self._leader(draft, sequence, match.token_count)
        if sequence.leader is not None or self._exceeds(sequence, match, most, draft):
            return Outcome.LATER
        # The rest has to fit; giving up the match's last block, which would be copied, can make it fit.
        fitting = self._fitting(sequence, match, room)
        if fitting is None:
            needed = self._needed(sequence, match) - self._copies(match)
            self._no_room = NoRoom(sequence, needed, draft.step_id + RETRY_STEPS)
            return Outcome.NO_ROOM
        if fitting is not match and self._exceeds(sequence, fitting, most, draft):
            return Outcome.LATER
        self._place(sequence, fitting, draft)
        return Outcome.PLACED

    def _place(self, sequence: Sequence, match: Match, draft: Draft) -> None:
        """Give the sequence its slot, the matched blocks, and a first chunk of what is left."""
        if match.blocks:
            self._take_prefix(sequence, match, draft)
        else:
            sequence.computed_count = 0
        if sequence.host_blocks:
            self._swap_in(sequence, draft)
        row = ChunkRow(sequence, sequence.computed_count, 0, is_new=True)
        draft.place(row)
        count = chunk_share(len(sequence.tokens) - sequence.computed_count, draft.budget, others=True)
        draft.extend(row, count, self._pool)
        sequence.slot = self._state.free_slots.popleft()

    def _exceeds(self, sequence: Sequence, match: Match, most: int, draft: Draft) -> bool:
        """Whether more than `most` tokens remain to be computed; if so, the sequence is not looked up for a while."""
        sequence.uncached_count = len(sequence.tokens) - match.token_count
        sequence.retry_step = draft.step_id + RETRY_STEPS
        return sequence.uncached_count > most

    def _unfinished_count(self, draft: Draft) -> int:
        started = sum(sequence.unplanned_count > 0 for sequence in self._state.prefilling)
        return started + sum(row.is_new and not row.samples for row in draft.chunks)

    def _holder(self, sequence: Sequence, draft: Draft) -> Sequence | None:
        """Another sample of the request that has blocks; preferably one that has computed the prompt."""
        if len(sequence.request.sequences) == 1 or sequence.status is Status.SWAPPED or sequence.needs_all_computed:
            return None
        holders = [s for s in sequence.request.sequences if s.blocks and s is not sequence]
        return next((s for s in holders if _has_prompt(s, draft)), holders[0] if holders else None)

    def _lookup(self, sequence: Sequence, holder: Sequence | None) -> Match:
        """The tokens that need not be computed: from the cache, or from another sample that has computed the prompt."""
        self._looked_up += len(sequence.tokens)
        if sequence.status is Status.SWAPPED:
            return self._whole_blocks(sequence)
        if sequence.needs_all_computed:
            sequence.chain.rewind()
            return NO_MATCH
        match = self._state.cache.lookup(sequence.chain, sequence.tokens, len(sequence.tokens) - 1)
        shared_count = min(sequence.prompt_count, len(sequence.tokens) - 1)
        if holder is None or shared_count <= match.token_count:
            return match
        return Match(holder.blocks[: -(-shared_count // self._block_size)], shared_count)

    def _whole_blocks(self, sequence: Sequence) -> Match:
        """The whole blocks of a swapped sequence that are still on the device; the rest comes from the host."""
        limit = len(sequence.tokens) - 1
        if sequence.prompt_logprobs is not None:  # what others have computed gave it no logits
            limit = min(limit, sequence.swapped_count)
        match = self._state.cache.lookup(sequence.chain, sequence.tokens, limit)
        count = match.token_count // self._block_size
        return Match(match.blocks[:count], count * self._block_size)

    def _leader(self, draft: Draft, sequence: Sequence, matched: int) -> Leader | None:
        """Another prompt that computes the block after the match in this step or later.

        Once it has, the sequence finds that block in the prefix cache.
        """
        if (
            not (draft.chunks or self._state.prefilling)
            or matched - matched % self._block_size + self._block_size > len(sequence.tokens)
            or matched == len(sequence.tokens) - 1  # all is there but what must be computed anyway
            or self._state.limits.prefix_cache == "off"
            or sequence.status is Status.SWAPPED
            or sequence.needs_all_computed
        ):
            return None
        if self._leaders is None:
            self._leaders = Leaders(draft, self._state.prefilling, self._block_size)
        return self._leaders.find(sequence, matched)

    def _needed(self, sequence: Sequence, match: Match) -> int:
        """How many of the available blocks the sequence would take: new ones, and matched ones that nobody holds."""
        count = -(-len(sequence.tokens) // self._block_size)
        if not match.blocks:
            return count
        held_by_others = sum(1 for block in match.blocks if self._pool.refs(block))
        return count - held_by_others + self._copies(match)

    def _copies(self, match: Match) -> int:
        return 1 if match.token_count % self._block_size else 0

    def _fitting(self, sequence: Sequence, match: Match, room: int) -> Match | None:
        """The match, without the block that would be copied if it does not fit with it; None if nothing fits."""
        if self._needed(sequence, match) <= room:
            return match
        if not self._copies(match):
            return None
        blocks = match.blocks[:-1]
        match = Match(blocks, len(blocks) * self._block_size)
        return match if self._needed(sequence, match) <= room else None

    def _take_prefix(self, sequence: Sequence, match: Match, draft: Draft) -> None:
        """Share the matched blocks; one that is matched only partly is copied, since the sequence will write to it."""
        for block in match.blocks:
            self._pool.share(block)
        blocks = match.blocks.copy()
        if match.token_count % self._block_size:
            source, blocks[-1] = blocks[-1], self._pool.allocate()
            draft.copies.append((source, blocks[-1]))
        sequence.add_blocks(blocks, self._block_size)
        sequence.computed_count = match.token_count

    def _swap_in(self, sequence: Sequence, draft: Draft) -> None:
        """Bring the blocks back from the host that are not on the device any more."""
        host_blocks, present_count = sequence.host_blocks, len(sequence.blocks)
        missing = host_blocks[present_count:]
        new = self._pool.allocate_many(len(missing))
        draft.swap_ins += zip(missing, new, strict=True)
        sequence.add_blocks(new, self._block_size)
        sequence.computed_count = max(sequence.computed_count, sequence.swapped_count)
        draft.released_host.append(host_blocks)
        sequence.host_blocks = []

    def _enter(self, row: ChunkRow) -> None:
        """Move a sequence that was placed from its queue to the running ones."""
        state, sequence = self._state, row.sequence
        if sequence.status is Status.WAITING:
            state.waiting.start(sequence)
            if sequence.sample_index == 0 and len(sequence.tokens) == sequence.prompt_count:
                # what the others have from this one is no hit, nor what was reported before a restart
                sequence.cached_count = row.cached_count
                state.counters.prompt_tokens += sequence.prompt_count
                state.counters.prefix_query_tokens += sequence.prompt_count
                state.counters.prefix_hit_tokens += row.cached_count
        else:
            state.preempted.remove(sequence)
        sequence.status = Status.RUNNING
        state.prefilling.append(sequence)


def _has_prompt(sequence: Sequence, draft: Draft) -> bool:
    """Whether the sequence's prompt was computed in the steps before this one."""
    is_computed = sequence.planned_len > sequence.prompt_count <= sequence.computed_count
    return is_computed and not (
        sequence.last_step == draft.step_id and any(r.sequence is sequence for r in draft.chunks)
    )


def _is_ahead(leader: Leader | None) -> bool:
    """Whether the leader is still computing the tokens that are shared with it."""
    if leader is None:
        return False
    return leader.sequence.status is Status.RUNNING and leader.sequence.computed_count < leader.shared_count
