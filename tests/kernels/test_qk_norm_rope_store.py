"""q/k norm, RoPE and the paged store against float32."""

import pytest
import torch

from kernels.kv_format import dequantise, read_back
from kernels.qk_norm_rope_store import (
    QkNormRopeStorePlan,
    bytes_moved,
    launch_plan,
    qk_norm_rope_store,
    qk_norm_rope_store_reference,
)
from tests.kernels.closeness import DEVICE, DTYPES, assert_as_exact, assert_replay_equals_eager, random_tensor

MAX_POSITION = 200
EPS = 1e-6


def rope_table(rotary_dim: int) -> torch.Tensor:
    frequency = 10_000.0 ** (-torch.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    angle = torch.arange(MAX_POSITION)[:, None] * frequency[None, :]
    return torch.cat((angle.cos(), angle.sin()), dim=1).float().to(DEVICE)


def make_case(tokens, query_heads, kv_heads, head_dim, dtype, *, block_size=4, blocks=9, with_norm=True, seed=0):
    """Random rows, NaN caches, distinct slots in shuffled order with every third token masked."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[1::3] = -1
    cache_shape = (blocks, kv_heads, block_size, head_dim)
    weights = [random_tensor(head_dim, dtype=dtype, seed=seed + i) if with_norm else None for i in (1, 2)]
    return {
        "qkv": random_tensor(tokens, (query_heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=seed + 3),
        "key_cache": torch.full(cache_shape, float("nan"), dtype=dtype, device=DEVICE),
        "value_cache": torch.full(cache_shape, float("nan"), dtype=dtype, device=DEVICE),
        "slot_mapping": slots.to(DEVICE),
        "positions": torch.randint(MAX_POSITION, (tokens,), generator=generator).int().to(DEVICE),
        "q_weight": weights[0],
        "k_weight": weights[1],
        "eps": EPS,
    }


def run(case, query_heads: int, table: torch.Tensor) -> torch.Tensor:
    head_dim = case["key_cache"].shape[3]
    q_out = torch.full((case["qkv"].shape[0], query_heads, head_dim), float("nan"), device=DEVICE).to(case["qkv"].dtype)
    qk_norm_rope_store(q_out=q_out, rope_table=table, **case)
    return q_out


def exact(case, query_heads: int, table: torch.Tensor):
    """`(q, key_cache, value_cache)` in float32."""
    wide = {name: value.clone() if torch.is_tensor(value) else value for name, value in case.items()}
    for name in ("qkv", "key_cache", "value_cache"):
        wide[name] = wide[name].float()
    q = qk_norm_rope_store_reference(query_heads=query_heads, rope_table=table, **wide)
    return q, wide["key_cache"], wide["value_cache"]


SHAPES = [(1, 4, 2, 64, 64), (7, 2, 2, 80, 80), (5, 6, 2, 96, 96), (4, 4, 4, 128, 64), (3, 3, 1, 16, 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("tokens", "query_heads", "kv_heads", "head_dim", "rotary_dim"), SHAPES)
def test_matches_float32(tokens, query_heads, kv_heads, head_dim, rotary_dim, with_norm, dtype):
    table = rope_table(rotary_dim)
    case = make_case(tokens, query_heads, kv_heads, head_dim, dtype, with_norm=with_norm)
    want_q, want_k, want_v = exact(case, query_heads, table)
    q = run(case, query_heads, table)
    assert_as_exact(q, want_q)
    for cache, want in ((case["key_cache"], want_k), (case["value_cache"], want_v)):
        assert torch.equal(cache.isnan(), want.isnan()), "stored where nothing should be, or the other way round"
        assert_as_exact(cache.nan_to_num(0), want.nan_to_num(0))


def test_rows_in_parts_are_added_up():
    table = rope_table(64)
    case = make_case(5, 4, 2, 64, torch.float32)
    parts = random_tensor(3, *case["qkv"].shape, seed=20)
    case["qkv"] = parts.sum(0)
    want_q, want_k, want_v = exact(case, 4, table)
    case["qkv"] = parts
    q_out = torch.full((5, 4, 64), float("nan"), device=DEVICE)
    qk_norm_rope_store(q_out=q_out, rope_table=table, **case)
    assert_as_exact(q_out, want_q)
    assert_as_exact(case["key_cache"].nan_to_num(0), want_k.nan_to_num(0))
    assert_as_exact(case["value_cache"].nan_to_num(0), want_v.nan_to_num(0))


QUANTISED = [torch.int8, torch.float8_e4m3fn]


def quantised_case(case, cache_dtype):
    """The same case with a cache of 8 bits; what is not written holds NaN in scales, and in FP8 elements too."""
    shape = case["key_cache"].shape
    caches = [torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE).view(cache_dtype) for _ in range(2)]
    scales = [torch.full(shape[:3], float("nan"), dtype=torch.float16, device=DEVICE) for _ in range(2)]
    return case | {"key_cache": caches[0], "value_cache": caches[1], "key_scales": scales[0], "value_scales": scales[1]}


@pytest.mark.parametrize("cache_dtype", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "query_heads", "kv_heads", "head_dim", "rotary_dim"), [SHAPES[0], *SHAPES[2:]])
def test_quantised_caches_match_the_reference(tokens, query_heads, kv_heads, head_dim, rotary_dim, dtype, cache_dtype):
    """A level may differ by one where the last bit of float32 decides between two; scales by their last bit."""
    table = rope_table(rotary_dim)
    case = quantised_case(make_case(tokens, query_heads, kv_heads, head_dim, dtype), cache_dtype)
    wanted = {name: value.clone() if torch.is_tensor(value) else value for name, value in case.items()}
    want_q = qk_norm_rope_store_reference(query_heads=query_heads, rope_table=table, **wanted)
    assert_as_exact(run(case, query_heads, table), want_q.float())
    for kind in ("key", "value"):
        scales, want_scales = case[f"{kind}_scales"], wanted[f"{kind}_scales"]
        written = ~want_scales.isnan()
        assert torch.equal(scales.isnan(), ~written), "stored where nothing should be, or the other way round"
        torch.testing.assert_close(scales[written], want_scales[written], rtol=2**-10, atol=0)
        cache, want = case[f"{kind}_cache"], wanted[f"{kind}_cache"]
        assert torch.equal(cache.view(torch.uint8)[~written], want.view(torch.uint8)[~written])
        got, exact_one = dequantise(cache[written], scales[written]), dequantise(want[written], want_scales[written])
        step = want_scales[written].float().unsqueeze(-1) * (1 if cache_dtype == torch.int8 else 32)
        assert ((got - exact_one).abs() <= step * 1.01).all()
        assert (cache.view(torch.uint8) != want.view(torch.uint8)).float().mean() < 0.01


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("cache_dtype", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("tokens", "query_heads", "kv_heads", "head_dim", "rotary_dim"),
    [*SHAPES[2:4], pytest.param(600, 16, 8, 128, 128, marks=pytest.mark.gpu)],  # the last: a program has all the heads
)
def test_what_was_stored_is_written_back(tokens, query_heads, kv_heads, head_dim, rotary_dim, dtype, cache_dtype):
    """To the bit, for the tokens that were stored; queries and other tokens, of NaN here, stay as they were."""
    table = rope_table(rotary_dim)
    blocks = tokens // 4 + 9
    case = quantised_case(make_case(tokens, query_heads, kv_heads, head_dim, dtype, blocks=blocks), cache_dtype)
    stored = case["slot_mapping"] >= 0
    case["qkv"][~stored] = float("nan")
    case["qkv"][0, -head_dim:] = 0  # a vector of zeros has the scale 0
    before, plain = case["qkv"].clone(), {name: case[name].clone() for name in ("key_cache", "key_scales")}
    q = run(case | plain, query_heads, table)
    assert torch.equal(case["qkv"].nan_to_num(7.0), before.nan_to_num(7.0)), "written back without being asked"
    torch.testing.assert_close(run(case | {"write_back": True}, query_heads, table), q, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(case["key_cache"].view(torch.uint8), plain["key_cache"].view(torch.uint8))
    heads = case["qkv"].view(tokens, -1, head_dim)
    assert torch.equal(heads[:, :query_heads].nan_to_num(7.0), before.view_as(heads)[:, :query_heads].nan_to_num(7.0))
    assert heads[~stored].isnan().all()
    slots = case["slot_mapping"][stored]
    for first, kind in ((query_heads, "key"), (query_heads + kv_heads, "value")):
        cache, scales = case[f"{kind}_cache"], case[f"{kind}_scales"]
        block, place = slots // cache.shape[2], slots % cache.shape[2]
        want = read_back(cache[block, :, place], scales[block, :, place])
        assert torch.equal(heads[stored, first : first + kv_heads].float(), want.float())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("query_heads", "kv_heads", "head_dim", "rotary_dim"), [shape[1:] for shape in SHAPES[2:4]])
def test_what_was_stored_in_a_plain_cache_is_written_back(query_heads, kv_heads, head_dim, rotary_dim, dtype):
    table = rope_table(rotary_dim)
    case = make_case(6, query_heads, kv_heads, head_dim, dtype) | {"write_back": True}
    stored, before = case["slot_mapping"] >= 0, case["qkv"].clone()
    run(case, query_heads, table)
    heads, others = (rows.view(6, -1, head_dim) for rows in (case["qkv"], before))
    assert torch.equal(heads[:, :query_heads], others[:, :query_heads]) and torch.equal(heads[~stored], others[~stored])
    slots = case["slot_mapping"][stored]
    for first, cache in ((query_heads, case["key_cache"]), (query_heads + kv_heads, case["value_cache"])):
        want = cache[slots // cache.shape[2], :, slots % cache.shape[2]]
        assert torch.equal(heads[stored, first : first + kv_heads], want)


@pytest.mark.parametrize("cache_dtype", QUANTISED)
def test_the_reference_writes_back_too(cache_dtype):
    table = rope_table(64)
    case = quantised_case(make_case(4, 4, 2, 64, torch.float32), cache_dtype) | {"write_back": True}
    wanted = {name: value.clone() if torch.is_tensor(value) else value for name, value in case.items()}
    qk_norm_rope_store_reference(query_heads=4, rope_table=table, **wanted)
    run(case, 4, table)
    torch.testing.assert_close(case["qkv"], wanted["qkv"], rtol=0.1, atol=0.05)  # a level off at most
    assert (case["qkv"] == wanted["qkv"]).float().mean() > 0.97


def test_slot_minus_one_stores_nothing_even_from_a_row_of_nan():
    table = rope_table(32)
    case = make_case(3, 2, 1, 32, torch.float32)
    case["slot_mapping"].fill_(-1)
    case["qkv"].fill_(float("nan"))
    case["key_cache"].fill_(5.0)
    case["value_cache"].fill_(6.0)
    run(case, 2, table)
    assert (case["key_cache"] == 5).all() and (case["value_cache"] == 6).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("cache_dtype", QUANTISED)
def test_slot_minus_one_leaves_quantised_blocks_alone(cache_dtype):
    case = quantised_case(make_case(3, 2, 1, 32, torch.float32), cache_dtype)
    case["slot_mapping"].fill_(-1)
    case["qkv"].fill_(float("nan"))
    run(case, 2, rope_table(32))
    assert (case["key_cache"].view(torch.uint8) == 0x7F).all() and (case["value_cache"].view(torch.uint8) == 0x7F).all()
    assert case["key_scales"].isnan().all() and case["value_scales"].isnan().all()


def test_whole_tokens_quantise_as_groups_of_heads_do(monkeypatch):
    table = rope_table(32)
    case = quantised_case(make_case(3, 4, 2, 32, torch.float32), torch.int8)
    run(case, 4, table)
    names = ("key_cache", "value_cache", "key_scales", "value_scales")
    alone = {name: case[name].view(torch.uint8).clone() for name in names}
    monkeypatch.setattr("kernels.qk_norm_rope_store.PROGRAM_TARGET", 1)
    assert launch_plan(3, 4, 2, 32).grid == (3, 1)
    run(case, 4, table)
    for name in names:
        assert (case[name].view(torch.uint8) != alone[name]).float().mean() < 0.01, name


def test_whole_tokens_equal_groups_of_heads(monkeypatch):
    table = rope_table(32)
    case = make_case(6, 8, 4, 32, torch.float32)
    alone = run(case, 8, table)
    cache = case["key_cache"].clone()
    monkeypatch.setattr("kernels.qk_norm_rope_store.PROGRAM_TARGET", 1)
    assert launch_plan(6, 8, 4, 32).query_heads == 8
    assert_as_exact(run(case, 8, table), alone)
    assert_as_exact(case["key_cache"].nan_to_num(0), cache.nan_to_num(0))


def test_no_tokens_is_no_work():
    case = make_case(0, 2, 1, 32, torch.float32)
    before = case["key_cache"].clone(), case["value_cache"].clone()
    run(case, 2, rope_table(32))
    for cache, content in zip((case["key_cache"], case["value_cache"]), before, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), content.nan_to_num(7.0))


def test_plan_and_bytes():
    plan = launch_plan(1, 16, 8, 128)
    assert plan.grid == (1, 8) and (plan.query_heads, plan.kv_heads, plan.num_warps) == (2, 1, 1)
    assert launch_plan(4096, 16, 8, 128) == QkNormRopeStorePlan((4096, 1), 16, 8, num_warps=4)
    assert launch_plan(1, 9, 3, 64).grid == (1, 1)
    assert bytes_moved(2, 2, 1, 8, 2) == 2 * 2 * 4 * 8 * 2
    assert bytes_moved(2, 2, 1, 8, 2, torch.int8) == 2 * (4 * 8 * 2 + 2 * 8 * 2 + 2 * 10)
    assert bytes_moved(2, 2, 1, 8, 2, torch.int8, write_back=True) == 2 * (4 * 8 * 2 + 4 * 8 * 2 + 2 * 10)


def test_wrong_arguments_are_named():
    table = rope_table(32)
    case = make_case(3, 2, 1, 32, torch.float32)
    with pytest.raises(ValueError, match=r"qkv: wanted shape \[3, 160\], got \[3, 128\]"):
        run(case, 3, table)
    with pytest.raises(ValueError, match="slot_mapping: wanted dtype torch.int64"):
        run(case | {"slot_mapping": case["slot_mapping"].int()}, 2, table)
    with pytest.raises(ValueError, match="wanted both or neither"):
        run(case | {"q_weight": None}, 2, table)
    with pytest.raises(ValueError, match=r"value_scales: wanted scales beside a cache of torch.int8, got None"):
        run(quantised_case(case, torch.int8) | {"value_scales": None}, 2, table)
    narrow = {name: case[name].bfloat16() for name in ("key_cache", "value_cache")}
    with pytest.raises(ValueError, match="write_back: wanted qkv in one part, of the cache's type or an 8-bit cache"):
        run(case | narrow | {"write_back": True}, 2, table)
    with pytest.raises(ValueError, match="even number of columns up to 32"):
        run(case, 2, rope_table(34))


@pytest.mark.gpu
def test_64_bit_offsets():
    """A cache of more than 2^31 elements: the last block is written, and only there."""
    block_size, kv_heads, head_dim = 16, 8, 128
    blocks = 2**31 // (block_size * kv_heads * head_dim) + 3
    case = make_case(1, 16, kv_heads, head_dim, torch.bfloat16, block_size=block_size, blocks=1)
    case["key_cache"] = torch.zeros(blocks, kv_heads, block_size, head_dim, dtype=torch.bfloat16, device=DEVICE)
    case["value_cache"] = torch.zeros_like(case["key_cache"])
    case["slot_mapping"][0] = blocks * block_size - 1
    run(case, 16, rope_table(128))
    assert case["key_cache"][-1, :, -1].abs().sum() > 0 and case["value_cache"][-1, :, -1].abs().sum() > 0
    assert case["key_cache"][:-1].count_nonzero() == 0


@pytest.mark.gpu
def test_replay_equals_eager():
    table = rope_table(128)
    case = make_case(9, 16, 8, 128, torch.bfloat16)
    q_out = torch.empty(9, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    case["key_cache"].zero_()
    assert_replay_equals_eager(
        lambda: qk_norm_rope_store(q_out=q_out, rope_table=table, **case), q_out, case["key_cache"]
    )
