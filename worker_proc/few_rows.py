"""Packs a step of few rows, row by row: the same as `StepStager` does for many rows at a time with NumPy.

A step after a pause finds the caches cold. Each of NumPy's functions then costs microseconds when it is first called,
whatever it is given, and the device has nothing to do meanwhile. Python's own loop over a few rows costs less. Called
by `StepStager`.
"""

from array import array

from common.messages import StepPlan
from kernels.step_layout import HEADER, PlanLayout
from worker_proc.slots import IntArray, SlotMemory, SlotMirror

FEW_ROWS = 24
"""Rows that are packed one by one at most."""

Sampled = tuple[list[int], list[int], list[int]]
"""Of the rows that sample: their numbers, their slots, and where the sampled tokens go."""


def pack_few(
    plan: StepPlan, row_slots: "array[int]", target: IntArray, layout: PlanLayout, memory: SlotMemory,
    mirror: SlotMirror,
) -> Sampled:  # fmt: skip
    """Advance the mirror by the plan's rows and pack it into `target`, as `StepStager.pack`."""
    decode_rows, size = len(plan.decode_slots), memory.block_size
    counts = [1] * decode_rows + plan.chunk_token_counts.tolist()
    samples = [1] * decode_rows + plan.chunk_samples.tolist()
    added = (plan.decode_block_counts.tolist() or [0] * decode_rows) + plan.chunk_block_counts.tolist()
    rows: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    words, start, append = memoryview(target), 0, 0
    slots_at, counts_at, starts_at, firsts_at, appends_at, ids_at = layout.starts
    words[starts_at] = words[appends_at] = 0
    for row, slot in enumerate(row_slots):
        blocks, known, computed = mirror.lengths(slot)
        length, block_count, does_sample = computed + counts[row], blocks + added[row], samples[row]
        check_capacity(plan, block_count, memory)
        room = block_count * size
        if length > min(known, room, memory.token_capacity - 1) or (length == known) != does_sample:
            raise misfit(row, slot, length, bool(does_sample), known, room, memory)
        if does_sample:
            rows.append(row)
            slots.append(slot)
            positions.append(known)
        mirror.advance(slot, block_count, known + does_sample, length)
        start, append = start + counts[row], append + added[row]
        words[slots_at + row], words[counts_at + row], words[firsts_at + row] = slot, counts[row], blocks
        words[starts_at + row + 1], words[appends_at + row + 1] = start, append
    words[ids_at : ids_at + append] = plan.block_ids
    words[:HEADER] = array("i", (len(counts), decode_rows, start, append, 0))
    return rows, slots, positions


def check_capacity(plan: StepPlan, block_count: int, memory: SlotMemory) -> None:
    """Raise AssertionError if a slot gets more blocks than its table holds."""
    capacity = memory.block_capacity
    assert block_count <= capacity, f"step {plan.step_id}: a slot gets {block_count} blocks, its table holds {capacity}"


def misfit(
    row: int, slot: int, length: int, samples: bool, known: int, room: int, memory: SlotMemory
) -> AssertionError:
    """What is wrong with a row that would bring its slot to `length` computed tokens."""
    if length >= memory.token_capacity:
        return AssertionError("a slot samples beyond its last token place")
    return AssertionError(
        f"row {row}, slot {slot}: computes tokens up to {length} (samples: {samples}), knows {known}, has blocks for "
        f"{room}"
    )
