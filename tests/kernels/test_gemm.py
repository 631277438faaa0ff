"""Prompts' products by rule: where they run, in which tiles, what they refuse; test_gemm_hopper.py has the kernel."""

from dataclasses import replace

import pytest
import torch

from kernels import gemm as module
from kernels import tuning
from kernels.gemm import HeadStore, gemm, heads_plan, project_heads
from kernels.new_token import NewTokens
from kernels.tuning import LIBRARY, LinearPlan, find_plan, gemm_plan, most_library_rows

PLAN = LinearPlan("gemm", 128, 64, 4, block_m=128, norm_apart=True)
SMS = 132  # of an H200


def block_n(*shape: int, **options) -> int:
    plan = gemm_plan(*shape, SMS, **options)
    return 0 if plan is None else plan.block_n


def test_tiles_follow_from_how_full_their_waves_are():
    assert block_n(8192, 6144, 1024, fused=True) == 256
    assert block_n(2048, 1024, 2048) == 128  # of 256 columns there would be 64 tiles
    assert block_n(1024, 1024, 2048) == 0  # of 128 columns there are 64, and the library splits K
    assert block_n(1024, 6144, 1024, fused=True) == 128  # 384 fill three waves, 192 not two


def test_rows_of_decoding_and_shapes_that_do_not_divide_are_left_to_others():
    assert block_n(64, 65_536, 4096) == 0
    assert block_n(8192, 6144, 1000) == 0
    assert block_n(8192, 6144 + 64, 1024) == 0
    assert block_n(8192, 2 * 3136, 1024, fused=True) == 128  # 3,136 is a multiple of 64, and not of 128


GATE_AND_UP = {"qwen3-0.6b": (6144, 1024), "llama-3.1-8b": (28_672, 4096), "small": (2 * 256, 64)}


@pytest.mark.parametrize("is_hopper", [True, False])
@pytest.mark.parametrize("shape", GATE_AND_UP.values(), ids=GATE_AND_UP.keys())
def test_gate_and_up_find_room_where_the_library_computes_them(shape, is_hopper, monkeypatch):
    """A buffer for 8,192 tokens of an 8B model took 470 MB that nothing used."""
    monkeypatch.setattr(tuning, "takes_gluon", lambda major: is_hopper)
    monkeypatch.setattr(tuning, "multiprocessor_count", lambda device: SMS)
    kind = torch.device("cpu"), torch.bfloat16

    def is_librarys(rows: int) -> bool:
        plans = [find_plan(*kind, rows, *shape, silu_mul=True, has_norm=has_norm) for has_norm in (True, False)]
        return LIBRARY in plans

    for most in (1, 16, 255, 300, 1000, 4096):
        room = most_library_rows(*kind, most, *shape)
        assert room == most or not any(map(is_librarys, range(room + 1, most + 1)))
        assert room <= 256 or is_librarys(room), "more room than is used"


def make_store(rows: int, kv_heads: int = 8, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> HeadStore:
    caches = [torch.zeros(rows // 16 + 1, kv_heads, 16, head_dim, dtype=dtype) for _ in range(2)]
    slots, positions = torch.arange(rows), torch.arange(rows, dtype=torch.int32)
    return HeadStore(*caches, slots, positions, NewTokens(torch.zeros(rows, head_dim)))


@pytest.fixture
def hopper(monkeypatch):
    """Plans as on an H200; a list of the plans that would have been launched."""
    launched: list[LinearPlan] = []
    monkeypatch.setattr(module, "takes_gluon", lambda major: True)
    monkeypatch.setattr(module, "multiprocessor_count", lambda device: SMS)
    monkeypatch.setattr(module, "_launch", lambda plan, *args, **rest: launched.append(plan))
    return launched


def weights(kv_heads: int = 8, head_dim: int = 128, query_heads: int = 16) -> torch.Tensor:
    return torch.zeros((query_heads + 2 * kv_heads) * head_dim, 64, dtype=torch.bfloat16)


def test_heads_are_stored_by_the_product_where_it_can(hopper):
    store = make_store(2048)
    plan = heads_plan(weights(), 2048, 16, store)
    assert plan is not None and plan.block_n == 256
    partly = replace(store, new=NewTokens(torch.zeros(2048, 64)))
    other_strides = replace(store, value_cache=torch.zeros(129, 8, 32, 128, dtype=torch.bfloat16)[:, :, :16])
    eight_bits = replace(store, key_cache=store.key_cache.to(torch.int8), value_cache=store.value_cache.to(torch.int8))
    for refused in (partly, other_strides, eight_bits):
        assert heads_plan(weights(), 2048, 16, refused) is None
    assert heads_plan(weights(head_dim=256), 2048, 16, make_store(2048, head_dim=256)) is None
    narrow = heads_plan(weights(kv_heads=3, query_heads=12), 4096, 12, make_store(4096, kv_heads=3))
    assert narrow is not None and narrow.block_n == 128  # one of 256 columns would hold keys and values
    assert heads_plan(weights(3, 64, 12), 4096, 12, make_store(4096, kv_heads=3, head_dim=64)) is None


def test_no_heads_are_stored_without_hopper():
    assert heads_plan(weights(), 2048, 16, make_store(2048)) is None


def test_wrong_tensors_are_named(hopper):
    x, weight, out = (torch.zeros(300, 128, dtype=torch.bfloat16), torch.zeros(256, 128, dtype=torch.bfloat16),
                      torch.zeros(300, 256, dtype=torch.bfloat16))  # fmt: skip
    shifted = torch.zeros(300 * 256 + 1, dtype=torch.bfloat16)[1:].view(300, 256)
    for arguments, options, word in [
        ((x.float(), weight.float(), out, PLAN), {}, "x"),
        ((x, weight[:, :64], out, PLAN), {}, "weight"),
        ((x, weight[:192], out[:, :192], PLAN), {}, "weight"),
        ((x[:, :96], weight[:, :96], out, PLAN), {}, "weight"),
        ((x, weight, out[:200], PLAN), {}, "out"),
        ((x, weight, out.float(), PLAN), {}, "out"),
        ((x, weight, out, PLAN), {"residual": out[:200]}, "residual"),
        ((x, weight, shifted, PLAN), {}, "out"),
        ((x, weight, out, PLAN), {"residual": shifted}, "residual"),
        ((x, weight, out[:, :128], PLAN), {"residual": out[:, :128], "silu_mul": True}, "residual and silu_mul"),
        ((x, weight, out, PLAN), {"token_count": torch.zeros(2, dtype=torch.int32)}, "token_count"),
        ((x, weight, out, PLAN), {"token_count": torch.zeros(1, dtype=torch.int64)}, "token_count"),
        ((x, weight, out, LIBRARY), {}, "plan"),
    ]:
        with pytest.raises(ValueError, match=f"^{word}: "):
            gemm(*arguments, **options)
    assert hopper == []


def test_no_rows_are_no_launch(hopper):
    """A tensor without rows cannot be described to the copy engine."""
    for rows, launches in ((0, []), (1, [PLAN])):
        gemm(torch.zeros(rows, 128).half(), torch.zeros(256, 128).half(), torch.zeros(rows, 256).half(), PLAN)
        assert hopper == launches


def test_wrong_heads_are_named(hopper):
    x, query = torch.zeros(2048, 64, dtype=torch.bfloat16), torch.zeros(2048, 16, 128, dtype=torch.bfloat16)
    store = make_store(2048)
    for arguments, word in [
        ((x[:100], weights(), query, store), "x"),
        ((x, weights()[:, :32], query, store), "weight"),
        ((x, weights(query_heads=8), query, store), "heads_out"),
        ((x, weights(), query.float(), store), "heads_out"),
        ((x, weights(), query, replace(store, slot_mapping=store.slot_mapping[:9])), "slot_mapping"),
        ((x, weights(), query, replace(store, positions=store.positions.float())), "positions"),
        ((x, weights(), query.transpose(0, 1).contiguous().transpose(0, 1), store), "heads_out"),
        ((x, weights(), query, store, torch.zeros(1)), "token_count"),
        ((x[:100], weights(), query[:100], make_store(100)), "weight"),
    ]:
        with pytest.raises(ValueError, match=f"^{word}: "):
            project_heads(*arguments)
    assert hopper == []
