"""Rows of the embedding table."""

import pytest
import torch

from kernels.embedding import bytes_moved, embedding, embedding_reference, launch_plan
from tests.kernels.closeness import DEVICE, DTYPES, assert_replay_equals_eager, random_tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (5, 100), (3, 2500)])
def test_gathers_rows(tokens, hidden, dtype):
    table = random_tensor(11, hidden, dtype=dtype)
    ids = torch.tensor([3, 10, 0, 10, 7][:tokens], dtype=torch.int32, device=DEVICE)
    out = torch.full((tokens, hidden), float("nan"), dtype=dtype, device=DEVICE)
    embedding(ids, table, out)
    assert torch.equal(out, table[ids.long()])


def test_ids_outside_the_table_give_zeros():
    table = random_tensor(4, 32)
    ids = torch.tensor([-1, 4, 2**31 - 1, 1], dtype=torch.int32, device=DEVICE)
    out = torch.full((4, 32), float("nan"), device=DEVICE)
    embedding(ids, table, out)
    assert torch.equal(out, embedding_reference(ids, table)) and (out[:3] == 0).all()


def test_no_tokens_is_no_work():
    room = torch.full((2, 8), float("nan"), device=DEVICE)
    embedding(torch.empty(0, dtype=torch.int32, device=DEVICE), random_tensor(4, 8), room[:0])
    assert room.isnan().all()


def test_plan_and_bytes():
    assert launch_plan(2, 5000).grid == (2, 3) and bytes_moved(2, 10, 2) == 88


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="token_ids: wanted dtype torch.int32, got torch.int64"):
        embedding(torch.zeros(1, dtype=torch.int64), torch.zeros(4, 8), torch.zeros(1, 8))


@pytest.mark.gpu
def test_replay_equals_eager():
    table = random_tensor(100, 1024, dtype=torch.bfloat16)
    ids = torch.arange(9, dtype=torch.int32, device=DEVICE)
    out = torch.empty(9, 1024, dtype=torch.bfloat16, device=DEVICE)
    assert_replay_equals_eager(lambda: embedding(ids, table, out), out)
