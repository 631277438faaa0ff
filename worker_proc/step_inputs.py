"""From a step plan to the model's inputs: the host's part, and the CPU's version of the device's part.

The host checks a plan against its mirror of the slots and packs it into one int32 buffer (`StepStager.pack`), in the
layout of `kernels/step_inputs.py`. Token ids, positions, slot mapping and the rest are then made from that buffer and
the slots' memory: on a GPU by one kernel, on the CPU by `fill_inputs`. Nothing here knows the model or reads a sampled
token.
"""

from dataclasses import dataclass

import numpy as np
import torch

from common.messages import StepPlan
from kernels.step_layout import HEADER, PlanLayout, SlotState, StepInputs
from worker_proc.slots import IntArray, SlotMemory, SlotMirror, StateWrites


@dataclass(frozen=True)
class PromptRows:
    """Chunk tokens whose logits predict a prompt token, of a slot that asked for prompt log probabilities.

    first_token: index of the first one in the step; first_position: its position in the prompt.
    """

    slot: int
    first_token: int
    first_position: int
    count: int


@dataclass(frozen=True)
class PooledRows:
    """A chunk's tokens, of a slot that asked for an embedding.

    first_token: index of the first one in the step; is_last: whether the prompt ends with them; pooling: of POOLINGS.
    """

    slot: int
    first_token: int
    count: int
    is_last: bool
    pooling: str


@dataclass(frozen=True)
class PackedStep:
    """A plan, checked and packed.

    Attributes:
        size: elements of the buffer that the plan takes.
        sampled_rows: [S]: rows that sample, in the order of the result's tokens.
        sampled_slots: [S]: their slots.
        sampled_positions: [S]: where each sampled token goes in its request.
        prompt_rows: for slots that asked for prompt log probabilities.
        pooled_rows: for slots that asked for an embedding.
    """

    size: int
    row_count: int
    decode_row_count: int
    token_count: int
    sampled_rows: IntArray
    sampled_slots: IntArray
    sampled_positions: IntArray
    prompt_rows: tuple[PromptRows, ...]
    pooled_rows: tuple[PooledRows, ...]


class StepStager:
    """Checks step plans against the mirror, advances it, and packs them at the places of one layout.

    Args:
        layout: of the largest plan.
        token_limit: tokens that a step may compute.
    """

    def __init__(self, memory: SlotMemory, mirror: SlotMirror, layout: PlanLayout, token_limit: int) -> None:
        self._memory, self._mirror = memory, mirror
        self._layout, self._token_limit = layout, token_limit

    def change_slots(self, plan: StepPlan) -> StateWrites:
        """Free and fill the mirror's slots as the plan says; returns what the new ones write on the device."""
        for slot in plan.cleared_slots:
            self._mirror.clear(slot)
        writes = StateWrites(self._memory)
        for init in plan.new_slots:
            self._mirror.start(init)
            writes.add_slot(init)
        return writes

    def pack(self, plan: StepPlan, target: IntArray) -> PackedStep:
        """Advance the mirror by the plan's rows and pack it into `target`, int32 [layout.size].

        Raises:
            AssertionError: the plan does not fit what the slots hold, which is a fault of ours; the text says how.
        """
        layout, limit, decode_rows = self._layout, self._token_limit, len(plan.decode_slots)
        rows, block_count = decode_rows + len(plan.chunk_slots), len(plan.block_ids)
        assert rows <= layout.rows and block_count <= layout.blocks, (
            f"step {plan.step_id}: {rows} rows, {block_count} blocks"
        )
        slots, counts = target[layout.row_slots][:rows], target[layout.token_counts][:rows]
        slots[:decode_rows], counts[:decode_rows] = plan.decode_slots, 1
        slots[decode_rows:], counts[decode_rows:] = plan.chunk_slots, plan.chunk_token_counts
        assert len(set(slots.tolist())) == rows, f"step {plan.step_id}: a slot stands in two rows"
        starts = _put_sums(target[layout.query_starts], counts)
        prompt_rows = self._prompt_rows(plan, starts)
        target[layout.first_blocks][:rows], appends = self._append_blocks(plan, slots)
        _put_sums(target[layout.append_starts], appends)
        target[layout.appended_ids][:block_count] = plan.block_ids
        token_count = int(starts[-1])
        assert token_count <= limit, f"step {plan.step_id} computes {token_count} tokens, more than {limit}"
        target[:HEADER] = rows, decode_rows, token_count, block_count
        samples = np.ones(rows, dtype=bool)
        samples[decode_rows:] = plan.chunk_samples
        sampled_rows = np.flatnonzero(samples)
        sampled_slots = slots[sampled_rows]
        positions = self._mirror.known_lengths[sampled_slots]
        self._advance(slots, counts, samples)
        return PackedStep(
            layout.appended_ids.start + block_count, rows, decode_rows, token_count, sampled_rows, sampled_slots,
            positions, prompt_rows, self._pooled_rows(plan, starts),
        )  # fmt: skip

    def _append_blocks(self, plan: StepPlan, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Per row: its block count so far, and how many blocks it gets."""
        decode_counts = plan.decode_block_counts or bytes(len(plan.decode_slots))
        counts = np.concatenate((np.frombuffer(decode_counts, np.uint8), plan.chunk_block_counts), dtype=np.int32)
        first_blocks = self._mirror.block_counts[slots]
        self._mirror.block_counts[slots] += counts
        most = self._mirror.block_counts[slots].max(initial=0)
        capacity = self._memory.block_capacity
        assert most <= capacity, f"step {plan.step_id}: a slot gets {most} blocks, its table holds {capacity}"
        return first_blocks, counts

    def _advance(self, slots: IntArray, counts: IntArray, samples: np.ndarray) -> None:
        """Grow the lengths, after checking that each row computes tokens it knows and samples at the end of them."""
        mirror = self._mirror
        lengths = mirror.computed_lengths[slots] + counts
        known = mirror.known_lengths[slots]
        room = mirror.block_counts[slots] * self._memory.block_size
        good = (counts > 0) & (lengths <= known) & (samples == (lengths == known)) & (lengths <= room)
        if not good.all():
            row = int(np.argmin(good))
            raise AssertionError(
                f"row {row}, slot {slots[row]}: computes tokens up to {lengths[row]} (samples: {samples[row]}), knows "
                f"{known[row]}, has blocks for {room[row]}"
            )
        assert known[samples].max(initial=0) < self._memory.token_capacity, "a slot samples beyond its last token place"
        mirror.computed_lengths[slots] = lengths
        mirror.known_lengths[slots] += samples

    def _prompt_rows(self, plan: StepPlan, starts: IntArray) -> tuple[PromptRows, ...]:
        """Among the chunk rows: a decode row is past its prompt."""
        found = []
        for slot, count, start in zip(
            plan.chunk_slots, plan.chunk_token_counts, starts[len(plan.decode_slots) :].tolist(), strict=False
        ):
            sampling = self._mirror.sampling[slot]
            assert sampling is not None, f"step {plan.step_id}: slot {slot} has a chunk, but it is free"
            if sampling.prompt_logprobs < 0:
                continue
            position = int(self._mirror.computed_lengths[slot])
            predicting = min(count, int(self._mirror.prompt_lengths[slot]) - 1 - position)
            if predicting > 0:
                found.append(PromptRows(slot, start, position, predicting))
        return tuple(found)

    def _pooled_rows(self, plan: StepPlan, starts: IntArray) -> tuple[PooledRows, ...]:
        """Among the chunk rows."""
        found = []
        firsts = starts[len(plan.decode_slots) :].tolist()
        for slot, count, samples, first in zip(
            plan.chunk_slots, plan.chunk_token_counts, plan.chunk_samples, firsts, strict=False
        ):
            sampling = self._mirror.sampling[slot]
            if sampling is not None and sampling.pooling:
                found.append(PooledRows(slot, first, count, bool(samples), sampling.pooling))
        return tuple(found)


def _put_sums(target: IntArray, counts: IntArray) -> IntArray:
    """Write the running sums of `counts`, from 0, to the start of `target`; returns what was written."""
    written = target[: len(counts) + 1]
    written[0] = 0
    np.cumsum(counts, out=written[1:])
    return written


def fill_inputs(plan: IntArray, layout: PlanLayout, state: SlotState, inputs: StepInputs, block_size: int) -> None:
    """Append the plan's blocks, fill the inputs and advance the slots' computed lengths, on the CPU.

    The same as the kernel in `kernels/step_inputs.py`, whose docstring has formula, tables and padding.
    """
    row_count, _, token_count, block_count = plan[:HEADER].tolist()
    slots, counts = plan[layout.row_slots][:row_count], plan[layout.token_counts][:row_count]
    tables, computed_lengths = state.block_tables.numpy(), state.computed_lengths.numpy()
    if block_count:
        _append_to_tables(plan, layout, tables, row_count)
    starts = plan[layout.query_starts][: row_count + 1]
    rows = np.repeat(np.arange(row_count), counts)
    computed = computed_lengths[slots]
    positions = computed[rows] + np.arange(token_count) - starts[rows]
    token_slots = slots[rows]
    blocks = tables[token_slots, positions // block_size].astype(np.int64)
    lengths = computed + counts
    sampled = lengths >= state.known_lengths.numpy()[slots]
    _put(inputs.token_ids, state.slot_token_ids.numpy()[token_slots, positions], 0)
    _put(inputs.positions, positions, 0)
    _put(inputs.slot_mapping, blocks * block_size + positions % block_size, -1)
    _put(inputs.row_slots, slots, -1)
    _put(inputs.query_starts, starts, token_count)
    _put(inputs.context_lengths, lengths, 0)
    _put(inputs.sample_rows, np.where(sampled, starts[1:] - 1, -1), -1)
    computed_lengths[slots] = lengths


def _append_to_tables(plan: IntArray, layout: PlanLayout, tables: IntArray, row_count: int) -> None:
    starts = plan[layout.append_starts][: row_count + 1]
    rows = np.repeat(np.arange(row_count), np.diff(starts))
    places = plan[layout.first_blocks][rows] + np.arange(starts[-1]) - starts[rows]
    tables[plan[layout.row_slots][rows], places] = plan[layout.appended_ids][: starts[-1]]


def _put(tensor: torch.Tensor, values: np.ndarray, padding: int) -> None:
    target = tensor.numpy()
    target[: len(values)] = values
    target[len(values) :] = padding
