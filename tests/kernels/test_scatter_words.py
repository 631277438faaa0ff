"""Scattered words, against the same in plain torch."""

import pytest
import torch

from kernels.scatter_words import BLOCK, scatter_words, scatter_words_reference
from tests.kernels.closeness import DEVICE, assert_replay_equals_eager


def words(count: int, seed: int) -> torch.Tensor:
    """Any bits, as int32 [count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).int().to(DEVICE)


def places(count: int, size: int, seed: int) -> torch.Tensor:
    """Different addresses in random order, int32 [count]."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count].int().to(DEVICE)


@pytest.mark.parametrize("count", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300])
def test_writes_what_the_reference_writes(count):
    memory, addresses, values = words(3000, 0), places(count, 3000, 1), words(count, 2)
    want = memory.clone()
    scatter_words_reference(want, addresses, values)
    scatter_words(memory, addresses, values)
    assert torch.equal(memory, want)
    assert torch.equal(memory[addresses.long()], values)


def test_addresses_outside_the_memory_are_skipped():
    room = words(48, 0)
    before, memory = room.clone(), room[16:32]
    addresses = torch.tensor([-1, 16, 3, -16, 2**31 - 1, -(2**31), 15], dtype=torch.int32, device=DEVICE)
    values, want = words(7, 1), memory.clone()
    scatter_words_reference(want, addresses, values)
    scatter_words(memory, addresses, values)
    assert torch.equal(memory, want)
    assert torch.equal(room[:16], before[:16]) and torch.equal(room[32:], before[32:])


def test_no_words_is_no_work():
    memory = words(8, 0)
    before = memory.clone()
    scatter_words(memory, places(0, 8, 1), words(0, 2))
    assert torch.equal(memory, before)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="addresses: wanted dtype torch.int32, got torch.int64"):
        scatter_words(words(8, 0), places(2, 8, 1).long(), words(2, 2))
    with pytest.raises(ValueError, match="values"):
        scatter_words(words(8, 0), places(2, 8, 1), words(3, 2))


@pytest.mark.gpu
def test_replay_equals_eager():
    memory, addresses, values = words(3000, 0), places(1500, 3000, 1), words(1500, 2)
    assert_replay_equals_eager(lambda: scatter_words(memory, addresses, values), memory)
