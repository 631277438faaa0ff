"""The Hopper decode kernel against its reference: on a GPU, and without one in the emulator."""

from types import ModuleType

import pytest
import torch

from kernels import decode_attention, decode_attention_hopper
from kernels.decode_attention import can_specialise, launch_plan
from kernels.paged_kv import HeadShape
from kernels.qk_norm_rope_store import qk_norm_rope_store
from tests.kernels.gluon_emulator import KernelAhead, emulate
from tests.kernels.paged_batches import PagedBatch, make_batch, quantise_caches, skip_unless_here
from tests.kernels.test_decode_attention import check, ones, run


@pytest.fixture
def device(hopper_device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if hopper_device == "cpu":
        emulate(monkeypatch, decode_attention_hopper, "_hopper_decode_kernel")
    return hopper_device


def batch_of(lengths: tuple[int, ...], device: str, cache: torch.dtype | None, **options):
    batch = make_batch(ones(*lengths), device, torch.bfloat16, seed=sum(lengths), **options)
    return batch if cache is None else quantise_caches(batch, cache)


def plan(**options) -> dict[str, dict]:
    return {"plan_options": {"specialised": True, "num_warps": 1, "tile_tokens": 16} | options}


@pytest.mark.parametrize("lengths", [(1,), (31, 32, 33), (400,), (1, 64, 3, 130), (500, 1, 1, 1)])
def test_rows_of_any_length_match_the_reference(lengths, device, cache):
    check(batch_of(lengths, device, cache), **plan(programs_per_multiprocessor=2))


@pytest.mark.parametrize(
    "head_dim, kv_heads, query_heads, cache",
    [
        (128, 2, 4, None),
        (128, 1, 8, torch.int8),
        (128, 2, 6, torch.float8_e4m3fn),
        (64, 1, 8, torch.int8),
        (64, 3, 3, torch.float8_e4m3fn),
    ],
)
def test_head_shapes(head_dim, kv_heads, query_heads, cache, device):
    batch = batch_of((90, 7), device, cache, head_dim=head_dim, kv_heads=kv_heads, query_heads=query_heads)
    check(batch, **plan(programs_per_multiprocessor=3))


@pytest.mark.parametrize(
    "block_size, tile_tokens, cache",
    [
        (8, 16, None),
        (16, 32, None),
        (128, 64, None),
        (32, 64, torch.int8),
        (64, 32, torch.int8),
        (16, 16, torch.float8_e4m3fn),
        (128, 16, torch.float8_e4m3fn),
    ],
)
def test_blocks_and_tiles(block_size, tile_tokens, cache, device):
    batch = batch_of((100, 128, 1), device, cache, block_size=block_size)
    check(batch, **plan(tile_tokens=tile_tokens, programs_per_multiprocessor=1))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_tiles_on_their_way(num_stages, device, cache):
    batch = batch_of((150, 2, 37), device, cache)
    check(batch, **plan(num_stages=num_stages, programs_per_multiprocessor=2))


def test_more_rows_are_shared_among_more_programs_in_the_same_shared_memory():
    few, many = (launch_plan(rows, 16, 8, 128, 132, specialised=True) for rows in (64, 65))
    assert few.program_count < many.program_count
    used = [each.program_count * each.num_stages * each.tile_tokens for each in (few, many)]
    assert used[0] == used[1]


@pytest.mark.parametrize("start_tiles, min_tiles, cache", [(3, 1, torch.int8), (1, 5, None)])
def test_shares_of_the_work(start_tiles, min_tiles, cache, device):
    batch = batch_of((150, 2, 37), device, cache)
    check(batch, **plan(start_tiles=start_tiles, min_tiles=min_tiles, programs_per_multiprocessor=4))


def test_many_parts_merge(device, cache):
    batch = batch_of((600,), device, cache, head_dim=128, kv_heads=1, query_heads=2)
    programs = 16 if device == "cpu" else 1
    check(batch, **plan(tile_tokens=16, programs_per_multiprocessor=programs))


def test_padding_and_empty_rows_get_zeros(device, cache):
    check_padding(batch_of((40, 9, 0, 64, 5), device, cache, padding=(1, 4)), plan())


def check_padding(batch: PagedBatch, options: dict[str, dict]) -> None:
    """Of a batch whose rows 1, 2 and 4 have no tokens."""
    assert not run(batch, **options)[[1, 2, 4]].any()
    check(batch, **options)


def test_rows_past_the_decode_rows_are_left_alone(device, cache):
    check_decode_rows(batch_of((40, 90, 20, 300), device, cache), plan())


def check_decode_rows(batch: PagedBatch, options: dict[str, dict]) -> None:
    """Of a batch whose first two rows decode."""
    count = torch.tensor([2], dtype=torch.int32, device=batch.query.device)
    whole, result = run(batch, **options), run(batch, decode_row_count=count, **options)
    assert result[2:].isnan().all(), "rows of the prefill kernel were written"
    assert torch.allclose(result[:2].float(), whole[:2].float(), atol=1e-2)


EDGES = (1, 31, 32, 33, 64, 65, 96, 97, 128, 400)  # the new token in each of the first tiles, and in a later one


def test_tiles_asked_for_early_or_late(device, cache, monkeypatch):
    monkeypatch.setattr(decode_attention, "launch_options", lambda output: {"PDL": True, "launch_pdl": True})
    batch = batch_of(EDGES, device, cache)
    options = plan(programs_per_multiprocessor=2)
    assert torch.equal(run(batch, pdl=True, **options), run(batch, **options))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_is_asked_for_early_is_there_already(num_stages, cache, monkeypatch):
    options = plan(programs_per_multiprocessor=2, num_stages=num_stages)
    check_early(decode_attention_hopper, "_hopper_decode_kernel", cache, options, monkeypatch)


def check_early(
    module: ModuleType, kernel: str, cache: torch.dtype | None, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read before the wait: not the queries, nor the new tokens, in whatever tile they are."""
    batch = batch_of(EDGES, "cpu", cache)
    emulate(monkeypatch, module, kernel)
    expected = run(batch, **options)
    stored = (batch.key_cache, batch.value_cache, batch.key_scales, batch.value_scales)
    new, size = [], batch.key_cache.shape[2]
    for slot, last in zip(batch.row_slots.tolist(), (batch.context_lengths - 1).tolist(), strict=True):
        block, place = int(batch.block_tables[slot, last // size]), last % size
        new += [part[block, :, place] for part in stored if part is not None]
    emulate(monkeypatch, module, kernel, KernelAhead(batch.query, *new))
    monkeypatch.setattr(decode_attention, "launch_options", lambda output: {"PDL": True, "launch_pdl": True})
    assert torch.equal(run(batch, pdl=True, **options), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{}, {"num_warps": 4, "tile_tokens": 64}], ids=["single warps", "teams"])
def test_an_early_launch_sees_what_the_kernel_ahead_stores(sizes, cache):
    skip_unless_here("cuda")
    batch = batch_of(EDGES * 6, "cuda", cache)
    kv_heads, block_size, head_dim = batch.key_cache.shape[1:]
    rows, query_heads = batch.query.shape[:2]
    last = batch.context_lengths.long() - 1
    blocks = batch.block_tables[batch.row_slots.long()].gather(1, (last // block_size)[:, None])[:, 0].long()
    qkv = torch.randn(rows, (query_heads + 2 * kv_heads) * head_dim, device="cuda", dtype=torch.bfloat16)
    table = torch.rand(512, head_dim, device="cuda")

    def store():
        qk_norm_rope_store(
            qkv, batch.query, batch.key_cache, batch.value_cache, blocks * block_size + last % block_size, last, table,
            key_scales=batch.key_scales, value_scales=batch.value_scales,
        )  # fmt: skip

    def forget():
        """Other keys, values and scales in the new tokens' places."""
        for tensor in (batch.key_cache, batch.value_cache, batch.key_scales, batch.value_scales):
            if tensor is not None:
                tensor[blocks, :, last % block_size] = 7.0

    options = plan(**sizes)["plan_options"] | {"quantised": cache is not None}
    launch = launch_plan(rows, query_heads, kv_heads, head_dim, 132, **options)
    output = torch.empty_like(batch.query)
    partials = torch.empty(launch.workspace_floats, device="cuda")
    counters = torch.zeros(launch.counter_count, dtype=torch.int32, device="cuda")
    store()
    expected = run(batch, **plan(**sizes))
    heavy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        forget()
        heavy @ heavy  # the two launches are queued before it ends
        store()
        decode_attention.decode_attention(
            output, *batch.decode_inputs, partials, counters, launch, scale=0.125, pdl=True, **batch.scales
        )
        assert torch.equal(output, expected)


def test_half_precision(device):
    check(make_batch(ones(1, 64, 3, 130), device, torch.float16, seed=5), **plan())


@pytest.mark.parametrize("change", [{"head_dim": 80}, {"query_heads": 18}, {"block_size": 4}, {"dtype": torch.float32}])
def test_what_it_cannot_compute_is_refused(change):
    sizes = {"query_heads": 4, "kv_heads": 2, "head_dim": 64, "block_size": 16}
    assert can_specialise(HeadShape(**sizes), torch.bfloat16, triton_version="3.6.0")
    dtype = change.get("dtype", torch.bfloat16)
    changed = HeadShape(**(sizes | {name: value for name, value in change.items() if name in sizes}))
    assert not can_specialise(changed, dtype, triton_version="3.6.0")
