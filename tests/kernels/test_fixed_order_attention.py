"""Attention in one order: right, and a query has the same bits wherever it stands."""

import pytest
import torch

from kernels import fixed_order_attention as module
from kernels.fixed_order_attention import SPAN, fixed_order_attention, launch_plan
from kernels.prefill_attention import prefill_attention_reference
from tests.kernels.paged_batches import (
    PagedBatch,
    assert_as_exact_as_torch,
    make_batch,
    quantise_caches,
    usual_rows,
)
from tests.support.ordered_product import use_ordered_products

SMALL = {"span": 32, "key_tile": 16}
MANY, FEW = 132, 1
"""Multiprocessors: with many, single rows are split into their spans; with few they are taken whole."""


def run(batch: PagedBatch, multiprocessors: int = MANY, options: dict | None = None, **window) -> torch.Tensor:
    """Launch on a poisoned output; check that the counters come back as zeros."""
    query_heads, head_dim = batch.query.shape[1:]
    kv_heads, max_rows = batch.key_cache.shape[1], len(batch.row_slots)
    if options is None:
        options = SMALL if batch.query.device.type == "cpu" else {}
    device = batch.query.device
    plan = launch_plan(len(batch.query), max_rows, query_heads, kv_heads, head_dim, multiprocessors, **options)
    plan = usual_rows(plan, device)
    output = torch.full_like(batch.query, float("nan"))
    partials = torch.full((plan.workspace_floats,), float("nan"), device=device)
    counters = torch.zeros(max_rows * kv_heads, dtype=torch.int32, device=device)
    fixed_order_attention(
        output, *batch.prefill_inputs, partials, counters, plan, scale=0.125, **batch.scales, **window
    )
    assert not counters.any(), "the counters were not left at zero"
    return output


def check(batch: PagedBatch, multiprocessors: int = MANY, **window) -> None:
    """Against the reference, where a row owns the token."""
    result = run(batch, multiprocessors, **window)
    same, exact = (
        prefill_attention_reference(*batch.prefill_inputs, scale=0.125, dtype=dtype, **batch.scales, **window)
        for dtype in (batch.query.dtype, torch.float64)
    )
    owned = exact.abs().sum((1, 2)) > 0
    assert owned.any()
    assert_as_exact_as_torch(result[owned], same[owned], exact[owned], 2.0)
    assert result[~owned].isnan().all(), "a token of no row was written"


@pytest.mark.parametrize("multiprocessors", [FEW, MANY])
@pytest.mark.parametrize(
    "rows", [[(1, 1)], [(1, 31), (1, 32), (1, 33)], [(33, 97), (1, 1), (2, 40), (1, 130)], [(1, 3)] * 5]
)
def test_rows_of_any_length_match_the_reference(rows, multiprocessors, place):
    check(make_batch(rows, *place, seed=len(rows)), multiprocessors)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_head_dims(head_dim, place):
    check(make_batch([(20, 40), (1, 40)], *place, head_dim=head_dim))


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(1, 1), (3, 1), (32, 2)])
def test_groups(query_heads, kv_heads, place):
    check(make_batch([(19, 19), (1, 70)], *place, query_heads=query_heads, kv_heads=kv_heads))


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_block_sizes(block_size, place):
    check(make_batch([(40, 70), (1, 70)], *place, block_size=block_size))


@pytest.mark.parametrize("multiprocessors", [FEW, MANY])
@pytest.mark.parametrize("window", [1, 40])
def test_windows(window, multiprocessors, place):
    check(make_batch([(70, 150), (1, 150), (1, 21)], *place), multiprocessors, sliding_window=window)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_caches(dtype, place):
    check(quantise_caches(make_batch([(19, 50), (1, 70), (1, 5)], *place), dtype))


def test_padding_and_spare_tokens_are_left_alone(place):
    check(make_batch([(4, 9), (1, 40), (3, 3), (1, 5)], *place, padding=(2, 3), spare_tokens=5))


def test_more_spans_than_the_workspace_holds(place, monkeypatch):
    monkeypatch.setattr(module, "PART_COUNT", 3)
    check(make_batch([(1, 130), (1, 700)], *place))


def in_rows(whole: PagedBatch, lengths: list[int]) -> PagedBatch:
    """The one prompt of a batch, cut into rows that share its blocks."""
    ends = torch.tensor(lengths).cumsum(0).int()
    device = whole.query.device
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), ends)).to(device)
    return PagedBatch(
        whole.query, whole.key_cache, whole.value_cache, whole.block_tables, whole.row_slots.repeat(len(ends)),
        ends.to(device), starts, whole.key_scales, whole.value_scales,
    )  # fmt: skip


@pytest.mark.parametrize(("window", "cache_dtype"), [(0, None), (40, torch.int8)])
def test_a_query_has_the_same_bits_in_every_chunk(window, cache_dtype, place, monkeypatch):
    """A whole prompt, chunks, single rows split and taken whole; NumPy's products would depend on a row's place."""
    if place[0] == "cpu":
        use_ordered_products(monkeypatch)
    length = 2 * SPAN + 300 if place[0] == "cuda" else 45
    batch = make_batch([(length, length)], *place, seed=3)
    if cache_dtype is not None:
        batch = quantise_caches(batch, cache_dtype)
    whole = run(batch, sliding_window=window)
    for cut in ([17] * (length // 17) + [length % 17], [length - 4, 1, 2, 1]):
        rows = in_rows(batch, [count for count in cut if count])
        for multiprocessors in (FEW, MANY):
            assert torch.equal(run(rows, multiprocessors, sliding_window=window), whole), (cut[:4], multiprocessors)
    if place[0] == "cuda":
        singles = in_rows(batch, [1] * 900)
        singles.query = batch.query[:900].contiguous()
        assert torch.equal(run(singles, sliding_window=window), whole[:900]), "900 single rows"


@pytest.mark.parametrize(
    "name, alter, message",
    [
        ("counters", torch.Tensor.long, "counters dtype: wanted torch.int32, got torch.int64"),
        ("partials", torch.Tensor.half, "partials dtype: wanted torch.float32, got torch.float16"),
        ("query_starts", torch.Tensor.long, "query_starts dtype: wanted torch.int32, got torch.int64"),
    ],
)
def test_tensors_of_another_type_are_named(name, alter, message):
    """A kernel would take the bytes of such a workspace for its own numbers."""
    batch = make_batch([(5, 5), (2, 6)], "cpu", torch.float32)
    plan = launch_plan(7, 2, 4, 2, 64, MANY)
    given = {
        "query_starts": batch.query_starts,
        "partials": torch.empty(plan.workspace_floats),
        "counters": torch.zeros(4, dtype=torch.int32),
    }
    given[name] = alter(given[name])
    inputs = (*batch.decode_inputs, *given.values())
    with pytest.raises(ValueError, match=message):
        fixed_order_attention(torch.empty_like(batch.query), *inputs, plan, scale=0.1)


def test_plans_without_a_gpu():
    plan = launch_plan(100, 16, 16, 8, 128, 132)
    assert (plan.query_tile, plan.chunk_programs, plan.single_programs) == (32, 19, 264)
    assert plan.part_floats == 2 * 130 and plan.workspace_floats == module.PART_COUNT * 260
    with pytest.raises(ValueError, match="max_rows"):
        launch_plan(1, 2000, 16, 8, 128, 132)
