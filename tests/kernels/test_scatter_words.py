"""Scattered words, against the same in plain torch."""

import pytest
import torch

from kernels.scatter_words import BLOCK, PROGRAMS, scatter_words, scatter_words_reference
from kernels.step_layout import BLOCK_COUNT, WRITE_COUNT, PlanLayout
from tests.kernels.closeness import DEVICE, assert_replay_equals_eager

LAYOUT = PlanLayout(rows=3, blocks=10)


def words(count: int, seed: int) -> torch.Tensor:
    """Any bits, as int32 [count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).int().to(DEVICE)


def places(count: int, size: int, seed: int) -> torch.Tensor:
    """Different addresses in random order, int32 [count]."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count].int().to(DEVICE)


def plan_of(addresses: torch.Tensor, values: torch.Tensor, blocks: int = 0) -> torch.Tensor:
    """A plan that appends so many blocks, with other words wherever it may hold anything."""
    plan = torch.full((LAYOUT.size + 2 * len(values) + 5,), 7, dtype=torch.int32, device=DEVICE)
    plan[BLOCK_COUNT], plan[WRITE_COUNT] = blocks, len(values)
    start = LAYOUT.appended_ids.start + blocks
    plan[start : start + 2 * len(values)] = torch.cat((addresses, values))
    return plan


@pytest.mark.parametrize(
    "count", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300, PROGRAMS * BLOCK, 2 * PROGRAMS * BLOCK + BLOCK + 1]
)
def test_writes_what_the_reference_writes(count):
    size = max(3000, 2 * count)
    memory, addresses, values = words(size, 0), places(count, size, 1), words(count, 2)
    plan, want = plan_of(addresses, values, blocks=count % 10), memory.clone()
    scatter_words_reference(want, plan, LAYOUT)
    scatter_words(memory, plan, LAYOUT)
    assert torch.equal(memory, want)
    assert torch.equal(memory[addresses.long()], values)


def test_addresses_outside_the_memory_are_skipped():
    room = words(48, 0)
    before, memory = room.clone(), room[16:32]
    addresses = torch.tensor([-1, 16, 3, -16, 2**31 - 1, -(2**31), 15], dtype=torch.int32, device=DEVICE)
    plan, want = plan_of(addresses, words(7, 1)), memory.clone()
    scatter_words_reference(want, plan, LAYOUT)
    scatter_words(memory, plan, LAYOUT)
    assert torch.equal(memory, want)
    assert torch.equal(room[:16], before[:16]) and torch.equal(room[32:], before[32:])


def test_no_words_are_no_work():
    memory = words(8, 0)
    before = memory.clone()
    scatter_words(memory, plan_of(places(0, 8, 1), words(0, 2), blocks=4), LAYOUT)
    assert torch.equal(memory, before)


def test_wrong_arguments_are_named():
    plan = plan_of(places(2, 8, 1), words(2, 2))
    with pytest.raises(ValueError, match="plan: wanted dtype torch.int32, got torch.int64"):
        scatter_words(words(8, 0), plan.long(), LAYOUT)
    with pytest.raises(ValueError, match=r"memory: wanted shape \[any\], got \[2, 4\]"):
        scatter_words(words(8, 0).view(2, 4), plan, LAYOUT)
    with pytest.raises(ValueError, match=f"plan: wanted at least {LAYOUT.size} elements, got 9"):
        scatter_words(words(8, 0), plan[:9], LAYOUT)


@pytest.mark.gpu
def test_replay_equals_eager():
    memory, plan = words(3000, 0), plan_of(places(1500, 3000, 1), words(1500, 2))
    assert_replay_equals_eager(lambda: scatter_words(memory, plan, LAYOUT), memory)


@pytest.mark.gpu
def test_one_captured_launch_serves_any_number_of_words():
    memory, plan = words(3000, 0), plan_of(places(1500, 3000, 1), words(1500, 2))
    graph = torch.cuda.CUDAGraph()
    scatter_words(memory, plan, LAYOUT)
    with torch.cuda.graph(graph):
        scatter_words(memory, plan, LAYOUT)
    for count in (0, 3, 1500, 1400):
        other = plan_of(places(count, 3000, count), words(count, count + 1), blocks=count % 10)
        plan[: len(other)] = other
        want = memory.clone()
        scatter_words_reference(want, plan, LAYOUT)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(memory, want)
