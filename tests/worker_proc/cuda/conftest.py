"""Drivers of the GPU's runner: on a GPU with graphs, elsewhere in Triton's interpreter."""

import pytest
import torch

from common.config import StepLimits
from kernels import prefill_attention, prefill_attention_hopper, prefill_plans, tuning
from kernels.qk_norm_rope_store import qk_norm_rope_store_reference
from tests.kernels.gluon_emulator import emulate
from tests.support.poison import poison
from worker_proc.cuda import fused_forward
from worker_proc.cuda.fused_forward import FusedForward
from worker_proc.cuda.runner import CudaRunner
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.kv_cache import KVCache, cache_specs
from worker_proc.loader import load_model

FUSED = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 2}
BLOCK_SIZE = 4
MAX_LEN = 96


@pytest.fixture
def fused_sizes() -> dict[str, int]:
    """Configuration values of a tiny model that the fused pass covers."""
    return dict(FUSED)


@pytest.fixture
def library_products(monkeypatch):
    """Leave matrix products to the library, as for large batches: the interpreter takes seconds for small ones."""
    monkeypatch.setattr(tuning, "default_plan", lambda *_, **__: tuning.LIBRARY)


@pytest.fixture
def quick_stores(monkeypatch, device):
    """Without a GPU keys and values are stored by the reference: the interpreter takes a second for a few tokens."""
    if device == "cpu":
        monkeypatch.setattr(fused_forward, "qk_norm_rope_store", store_by_reference)


@pytest.fixture
def make_gpu_driver(plan_driver):
    """make(folder, device, ...) -> a PlanDriver over a fresh runner; what nothing has written in its cache is NaN.

    `padded` pads every step to its bucket without a GPU too; `eager` runs without graphs on one.
    """

    def make(
        folder, device, *, slot_count=4, block_count=48, padded=False, eager=False, dtype=torch.float32,
        kv_cache_dtype="auto", block_size=BLOCK_SIZE, step_tokens=64, max_len=MAX_LEN,
    ):  # fmt: skip
        place = torch.device(device)
        model = load_model(folder, device=place, dtype=dtype)
        limits = StepLimits(slot_count, step_tokens)
        cache = KVCache(
            cache_specs(model.config, dtype, kv_cache_dtype),
            block_size=block_size, block_count=block_count, host_block_count=0, device=place,
        )  # fmt: skip
        poison(cache)
        if device == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream())
        slots = DeviceSlots(slot_count, max_len, block_size, model.config.vocab_size, place)
        forward = FusedForward(model, max_rows=slot_count, max_tokens=step_tokens, max_positions=max_len + 16)
        runner = CudaRunner(forward, cache, slots, limits, model.config.vocab_size, eager=eager)
        if padded:
            runner.pads_steps = True
        driver = plan_driver(lambda plan: runner.execute(plan).result(), slot_count, block_count, block_size)
        driver.runner, driver.cache, driver.model, driver.forward = runner, cache, model, forward
        driver.issue = runner.execute
        return driver

    return make


@pytest.fixture
def fresh_plans(monkeypatch, device, quick_stores):
    """The Hopper prefill kernel for steps of any size; of each call: did it read fresh keys and values?

    Without a GPU it runs in the emulator.
    """
    calls, attend = [], prefill_attention.prefill_attention
    monkeypatch.setattr(prefill_plans, "is_specialised_size", lambda *_: True)
    monkeypatch.setattr(
        prefill_attention, "prefill_attention", lambda *a, **o: calls.append(o["fresh"] is not None) or attend(*a, **o)
    )
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for Hopper")
    if device == "cpu":
        emulate(monkeypatch, prefill_attention_hopper, "_hopper_kernel")
        monkeypatch.setattr(
            fused_forward.FusedForward, "_has_hopper_kernel", lambda self, plans, *_, **__: plans is prefill_plans
        )
    return calls


def store_by_reference(
    qkv, q_out, key_cache, value_cache, slots, positions, rope_table, q_weight, k_weight, *rest, **named
):
    """Stands in for `qk_norm_rope_store`."""
    heads = (q_out.shape[1], q_weight, k_weight, *rest)
    q_out.copy_(
        qk_norm_rope_store_reference(qkv, key_cache, value_cache, slots, positions, rope_table, *heads, **named)
    )
