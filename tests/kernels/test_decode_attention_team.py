"""The decode kernel of teams of warps against its reference: on a GPU, and without one in the emulator."""

import pytest
import torch

from kernels import decode_attention_hopper, decode_attention_team
from tests.kernels import gluon_emulator
from tests.kernels.gluon_emulator import emulate
from tests.kernels.test_decode_attention import check
from tests.kernels.test_decode_attention_hopper import batch_of, check_decode_rows, check_early, check_padding, plan


@pytest.fixture
def device(hopper_device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if hopper_device == "cpu":
        emulate(monkeypatch, decode_attention_team, "_team_decode_kernel")
    return hopper_device


def team(warps: int = 4, tile_tokens: int | None = None, programs: int = 2, **options) -> dict[str, dict]:
    sizes = {"num_warps": warps, "tile_tokens": tile_tokens or 16 * warps, "programs_per_multiprocessor": programs}
    return plan(**sizes, **options)


@pytest.mark.parametrize("lengths", [(1,), (63, 64, 65), (400,), (1, 64, 3, 130), (500, 1, 1, 1)])
def test_rows_of_any_length_match_the_reference(lengths, device, cache):
    check(batch_of(lengths, device, cache), **team())


@pytest.mark.parametrize("warps, tile_tokens, start_tiles, min_tiles", [(2, 32, 0, 1), (4, 128, 1, 2), (8, 128, 0, 1)])
def test_sizes_of_a_team(warps, tile_tokens, start_tiles, min_tiles, device, cache):
    batch = batch_of((150, 2, 37, 300), device, cache, head_dim=128, kv_heads=1, query_heads=2)
    check(batch, **team(warps, tile_tokens, start_tiles=start_tiles, min_tiles=min_tiles))


@pytest.mark.parametrize(
    "warps, head_dim, kv_heads, query_heads, cache",
    [
        (4, 128, 2, 4, None),
        (4, 128, 1, 8, torch.int8),
        (2, 128, 2, 6, torch.float8_e4m3fn),
        (8, 64, 1, 8, torch.int8),
        (8, 64, 3, 3, torch.float8_e4m3fn),
    ],
)
def test_head_shapes(warps, head_dim, kv_heads, query_heads, cache, device):
    batch = batch_of((290, 7), device, cache, head_dim=head_dim, kv_heads=kv_heads, query_heads=query_heads)
    check(batch, **team(warps, programs=3))


@pytest.mark.parametrize(
    "block_size, cache",
    [(8, None), (128, None), (32, torch.int8), (128, torch.int8), (8, torch.float8_e4m3fn)],
)
def test_blocks(block_size, cache, device):
    check(batch_of((100, 128, 1), device, cache, block_size=block_size), **team(programs=1))


def test_equal_rows_are_not_cut_where_pairs_fit_the_programs(cache, monkeypatch):
    """Few tiles, of many tokens, of which a beginning costs none: then a piece is a pair, and no counter is needed."""
    merged = []
    monkeypatch.setattr(gluon_emulator, "_atomic_add", lambda *_, **__: merged.append(1))
    emulate(monkeypatch, decode_attention_team, "_team_decode_kernel")
    batch = batch_of((250,) * 5, "cpu", cache, kv_heads=1, query_heads=2)
    check(batch, **team(4, 64, start_tiles=0))  # 20 tiles for 6 programs: 4 for each of 5
    assert not merged


def test_a_piece_of_several_rows_and_heads(device, cache):
    """What is asked for ahead belongs to the next rows: of one tile each, and of more than there are stages."""
    batch = batch_of((1, 64, 3, 130, 65, 300, 2), device, cache, kv_heads=1, query_heads=2)
    check(batch, **team(start_tiles=1, programs=1))


@pytest.mark.parametrize("start_tiles", [0, 1])
@pytest.mark.parametrize(
    "lengths, padding", [((5,), ()), ((1, 40), ()), ((130, 0, 1, 64, 65, 0, 7, 16), (3, 7)), ((9, 9), (0, 1))]
)
def test_every_address_is_inside_its_tensor(lengths, padding, start_tiles, cache, monkeypatch):
    """Also those of programs without work: tensors end where the last row, head, block and table entry do."""
    emulate(monkeypatch, decode_attention_team, "_team_decode_kernel")
    emulate(monkeypatch, decode_attention_hopper, "_hopper_decode_kernel")
    batch = batch_of(lengths, "cpu", cache, padding=padding)
    used = batch.context_lengths.max().item()
    batch.block_tables = batch.block_tables[:, : -(-used // batch.key_cache.shape[2])].contiguous()
    for warps in (1, 4):
        check(batch, **team(warps, programs=16, start_tiles=start_tiles))


@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("value_scale, query_scale", [(2.0**-23, 1.0), (2.0**15, 1e-6), (1.0, 1e6)])
def test_scales_and_queries_of_any_size(value_scale, query_scale, device, cache):
    """Weights times scales, and queries, stay within the range of the numbers that they are put in; a row that begins
    with scales of zero too."""
    batch = batch_of((300, 77), device, cache)
    batch.query *= query_scale
    batch.value_scales[batch.value_scales.isfinite()] = value_scale
    batch.value_scales[batch.block_tables[batch.row_slots[0].item(), :8].long()] = 0.0
    check(batch, **team())


def test_many_parts_merge(device, cache):
    batch = batch_of((700,), device, cache, head_dim=128, kv_heads=1, query_heads=2)
    check(batch, **team(2, 32, programs=16 if device == "cpu" else 1))


def test_padding_and_empty_rows_get_zeros(device, cache):
    check_padding(batch_of((40, 9, 0, 64, 5), device, cache, padding=(1, 4)), team())


def test_rows_past_the_decode_rows_are_left_alone(device, cache):
    check_decode_rows(batch_of((40, 90, 20, 300), device, cache), team())


def test_what_is_asked_for_early_is_there_already(cache, monkeypatch):
    check_early(decode_attention_team, "_team_decode_kernel", cache, team(2, 32), monkeypatch)
