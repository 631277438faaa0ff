"""The decode kernel of teams of warps against its reference: on a GPU, and without one in the emulator."""

import pytest
import torch

from kernels import decode_attention_stream, decode_attention_team
from tests.kernels import gluon_emulator
from tests.kernels.gluon_emulator import emulate
from tests.kernels.test_decode_attention import check
from tests.kernels.test_decode_attention_hopper import batch_of, check_decode_rows, check_early, check_padding, plan


@pytest.fixture
def device(hopper_device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if hopper_device == "cpu":
        emulate(monkeypatch, decode_attention_team, "_team_decode_kernel")
        emulate(monkeypatch, decode_attention_stream, "_stream_decode_kernel")
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


WAYS = [
    {"queries_first": True},
    {"queries_first": True, "guess": True},
    {"one_exchange": True},
    {"queries_first": True, "guess": True, "one_exchange": True, "num_stages": 4},
    {"stream": True},
    {"stream": True, "num_stages": 6, "start_tiles": 1},
]


@pytest.mark.parametrize("ways", WAYS, ids="+".join)
@pytest.mark.parametrize("lengths, tile_tokens", [((250,) * 5, 256), ((1, 64, 3, 130, 65), 64)])
def test_ways_to_begin_and_to_end(ways, lengths, tile_tokens, device, cache):
    check(batch_of(lengths, device, cache, kv_heads=1, query_heads=2), **team(4, tile_tokens, **ways))


def test_many_parts_merge(device, cache):
    batch = batch_of((700,), device, cache, head_dim=128, kv_heads=1, query_heads=2)
    check(batch, **team(2, 32, programs=16 if device == "cpu" else 1))


def test_padding_and_empty_rows_get_zeros(device, cache):
    check_padding(batch_of((40, 9, 0, 64, 5), device, cache, padding=(1, 4)), team())


def test_rows_past_the_decode_rows_are_left_alone(device, cache):
    check_decode_rows(batch_of((40, 90, 20, 300), device, cache), team())


def test_what_is_asked_for_early_is_there_already(cache, monkeypatch):
    check_early(decode_attention_team, "_team_decode_kernel", cache, team(2, 32), monkeypatch)


def test_what_a_stream_asks_for_early_is_there_already(cache, monkeypatch):
    check_early(decode_attention_stream, "_stream_decode_kernel", cache, team(2, 32, stream=True), monkeypatch)
