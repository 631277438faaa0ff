"""From a step plan to the packed buffer that the GPU reads: checks, mirror, pinned memory.

One pinned buffer holds a step: the plan at fixed places (`PlanLayout` of the largest step, so that a captured graph
finds each part), then the addresses and values of the slots' writes. A step has the buffer of its lane, which lets the
host pack the next steps while earlier ones still run. What a step uses of it is copied to the device, or read by the
step's own kernels (`FETCHING`). Nothing here reads the device.
"""

from dataclasses import dataclass

import numpy as np
import torch

from common.messages import StepPlan
from kernels.fetch_plan import HostLines, plan_words
from kernels.step_layout import HEADER, PlanLayout
from worker_proc.slots import IntArray, SlotMemory, SlotMirror, StateWrites
from worker_proc.step_inputs import PooledRows, PromptRows, StepStager

FETCHING = False
"""Whether a step's kernels read their plan from the host's memory and write the sampled ids there, so that a step is
nothing but its graph; otherwise a copy goes before the graph and another behind it. See docs/adr/0011."""

WRITE_ROOM = 1 << 17
"""Writes that a ring buffer has room for; a step with more brings them in a buffer of its own."""

ALIGNMENT = 4
"""Elements that the writes' parts start at a multiple of: 16 bytes."""

WRITE_WORDS = 2 * WRITE_ROOM + 2 * ALIGNMENT
"""Elements that a buffer has behind the plan."""


@dataclass(frozen=True)
class PackedStep:
    """A plan, checked and packed.

    Attributes:
        size: elements of the plan's part of the buffer that are used.
        sampled_rows, sampled_slots: [S], in the order of the result's tokens.
        sampled_positions: [S], where the tokens go in their requests.
        prompt_rows: for slots that asked for prompt log probabilities.
        pooled_rows: for slots that asked for an embedding.
    """

    size: int
    decode_rows: int
    chunk_rows: int
    token_count: int
    sampled_rows: IntArray
    sampled_slots: IntArray
    sampled_positions: IntArray
    prompt_rows: tuple[PromptRows, ...]
    pooled_rows: tuple[PooledRows, ...]


class DeviceStager(StepStager):
    """Checks step plans against the mirror, advances it, and packs them at the places of one layout."""

    def __init__(self, memory: SlotMemory, mirror: SlotMirror, layout: PlanLayout, token_limit: int) -> None:
        super().__init__(memory, mirror)
        self._layout, self._token_limit = layout, token_limit

    def pack(self, plan: StepPlan, target: IntArray, number: int) -> PackedStep:
        """Advance the mirror by the plan's rows and pack it into `target`, int32 [layout.size], as step `number`.

        Raises:
            AssertionError: the plan does not fit what the slots hold, which is a fault of ours; the text says how.
        """
        layout, decode_rows = self._layout, len(plan.decode_slots)
        rows, block_count = decode_rows + len(plan.chunk_slots), len(plan.block_ids)
        assert rows <= layout.rows and block_count <= layout.blocks, f"step {plan.step_id}: {rows} rows, {block_count}"
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
        assert token_count <= self._token_limit, f"step {plan.step_id} computes {token_count} tokens"
        target[:HEADER] = rows, decode_rows, token_count, block_count, number
        samples = np.ones(rows, dtype=bool)
        samples[decode_rows:] = plan.chunk_samples
        sampled_rows = np.flatnonzero(samples)
        sampled_slots = slots[sampled_rows]
        positions = self._mirror.known_lengths[sampled_slots]
        self._advance(slots, counts, samples)
        return PackedStep(
            layout.appended_ids.start + block_count, decode_rows, rows - decode_rows, token_count, sampled_rows,
            sampled_slots, positions, prompt_rows, self._pooled_rows(plan, starts),
        )  # fmt: skip


def _put_sums(target: IntArray, counts: IntArray) -> IntArray:
    """Write the running sums of `counts`, from 0, to the start of `target`; returns what was written."""
    written = target[: len(counts) + 1]
    written[0] = 0
    np.cumsum(counts, out=written[1:])
    return written


class StagingRing:
    """The lanes' pinned buffers that steps are packed into, and the device buffer that plans go to.

    Args:
        lines: with WRITE_WORDS behind each plan.
        fetching: a step's kernels read the buffer; nothing is copied to the device ahead of them.

    Attributes:
        device_buffer: int32; a graph reads the plan from its start.
    """

    def __init__(self, layout: PlanLayout, lines: HostLines, device: torch.device, *, fetching: bool) -> None:
        self._plan_size, self._host, self.fetching = layout.size, lines.plans, fetching
        self._views = [line.numpy() for line in lines.plans]
        size = plan_words(layout) if fetching else lines.plans.shape[1]
        self.device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        guarded = device.type == "cuda" and not fetching
        self._copied = [torch.cuda.Event() for _ in self._views] if guarded else None

    def buffer(self, lane: int) -> IntArray:
        """The plan's part of a lane's buffer, free to be written: the step before that had the lane has ended."""
        if self._copied is not None:
            self._copied[lane].synchronize()  # returns at once
        return self._views[lane][: self._plan_size]

    def send(self, lane: int, plan_size: int, writes: StateWrites) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the writes behind the plan, and copy both to the device, in stream order, unless the step fetches them.

        Returns:
            Addresses and values of the writes where kernels can read them, int32 [n] each.
        """
        addresses, values = writes.arrays()
        count = len(addresses)
        if count > WRITE_ROOM:
            self._copy(lane, plan_size)
            return self._copy_apart(addresses, values)
        start = _align(plan_size)
        middle = _align(start + count)
        view = self._views[lane]
        view[start : start + count] = addresses
        view[middle : middle + count] = values
        self._copy(lane, middle + count if count else plan_size)
        readable = self._host[lane] if self.fetching else self.device_buffer
        return readable[start : start + count], readable[middle : middle + count]

    def _copy(self, lane: int, size: int) -> None:
        if self.fetching:
            return
        self.device_buffer[:size].copy_(self._host[lane, :size], non_blocking=True)
        if self._copied is not None:
            self._copied[lane].record()

    def _copy_apart(self, addresses: IntArray, values: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of its own; the allocator keeps the pinned memory until the copy is done."""
        host = torch.from_numpy(np.stack((addresses, values)))
        if self.device_buffer.is_cuda:
            host = host.pin_memory()
        both = host.to(self.device_buffer.device, non_blocking=True)
        return both[0], both[1]


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
