"""Kernels on cards that are not Hopper: compiled, though not run, for one that is not there."""

import json

import torch

from kernels import launch

SCRIPT = """
import json
import torch
from benchmarks.kernels.paged_inputs import make_inputs
from benchmarks.kernels.shapes import AttentionShape
from kernels import compile_ahead
from kernels.fixed_order_linear import HALF_PLANS, fixed_order_linear, fitted
from kernels.prefill_attention import prefill_attention
from kernels.prefill_plans import launch_plan
from benchmarks.kernels.pretended_gpu import pretend_gpu

SHARED_BYTES = 99 * 1024

pretend_gpu(86)
inputs = make_inputs(AttentionShape(1, 4, 20, 4, 2, 64))
counters = torch.zeros(2, dtype=torch.int32)
half = lambda *shape: torch.zeros(shape, dtype=torch.float16)
with compile_ahead.launches_left_out() as needed:
    plan = launch_plan(4, 1, 4, 2, 64, 2)
    prefill_attention(torch.empty_like(inputs.query), *inputs.prefill_inputs, counters, plan, scale=1.0, pdl=True)
    for plan in HALF_PLANS:
        fixed_order_linear(half(64, 512), half(512, 512), half(64, 512), plan=fitted(plan, 2, SHARED_BYTES))
ready = [kernel.function.preload(kernel.specialization) for kernel in needed]
fits = [kernel.metadata.shared <= SHARED_BYTES for kernel in ready]
print(json.dumps({"names": sorted({k.function.fn.__name__ for k in needed}), "count": len(ready), "fit": all(fits)}))
"""


def test_early_launch_and_large_tiles_are_left_to_cards_that_have_them(run_script):
    """A chunk's attention asks for early launch, which the assembler refuses before Hopper; 99 KB for a program."""
    found = json.loads(run_script(["-c", SCRIPT]))
    assert found == {"names": ["_fixed_order_linear_kernel", "_prefill_kernel"], "count": 6, "fit": True}


def test_an_amd_card_is_not_taken_for_hopper(monkeypatch):
    """The MI300's numbers are 9.4."""
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "_capability_major", lambda index: 9)
    assert launch.capability_major(torch.device("cuda")) == 9
    assert launch.capability_major(torch.device("cpu")) == 0
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert launch.capability_major(torch.device("cuda")) == 0
    assert not launch.is_hopper_or_later(torch.device("cuda"))
