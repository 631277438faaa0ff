"""Without a GPU the worker's GPU path runs in Triton's interpreter, on tiny float32 models."""

from pathlib import Path

import pytest
import torch

from kernels import interpreter

if not torch.cuda.is_available():
    interpreter.enable()

from common.config import StepLimits
from worker_proc.cuda.fused_forward import FusedForward, unsupported_reason
from worker_proc.cuda.plain_forward import PlainForward
from worker_proc.cuda.runner import CudaRunner
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.kv_cache import KVCache, cache_specs
from worker_proc.loader import load_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 2}


@pytest.fixture
def fused_sizes() -> dict[str, int]:
    """Configuration values of a tiny model that the fused pass covers."""
    return dict(FUSED)


@pytest.fixture
def make_gpu_driver(plan_driver):
    """make(folder, ...) -> a PlanDriver over a fresh CudaRunner whose cache holds NaN wherever nothing was written."""

    def make(folder: Path, *, slot_count: int = 4, block_count: int = 48, vocab: int = 131, eager: bool = False):
        model = load_model(folder, device=DEVICE, dtype=torch.float32)
        limits, block_size, max_len = StepLimits(slot_count, 64), 4, 96
        cache = KVCache(
            cache_specs(model.config, torch.float32, "auto"),
            block_size=block_size, block_count=block_count, host_block_count=4, device=DEVICE,
        )  # fmt: skip
        for tensor in cache.tensors():
            tensor.fill_(float("nan"))
        slots = DeviceSlots(slot_count, max_len, block_size, vocab, DEVICE)
        if unsupported_reason(model) is None:
            forward = FusedForward(model, max_rows=slot_count, max_tokens=64, max_positions=max_len + 8)
        else:
            forward = PlainForward(model)
        runner = CudaRunner(forward, cache, slots, limits, vocab, eager=eager)
        driver = plan_driver(lambda plan: runner.execute(plan).result(), slot_count, block_count, block_size)
        driver.runner, driver.cache = runner, cache
        return driver

    return make
