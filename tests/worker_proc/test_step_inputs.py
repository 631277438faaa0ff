"""Random plans against a naive Python model of the slots, and against the kernel's reference."""

from array import array
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import torch

from common.messages import NewSlots, SlotInit, SlotSampling, StepPlan
from kernels.step_inputs import step_inputs_reference
from kernels.step_layout import PlanLayout, StepInputs
from worker_proc import slots as slots_module
from worker_proc import step_inputs
from worker_proc.slots import SlotMemory, SlotMirror
from worker_proc.step_inputs import StepStager, fill_inputs

SLOTS, MAX_LEN, BLOCK = 6, 60, 4


@dataclass
class NaiveSlot:
    tokens: list[int]
    computed: int
    blocks: list[int] = field(default_factory=list)


class Host:
    """Slots on a device of their own, and the host's side of them."""

    def __init__(self, fill) -> None:
        self.memory = SlotMemory(SLOTS, MAX_LEN, BLOCK, torch.device("cpu"))
        self.mirror = SlotMirror(SLOTS)
        self.layout = PlanLayout(SLOTS, 64)
        self.plan = np.full(self.layout.size, -7, dtype=np.int32)
        self.stager = StepStager(self.memory, self.mirror, self.layout, token_limit=64)
        self.buffers = StepInputs.allocate(SLOTS, 64, "cpu")
        self.fill = fill

    def run(self, plan: StepPlan, padding: int) -> StepInputs:
        writes = self.stager.change_slots(plan)
        packed = self.stager.pack(plan, self.plan)
        self.memory.apply(*map(torch.from_numpy, writes.arrays()))
        rows = min(SLOTS, packed.row_count + padding)
        inputs = self.buffers.bucket(rows, packed.token_count + padding)
        self.fill(self.plan, self.layout, self.memory.state, inputs)
        return inputs

    def sampled(self, slot: int, token: int) -> None:
        """What a sampler does to the slot."""
        length = int(self.memory.known_lengths[slot])
        self.memory.token_ids[slot, length] = token
        self.memory.known_lengths[slot] += 1


def random_plan(rng: Random, step_id: int, slots: dict[int, NaiveSlot]) -> tuple[StepPlan, list[tuple[int, int]]]:
    """A plan that fits the slots, and its rows as (slot, token count); advances blocks, not lengths."""
    cleared = [slot for slot, state in list(slots.items()) if len(state.tokens) > 45 or rng.random() < 0.05]
    for slot in cleared:
        del slots[slot]
    new = []
    for slot in sorted(set(range(SLOTS)) - set(slots)):
        if rng.random() < 0.5:
            tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
            computed = rng.randrange(len(tokens))
            blocks = [rng.randrange(500) for _ in range(-(-computed // BLOCK))]
            slots[slot] = NaiveSlot(tokens, computed, blocks)
            new.append((slot, len(tokens), computed, list(blocks)))
    chosen = [slot for slot in slots if rng.random() < 0.8]
    rng.shuffle(chosen)
    is_decode = {slot: slots[slot].computed + 1 == len(slots[slot].tokens) and rng.random() < 0.8 for slot in chosen}
    decodes, chunks = ([slot for slot in chosen if is_decode[slot] is kind] for kind in (True, False))
    counts = [rng.randint(1, min(9, len(slots[slot].tokens) - slots[slot].computed)) for slot in chunks]
    rows = [(slot, 1) for slot in decodes] + list(zip(chunks, counts, strict=True))
    appended = []
    for slot, count in rows:
        needed = -(-(slots[slot].computed + count) // BLOCK) - len(slots[slot].blocks)
        appended.append([rng.randrange(500) for _ in range(needed)])
        slots[slot].blocks += appended[-1]
    block_counts = [len(blocks) for blocks in appended]
    plan = StepPlan(
        step_id=step_id,
        decode_slots=array("H", decodes),
        decode_block_counts=array("B", block_counts[: len(decodes)] if any(block_counts[: len(decodes)]) else []),
        chunk_slots=array("H", chunks),
        chunk_token_counts=array("i", counts),
        chunk_samples=array("B", [slots[s].computed + n == len(slots[s].tokens) for s, n in rows[len(decodes) :]]),
        chunk_block_counts=array("i", block_counts[len(decodes) :]),
        block_ids=array("i", [block for blocks in appended for block in blocks]),
        new_slots=NewSlots.of(*(
            SlotInit(
                slot=slot, token_ids=array("i", slots[slot].tokens), prompt_count=length, computed_count=computed,
                block_ids=array("i", blocks), sampling=SlotSampling(),
            )
            for slot, length, computed, blocks in new
        )),
        cleared_slots=array("H", cleared),
    )  # fmt: skip
    return plan, rows


def check_inputs(inputs: StepInputs, rows: list[tuple[int, int]], slots: dict[int, NaiveSlot]) -> None:
    """Every field, token by token, padding included."""
    tokens, positions, mapping, starts = [], [], [], [0]
    for slot, count in rows:
        state = slots[slot]
        for position in range(state.computed, state.computed + count):
            tokens.append(state.tokens[position])
            positions.append(position)
            mapping.append(state.blocks[position // BLOCK] * BLOCK + position % BLOCK)
        starts.append(len(tokens))
    token_padding = len(inputs.token_ids) - len(tokens)
    row_padding = len(inputs.row_slots) - len(rows)
    ends = [slots[slot].computed + count for slot, count in rows]
    samples = [
        start - 1 if end == len(slots[slot].tokens) else -1
        for (slot, _), start, end in zip(rows, starts[1:], ends, strict=True)
    ]
    assert inputs.token_ids.tolist() == tokens + [0] * token_padding
    assert inputs.positions.tolist() == positions + [0] * token_padding
    assert inputs.slot_mapping.tolist() == mapping + [-1] * token_padding
    assert inputs.row_slots.tolist() == [slot for slot, _ in rows] + [-1] * row_padding
    assert inputs.query_starts.tolist() == starts + [starts[-1]] * row_padding
    assert inputs.context_lengths.tolist() == ends + [0] * row_padding
    assert inputs.sample_rows.tolist() == samples + [-1] * row_padding


def fill_on_cpu(plan, layout, state, inputs) -> None:
    fill_inputs(plan, layout, state, inputs, BLOCK)


def fill_by_reference(plan, layout, state, inputs) -> None:
    step_inputs_reference(torch.from_numpy(plan), layout, state, inputs, BLOCK)


@pytest.fixture(params=["one by one", "all at once"])
def way(request, monkeypatch):
    """Both ways in which rows and new slots are packed, for any number of them."""
    few = 1000 if request.param == "one by one" else 0
    monkeypatch.setattr(step_inputs, "FEW_ROWS", few)
    monkeypatch.setattr(slots_module, "FEW_SLOTS", few)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("fill", [fill_on_cpu, fill_by_reference], ids=["cpu", "kernel reference"])
@pytest.mark.parametrize("seed", range(4))
def test_random_plans_give_the_inputs_of_a_naive_model(seed, fill):
    rng, slots, host = Random(seed), {}, Host(fill)
    for step_id in range(1, 60):
        plan, rows = random_plan(rng, step_id, slots)
        inputs = host.run(plan, padding=rng.choice([0, 0, 3]))
        check_inputs(inputs, rows, slots)
        for slot, count in rows:
            slots[slot].computed += count
            if slots[slot].computed == len(slots[slot].tokens):
                slots[slot].tokens.append(rng.randrange(1000))
                host.sampled(slot, slots[slot].tokens[-1])
        for slot, state in slots.items():
            assert int(host.memory.computed_lengths[slot]) == host.mirror.computed_lengths[slot] == state.computed
            assert int(host.memory.known_lengths[slot]) == host.mirror.known_lengths[slot] == len(state.tokens)
            assert host.memory.block_tables[slot, : len(state.blocks)].tolist() == state.blocks


def init(slot: int = 0, count: int = 5, computed: int = 0, blocks: int = 2) -> SlotInit:
    return SlotInit(
        slot=slot, token_ids=array("i", range(count)), prompt_count=count, computed_count=computed,
        block_ids=array("i", range(blocks)), sampling=SlotSampling(),
    )  # fmt: skip


def chunk(count: int, samples: int, blocks: int = 0, **fields) -> StepPlan:
    return StepPlan(
        step_id=1, chunk_slots=array("H", [0]), chunk_token_counts=array("i", [count]),
        chunk_samples=array("B", [samples]), chunk_block_counts=array("i", [blocks]), **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (chunk(6, 1, new_slots=NewSlots.of(init())), "computes tokens up to 6 .* knows 5"),
        (chunk(4, 1, new_slots=NewSlots.of(init())), "samples: True"),
        (chunk(5, 0, new_slots=NewSlots.of(init())), "samples: False"),
        (chunk(9, 1, new_slots=NewSlots.of(init(count=9))), "has blocks for 8"),
        (chunk(0, 0, new_slots=NewSlots.of(init())), "the chunk of slot 0 has 0 tokens"),
        (
            chunk(5, 1, blocks=16, new_slots=NewSlots.of(init()), block_ids=array("i", range(16))),
            "gets 18 blocks, .* holds 17",
        ),
        (
            chunk(8, 1, new_slots=NewSlots.of(init(count=68, computed=60, blocks=17))),
            "samples beyond its last token place",
        ),
        (chunk(5, 1, new_slots=NewSlots.of(init(), init())), "not free"),
        (chunk(5, 1), "slot 0 has a chunk, but it is free"),
        (StepPlan(step_id=1, decode_slots=array("H", [2])), "slot 2: computes tokens up to 1"),
        (
            StepPlan(step_id=1, decode_slots=array("H", [0, 0]), new_slots=NewSlots.of(init(count=1))),
            "stands in two rows",
        ),
        (StepPlan(step_id=1, cleared_slots=array("H", [2])), "slot 2 is cleared, but it is free"),
        (StepPlan(step_id=1, new_slots=NewSlots.of(init(slot=9))), "slot 9 of 6"),
        (chunk(5, 1, new_slots=NewSlots.of(init()), block_ids=array("i", range(65))), "step 1: 1 rows, 65 blocks"),
        (chunk(65, 0, new_slots=NewSlots.of(init())), "step 1 computes 65 tokens, more than 64"),
    ],
)
@pytest.mark.usefixtures("way")
def test_a_plan_that_does_not_fit_the_slots_is_refused(plan, text):
    with pytest.raises(AssertionError, match=text):
        Host(fill_on_cpu).run(plan, padding=0)


@pytest.mark.parametrize(("count", "blocks", "text"), [(69, 2, "with 69 tokens"), (5, 18, "with 18 blocks")])
def test_a_slot_that_starts_with_more_than_fits_is_refused(count, blocks, text):
    with pytest.raises(AssertionError, match=text):
        Host(fill_by_reference).run(StepPlan(step_id=1, new_slots=NewSlots.of(init(count=count, blocks=blocks))), 0)


@pytest.mark.usefixtures("way")
def test_a_step_without_blocks_appends_none_of_the_step_before():
    host = Host(fill_by_reference)
    host.run(chunk(5, 1, blocks=1, new_slots=NewSlots.of(init(blocks=1)), block_ids=array("i", [9])), padding=0)
    host.sampled(0, 7)
    host.run(StepPlan(step_id=2, decode_slots=array("H", [0])), padding=0)
    assert host.memory.block_tables[0, :4].tolist() == [0, 9, 0, 0]


def test_scratch_row_takes_what_padding_writes():
    memory = SlotMemory(SLOTS, MAX_LEN, BLOCK, torch.device("cpu"))
    memory.token_ids[-1] = 7
    assert memory.token_ids[:SLOTS].eq(0).all()
    assert memory.block_tables.eq(0).all()
    assert np.shares_memory(memory.token_ids.numpy(), memory.memory.numpy())
