"""Prefill attention against its reference: fresh and cached prompts, chunks, mixed steps, poison, and graphs."""

from dataclasses import replace

import pytest
import torch
from triton.runtime import interpreter

from kernels import prefill_attention as kernel
from kernels.prefill_attention import COUNTER_COUNT, flops, prefill_attention, prefill_attention_reference
from kernels.prefill_plans import launch_plan, measured_tiles
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
SMALL_TILES = {"tile_rows": 32, "key_tile": 16}  # several tiles in few tokens


def run(
    batch: PagedBatch, *, scale: float = 0.125, plan_options: dict | None = None, fresh: tuple | None = None,
    programs: int | None = None, **options,
) -> torch.Tensor:  # fmt: skip
    """Launch on a poisoned output; check that the counters come back as zeros. `fresh`: by default what is stored;
    `programs`: by default as many as planned."""
    device = batch.query.device
    query_heads, head_dim = batch.query.shape[1:]
    multiprocessors = 132 if device.type == "cuda" else MULTIPROCESSORS
    plan_options = (SMALL_TILES if device.type == "cpu" else {}) if plan_options is None else plan_options
    plan_options = {"quantised": batch.key_scales is not None} | plan_options
    plan = launch_plan(
        len(batch.query),
        len(batch.row_slots),
        query_heads,
        batch.key_cache.shape[1],
        head_dim,
        multiprocessors,
        **plan_options,
    )
    plan = usual_rows(plan, device)
    plan = replace(plan, program_count=programs or plan.program_count)
    output = torch.full_like(batch.query, float("nan"))
    counters = torch.zeros(COUNTER_COUNT, dtype=torch.int32, device=device)
    if plan.fresh and fresh is None:
        fresh = batch.fresh()
    prefill_attention(
        output, *batch.prefill_inputs, counters, plan, scale=scale, fresh=fresh, **batch.scales, **options
    )
    assert not counters.any(), "the counters were not left at zero"
    return output


def references(batch: PagedBatch, scale: float = 0.125, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """In the batch's own dtype, and in float64."""
    same, exact = (
        prefill_attention_reference(*batch.prefill_inputs, scale=scale, dtype=dtype, **batch.scales, **options)
        for dtype in (batch.query.dtype, torch.float64)
    )
    return same, exact


def check(batch: PagedBatch, *, plan_options: dict | None = None, scale: float = 0.125, **options) -> None:
    result = run(batch, scale=scale, plan_options=plan_options, **options)
    assert_as_exact_as_torch(result, *references(batch, scale, **options), ERROR_FACTOR)


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(16, 16)],
        [(17, 17)],
        [(63, 63)],
        [(100, 100)],
        [(1, 50), (5, 64), (30, 31)],
        [(16, 48)],
        [(33, 97), (1, 1), (2, 40), (64, 64)],
        [(3, 3)] * 9,
    ],
)
def test_rows_of_any_length_match_the_reference(rows, place):
    check(make_batch(rows, *place, seed=len(rows)))


EARLY_ROWS = [
    [(33, 97), (1, 1), (2, 40), (64, 64)],
    [(3, 3)] * 9,
]


@pytest.mark.parametrize("one_loop", [True, False])
@pytest.mark.parametrize("rows", [*EARLY_ROWS, [(0, 0)]], ids=len)
def test_every_program_waits_before_it_reads_what_the_kernel_ahead_writes(rows, one_loop, monkeypatch):
    """Until then there are no queries, keys and values, and it writes nothing. Those without work wait as well: who
    waits for this kernel waits for those before it."""
    skip_unless_here("cpu")
    batch = make_batch(rows, "cpu", torch.float32, seed=3, spare_tokens=2)
    want, late = run(batch), (batch.query, batch.key_cache, batch.value_cache)
    written, output = [tensor.clone() for tensor in late], torch.full_like(batch.query, float("nan"))
    before, waited = [], []

    def begin(*index: int) -> None:
        for tensor in late:
            tensor.fill_(float("nan"))
        before.append(output.clone())
        set_index(*index)

    def wait(_: object) -> None:
        if len(waited) < len(before):
            waited.append(torch.equal(output.nan_to_num(), before[-1].nan_to_num()))
        for tensor, values in zip(late, written, strict=True):
            tensor.copy_(values)

    set_index = interpreter.interpreter_builder.set_grid_idx
    monkeypatch.setattr(interpreter.interpreter_builder, "set_grid_idx", begin)
    monkeypatch.setattr(kernel, "wait_for_inputs", wait)
    plan = launch_plan(len(output), len(rows), 4, 2, 64, MULTIPROCESSORS, **SMALL_TILES | {"one_loop": one_loop})
    counters = torch.zeros(COUNTER_COUNT, dtype=torch.int32)
    prefill_attention(output, *batch.prefill_inputs, counters, plan, scale=0.125)
    assert torch.equal(output, want) and all(waited) and len(waited) == len(before) == plan.program_count


def test_half_precision():
    skip_unless_here("cpu")
    check(make_batch([(33, 97), (1, 1), (2, 40)], "cpu", torch.float16, seed=5))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim, place):
    check(make_batch([(20, 20), (9, 40)], *place, head_dim=head_dim))


@pytest.mark.parametrize("query_heads, kv_heads", [(1, 1), (3, 1), (16, 8), (9, 3), (32, 2), (24, 1)])
def test_groups(query_heads, kv_heads, place):
    check(make_batch([(19, 19), (7, 23)], *place, query_heads=query_heads, kv_heads=kv_heads))


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 64, 128])
def test_block_sizes(block_size, place):
    check(make_batch([(40, 40), (16, 128), (1, 1)], *place, block_size=block_size))


@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 1}, {"sliding_window": 20}, {"sliding_window": 32}, {"soft_cap": 3.0}, {"scale": 0.7}],
)
def test_options(options, place):
    check(make_batch([(70, 70), (21, 90), (5, 21)], *place), **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"soft_cap": 3.0}])
def test_full_tiles_in_a_loop_of_their_own(options, place):
    plan_options = SMALL_TILES | {"one_loop": False}
    check(make_batch([(70, 70), (21, 90), (5, 21)], *place), plan_options=plan_options, **options)


def test_quantised_full_tiles_in_a_loop_of_their_own(place, cache_dtype):
    batch = quantise_caches(make_batch([(70, 70), (21, 90), (5, 21)], *place), cache_dtype)
    check(batch, plan_options=SMALL_TILES | {"one_loop": False})


def test_the_default_plan(place):
    check(make_batch([(70, 150), (3, 3)], *place), plan_options={})


@pytest.mark.parametrize("chunk", [1, 15, 16, 17])
def test_chunks_give_what_the_whole_gives(chunk, place):
    """The rows of a prompt taken in chunks, as one batch whose rows share the prompt's blocks."""
    length = 35
    whole = make_batch([(length, length)], *place)
    starts = [*range(0, length, chunk), length]
    ends = torch.tensor(starts[1:], dtype=torch.int32, device=place[0])
    chunked = PagedBatch(
        whole.query,
        whole.key_cache,
        whole.value_cache,
        whole.block_tables,
        whole.row_slots.repeat(len(ends)),
        ends,
        torch.tensor(starts, dtype=torch.int32, device=place[0]),
    )
    assert_as_exact_as_torch(run(chunked), *references(whole), ERROR_FACTOR)


def test_padding_rows_empty_rows_and_spare_tokens_get_zeros(place):
    batch = make_batch([(4, 9), (5, 20), (0, 0), (6, 6), (0, 12)], *place, padding=(1,), spare_tokens=5)
    check(batch)
    result = run(batch)
    assert not result[4:9].any()
    assert not result[15:].any()


def test_many_empty_rows_and_spare_tokens(place):
    check(make_batch([(5, 5), (3, 40), *[(0, 0)] * 119], *place, spare_tokens=56))


def test_a_batch_of_padding_alone_gets_zeros(place):
    assert not run(make_batch([(3, 8), (0, 0)], *place, padding=(0, 1), spare_tokens=2)).any()


def test_decode_rows_are_left_alone(place):
    batch = make_batch([(1, 30), (1, 17), (12, 40), (5, 5)], *place, spare_tokens=1)
    result = run(batch, decode_row_count=torch.tensor([2], dtype=torch.int32, device=place[0]))
    assert result[:2].isnan().all(), "rows of the decode kernel were written"
    same, exact = references(batch)
    assert_as_exact_as_torch(result[2:], same[2:], exact[2:], ERROR_FACTOR)


@pytest.fixture(params=[torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def cache_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("rows", [[(1, 1)], [(17, 17)], [(1, 50), (5, 64), (30, 31)], [(33, 97), (1, 1), (2, 40)]])
def test_quantised_rows_of_any_length_match_the_reference(rows, place, cache_dtype):
    check(quantise_caches(make_batch(rows, *place, seed=len(rows)), cache_dtype))


@pytest.mark.parametrize("head_dim, kv_heads, block_size", [(80, 1, 1), (128, 2, 4), (96, 4, 32), (256, 2, 128)])
def test_quantised_shapes(head_dim, kv_heads, block_size, place, cache_dtype):
    batch = make_batch([(20, 20), (9, 40)], *place, head_dim=head_dim, kv_heads=kv_heads, block_size=block_size)
    check(quantise_caches(batch, cache_dtype))


@pytest.mark.parametrize("options", [{"sliding_window": 1}, {"sliding_window": 20}, {"soft_cap": 3.0}])
def test_quantised_options(options, place, cache_dtype):
    check(quantise_caches(make_batch([(70, 70), (21, 90), (5, 21)], *place), cache_dtype), **options)


def test_quantised_padding_rows_and_spare_tokens_get_zeros(place, cache_dtype):
    batch = make_batch([(4, 9), (5, 20), (0, 0), (6, 6)], *place, padding=(1,), spare_tokens=5)
    batch = quantise_caches(batch, cache_dtype)
    check(batch)
    result = run(batch)
    assert not result[4:9].any()
    assert not result[15:].any()


def test_quantised_half_precision(cache_dtype):
    skip_unless_here("cpu")
    check(quantise_caches(make_batch([(33, 97), (1, 1), (2, 40)], "cpu", torch.float16, seed=5), cache_dtype))


@pytest.mark.parametrize("change, message", [
    ({"query_starts": lambda t: t[:-1]}, r"query_starts shape: wanted \[3\], got \[2\]"),
    ({"query_starts": lambda t: t.long()}, "query_starts dtype"),
    ({"block_tables": lambda t: t[0]}, "block_tables: wanted"),
    ({"query": lambda t: t[:, :3]}, "query_heads: wanted a multiple of 2 kv heads, got 3"),
])  # fmt: skip
def test_wrong_inputs_are_named(change, message):
    batch = make_batch([(5, 5), (2, 6)], "cpu", torch.float32)
    for name, alter in change.items():
        setattr(batch, name, alter(getattr(batch, name)))
    plan = launch_plan(7, 2, 4, 2, 64, MULTIPROCESSORS)
    counters = torch.zeros(COUNTER_COUNT, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        prefill_attention(torch.empty_like(batch.query), *batch.prefill_inputs, counters, plan, scale=0.1)


def test_plan_is_sized_by_the_bucket_alone():
    assert launch_plan(8192, 256, 16, 8, 128, 132).program_count % 132 == 0
    assert launch_plan(1, 1, 16, 8, 128, 132).program_count == 8
    assert launch_plan(8192, 256, 24, 1, 128, 132).query_tile * 24 <= launch_plan(8192, 256, 24, 1, 128, 132).tile_rows
    with pytest.raises(ValueError, match="query heads a K/V head: wanted <= 128, got 129"):
        launch_plan(64, 1, 129, 1, 128, 132)


def test_flops_count_causal_pairs():
    assert flops([3], [3], query_heads=1, head_dim=1) == 4 * 6
    assert flops([2], [5], query_heads=2, head_dim=8) == 4 * (4 + 5) * 16


@pytest.mark.gpu
@pytest.mark.parametrize(
    "specialised, cache",
    [(False, None), (True, None), (False, torch.int8), (False, torch.float8_e4m3fn), (True, torch.int8)],
)
def test_one_graph_is_right_for_every_mix_of_lengths(specialised, cache):
    skip_unless_here("cuda")
    shape = {"query_heads": 16, "kv_heads": 8, "head_dim": 128}
    mixes = [
        [(300, 2000), (1, 1), (100, 100), (0, 0)],
        [(512, 512), (0, 0), (0, 0), (0, 0)],
        [(1, 3000), (2, 2), (3, 500), (506, 600)],
    ]
    batches = [make_batch(rows, "cuda", torch.bfloat16, spare_tokens=512 - sum(q for q, _ in rows), seed=seed, **shape)
               for seed, rows in enumerate(mixes)]  # fmt: skip
    if cache is not None:
        batches = [quantise_caches(batch, cache) for batch in batches]
    room = room_for(batches)
    plan = launch_plan(512, 4, 16, 8, 128, 132, specialised=specialised, quantised=cache is not None)
    output = torch.full_like(room.query, float("nan"))
    counters = torch.zeros(COUNTER_COUNT, dtype=torch.int32, device="cuda")

    fresh = room.fresh() if plan.fresh else None

    def call() -> None:
        prefill_attention(output, *room.prefill_inputs, counters, plan, scale=0.1, fresh=fresh, **room.scales)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for batch in batches:
        put(batch, room)
        for target, source in zip(fresh or (), batch.fresh() if plan.fresh else (), strict=True):
            target.copy_(source)
        output.fill_(float("nan"))
        graph.replay()
        assert_as_exact_as_torch(output, *references(batch, 0.1), ERROR_FACTOR)
        assert torch.equal(output, run(batch, scale=0.1, plan_options={"specialised": specialised})), (
            "replay and eager call differ"
        )


def test_tiles_fit_into_the_shared_memory_of_the_card():
    """Float32 heads of 256 on Hopper, and 16-bit ones where a program has 99 KB: the tiles of few tokens."""
    few, many = (measured_tiles(count, 4, 256) for count in (64, 8192))
    for element_bytes, shared_bytes, wanted in ((2, 227, many), (4, 227, few), (2, 99, few)):
        plan = launch_plan(8192, 4, 4, 2, 256, 132, element_bytes=element_bytes, shared_bytes=shared_bytes << 10)
        assert (plan.tile_rows, plan.key_tile, plan.num_warps) == (wanted.tile_rows, wanted.key_tile, wanted.num_warps)
        assert wanted.shared_bytes(256, element_bytes) <= shared_bytes << 10
    assert (
        launch_plan(128, 4, 4, 2, 128, 132, shared_bytes=99 << 10).tile_rows
        == 64
        > measured_tiles(128, 4, 128).tile_rows
    )
    assert (
        launch_plan(8192, 4, 4, 2, 128, 132, shared_bytes=99 << 10).tile_rows == measured_tiles(8192, 4, 128).tile_rows
    )
    assert measured_tiles(8192, 4, 256).shared_bytes(256, 4) == 393_216, "what Triton 3.6 asked for on Hopper"
