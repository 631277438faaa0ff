"""The few-row decode kernel of single warps against the operation's reference: on a Hopper card, or in the emulator."""

import pytest
import torch

from kernels import fused_decode_warps
from kernels.fused_decode_attention import can_take_warps, launch_plan
from tests.kernels import test_fused_decode_attention as fused
from tests.kernels.gluon_emulator import EmulatedKernel
from tests.kernels.paged_batches import skip_unless_here


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_here(request.param)
    if request.param == "cpu":
        emulated = EmulatedKernel(fused_decode_warps.fused_decode_warps_kernel)
        monkeypatch.setattr(fused_decode_warps, "fused_decode_warps_kernel", emulated)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for Hopper")
    monkeypatch.setattr(fused, "launch_plan", lambda *sizes, is_apart: launch_plan(*sizes, single_warps=True))


def check(lengths: list[int], dtype: torch.dtype = torch.bfloat16, **shape) -> None:
    fused.check(fused.Case(lengths, dtype, **shape), fused.KERNELS[1])


@pytest.mark.parametrize("lengths", [[1], [2, 33, 34], [66, 129, 200, 0], [16, 17, 255], [0, 0], [32, 31]])
def test_equals_the_reference(lengths):
    check(lengths)


@pytest.mark.parametrize(
    "shape",
    [
        {"query_heads": 2, "kv_heads": 2},
        {"query_heads": 5, "kv_heads": 1, "norm": False},
        {"query_heads": 8, "kv_heads": 1, "head_dim": 128},
        {"query_heads": 4, "kv_heads": 2, "head_dim": 128},
    ],
)
def test_head_shapes(shape):
    check([130, 1, 31], **shape)


def test_long_rows_give_a_part_several_tiles():
    assert launch_plan(16, 16, 64, single_warps=True).splits == 4
    check([250, 0, 1, 97] + [0] * 12, query_heads=16, kv_heads=16)


def test_many_parts_are_merged_in_several_rounds():
    check([1000], head_dim=128, max_blocks=64)


@pytest.mark.parametrize(
    "cache, dtype, group",
    [
        (torch.empty(1, 2, 16, 128, dtype=torch.int8), torch.bfloat16, 2),
        (torch.empty(1, 2, 4, 128, dtype=torch.bfloat16), torch.bfloat16, 2),
        (torch.empty(1, 2, 16, 256, dtype=torch.bfloat16), torch.bfloat16, 2),
        (torch.empty(1, 2, 16, 128), torch.float32, 2),
        (torch.empty(1, 2, 16, 128, dtype=torch.bfloat16), torch.bfloat16, 9),
    ],
)
def test_what_it_cannot_compute(cache, dtype, group):
    here = {"capability_major": 9, "triton_version": "3.6.0"}
    assert can_take_warps(torch.bfloat16, torch.empty(1, 2, 16, 128, dtype=torch.bfloat16), 2, **here)
    assert not can_take_warps(dtype, cache, group, **here)
