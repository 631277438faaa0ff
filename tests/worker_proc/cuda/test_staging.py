"""What a plan changes in the slots' memory gets there: with the step, before it, or apart where it is too much."""

from array import array
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from common.messages import NewSlots, SlotInit, SlotSampling, StepPlan
from kernels.sampling_state import ALLOWED_ROW, BANNED_UNTIL, COUNT_ROW, SEED_HIGH, SEED_LOW
from kernels.scatter_words import scatter_words
from kernels.step_layout import HEADER, WRITE_COUNT, PlanLayout
from tests.kernels.closeness import DEVICE
from worker_proc import slots as slots_module
from worker_proc.cuda import runner as runner_module
from worker_proc.cuda.slot_records import KernelRules
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.cuda.staging import COPY_UNIT, StagedPlan, device_buffer, write_apart
from worker_proc.slots import SlotMemory, StateWrites

LAYOUT = PlanLayout(rows=4, blocks=40)
MASK = (b"\xff" * 20,)


def random_writes(seed: int, memory: SlotMemory) -> StateWrites:
    """Rows of tokens of any length, none among them, and single numbers."""
    rng, writes = Random(seed), StateWrites(memory)
    for slot in range(memory.slot_count):
        count = rng.choice([0, 1, 7, memory.token_capacity])
        writes.add("token_ids", slot, array("i", [rng.randrange(-(2**31), 2**31) for _ in range(count)]))
        writes.add("numbers", slot, array("f", [rng.random()] * 3))
        writes.add("known_lengths", slot, np.array([rng.randrange(100)], dtype=np.int32))
    return writes


def slot_memory() -> SlotMemory:
    return SlotMemory(4, 600, 4, torch.device(DEVICE), {"numbers": 3})


@pytest.mark.parametrize("seed", range(3))
def test_writes_arrive_behind_a_plan_of_any_size_and_apart(seed):
    want, got, apart = slot_memory(), slot_memory(), slot_memory()
    writes = random_writes(seed, want)
    want.apply(*(torch.from_numpy(part).to(DEVICE) for part in writes.arrays()))
    assert want.memory.count_nonzero() > 0
    target = device_buffer(LAYOUT, torch.device(DEVICE))
    staged, block_count = StagedPlan(target), 3 * seed
    staged.words[:HEADER] = 0, 0, 0, block_count, 0
    staged.words[LAYOUT.appended_ids] = 7
    staged.send(LAYOUT.appended_ids.start + block_count, writes)
    staged.deliver()
    scatter_words(got.memory, target, LAYOUT)
    write_apart(apart.memory, writes)
    assert torch.equal(got.memory, want.memory) and torch.equal(apart.memory, want.memory)
    staged.send(LAYOUT.appended_ids.start + block_count, StateWrites(want))
    staged.deliver()
    got.memory.zero_()
    scatter_words(got.memory, target, LAYOUT)
    assert not got.memory.any(), "the writes of the step before"


def test_a_plan_waits_on_the_device_in_a_line_of_its_own():
    """Later plans are sent while the step before them reads its own."""
    target, nothing = device_buffer(LAYOUT, torch.device(DEVICE)), StateWrites(slot_memory())
    plans = [StagedPlan(target) for _ in range(3)]
    for number, staged in enumerate(plans, 1):
        staged.words[: LAYOUT.size] = range(number, number + LAYOUT.size)
        staged.send(LAYOUT.size, nothing)
    assert not target.any(), "a plan that was not delivered yet"
    for number, staged in enumerate(plans, 1):
        staged.deliver()
        want = torch.arange(number, number + LAYOUT.size)
        want[WRITE_COUNT] = 0
        assert torch.equal(target[: LAYOUT.size].cpu(), want)


def test_a_buffer_ends_where_a_copy_may():
    assert device_buffer(LAYOUT, torch.device("cpu")).shape[0] % COPY_UNIT == 0


@pytest.mark.parametrize(
    ("sampling", "rules"),
    [
        (SlotSampling(end_token_ids=(2, 3)), KernelRules(0, 0, 0)),
        (SlotSampling(bias_token_ids=array("i", [5]), bias_values=array("f", [1.0])), KernelRules(1, 0, 0)),
        (SlotSampling(end_token_ids=(2, 3), min_output_count=4), KernelRules(0, 2, 0)),
        (SlotSampling(bad_token_ids=((5,), (6, 7), (8,))), KernelRules(0, 0, 3)),
    ],
    ids=["none", "biases", "banned", "bad words"],
)
def test_each_kind_of_rule_alone_goes_to_the_kernel(sampling, rules):
    assert KernelRules.of(sampling) == rules


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x8000_0001_FFFF_FFFE])
def test_a_seed_of_any_size_arrives_whole(seed):
    slots = DeviceSlots(2, 16, 4, 80, torch.device("cpu"))
    writes = slots.writes_of(plan_of(SlotSampling(seed=seed)).new_slots)
    slots.apply(*map(torch.from_numpy, writes.arrays()))
    low, high = (int(slots.sampling.choices[1, column]) % 2**32 for column in (SEED_LOW, SEED_HIGH))
    assert low + (high << 32) == seed


def test_a_least_length_of_output_that_no_output_can_have_counts_as_such():
    slots = DeviceSlots(2, 16, 4, 80, torch.device("cpu"))
    sampling = SlotSampling(min_output_count=2**31 - 1, end_token_ids=(3,))
    slots.apply(*map(torch.from_numpy, slots.writes_of(plan_of(sampling).new_slots).arrays()))
    assert int(slots.sampling.choices[1, BANNED_UNTIL]) > 10**9


def test_a_way_of_sampling_that_is_not_remembered_is_not_kept_either():
    """It is another object each time that it comes, so its record was never found again."""
    slots = DeviceSlots(2, 16, 4, 80, torch.device("cpu"))
    long = SlotSampling(bad_token_ids=(tuple(range(1000)),))
    for sampling, kept_count in ((SlotSampling(), 1), (long, 1), (SlotSampling(top_k=3), 2)):
        slots.writes_of(plan_of(sampling).new_slots)
        assert len(slots._records) == kept_count


@pytest.mark.parametrize("limits", [{}, {"FEW_SLOTS": 0}, {"KNOWN_TOKENS": 3}], ids=str)
def test_each_of_several_new_slots_gets_what_it_gets_alone(limits, monkeypatch):
    """However the addresses are found."""
    kinds = [
        SlotSampling(seed=5, top_k=9), SlotSampling(seed=6, top_k=9), SlotSampling(masked=True, temperature=0.0),
        SlotSampling(repetition_penalty=1.5, bias_token_ids=array("i", [5]), bias_values=array("f", [1.0])),
        SlotSampling(end_token_ids=(2, 99), min_output_count=4, bad_token_ids=((5,), (6, 7))),
        SlotSampling(allowed_token_ids=array("i", [3, 40]), presence_penalty=0.5, seed=2**64 - 1),
    ]  # fmt: skip
    inits = [
        replace(next(iter(plan_of(kind).new_slots)), slot=slot, token_ids=array("i", range(4 + slot)))
        for slot, kind in enumerate(kinds)
    ]
    alone = DeviceSlots(6, 16, 4, 80, torch.device("cpu"))
    for name, value in limits.items():
        monkeypatch.setattr(slots_module, name, value)
    together = DeviceSlots(6, 16, 4, 80, torch.device("cpu"))
    together.apply(*map(torch.from_numpy, together.writes_of(NewSlots.of(*inits)).arrays()))
    monkeypatch.undo()
    for init in inits:
        alone.apply(*map(torch.from_numpy, alone.writes_of(NewSlots.of(init)).arrays()))
    assert torch.equal(together.memory, alone.memory)
    rows = together.sampling.choices
    assert rows[:6, COUNT_ROW].tolist() == [-1, -1, -1, 3, -1, 5]
    assert rows[:6, ALLOWED_ROW].tolist() == [-1, -1, 2, -1, -1, 5]
    assert rows[:6, BANNED_UNTIL].tolist() == [4, 4, 4, 4, 8, 4]
    assert together.known_lengths[:6].tolist() == [4, 5, 6, 7, 8, 9]
    assert together.token_ids[5, :9].tolist() == [*range(9)] and together.block_tables[:6, 0].tolist() == [2] * 6


def plan_of(sampling: SlotSampling, **rows) -> StepPlan:
    """A new slot, whose four tokens have been computed but for the last."""
    init = SlotInit(
        slot=1, token_ids=array("i", [5, 9, 77, 30]), prompt_count=4, computed_count=3, block_ids=array("i", [2]),
        sampling=sampling,
    )  # fmt: skip
    return StepPlan(step_id=1, new_slots=NewSlots.of(init), **rows)


DECODE = {"decode_slots": array("H", [1])}
CHUNK = {
    "chunk_slots": array("H", [1]), "chunk_token_counts": array("i", [1]), "chunk_samples": array("B", [1]),
    "chunk_block_counts": array("i", [0]),
}  # fmt: skip
GREEDY, PENALISED = SlotSampling(temperature=0.0), SlotSampling(temperature=0.0, repetition_penalty=1.3)
MASKED = SlotSampling(temperature=0.0, masked=True, allowed_token_ids=array("i", [3]))


@pytest.mark.parametrize(
    ("plan", "room", "early"),
    [
        (plan_of(GREEDY, **CHUNK), 1 << 17, False),
        (plan_of(GREEDY, **CHUNK), 10, False),
        (plan_of(GREEDY, **DECODE), 1 << 17, True),
        (plan_of(PENALISED, **CHUNK), 1 << 17, True),
        (plan_of(MASKED, **CHUNK, mask_slots=array("H", [1]), masks=MASK), 1 << 17, True),
    ],
    ids=["chunk", "too many words", "decode", "penalised", "masked"],
)
def test_a_new_slot_is_written_once_before_anything_reads_it(
    plan, room, early, library_products, tiny_model, make_gpu_driver, fused_sizes, monkeypatch
):
    """Nothing is read before it is there, and nothing is written twice, over what came after."""
    monkeypatch.setattr(runner_module, "WRITE_ROOM", room)
    _, folder = tiny_model("Llama", **fused_sizes)
    runner = make_gpu_driver(folder, DEVICE, padded=DEVICE == "cpu").runner
    for cache in (*runner.swap._cache.key_caches, *runner.swap._cache.value_caches):
        cache.fill_(0.1)
    calls, write_slots = [], runner.program.write_slots
    monkeypatch.setattr(runner.program, "write_slots", lambda: calls.append(1) or write_slots())
    result = runner.execute(plan).result()
    assert len(calls) == early
    assert runner.slots.token_ids[1, :5].tolist() == [5, 9, 77, 30, result.token_ids[0]]
    assert int(runner.slots.known_lengths[1]) == 5 and int(runner.slots.computed_lengths[1]) == 4
    if plan.masks:
        assert runner.slots.sampling.allowed[1].tolist() == [-1] * 5
    if PENALISED in plan.new_slots.samplings:
        assert runner.slots.sampling.counts[1].count_nonzero() == 5, "of the prompt and the sampled token"
