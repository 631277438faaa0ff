"""Decides who runs in the next step.

    1. decode rows, one token each while the budget lasts; whoever has waited longest since its last step comes first
    2. the next chunk of each running prompt, as large as fits
    3. sequences that get a slot: preempted ones, then waiting ones in the policy's order
    4. what is left of the budget, to the chunks again

When blocks run out, the running sequence with the highest rank that is not placed in this step yet is preempted. Its
blocks can be reused once all plans in flight that use them have come back; until then, a sequence that needs a block
skips the step. New sequences preempt nobody. So the lowest rank that is running always makes progress.

A prompt that is longer than the budget leaves half of it to those behind it, so a long prompt at the head of the queue
does not hold up the others. `admission` decides who gets a slot.

No clock, no sockets. Called by the core.
"""

from collections.abc import Callable

from common.messages import EARLY_POOLINGS, StepPlan
from scheduler_proc.admission import Admission
from scheduler_proc.draft import ChunkRow, Draft, chunk_share
from scheduler_proc.queues import rank_of
from scheduler_proc.sequence import Sequence, Status
from scheduler_proc.state import Flight, State


class Planner:
    """Plans one step after another.

    Args:
        state: the scheduler's.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._pool = state.pool
        self._block_size = state.limits.block_size
        self._decode_bound = 1  # tokens that a decode row computes at most; more with speculative decoding
        self._admission = Admission(state)

    def plan_step(self, send: Callable[[StepPlan], None] = lambda plan: None) -> StepPlan | None:
        """The next step; None when nothing can run now.

        Args:
            send: gets the step while the state does not know of it yet, so that the worker need not wait for that. A
                caller without it sends the step before anything else happens.
        """
        draft = Draft(self._state.planned_step + 1, self._state.limits.max_num_batched_tokens, self._block_size)
        self._place_decodes(draft)
        draft.budget = self._state.step_time.chunk_budget(draft.budget, decodes=bool(draft.decode_rows))
        self._place_chunks(draft)
        self._admission.admit(draft)
        if draft.is_empty:
            return None
        self._top_up(draft)
        return self._commit(draft, send)

    # ---- decode rows

    def _place_decodes(self, draft: Draft) -> None:
        """One row for each decoding sequence, those that waited longest first, while budget and blocks last."""
        order, step_id, bound = self._state.decoding.copy(), draft.step_id, self._decode_bound
        if self._state.grammar_count:
            order = [sequence for sequence in order if sequence.is_plannable]
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
        new = self._pool.allocate_many(needed)
        sequence.add_blocks(new, self._block_size)
        draft.decode_blocks += new
        draft.decode_block_rows += [len(draft.decode_rows)] * needed
        return True

    # ---- blocks

    def _make_room(self, sequence: Sequence, needed: int, draft: Draft) -> bool:
        """Preempt until `needed` blocks are available; False if the sequence must skip this step."""
        state, pool = self._state, self._pool
        while pool.available_count < needed:
            if pool.available_count + state.pending_count >= needed:
                return False  # enough blocks will be free when the plans in flight have come back
            unplaced = [s for s in state.decoding + state.prefilling if s.last_step != draft.step_id]
            if len(unplaced) < 2:
                return False  # all others are placed; in the next step this sequence comes first, and can preempt them
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
        """Whether the victim's K/V is swapped to the host: as configured, or (auto) if moving it twice is faster.

        Not for an embedding: what it needs of earlier tokens is lost with the slot, so all of them are computed again.
        """
        if victim.request.message.pooling in EARLY_POOLINGS:
            return False
        limits, host_pool = self._state.limits, self._state.host_pool
        if limits.preemption == "recompute" or host_pool is None or host_pool.available_count < len(victim.blocks):
            return False
        token_s = self._state.step_time.token_s
        if limits.preemption == "swap" or token_s is None:
            return True
        swap_s = 2 * len(victim.blocks) * limits.block_bytes / limits.link_bytes_per_s
        return swap_s < victim.computed_count * token_s

    def _room(self, sequence: Sequence) -> int:
        """How many more tokens the sequence has blocks for, or can get blocks for."""
        return sequence.capacity - sequence.computed_count + self._pool.available_count * self._block_size

    # ---- prompts that run already

    def _place_chunks(self, draft: Draft) -> None:
        """Place the next chunk of each prompt that is under way."""
        order = self._state.prefilling.copy()
        for index, sequence in enumerate(order):
            if not draft.budget:
                return
            if sequence.slot < 0 or (self._room(sequence) < 1 and not self._make_room(sequence, 1, draft)):
                continue
            others = index + 1 < len(order) or self._others_wait()
            count = min(chunk_share(sequence.unplanned_count, draft.budget, others), self._room(sequence))
            row = ChunkRow(sequence, sequence.computed_count, 0, is_new=False)
            draft.place(row)
            draft.extend(row, count, self._pool)

    def _others_wait(self) -> bool:
        return bool(self._state.free_slots) and (len(self._state.waiting) + len(self._state.preempted) > 0)

    def _top_up(self, draft: Draft) -> None:
        """Give the budget that nobody else could use to the unfinished chunks."""
        for row in draft.chunks:
            wanted = min(row.sequence.unplanned_count, draft.budget)
            if wanted and (extra := min(wanted, self._room(row.sequence))) > 0:
                draft.extend(row, extra, self._pool)

    # ---- the plan

    def _commit(self, draft: Draft, send: Callable[[StepPlan], None]) -> StepPlan:
        """Send the step and record it: index the blocks that it computes, free the slots of sequences that it ends."""
        state = self._state
        plan = draft.to_plan(state.cleared_slots, has_grammars=state.grammar_count > 0)
        send(plan)
        self._admission.enter(draft)
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
        counters.decode_tokens += flight.decode_count
        counters.chunk_tokens += flight.chunk_tokens
        state.chunk_tokens_in_flight += flight.chunk_tokens
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
        """Its last token is planned: its slot is free for the next step, its blocks are when the result has come."""
        self._state.decoding.remove(sequence)
        self._state.free_slot(sequence)
        sequence.status = Status.DRAINING
