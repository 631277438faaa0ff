"""From a step plan to the model's inputs: the host's part, and the CPU's version of the device's part.

The host checks a plan against its mirror of the slots and packs it into one int32 buffer (`StepStager.pack`), in the
layout of `kernels/step_inputs.py`. Token ids, positions, slot mapping and the rest are then made from that buffer and
the slots' memory: on a GPU by one kernel, on the CPU by `fill_inputs`. Nothing here knows the model or reads a sampled
token.
"""

from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from common.messages import StepPlan
from kernels.step_layout import HEADER, PlanLayout, SlotState, StepInputs
from worker_proc.few_rows import FEW_ROWS, check_capacity, misfit, pack_few
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


Numbers = IntArray | list[int]

RowsThatSample = tuple[Numbers, Numbers, Numbers]


class PackedStep(NamedTuple):
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
    sampled_rows: Numbers
    sampled_slots: Numbers
    sampled_positions: Numbers
    prompt_rows: tuple[PromptRows, ...]
    pooled_rows: tuple[PooledRows, ...]

    def sampled_pairs(self) -> list[tuple[int, int]]:
        """Row and slot of each that samples."""
        return [*zip(_listed(self.sampled_rows), _listed(self.sampled_slots), strict=True)]


class StepStager:
    """Checks step plans against the mirror, advances it, and packs them at the places of one layout.

    A step that only decodes is the commonest by far, and the shortest: what is the same in all of them is made once.

    Args:
        layout: of the largest plan.
        token_limit: tokens that a step may compute.
    """

    def __init__(self, memory: SlotMemory, mirror: SlotMirror, layout: PlanLayout, token_limit: int) -> None:
        self._memory, self._mirror = memory, mirror
        self._layout, self._token_limit = layout, token_limit
        self._row_numbers = np.arange(layout.rows + 1, dtype=np.int32)
        self._single_tokens = np.concatenate((np.ones(layout.rows, np.int32), self._row_numbers))
        self._all_samples = np.ones(layout.rows, dtype=bool)
        self._block_size = np.array([memory.block_size], dtype=np.int32)  # an array is quicker to compute with
        self._last_place = np.array([memory.token_capacity - 1], dtype=np.int32)

    def change_slots(self, plan: StepPlan) -> StateWrites:
        """Free and fill the mirror's slots as the plan says; returns what the new ones write on the device."""
        for slot in plan.cleared_slots:
            self._mirror.clear(slot)
        if not plan.new_slots:
            return StateWrites(self._memory)
        self._mirror.start(plan.new_slots)
        return self._memory.writes_of(plan.new_slots)

    def pack(self, plan: StepPlan, target: IntArray) -> PackedStep:
        """Advance the mirror by the plan's rows and pack it into `target`, int32 [layout.size].

        Raises:
            AssertionError: the plan does not fit what the slots hold, which is a fault of ours; the text says how.
        """
        layout, limit, decode_rows = self._layout, self._token_limit, len(plan.decode_slots)
        row_slots = plan.decode_slots + plan.chunk_slots
        rows, block_count = len(row_slots), len(plan.block_ids)
        assert rows <= layout.rows and block_count <= layout.blocks, (
            f"step {plan.step_id}: {rows} rows, {block_count} blocks"
        )
        assert len(set(row_slots)) == rows, f"step {plan.step_id}: a slot stands in two rows"
        token_count = decode_rows + sum(plan.chunk_token_counts)
        assert token_count <= limit, f"step {plan.step_id} computes {token_count} tokens, more than {limit}"
        prompt_rows, pooled_rows = self._asking_rows(plan) if plan.chunk_slots else ((), ())
        pack_rows = self._pack_many if rows > FEW_ROWS else self._pack_few
        return PackedStep(
            layout.appended_ids.start + block_count, rows, decode_rows, token_count,
            *pack_rows(plan, row_slots, target), prompt_rows, pooled_rows,
        )  # fmt: skip

    def _pack_few(self, plan: StepPlan, row_slots: "array[int]", target: IntArray) -> RowsThatSample:
        return pack_few(plan, row_slots, target, self._layout, self._memory, self._mirror)

    def _pack_many(self, plan: StepPlan, row_slots: "array[int]", target: IntArray) -> RowsThatSample:
        layout, rows = self._layout, len(row_slots)
        slots = np.array(row_slots, dtype=np.intp)
        _put(target, layout.row_slots, slots)
        counts, samples, token_count = self._put_counts(plan, target)
        blocks, known, computed, _ = self._mirror.table.take(slots, axis=1)
        blocks = self._append_blocks(plan, target, slots, blocks)
        target[:HEADER] = rows, len(plan.decode_slots), token_count, len(plan.block_ids), 0
        self._advance(slots, samples, known, computed + counts, blocks)
        if not plan.chunk_slots:
            return self._row_numbers[:rows], slots, known
        sampled_rows = np.flatnonzero(samples)
        return sampled_rows, slots[sampled_rows], known[sampled_rows]

    def _put_counts(self, plan: StepPlan, target: IntArray) -> tuple[IntArray, np.ndarray, int]:
        """Pack each row's token count, and their sums; returns the counts, which rows sample, and the tokens in all."""
        layout, decode_rows = self._layout, len(plan.decode_slots)
        rows = decode_rows + len(plan.chunk_slots)
        if rows == decode_rows:
            target[layout.token_counts.start : layout.query_starts.stop] = self._single_tokens
            return self._single_tokens[:rows], self._all_samples[:rows], rows
        counts = target[layout.token_counts][:rows]
        counts[:decode_rows], counts[decode_rows:] = 1, plan.chunk_token_counts
        starts = target[layout.query_starts][: rows + 1]
        starts[0] = 0
        counts.cumsum(out=starts[1:])
        samples = self._all_samples[:rows].copy()
        samples[decode_rows:] = plan.chunk_samples
        return counts, samples, int(starts[-1])

    def _append_blocks(self, plan: StepPlan, target: IntArray, slots: IntArray, blocks: IntArray) -> IntArray:
        """Pack what each row gets behind the `blocks` that it has; returns how many it has then."""
        layout, decode_rows = self._layout, len(plan.decode_slots)
        _put(target, layout.first_blocks, blocks)
        starts = target[layout.append_starts]
        if not plan.block_ids:
            starts[:] = 0
            return blocks
        _put(target, layout.appended_ids, plan.block_ids)
        counts = starts[1 : len(slots) + 1]
        counts[:decode_rows], counts[decode_rows:] = plan.decode_block_counts or 0, plan.chunk_block_counts
        blocks = blocks + counts
        starts[0] = 0
        counts.cumsum(out=counts)
        check_capacity(plan, int(blocks.max(initial=0)), self._memory)
        self._mirror.block_counts[slots] = blocks
        return blocks

    def _advance(
        self, slots: IntArray, samples: np.ndarray, known: IntArray, lengths: IntArray, blocks: IntArray
    ) -> None:
        """Grow the slots to `lengths`, which must be of tokens that they know, with a sample at the end of these."""
        room = blocks * self._block_size
        most = np.minimum(np.minimum(known, room), self._last_place)
        good = (lengths <= most) & ((lengths == known) == samples)
        if np.count_nonzero(good) < len(good):
            row = int(np.argmin(good))
            numbers = (int(each[row]) for each in (slots, lengths))
            raise misfit(row, *numbers, bool(samples[row]), int(known[row]), int(room[row]), self._memory)
        self._mirror.computed_lengths[slots] = lengths
        self._mirror.known_lengths[slots] = known + samples

    def _asking_rows(self, plan: StepPlan) -> tuple[tuple[PromptRows, ...], tuple[PooledRows, ...]]:
        """The chunks of slots that asked for prompt log probabilities, and for an embedding."""
        mirror = self._mirror
        prompt_rows, pooled_rows = [], []
        start = len(plan.decode_slots)
        for slot, count, samples in zip(plan.chunk_slots, plan.chunk_token_counts, plan.chunk_samples, strict=True):
            sampling = mirror.sampling[slot]
            assert sampling is not None, f"step {plan.step_id}: slot {slot} has a chunk, but it is free"
            assert count > 0, f"step {plan.step_id}: the chunk of slot {slot} has {count} tokens"
            if slot in mirror.asking:
                if sampling.prompt_logprobs >= 0:
                    position = int(mirror.computed_lengths[slot])
                    predicting = min(count, int(mirror.prompt_lengths[slot]) - 1 - position)
                    if predicting > 0:
                        prompt_rows.append(PromptRows(slot, start, position, predicting))
                if sampling.pooling:
                    pooled_rows.append(PooledRows(slot, start, count, bool(samples), sampling.pooling))
            start += count
        return tuple(prompt_rows), tuple(pooled_rows)


def _listed(numbers: Numbers) -> list[int]:
    return numbers if isinstance(numbers, list) else numbers.tolist()


def _put(target: IntArray, part: slice, values: Any) -> None:
    """Write values to the start of a part of the plan."""
    target[part.start : part.start + len(values)] = values


def fill_inputs(plan: IntArray, layout: PlanLayout, state: SlotState, inputs: StepInputs, block_size: int) -> None:
    """Append the plan's blocks, fill the inputs and advance the slots' computed lengths, on the CPU.

    The same as the kernel in `kernels/step_inputs.py`, whose docstring has formula, tables and padding.
    """
    row_count, _, token_count, block_count, _ = plan[:HEADER].tolist()
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
    _put_padded(inputs.token_ids, state.slot_token_ids.numpy()[token_slots, positions], 0)
    _put_padded(inputs.positions, positions, 0)
    _put_padded(inputs.slot_mapping, blocks * block_size + positions % block_size, -1)
    _put_padded(inputs.row_slots, slots, -1)
    _put_padded(inputs.query_starts, starts, token_count)
    _put_padded(inputs.context_lengths, lengths, 0)
    _put_padded(inputs.sample_rows, np.where(sampled, starts[1:] - 1, -1), -1)
    computed_lengths[slots] = lengths


def _append_to_tables(plan: IntArray, layout: PlanLayout, tables: IntArray, row_count: int) -> None:
    starts = plan[layout.append_starts][: row_count + 1]
    rows = np.repeat(np.arange(row_count), np.diff(starts))
    places = plan[layout.first_blocks][rows] + np.arange(starts[-1]) - starts[rows]
    tables[plan[layout.row_slots][rows], places] = plan[layout.appended_ids][: starts[-1]]


def _put_padded(tensor: torch.Tensor, values: np.ndarray, padding: int) -> None:
    target = tensor.numpy()
    target[: len(values)] = values
    target[len(values) :] = padding
