"""Decode attention against its reference: every way a row can be cut, padding, poison, and graphs."""

import pytest
import torch

from kernels.decode_attention import bytes_moved, decode_attention, decode_attention_reference, launch_plan
from tests.kernels.paged_batches import (
    MULTIPROCESSORS,
    PagedBatch,
    assert_as_exact_as_torch,
    make_batch,
    put,
    quantise_caches,
    room_for,
    skip_unless_here,
    usual_rows,
)

ERROR_FACTOR = 2.0


def run(batch: PagedBatch, *, scale: float = 0.125, plan_options: dict | None = None, **options) -> torch.Tensor:
    """Launch on a poisoned output and a poisoned workspace; check that the counters come back as zeros."""
    device = batch.query.device
    kv_heads = batch.key_cache.shape[1]
    rows, query_heads, head_dim = len(batch.row_slots), *batch.query.shape[1:]
    multiprocessors = 132 if device.type == "cuda" else MULTIPROCESSORS
    plan_options = {"quantised": batch.key_scales is not None} | (plan_options or {})
    plan = usual_rows(launch_plan(rows, query_heads, kv_heads, head_dim, multiprocessors, **plan_options), device)
    output = torch.full_like(batch.query, float("nan"))
    partials = torch.full((plan.workspace_floats,), float("nan"), device=device)
    counters = torch.zeros(plan.counter_count, dtype=torch.int32, device=device)
    decode_attention(output, *batch.decode_inputs, partials, counters, plan, scale=scale, **batch.scales, **options)
    assert not counters.any(), "the counters were not left at zero"
    return output


def check(batch: PagedBatch, *, plan_options: dict | None = None, scale: float = 0.125, **options) -> None:
    result = run(batch, scale=scale, plan_options=plan_options, **options)
    exact, same = (
        decode_attention_reference(*batch.decode_inputs, scale=scale, dtype=dtype, **batch.scales, **options)
        for dtype in (torch.float64, batch.query.dtype)
    )
    assert_as_exact_as_torch(result, same, exact, ERROR_FACTOR)


def ones(*lengths: int) -> list[tuple[int, int]]:
    return [(1, length) for length in lengths]


@pytest.mark.parametrize(
    "lengths",
    [(1,), (15,), (16,), (17,), (64,), (65,), (400,), (1, 64, 3, 130), (33,) * 7, (1, 1, 1, 500), (500, 1, 1, 1)],
)
def test_rows_of_any_length_match_the_reference(lengths, place):
    check(make_batch(ones(*lengths), *place, seed=sum(lengths)))


def test_half_precision():
    skip_unless_here("cpu")
    check(make_batch(ones(1, 64, 3, 130), "cpu", torch.float16, seed=5))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim, place):
    check(make_batch(ones(5, 70), *place, head_dim=head_dim))


@pytest.mark.parametrize("query_heads, kv_heads", [(1, 1), (3, 1), (16, 8), (9, 3), (32, 2), (24, 1)])
def test_groups(query_heads, kv_heads, place):
    check(make_batch(ones(90, 7), *place, query_heads=query_heads, kv_heads=kv_heads))


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 64, 128])
def test_block_sizes(block_size, place):
    check(make_batch(ones(100, 128, 1), *place, block_size=block_size))


@pytest.mark.parametrize("options", [{"sliding_window": 1}, {"sliding_window": 70}, {"soft_cap": 3.0}, {"scale": 0.7}])
def test_options(options, place):
    check(make_batch(ones(200, 71, 70, 3), *place), **options)


@pytest.mark.parametrize("min_tiles", [1, 2, 5])
@pytest.mark.parametrize("tile_tokens", [16, 32, 128])
def test_every_plan_gives_the_same_answer(min_tiles, tile_tokens, place):
    check(make_batch(ones(150, 2, 37), *place), plan_options={"min_tiles": min_tiles, "tile_tokens": tile_tokens})


def test_padding_rows_and_empty_rows_get_zeros(place):
    batch = make_batch(ones(40, 9, 0, 64, 5), *place, padding=(1, 4))
    check(batch)
    result = run(batch)
    assert not result[[1, 2, 4]].any()
    assert result[[0, 3]].any()


def test_a_batch_of_padding_alone_gets_zeros(place):
    assert not run(make_batch(ones(8, 8), *place, padding=(0, 1))).any()


def test_rows_past_the_decode_rows_are_left_alone(place):
    batch = make_batch(ones(40, 90, 20, 300), *place)
    result = run(batch, decode_row_count=torch.tensor([2], dtype=torch.int32, device=place[0]))
    exact, same = (
        decode_attention_reference(*batch.decode_inputs, scale=0.125, dtype=dtype)[:2]
        for dtype in (torch.float64, batch.query.dtype)
    )
    assert_as_exact_as_torch(result[:2], same, exact, ERROR_FACTOR)
    assert result[2:].isnan().all(), "rows of the prefill kernel were written"


@pytest.fixture(params=[torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def cache_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("lengths", [(1,), (16, 17), (400,), (1, 64, 3, 130), (500, 1, 1, 1)])
def test_quantised_rows_of_any_length_match_the_reference(lengths, place, cache_dtype):
    batch = make_batch(ones(*lengths), *place, seed=sum(lengths))
    check(quantise_caches(batch, cache_dtype), plan_options={"tile_tokens": 32})


@pytest.mark.parametrize("head_dim, kv_heads, block_size", [(80, 1, 1), (128, 2, 4), (96, 4, 32), (256, 2, 128)])
def test_quantised_shapes(head_dim, kv_heads, block_size, place, cache_dtype):
    batch = make_batch(ones(150, 7), *place, head_dim=head_dim, kv_heads=kv_heads, block_size=block_size)
    check(quantise_caches(batch, cache_dtype))


@pytest.mark.parametrize("options", [{"sliding_window": 1}, {"sliding_window": 70}, {"soft_cap": 3.0}])
def test_quantised_options(options, place, cache_dtype):
    check(quantise_caches(make_batch(ones(200, 71, 70, 3), *place), cache_dtype), **options)


def test_quantised_padding_rows_and_empty_rows_get_zeros(place, cache_dtype):
    batch = quantise_caches(make_batch(ones(40, 9, 0, 64, 5), *place, padding=(1, 4)), cache_dtype)
    check(batch)
    result = run(batch)
    assert not result[[1, 2, 4]].any()
    assert result[[0, 3]].any()


def test_quantised_half_precision(cache_dtype):
    skip_unless_here("cpu")
    check(quantise_caches(make_batch(ones(1, 64, 3, 130), "cpu", torch.float16, seed=5), cache_dtype))


@pytest.mark.parametrize(
    "device, dtype",
    [
        pytest.param("cpu", torch.float16, id="cpu"),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu, id="gpu"),
    ],
)
@pytest.mark.parametrize("lengths", [(1,), (400, 0, 64), (1, 130)])
def test_single_quantised_keys(lengths, device, dtype, cache_dtype):
    """As bytes or float16 instead of pairs; the interpreter's float32 queries would lose by it."""
    skip_unless_here(device)
    check(quantise_caches(make_batch(ones(*lengths), device, dtype, head_dim=128, seed=3), cache_dtype))


@pytest.mark.parametrize("start_tiles", [1, 3])
@pytest.mark.parametrize("lengths", [(1, 1, 1, 500), (33,) * 7, (130,)])
def test_weighted_beginnings(lengths, start_tiles, place):
    check(make_batch(ones(*lengths), *place), plan_options={"start_tiles": start_tiles, "tile_tokens": 16})


def test_many_parts_merge(place):
    plan_options = {"programs_per_multiprocessor": 16 if place[0] == "cpu" else 2, "tile_tokens": 16}
    check(make_batch(ones(600), *place, head_dim=128, kv_heads=1, query_heads=2), plan_options=plan_options)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": lambda t: t.double()}, "query dtype"),
        ({"key_cache": lambda t: t[..., :32]}, "key_cache head_dim: wanted 64, got 32"),
        ({"value_cache": lambda t: t[:1]}, "value_cache shape"),
        ({"row_slots": lambda t: t.long()}, "row_slots dtype: wanted torch.int32, got torch.int64"),
        ({"context_lengths": lambda t: t[:1]}, "context_lengths shape"),
        ({"query": lambda t: t[:1]}, "output shape"),
    ],
)
def test_wrong_inputs_are_named(change, message):
    batch = make_batch(ones(5, 6), "cpu", torch.float32)
    output = torch.empty_like(batch.query)
    for name, alter in change.items():
        setattr(batch, name, alter(getattr(batch, name)))
    plan = launch_plan(2, 4, 2, 64, MULTIPROCESSORS)
    partials, counters = torch.empty(plan.workspace_floats), torch.zeros(plan.counter_count, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        decode_attention(output, *batch.decode_inputs, partials, counters, plan, scale=0.1)


def test_plan_is_sized_by_the_bucket_alone():
    plan = launch_plan(48, 16, 8, 128, 132)
    assert plan.program_count % 132 == 0
    assert plan.rows_tile == 64
    assert plan.counter_count == 48 * 8
    assert plan.workspace_floats == 2 * plan.program_count * 16 * 130
    with pytest.raises(ValueError, match=r"max_rows: wanted 1\.\.1024, got 1025"):
        launch_plan(1025, 16, 8, 128, 132)


def test_bytes_count_keys_values_queries_and_outputs_once():
    shape = {"query_heads": 4, "kv_heads": 2, "head_dim": 64, "element_bytes": 2}
    assert bytes_moved([10, 20], **shape) == 2 * 64 * (4 * 30 + 8 * 2)
    assert bytes_moved([10, 20], **shape, cache_dtype=torch.int8) == 66 * 4 * 30 + 2 * 64 * 8 * 2


def test_a_quantised_cache_needs_its_scales(cache_dtype):
    batch = quantise_caches(make_batch(ones(5, 6), "cpu", torch.float32), cache_dtype)
    batch.value_scales = None
    with pytest.raises(ValueError, match="value_scales: wanted scales beside a cache of"):
        run(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("specialised", [False, True])
@pytest.mark.parametrize("cache", [None, torch.int8, torch.float8_e4m3fn])
def test_one_graph_is_right_for_every_mix_of_lengths(cache, specialised):
    skip_unless_here("cuda")
    if specialised and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for Hopper")
    shape = {"query_heads": 16, "kv_heads": 8, "head_dim": 128}
    mixes = [(1, 4000, 17, 0), (900, 901, 902, 903), (1, 1, 1, 1), (0, 0, 0, 0), (4096, 1, 64, 65)]
    batches = [make_batch(ones(*mix), "cuda", torch.bfloat16, seed=seed, **shape) for seed, mix in enumerate(mixes)]
    if cache is not None:
        batches = [quantise_caches(batch, cache) for batch in batches]
    room = room_for(batches)
    plan = launch_plan(4, 16, 8, 128, 132, quantised=cache is not None, specialised=specialised)
    output = torch.full_like(room.query, float("nan"))
    partials = torch.full((plan.workspace_floats,), float("nan"), device="cuda")
    counters = torch.zeros(plan.counter_count, dtype=torch.int32, device="cuda")

    def call() -> None:
        decode_attention(output, *room.decode_inputs, partials, counters, plan, scale=0.1, **room.scales)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for batch in batches:
        put(batch, room)
        output.fill_(float("nan"))
        graph.replay()
        same, exact = (
            decode_attention_reference(*batch.decode_inputs, scale=0.1, dtype=dtype, **batch.scales)
            for dtype in (torch.bfloat16, torch.float64)
        )
        assert_as_exact_as_torch(output, same, exact, ERROR_FACTOR)
        eager = run(batch, scale=0.1, plan_options={"specialised": specialised})
        assert torch.equal(output, eager), "replay and eager call differ"
