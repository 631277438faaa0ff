"""Step inputs built on the device against the row-by-row reference."""

import random
from dataclasses import fields

import pytest
import torch

from kernels.step_inputs import launch_plan, step_inputs, step_inputs_reference
from kernels.step_layout import HEADER, PlanLayout, SlotState, StepInputs
from tests.kernels.closeness import DEVICE

BLOCK_SIZE = 4
JUNK = 10**6


def make_plan(layout: PlanLayout, rows: list[tuple[int, int, int, list[int]]], decode_rows: int = 0) -> torch.Tensor:
    """The int32 buffer for rows of (slot, token count, first appended block, appended ids); junk beyond them."""
    plan = torch.full((layout.size,), JUNK, dtype=torch.int32)
    starts, appends, ids = [0], [0], []
    for _, count, _, new_ids in rows:
        starts.append(starts[-1] + count)
        appends.append(appends[-1] + len(new_ids))
        ids += new_ids
    parts = (
        (layout.row_slots, [row[0] for row in rows]),
        (layout.token_counts, [row[1] for row in rows]),
        (layout.query_starts, starts),
        (layout.first_blocks, [row[2] for row in rows]),
        (layout.append_starts, appends),
        (layout.appended_ids, ids),
    )
    plan[:HEADER] = torch.tensor([len(rows), decode_rows, starts[-1], len(ids), 0])
    for part, values in parts:
        plan[part.start : part.start + len(values)] = torch.tensor(values, dtype=torch.int32)
    return plan


def make_state(slots: int, max_length: int, seed: int) -> SlotState:
    generator = torch.Generator().manual_seed(seed)
    return SlotState(
        slot_token_ids=torch.randint(50_000, (slots, max_length), generator=generator).int(),
        known_lengths=torch.zeros(slots, dtype=torch.int32),
        computed_lengths=torch.zeros(slots, dtype=torch.int32),
        block_tables=torch.randint(1, 900, (slots, max_length // BLOCK_SIZE), generator=generator).int(),
    )


def copy_of(group, device):
    return type(group)(*(getattr(group, item.name).clone().to(device) for item in fields(group)))


def junk_inputs(rows: int, tokens: int) -> StepInputs:
    inputs = StepInputs.allocate(rows, tokens, "cpu")
    for item in fields(inputs):
        getattr(inputs, item.name).fill_(JUNK)
    return inputs


def assert_same_as_reference(state: SlotState, plan, layout, row_bucket: int, token_bucket: int):
    want_state, want = copy_of(state, "cpu"), junk_inputs(row_bucket, token_bucket)
    step_inputs_reference(plan, layout, want_state, want, BLOCK_SIZE)
    got_state, got = copy_of(state, DEVICE), copy_of(junk_inputs(row_bucket, token_bucket), DEVICE)
    step_inputs(plan.to(DEVICE), layout, got_state, got, BLOCK_SIZE)
    for group, wanted in ((got, want), (got_state, want_state)):
        for item in fields(group):
            value, expected = getattr(group, item.name).cpu(), getattr(wanted, item.name)
            assert torch.equal(value, expected), f"{item.name}: wanted {expected}, got {value}"
    return got, got_state


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_equal_the_reference(seed):
    chance = random.Random(seed)
    slots, max_length = 7, 96
    state = make_state(slots, max_length, seed)
    rows, layout = [], PlanLayout(rows=6, blocks=64)
    for slot in chance.sample(range(slots), chance.randint(1, 6)):
        known = chance.randint(1, max_length)
        computed = chance.randint(0, known - 1)
        count = 1 if chance.random() < 0.5 else chance.randint(1, known - computed)
        state.known_lengths[slot], state.computed_lengths[slot] = known, computed
        first = -(-computed // BLOCK_SIZE)
        needed = -(-(computed + count) // BLOCK_SIZE) - first
        rows.append((slot, count, first, [chance.randint(1, 900) for _ in range(needed)]))
    tokens = sum(row[1] for row in rows)
    assert_same_as_reference(state, make_plan(layout, rows), layout, 6, tokens + chance.choice([0, 1, 40]))


def test_a_chunk_that_is_not_the_last_yields_no_token():
    state = make_state(3, 32, 0)
    state.known_lengths[:] = torch.tensor([10, 10, 4])
    state.computed_lengths[:] = torch.tensor([0, 4, 3])
    layout = PlanLayout(3, 8)
    plan = make_plan(layout, [(2, 1, 1, []), (0, 4, 0, [7]), (1, 6, 1, [8, 9])], decode_rows=1)
    got, state_after = assert_same_as_reference(state, plan, layout, 3, 11)
    assert got.sample_rows.tolist() == [0, -1, 10]
    assert got.context_lengths.tolist() == [4, 4, 10]
    assert state_after.computed_lengths.tolist() == [4, 10, 4]
    assert got.slot_mapping[1:5].tolist() == [28, 29, 30, 31]


def test_no_rows_leaves_only_padding():
    state = make_state(2, 32, 0)
    layout = PlanLayout(4, 4)
    got, _ = assert_same_as_reference(state, make_plan(layout, []), layout, 4, 8)
    assert got.row_slots.tolist() == [-1] * 4 and got.slot_mapping.tolist() == [-1] * 8


def test_more_blocks_and_tokens_than_one_tile():
    state = make_state(1, 400, 0)
    state.known_lengths[0] = 350
    layout = PlanLayout(8, 100)
    plan = make_plan(layout, [(0, 350, 0, list(range(1, 89)))])
    assert launch_plan(8, 352).block == 64
    assert_same_as_reference(state, plan, layout, 8, 352)


def test_wrong_arguments_are_named():
    state, inputs, layout = make_state(2, 32, 0), StepInputs.allocate(4, 8, "cpu"), PlanLayout(4, 4)
    with pytest.raises(ValueError, match="plan: wanted at least 31 elements and room for 4 rows, got 3 elements"):
        step_inputs(torch.zeros(3, dtype=torch.int32), layout, state, inputs, BLOCK_SIZE)
    with pytest.raises(ValueError, match="plan: wanted dtype torch.int32, got torch.int64"):
        step_inputs(torch.zeros(64, dtype=torch.int64), layout, state, inputs, BLOCK_SIZE)


@pytest.mark.gpu
def test_replays_advance_like_eager_steps():
    state = copy_of(make_state(2, 32, 0), DEVICE)
    state.known_lengths.fill_(30)
    layout, inputs = PlanLayout(2, 4), StepInputs.allocate(2, 4, DEVICE)
    plan = make_plan(layout, [(1, 2, 0, [])]).to(DEVICE)
    step_inputs(plan, layout, state, inputs, BLOCK_SIZE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step_inputs(plan, layout, state, inputs, BLOCK_SIZE)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert state.computed_lengths.tolist() == [0, 8] and inputs.positions.tolist()[:2] == [6, 7]
