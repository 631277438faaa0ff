"""The Hopper prefill kernel against the reference: on such a card, and without one in the emulator."""

from dataclasses import replace

import pytest
import torch
from triton.experimental.gluon import language as gl

import kernels.prefill_attention
from kernels import prefill_attention_hopper, prefill_attention_hopper_copy
from kernels.kv_format import dequantise, read_back
from kernels.paged_kv import HeadShape
from kernels.prefill_attention_hopper_convert import FP8_TO_BF16, INT8_TO_BF16
from kernels.prefill_plans import can_specialise, hopper_key_tile, is_specialised_size, launch_plan
from tests.kernels import gluon_emulator
from tests.kernels.gluon_assembly import inline_asm
from tests.kernels.gluon_emulator import KernelAhead, emulate
from tests.kernels.paged_batches import (
    PagedBatch,
    assert_as_exact_as_torch,
    make_batch,
    quantise_caches,
    skip_unless_here,
)
from tests.kernels.test_prefill_attention import ERROR_FACTOR, SMALL_TILES, check, references, run

HOPPER_ROWS = 121
"""Rows of every batch of these tests, and multiples of 64 tokens: sizes of one kind, for which it is compiled once."""


def in_one_size(rows: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """The rows and as many empty ones as HOPPER_ROWS lacks; how many tokens go to no row."""
    return [*rows, *[(0, 0)] * (HOPPER_ROWS - len(rows))], -sum(count for count, _ in rows) % 64


def check_specialised(
    rows: list[tuple[int, int]], device: str, head_dim: int = 128, key_tile: int = 64, **shape
) -> None:
    rows, spare = in_one_size(rows) if device == "cuda" else (rows, 3)
    batch = make_batch(rows, device, torch.bfloat16, head_dim=head_dim, spare_tokens=spare, **shape)
    check(batch, plan_options={"specialised": True, "key_tile": key_tile})


@pytest.fixture
def device(hopper_device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if hopper_device == "cpu":
        emulate(monkeypatch, prefill_attention_hopper, "_hopper_kernel")
    return hopper_device


@pytest.mark.parametrize("head_dim, key_tile", [(64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(64, 64)],
        [(130, 130), (5, 5)],
        [(1000, 1000), (3, 500), (77, 130)],
        [(16, 4096)],
        [(33, 97), (1, 1), (2, 40), (64, 64)] * 30,
    ],
)
def test_the_hopper_kernel_on_rows_of_any_length(rows, head_dim, key_tile, device):
    if device == "cpu":  # where a token takes as long as a thousand do on a card
        rows = [(min(count, 400), min(length, 1500)) for count, length in rows[:24]]
    check_specialised(rows, device, head_dim=head_dim, key_tile=key_tile)


@pytest.mark.parametrize(
    "query_heads, kv_heads, key_tile", [(1, 1, 64), (9, 3, 64), (9, 3, 128), (32, 2, 128), (24, 1, 64), (14, 2, 128)]
)
def test_the_hopper_kernel_on_groups(query_heads, kv_heads, key_tile, device):
    heads = {"query_heads": query_heads, "kv_heads": kv_heads}
    check_specialised([(190, 190), (70, 823)], device, key_tile=key_tile, **heads)


@pytest.mark.parametrize("key_tile", [64, 128])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_the_hopper_kernel_on_block_sizes(block_size, key_tile, device):
    rows = [(200, 200), (16, 128), (1, 1), (129, 400), (2, 65)]
    check_specialised(rows, device, key_tile=key_tile, block_size=block_size)


@pytest.mark.parametrize("key_tile, programs", [(64, 1), (64, 4), (64, 40), (128, 7)])
def test_the_hopper_kernel_on_padding_and_decode_rows(key_tile, programs, device):
    rows = [(1, 30), (1, 17), (120, 400), (50, 50), (0, 0), (6, 6)]
    batch = make_batch(rows, device, torch.bfloat16, head_dim=128, padding=(3,), spare_tokens=7)
    row_count = torch.tensor([2], dtype=torch.int32, device=device)
    options = {"plan_options": {"specialised": True, "key_tile": key_tile}, "programs": programs}
    result = run(batch, decode_row_count=row_count, **options)
    assert result[:2].isnan().all(), "rows of the decode kernel were written"
    assert not result[122:172].any()
    assert not result[178:].any()
    same, exact = references(batch)
    assert_as_exact_as_torch(result[2:], same[2:], exact[2:], ERROR_FACTOR)


WAVES = [
    [(200, 200), (70, 300), (64, 64), (1, 1), (33, 97), (256, 700), (0, 0), (127, 255), (16, 1100)],
    [(70, 70)] * 4 + [(3, 3)] * 3,
]
"""Rows whose tiles of queries, of 64 tokens, are on the same levels of the context, and on levels far apart."""


@pytest.mark.parametrize(
    "programs, key_tile", [*((count, 64) for count in (1, 5, 14, 15, 29, 30, 31)), (14, 128), (29, 128), (31, 128)]
)
def test_any_number_of_programs_leaves_out_no_tile(programs, key_tile, device):
    """Of thirty: drawn, dealt in two waves of which one may be cut, and a program for each."""
    batch = make_batch(WAVES[0], device, torch.bfloat16, head_dim=64, padding=(2,), spare_tokens=5)
    result = run(batch, plan_options={"specialised": True, "key_tile": key_tile}, programs=programs)
    assert_as_exact_as_torch(result, *references(batch), ERROR_FACTOR)


def tiles_in_order(
    batch: PagedBatch, programs: int, monkeypatch: pytest.MonkeyPatch, key_tile: int = 64
) -> list[list[tuple[int, int]]]:
    """Of each program, the (first token in the batch, head) of its tiles, as it asks for their queries."""
    found: list[list[tuple[int, int]]] = []
    copy, program = gluon_emulator._copy, gluon_emulator._Program

    def begin(*arguments):
        found.append([])
        return program(*arguments)

    def record(descriptor, place, barrier, target):
        if len(place) == 3 and place[2] == 0:
            found[-1].append((int(place[0]), int(place[1])))
        copy(descriptor, place, barrier, target)

    monkeypatch.setattr(gluon_emulator, "_Program", begin)
    monkeypatch.setattr(gluon_emulator, "_copy", record)
    run(batch, plan_options={"specialised": True, "key_tile": key_tile, "fresh": False}, programs=programs)
    return [tiles[::2] for tiles in found]  # each is asked for in two parts of 64 rows


@pytest.mark.parametrize("rows, key_tile", [(WAVES[0], 64), (WAVES[1], 64), (WAVES[0], 128)])
def test_the_heaviest_tiles_come_first_and_are_dealt_to_and_fro(rows, key_tile, monkeypatch):
    skip_unless_here("cpu")
    emulate(monkeypatch, prefill_attention_hopper, "_hopper_kernel")
    batch = make_batch(rows, "cpu", torch.bfloat16)
    levels, start = [], 0
    for count, length in rows:
        first = (length - count) // 64
        levels += [
            ((start + 64 * tile, 2 * head), first + tile) for tile in range(-(-count // 64)) for head in range(2)
        ]
        start += count
    level_of = dict(levels)
    (one,) = tiles_in_order(batch, 1, monkeypatch, key_tile)
    assert sorted(one) == sorted(level_of) and len(set(one)) == len(one)
    assert [level_of[tile] for tile in one] == sorted(level_of.values(), reverse=True)
    half = len(one) // 2 + 1
    dealt = tiles_in_order(batch, half, monkeypatch, key_tile)
    want = [[one[index], *one[2 * half - 1 - index :][:1]] for index in range(half)]
    assert dealt == want


def test_rows_that_the_cache_cannot_hold_at_once_are_taken_band_by_band(monkeypatch):
    """A band of 256 tokens here: the row that begins behind them comes last, whatever its levels are."""
    skip_unless_here("cpu")
    emulate(monkeypatch, prefill_attention_hopper, "_hopper_kernel")
    monkeypatch.setattr(prefill_attention_hopper_copy, "BAND_TOKENS", 256)
    batch = make_batch([(200, 200), (0, 0), (65, 300), (65, 900)], "cpu", torch.bfloat16)
    starts = [264, 128 + 64, 200, 128, 64, 0, 265 + 64, 265]
    want = [(start, head) for start in starts for head in (0, 2)]
    assert sorted(tiles_in_order(batch, 1, monkeypatch)[0]) == sorted(want)
    assert tiles_in_order(batch, 1, monkeypatch) == [want]


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=["copied", "loaded"])
@pytest.mark.parametrize("key_tile, programs", [(64, 3), (64, 60), (128, 10)])
def test_what_is_read_early_is_there_already(key_tile, programs, heads, monkeypatch):
    """Not the queries, nor keys and values, nor may the output be written; a program without a tile waits too."""
    skip_unless_here("cpu")
    rows = [(33, 97), (1, 1), (2, 40), (130, 200), (64, 64)]
    heads = {"query_heads": heads[0], "kv_heads": heads[1]}
    batch = make_batch(rows, "cpu", torch.bfloat16, padding=(2,), spare_tokens=3, **heads)
    check_early(batch, {"specialised": True, "key_tile": key_tile}, programs, None, monkeypatch)


@pytest.mark.parametrize("is_fresh", [False, True], ids=["cached", "fresh"])
def test_what_is_read_early_over_8_bits_is_there_already(is_fresh, monkeypatch):
    skip_unless_here("cpu")
    monkeypatch.setattr(kernels.prefill_attention, "can_specialise", lambda *_, **__: True)  # heads of 64 too
    batch = make_batch([(33, 197), (1, 1), (2, 40), (130, 200)], "cpu", torch.bfloat16, padding=(2,), spare_tokens=3)
    batch = quantise_caches(batch, torch.int8)
    fresh = batch.fresh() if is_fresh else None
    check_early(batch, {"specialised": True, "fresh": is_fresh}, 5, fresh, monkeypatch)


def check_early(
    batch: PagedBatch, plan_options: dict, programs: int, fresh: tuple | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of an early launch behind what writes queries, caches and scales, and fresh keys and values."""
    emulate(monkeypatch, prefill_attention_hopper, "_hopper_kernel")
    options = {"plan_options": plan_options, "programs": programs, "fresh": fresh}
    expected = run(batch, **options)
    caches = [each for each in (batch.key_cache, batch.value_cache, *batch.scales.values()) if each is not None]
    ahead = KernelAhead(batch.query, *caches, *(fresh or ()))
    emulate(monkeypatch, prefill_attention_hopper, "_hopper_kernel", ahead)
    monkeypatch.setattr(kernels.prefill_attention, "launch_options", lambda output: {"PDL": True})
    assert torch.equal(run(batch, pdl=True, **options), expected)


def test_the_hopper_kernel_is_for_what_it_can_compute():
    shape = HeadShape(query_heads=16, kv_heads=8, head_dim=128, block_size=16)
    assert can_specialise(shape, torch.bfloat16, triton_version="3.6.0")
    assert not can_specialise(shape, torch.float32, triton_version="3.6.0")
    assert not can_specialise(shape, torch.bfloat16, sliding_window=64, triton_version="3.6.0")
    assert not can_specialise(shape, torch.bfloat16, soft_cap=30.0, triton_version="3.6.0")
    assert not can_specialise(shape, torch.float16, quantised=True, triton_version="3.6.0")
    assert can_specialise(shape, torch.bfloat16, quantised=True, triton_version="3.6.0")
    short = replace(shape, head_dim=64)
    assert can_specialise(short, torch.bfloat16, triton_version="3.6.0")
    assert not can_specialise(short, torch.bfloat16, quantised=True, triton_version="3.6.0")
    assert launch_plan(4096, 1, 16, 8, 128, 132, specialised=True, quantised=True).specialised
    assert not can_specialise(shape, torch.bfloat16, capability_major=10, triton_version="3.6.0")
    assert not can_specialise(shape, torch.bfloat16, triton_version="3.4.0")
    assert not can_specialise(HeadShape(16, 8, 128, block_size=4), torch.bfloat16, triton_version="3.6.0")
    assert not can_specialise(HeadShape(16, 8, 256, block_size=16), torch.bfloat16, triton_version="3.6.0")


def test_the_hopper_kernel_is_for_large_steps_of_long_rows():
    assert is_specialised_size(1024, row_count=1, query_heads=16)
    assert not is_specialised_size(1023, row_count=1, query_heads=16)
    assert not is_specialised_size(1024, row_count=16, query_heads=16), "8 prompts of 128 tokens, in their bucket"
    assert is_specialised_size(2048, row_count=16, query_heads=16), "8 prompts of 256 tokens"
    assert is_specialised_size(8192, row_count=256, query_heads=16)
    assert is_specialised_size(1024, row_count=16, query_heads=32), "twice as many tiles"
    assert not is_specialised_size(512, row_count=16, query_heads=32)


def test_few_long_rows_take_long_tiles_of_keys():
    assert hopper_key_tile(2048, row_count=4, quantised=False) == 64
    assert hopper_key_tile(8192, row_count=16, quantised=False) == 64
    assert hopper_key_tile(8192, row_count=4, quantised=False) == 128
    assert hopper_key_tile(1024, row_count=16, quantised=True) == 128
    sizes = (8192, 256, 16, 8, 128, 132)
    assert launch_plan(*sizes, specialised=True).key_tile == 64
    assert launch_plan(*sizes, specialised=True, chunk_rows=4).key_tile == 128
    with pytest.raises(ValueError, match=r"key_tile: wanted one of \[64, 128\] for the Hopper kernel, got 32"):
        launch_plan(*sizes, specialised=True, key_tile=32)


HOPPER_MIXES = [
    [(1, 60), (1, 9), (1000, 1000), (5, 5), (77, 300), (64, 640), *[(1, 1)] * 40],
    [(1, 60), (1, 9), (0, 0), *[(33, 97), (1, 1), (2, 40), (64, 64)] * 12],
    [(1, 60), (1, 9), (256, 9000), (128, 128), (127, 255), (129, 513), (16, 4096), *[(0, 0)] * 40],
]
"""Mixed steps of 33 to 64 rows, so that one compiled kernel takes them all; the first two rows are another kernel's."""


@pytest.mark.parametrize(
    "overlap, cache, head_dim",
    [
        (False, None, 128),
        (True, None, 128),
        (False, torch.int8, 128),
        *((True, cache, head_dim) for cache in (torch.int8, torch.float8_e4m3fn) for head_dim in (128, 64)),
    ],
    ids=["plain", "overlapped", "int8-apart", "int8", "int8-64", "fp8", "fp8-64"],
)
def test_variants_of_the_hopper_kernel(overlap, cache, head_dim, device, monkeypatch):
    """Each against float64, and on a card again and again: an error that moves would be a race."""
    if head_dim == 64:  # compiled, but not chosen before a card has confirmed it: this test would
        monkeypatch.setattr(kernels.prefill_attention, "can_specialise", lambda *_, **__: True)
    decode_rows = torch.tensor([2], dtype=torch.int32, device=device)
    is_emulated = device == "cpu"
    for seed, rows in enumerate([HOPPER_MIXES[1][:9]] if is_emulated else HOPPER_MIXES):
        spare = -sum(count for count, _ in rows) % 64
        shape = {"query_heads": 16, "kv_heads": 8, "head_dim": head_dim}
        batch = make_batch(
            rows, device, torch.bfloat16, padding=(3,), spare_tokens=spare, seed=seed, **shape
        )  # fmt: skip
        if cache is not None:
            batch = quantise_caches(batch, cache)
        options = {"plan_options": {"specialised": True, "overlap": overlap}, "decode_row_count": decode_rows}
        result = run(batch, **options)[2:]
        same, exact = references(batch)
        assert_as_exact_as_torch(result, same[2:], exact[2:], ERROR_FACTOR)
        for _ in range(0 if is_emulated else 8):
            assert torch.equal(run(batch, **options)[2:], result), f"another result in another run of mix {seed}"


FRESH_MIXES = [
    [(1, 60), (300, 300), (130, 386), (200, 259), (3, 200), (129, 129), (5, 5)],
    [(1, 60), (64, 192), (65, 190), (128, 513), (1, 1), (127, 255), (90, 90)],
]
"""Prefixes of 0, of a multiple of 128 and of others; the first row is the decode kernel's, the fifth padding."""


def poison_cached_copies(batch: PagedBatch) -> None:
    """NaN in the cache, or in its scales, for what lies in key tiles that hold none but the step's own tokens."""
    starts = batch.query_starts.tolist()
    for row, (slot, length) in enumerate(zip(batch.row_slots.tolist(), batch.context_lengths.tolist(), strict=True)):
        if slot < 0:
            continue
        prefix = length - (starts[row + 1] - starts[row])
        positions = torch.arange(length, device=batch.query.device)[-(-prefix // 128) * 128 :]
        blocks = batch.block_tables[slot, positions // batch.key_cache.shape[2]].long()
        is_plain = batch.key_scales is None
        for part in (batch.key_cache, batch.value_cache) if is_plain else (batch.key_scales, batch.value_scales):
            part[blocks, :, positions % batch.key_cache.shape[2]] = float("nan")


@pytest.mark.parametrize(
    "mix, head_dim, cache, key_tile",
    [
        (0, 128, torch.int8, 128), (1, 128, torch.float8_e4m3fn, 128), (1, 64, torch.int8, 128),
        (0, 64, torch.float8_e4m3fn, 128), (0, 128, None, 128), (1, 128, None, 64), (0, 64, None, 64),
    ],
    ids=["int8", "fp8", "int8-64", "fp8-64", "plain-long", "plain-short", "plain-short-64"],
)  # fmt: skip
def test_fresh_keys_and_values_give_the_bits_of_the_cache(mix, head_dim, cache, key_tile, device, monkeypatch):
    """So it does not matter in which step a token was computed. What need not be read holds NaN, in both places."""
    monkeypatch.setattr(kernels.prefill_attention, "can_specialise", lambda *_, **__: True)  # heads of 64 too
    heads = (4, 2) if device == "cpu" else (16, 8)  # on a card the kernels of the test above
    rows, shape = FRESH_MIXES[mix], {"query_heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim}
    spare = -sum(count for count, _ in rows) % 64 + 64
    batch = make_batch(rows, device, torch.bfloat16, padding=(4,), spare_tokens=spare, seed=mix, **shape)
    if cache is not None:
        batch = quantise_caches(batch, cache)
    decode_rows = torch.tensor([1], dtype=torch.int32, device=device)
    plan_options = {"specialised": True, "fresh": False, "key_tile": key_tile}
    from_cache = run(batch, plan_options=plan_options, decode_row_count=decode_rows)[1:]
    same, exact = references(batch)
    assert_as_exact_as_torch(from_cache, same[1:], exact[1:], ERROR_FACTOR)
    fresh = batch.fresh()
    for part in fresh:
        part[0] = float("nan")  # the decode row's
        assert part[-spare:].isnan().all() and part.stride(0) > part[0].numel()
    poison_cached_copies(batch)
    plan_options["fresh"] = True
    result = run(batch, plan_options=plan_options, fresh=fresh, decode_row_count=decode_rows)[1:]
    assert torch.equal(result, from_cache)


@pytest.mark.parametrize("key_tile, is_plain", [(128, False), (128, True), (64, True)])
def test_a_step_of_many_tiles_reads_its_own_keys(key_tile, is_plain, device):
    """More tiles than programs, so that letters with and without cached tiles follow one another in every order."""
    rows = [(140, 140), (70, 326), (1, 129), (64, 64), (64, 320), (130, 150), (20, 712), (2, 2), (140, 268)]
    heads = {"query_heads": 2, "kv_heads": 1, "head_dim": 128, "block_size": 32}
    batch = make_batch(rows, device, torch.bfloat16, spare_tokens=5, **heads)
    batch = batch if is_plain else quantise_caches(batch, torch.int8)
    options = {"specialised": True, "key_tile": key_tile}
    results = [run(batch, plan_options=options | {"fresh": fresh}) for fresh in (True, False)]
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_converted_tiles_are_what_is_written_back(dtype):
    """Every byte that is stored under scales of all magnitudes: the assembly against `read_back`, and that against
    the number rounded once."""
    stored = torch.arange(-127, 128) if dtype == torch.int8 else torch.arange(256)
    stored = stored.to(torch.int8 if dtype == torch.int8 else torch.uint8).view(dtype)
    stored = stored[~stored.float().isnan()].repeat(4)[: 4 * 240]
    bits = torch.cat([torch.arange(0, 64), torch.randint(64, 31744, (400,)), torch.tensor([31743])])
    scales = bits.to(torch.int16).view(torch.float16)
    high = scales.to(torch.bfloat16)
    low = (scales.float() - high.float()).to(torch.bfloat16)
    words = [part.view(torch.int16).to(torch.int32) & 0xFFFF for part in (high, low)]
    found = inline_asm(
        INT8_TO_BF16 if dtype == torch.int8 else FP8_TO_BF16, "=&r,=&r,r,r,r,r,r,r,r,r,r",
        [stored.view(torch.int8).expand(len(scales), -1), *((word | word << 16)[:, None] for word in words)],
        gl.bfloat16, True, 4,
    )  # fmt: skip
    want = read_back(stored.expand(len(scales), -1), scales)
    assert torch.equal(found.view(torch.int16), want.view(torch.int16))
    once = dequantise(stored.expand(len(scales), -1), scales, torch.bfloat16)
    assert dtype == torch.int8 or torch.equal(want, once)
    assert ((want.float() - once.float()).abs() <= once.float().abs() * 2**-7).all()
    assert (want != once).float().mean() < 2e-3


@pytest.mark.parametrize("values, message", [
    (torch.zeros(64, 2, 128), "fresh values: wanted dtype torch.bfloat16, got torch.float32"),
    (torch.zeros(64, 2, 132, dtype=torch.bfloat16)[..., :128], r"fresh values strides: wanted \(any, 128, 1\)"),
    (torch.zeros(64, 260, dtype=torch.bfloat16)[:, :256].view(64, 2, 128), "wanted tokens at multiples of 16 bytes"),
])  # fmt: skip
def test_wrong_fresh_tensors_are_named(values, message):
    batch = quantise_caches(make_batch([(64, 64)], "cpu", torch.bfloat16, head_dim=128), torch.int8)
    with pytest.raises(ValueError, match=message):
        run(batch, plan_options={"specialised": True, "fresh": True}, fresh=(batch.fresh()[0], values))
    with pytest.raises(ValueError, match="fresh: wanted keys and values beside a fresh plan, else None"):
        run(batch, plan_options=SMALL_TILES, fresh=batch.fresh())


def test_fresh_plans_are_of_the_hopper_kernel():
    sizes = (4096, 1, 16, 8, 128, 132)
    assert all(launch_plan(*sizes, specialised=True, quantised=quantised).fresh for quantised in (False, True))
    assert not any(launch_plan(*sizes, quantised=quantised).fresh for quantised in (False, True))
    batch = make_batch([(64, 64)], "cpu", torch.float32)
    with pytest.raises(ValueError, match="fresh plan: wanted only of the Hopper kernel"):
        run(batch, plan_options=SMALL_TILES | {"fresh": True}, fresh=(batch.query, batch.query))
