"""The few-row decode kernel of single warps against the operation's reference: on a Hopper card, or in the emulator."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels import fused_decode_attention, fused_decode_warps
from kernels.fused_decode_attention import FusedDecodePlan, can_take_warps, launch_plan, takes_warps
from kernels.paged_kv import HeadShape
from tests.kernels import test_fused_decode_attention as fused
from tests.kernels.gluon_emulator import KernelAhead, emulate
from tests.kernels.paged_batches import skip_unless_here


@pytest.fixture(autouse=True)
def device(hopper_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hopper_device == "cpu":
        emulate(monkeypatch, fused_decode_warps, "fused_decode_warps_kernel")
    monkeypatch.setattr(fused, "launch_plan", warps_plan)


def warps_plan(*sizes: int, is_apart: bool | None = None) -> FusedDecodePlan:
    return launch_plan(*sizes, single_warps=True)


def check(lengths: list[int], dtype: torch.dtype = torch.bfloat16, **shape) -> None:
    fused.check(fused.Case(lengths, dtype, **shape), fused.KERNELS[1])


@pytest.mark.parametrize("lengths", [[1], [2, 33, 34], [66, 129, 200, 0], [16, 17, 255], [0, 0], [32, 31]])
def test_equals_the_reference(lengths, cache):
    check(lengths, cache_dtype=cache)


@pytest.mark.parametrize(
    "shape",
    [
        {"query_heads": 2, "kv_heads": 2},
        {"query_heads": 5, "kv_heads": 1, "norm": False},
        {"query_heads": 8, "kv_heads": 1, "head_dim": 128},
        {"query_heads": 4, "kv_heads": 2, "head_dim": 128},
    ],
)
def test_head_shapes(shape, cache):
    check([130, 1, 31], cache_dtype=cache, **shape)


def test_half_precision():
    check([70, 3], torch.float16)


@pytest.mark.parametrize("tile", [16, 64])
def test_other_tiles(tile, cache, monkeypatch):
    monkeypatch.setattr(fused, "launch_plan", lambda *sizes, is_apart: replace(warps_plan(*sizes), tile=tile))
    check([2, 17, 66, 150], cache_dtype=cache)


def test_long_rows_give_a_part_several_tiles(cache, monkeypatch):
    monkeypatch.setattr(fused, "launch_plan", lambda *sizes, is_apart: replace(warps_plan(*sizes), splits=2))
    check([250, 0, 1, 97], cache_dtype=cache)


def test_many_parts_are_merged_in_several_rounds(cache):
    check([1000], head_dim=128, max_blocks=64, cache_dtype=cache)


def test_what_is_read_early_is_there_already(cache, monkeypatch):
    """The product ahead is not, whose rows are the new tokens; nothing is written before it is."""
    skip_unless_here("cpu")
    case = fused.Case([2, 17, 33, 66, 129, 0, 1], torch.bfloat16, cache_dtype=cache)
    emulate(monkeypatch, fused_decode_warps, "fused_decode_warps_kernel", KernelAhead(case.qkv))
    monkeypatch.setattr(fused_decode_attention, "launch_options", lambda tensor: {"PDL": True, "launch_pdl": True})
    fused.check(case, fused.KERNELS[1])


@pytest.mark.gpu
def test_one_graph_is_right_for_every_mix_of_lengths(cache):
    skip_unless_here("cuda")
    fused.check_one_graph(cache, fused.KERNELS[1])


@pytest.mark.parametrize("quantised", fused.QUANTISED, ids=["int8", "fp8"])
def test_new_tokens_are_stored_to_the_bit(quantised):
    """Zeros, halves of a level, and what float16's range makes of a scale; without norm and rotation all is exact."""
    case = fused.Case([40, 1, 17, 33] + [16] * 12, torch.bfloat16, norm=False, cache_dtype=quantised, max_blocks=4)
    case.rope[:, :32], case.rope[:, 32:] = 1.0, 0.0
    stored = case.qkv[:, case.query_heads * case.head_dim :].unflatten(1, (2 * case.kv_heads, case.head_dim))
    stored[0] = 0.0
    stored[1] = torch.arange(-127, 129, device=stored.device).view(4, 64) / 2
    stored[1, :, 0] = 127.0
    stored[2] *= 1e-7
    stored[3] *= 1e30
    stored[4:] *= torch.logspace(-4, 4, 12, device=stored.device).to(stored.dtype)[:, None, None]
    call, output, caches, scales, _ = case.launch(fused.KERNELS[1])
    call()
    want, want_caches, want_scales = case.reference()
    for got, wanted in zip((*caches, *scales), (*want_caches, *want_scales), strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    torch.testing.assert_close(output[:2].float(), want[:2], rtol=8e-2, atol=8e-2)


@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "8 bits"])
@pytest.mark.parametrize(
    "change", [{"block_size": 4}, {"head_dim": 256}, {"query_heads": 18}, {"dtype": torch.float32}], ids=str
)
def test_what_it_cannot_compute(change, quantised):
    sizes = {"query_heads": 4, "kv_heads": 2, "head_dim": 128, "block_size": 16}
    here = {"quantised": quantised, "capability_major": 9, "triton_version": "3.6.0"}
    assert can_take_warps(HeadShape(**sizes), torch.bfloat16, **here)
    assert can_take_warps(HeadShape(**sizes), torch.float16, **here) is not quantised
    changed = HeadShape(**(sizes | {name: value for name, value in change.items() if name in sizes}))
    assert not can_take_warps(changed, change.get("dtype", torch.bfloat16), **here)


def test_fewest_rows_are_left_to_the_other_kernels(monkeypatch):
    possible = partial(can_take_warps, triton_version="3.6.0")
    monkeypatch.setattr(fused_decode_attention, "can_take_warps", possible)
    plans = [
        takes_warps(rows, HeadShape(16, 8, 128, 16), torch.bfloat16, quantised=quantised, capability_major=9)
        for quantised in (False, True)
        for rows in (1, 2, 3, 4, 16)
    ]
    assert plans == [False, True, True, True, True, False, False, False, True, True]
