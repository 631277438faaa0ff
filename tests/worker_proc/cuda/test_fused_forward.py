"""What the fused pass decides from the model and the card, without either."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kernels import prefill_plans
from worker_proc.cuda.fused_forward import has_hopper_kernel


@pytest.mark.parametrize(
    ("block_size", "capability", "possible"), [(16, 9, True), (4, 9, False), (128, 9, True), (16, 8, False)]
)
def test_the_hopper_kernel_is_asked_about_the_blocks_that_there_are(block_size, capability, possible, monkeypatch):
    """Its copies start at eight positions: with smaller blocks the plain kernel has to do."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    monkeypatch.setattr(prefill_plans, "can_specialise", partial(prefill_plans.can_specialise, triton_version="3.6.0"))
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    model = SimpleNamespace(
        config=SimpleNamespace(head_count=16, kv_head_count=8, head_dim=128),
        model=SimpleNamespace(norm=SimpleNamespace(weight=weight)),
    )
    assert has_hopper_kernel(model, block_size, sliding_window=0, quantised=False) is possible
