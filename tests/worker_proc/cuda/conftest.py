"""Drivers of the GPU's runner: on a GPU with graphs, elsewhere in Triton's interpreter."""

import pytest
import torch

from common.config import StepLimits
from kernels import tuning
from tests.support.poison import poison
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
    monkeypatch.setattr(tuning, "default_plan", lambda *_: tuning.LIBRARY)


@pytest.fixture
def make_gpu_driver(plan_driver):
    """make(folder, device, ...) -> a PlanDriver over a fresh runner; what nothing has written in its cache is NaN.

    `padded` pads every step to its bucket without a GPU too; `eager` runs without graphs on one.
    """

    def make(
        folder, device, *, slot_count=4, block_count=48, padded=False, eager=False, dtype=torch.float32,
        kv_cache_dtype="auto",
    ):  # fmt: skip
        place = torch.device(device)
        model = load_model(folder, device=place, dtype=dtype)
        limits = StepLimits(slot_count, 64)
        cache = KVCache(
            cache_specs(model.config, dtype, kv_cache_dtype),
            block_size=BLOCK_SIZE, block_count=block_count, host_block_count=0, device=place,
        )  # fmt: skip
        poison(cache)
        if device == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream())
        slots = DeviceSlots(slot_count, MAX_LEN, BLOCK_SIZE, model.config.vocab_size, place)
        forward = FusedForward(model, max_rows=slot_count, max_tokens=64, max_positions=MAX_LEN + 16)
        runner = CudaRunner(forward, cache, slots, limits, model.config.vocab_size, eager=eager)
        if padded:
            runner.pads_steps = True
        driver = plan_driver(lambda plan: runner.execute(plan).result(), slot_count, block_count, BLOCK_SIZE)
        driver.runner, driver.cache, driver.model = runner, cache, model
        driver.issue = runner.execute
        return driver

    return make
