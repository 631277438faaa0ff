"""Decides who runs in the next step.

    1. decode rows, in the order in which they were served last, one each while the budget lasts
    2. the next chunk of each running prompt, the largest that fits
    3. sequences that get a slot: preempted ones, then waiting ones in the policy's order
    4. what is left of the budget, to the chunks again

When blocks run out, the highest rank among the running sequences not yet placed in this step is preempted. Its blocks
come back once the plans in flight that use them have; until then whoever needs them sits out. New sequences preempt
nobody. So the lowest rank at hand always makes progress.

A prompt that is longer than the budget leaves half of it to those behind it, and at most two prompts stay unfinished
after a step; others enter only if they finish in it. So a long prompt at the head holds up nobody.

No clock, no sockets. Called by the core.
"""

from collections.abc import Iterator
from enum import Enum, auto

from common.messages import StepPlan
from scheduler_proc.draft import ChunkRow, Draft
from scheduler_proc.prefix_cache import NO_MATCH, Match
from scheduler_proc.queues import rank_of
from scheduler_proc.sequence import Sequence, Status
from scheduler_proc.state import Flight, State

UNFINISHED_LIMIT = 2
"""Prompts that may stay unfinished after a step."""
LOOKAHEAD = 64
"""Waiting sequences that are passed over at most in a step, because they cannot enter now but others behind can."""
WATERMARK_DIVISOR = 100
"""One block in this many stays available to running sequences when another is let in."""


class Admission(Enum):
    """What came of trying to give a sequence its slot."""

    PLACED = auto()
    LATER = auto()  # not in this step, for its own reasons; those behind it may go ahead
    NO_ROOM = auto()  # the blocks do not suffice; those behind it wait too


class Planner:
    """Plans steps over the books.

    Args:
        state: the books.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._pool = state.pool
        self._block_size = state.limits.block_size
        self._decode_bound = 1  # tokens that a decode row computes at most; results correct the lengths downwards
        self._watermark = state.limits.block_count // WATERMARK_DIVISOR
        self._refused: tuple[Sequence, int] | None = None  # who found no room, with how many blocks available

    def plan_step(self) -> StepPlan | None:
        """The next step, which the caller sends before anything else happens; None when nothing can run now."""
        draft = Draft(self._state.planned_step + 1, self._state.limits.max_num_batched_tokens)
        self._place_decodes(draft)
        if draft.decode_rows:
            draft.budget = self._state.step_time.chunk_budget(draft.budget)
        self._place_chunks(draft)
        self._admit(draft)
        if draft.is_empty:
            return None
        self._top_up(draft)
        return self._commit(draft)

    # ---- decode rows

    def _place_decodes(self, draft: Draft) -> None:
        """One row for each decoding sequence, longest unserved first, while budget and blocks last."""
        order, step_id, bound = self._state.decoding.copy(), draft.step_id, self._decode_bound
        add_row, add_slot = draft.decode_rows.append, draft.decode_slots.append
        places = draft.budget // bound
        for sequence in order:
            if sequence.slot < 0:  # preempted a moment ago, for another row of this step
                continue
            if not places:
                break
            computed = sequence.computed_count + bound
            if computed > sequence.capacity and not self._append_decode_blocks(sequence, computed, draft):
                continue
            places -= 1
            sequence.computed_count = computed
            sequence.planned_len = planned_len = sequence.planned_len + bound
            sequence.last_step = step_id
            add_row(sequence)
            add_slot(sequence.slot)
            if planned_len >= sequence.max_len:
                draft.ending.append(sequence)
        draft.budget -= len(draft.decode_rows) * bound
        if len(draft.decode_rows) < len(self._state.decoding):
            unserved = [sequence for sequence in self._state.decoding if sequence.last_step != step_id]
            self._state.decoding = unserved + draft.decode_rows

    def _append_decode_blocks(self, sequence: Sequence, computed: int, draft: Draft) -> bool:
        needed = -(-computed // self._block_size) - len(sequence.blocks)
        if self._pool.available_count < needed and not self._make_room(sequence, needed, draft):
            return False
        for _ in range(needed):
            block = self._pool.allocate()
            sequence.blocks.append(block)
            draft.decode_blocks.append(block)
            draft.decode_block_rows.append(len(draft.decode_rows))
        sequence.capacity = len(sequence.blocks) * self._block_size
        return True

    # ---- blocks

    def _make_room(self, sequence: Sequence, needed: int, draft: Draft) -> bool:
        """Preempt until `needed` blocks are available; False if the sequence must sit out this step."""
        state, pool = self._state, self._pool
        while pool.available_count < needed:
            if pool.available_count + state.pending_count >= needed:
                return False  # they come back with plans in flight
            unplaced = [s for s in state.decoding + state.prefilling if s.last_step != draft.step_id]
            if len(unplaced) < 2:
                return False  # it comes first in the next step, and finds the others unplaced
            victim = max(unplaced, key=rank_of)
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        if self._swaps(victim):
            blocks, host_blocks = self._state.swap_out(victim, draft.step_id)
            draft.swap_outs += zip(blocks, host_blocks, strict=True)
            draft.released.append(blocks)
        else:
            self._state.preempt(victim)

    def _swaps(self, victim: Sequence) -> bool:
        """Whether the victim's K/V goes to the host: as told, or where moving it twice is faster than computing it."""
        limits, host_pool = self._state.limits, self._state.host_pool
        if limits.preemption == "recompute" or host_pool is None or host_pool.available_count < len(victim.blocks):
            return False
        token_s = self._state.step_time.token_s
        if limits.preemption == "swap" or token_s is None:
            return True
        swap_s = 2 * len(victim.blocks) * limits.block_bytes / limits.link_bytes_per_s
        return swap_s < victim.computed_count * token_s

    def _extend(self, row: ChunkRow, count: int, draft: Draft) -> None:
        """`count` more tokens for the row, with the blocks for them."""
        sequence = row.sequence
        row.count += count
        sequence.computed_count = row.first + row.count
        needed = -(-sequence.computed_count // self._block_size) - len(sequence.blocks)
        new = self._pool.allocate_many(needed)
        sequence.blocks += new
        sequence.capacity = len(sequence.blocks) * self._block_size
        if row.blocks is not None:
            row.blocks += new
        draft.budget -= count

    def _room(self, sequence: Sequence) -> int:
        """Tokens for which the sequence has blocks or can get them."""
        return sequence.capacity - sequence.computed_count + self._pool.available_count * self._block_size

    # ---- prompts that run already

    def _place_chunks(self, draft: Draft) -> None:
        """The next chunk of each prompt that is under way."""
        order = self._state.prefilling.copy()
        for index, sequence in enumerate(order):
            if not draft.budget:
                return
            if sequence.slot < 0 or (self._room(sequence) < 1 and not self._make_room(sequence, 1, draft)):
                continue
            others = index + 1 < len(order) or self._others_wait()
            count = min(_share(sequence.unplanned_count, draft.budget, others), self._room(sequence))
            row = ChunkRow(sequence, sequence.computed_count, 0, is_new=False)
            self._extend(row, count, draft)
            self._place(row, draft)

    def _place(self, row: ChunkRow, draft: Draft) -> None:
        row.sequence.last_step = draft.step_id
        draft.chunks.append(row)

    def _others_wait(self) -> bool:
        return bool(self._state.free_slots) and (len(self._state.waiting) + len(self._state.preempted) > 0)

    def _top_up(self, draft: Draft) -> None:
        """What nobody else could use goes to the unfinished chunks."""
        for row in draft.chunks:
            extra = min(row.sequence.unplanned_count, draft.budget, self._room(row.sequence))
            if extra > 0:
                self._extend(row, extra, draft)

    # ---- new slots

    def _admit(self, draft: Draft) -> None:
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
            admission = self._try_admit(sequence, draft, promised)
            if admission is Admission.NO_ROOM:
                break
            if admission is Admission.LATER:
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

    def _try_admit(self, sequence: Sequence, draft: Draft, promised: int) -> Admission:
        length = len(sequence.tokens)
        must_finish = self._unfinished_count(draft) >= UNFINISHED_LIMIT
        if must_finish and length > draft.budget:
            return Admission.LATER
        alone = not (self._state.running_count or self._state.in_flight or draft.chunks)
        if self._refused == (sequence, self._pool.available_count) and not alone:
            return Admission.NO_ROOM
        match = self._lookup(sequence, draft)
        if match is None or self._under_way(draft, sequence, match.token_count):
            return Admission.LATER
        fitting = self._fitting(sequence, match, promised, alone)
        if fitting is None:
            self._refused = (sequence, self._pool.available_count)
            return Admission.NO_ROOM
        self._take_prefix(sequence, fitting, draft)
        if sequence.host_blocks:
            self._swap_in(sequence, draft)
        row = ChunkRow(sequence, sequence.computed_count, 0, is_new=True)
        self._extend(row, _share(length - sequence.computed_count, draft.budget, others=True), draft)
        self._place(row, draft)
        sequence.slot = self._state.free_slots.popleft()
        return Admission.PLACED

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
        sequence.blocks = match.blocks.copy()
        if match.token_count % self._block_size:
            source, copy = sequence.blocks[-1], self._pool.allocate()
            draft.copies.append((source, copy))
            sequence.blocks[-1] = copy
        sequence.capacity = len(sequence.blocks) * self._block_size
        sequence.computed_count = match.token_count

    def _swap_in(self, sequence: Sequence, draft: Draft) -> None:
        """Bring back from the host what is not on the device any more."""
        host_blocks, present_count = sequence.host_blocks, len(sequence.blocks)
        missing = host_blocks[present_count:]
        new = self._pool.allocate_many(len(missing))
        draft.swap_ins += zip(missing, new, strict=True)
        sequence.blocks += new
        sequence.capacity = len(sequence.blocks) * self._block_size
        sequence.computed_count = max(sequence.computed_count, sequence.swapped_count)
        draft.released_host.append(host_blocks)
        sequence.host_blocks = []

    def _enter(self, row: ChunkRow) -> None:
        """Move a sequence that got its slot from its queue to the running ones."""
        state, sequence = self._state, row.sequence
        if sequence.status is Status.WAITING:
            state.waiting.start(sequence)
            # what a sample has from another one of its request is no hit
            sequence.cached_count = row.cached_count if sequence.sample_index == 0 else 0
            state.counters.prompt_tokens += sequence.prompt_count
        else:
            state.preempted.remove(sequence)
        if sequence.sample_index == 0:
            state.counters.prefix_query_tokens += len(sequence.tokens)
            state.counters.prefix_hit_tokens += row.cached_count
        sequence.status = Status.RUNNING
        state.prefilling.append(sequence)

    # ---- the plan

    def _commit(self, draft: Draft) -> StepPlan:
        """Write the step into the books: what it computes is findable, what it ends leaves its slot."""
        state = self._state
        plan = draft.to_plan(state.cleared_slots)
        state.cleared_slots = []
        flight = Flight(draft.step_id, draft.decode_rows, len(draft.decode_rows), {})
        flight.released = [[source] for source, _ in draft.copies] + draft.released
        flight.released_host = draft.released_host
        state.pending_count += len(draft.copies)
        state.planned_step = draft.step_id
        state.in_flight.append(flight)
        if draft.chunks:
            self._commit_chunks(draft, flight)
        for sequence in draft.ending:
            self._drain(sequence)
        counters = state.counters
        counters.steps += 1
        counters.last_decode_rows = flight.decode_count
        counters.last_chunk_tokens = flight.chunk_tokens = sum(row.count for row in draft.chunks)
        return plan

    def _commit_chunks(self, draft: Draft, flight: Flight) -> None:
        """Index what the chunks compute; prompts that are complete go on to decoding."""
        state = self._state
        complete = set()
        for row in draft.chunks:
            sequence = row.sequence
            flight.chunk_sequences[sequence.slot] = sequence
            state.cache.insert(sequence.chain, sequence.tokens, sequence.blocks, sequence.computed_count)
            if row.samples:
                complete.add(sequence)
                flight.sampled.append(sequence)
                sequence.planned_len += 1
                sequence.expect_block(self._block_size)
                if sequence.planned_len >= sequence.max_len:
                    draft.ending.append(sequence)
        state.decoding += [row.sequence for row in draft.chunks if row.sequence in complete]
        state.prefilling = sorted((s for s in state.prefilling if s not in complete), key=rank_of)

    def _drain(self, sequence: Sequence) -> None:
        """Its last token is planned: the slot is free for the next step, the blocks once the result is here."""
        self._state.decoding.remove(sequence)
        self._state.free_slot(sequence)
        sequence.status = Status.DRAINING


def _share(wanted: int, budget: int, others: bool) -> int:
    """Tokens for a chunk: all that are wanted if the budget allows, else half of the budget if others want some."""
    if wanted <= budget:
        return wanted
    return (budget + 1) // 2 if others else budget
