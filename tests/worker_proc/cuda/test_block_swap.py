"""Swapping beside the steps: blocks come back as they left, and no step sees one that is under way."""

from contextlib import contextmanager
from random import Random

import pytest
import torch

from tests.support.memory_engine import MemoryEngine
from worker_proc.cuda import block_swap
from worker_proc.cuda.block_swap import BlockSwap, Direction, block_runs, pinned_bytes
from worker_proc.cuda.fixed_order_forward import FixedOrderForward
from worker_proc.cuda.runner import CudaRunner
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.kv_cache import KVCache, LayerCacheSpec
from worker_proc.loader import load_model

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU in this process")
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
LONG = 4_000_000
"""Clock cycles of a GPU: about two milliseconds, in which dozens of tiny steps run."""


def random_cache(device: str, dtype: torch.dtype, seed: int) -> KVCache:
    spec = LayerCacheSpec("full", 2, 8, 8, dtype, scale_bytes=2 if dtype == torch.int8 else 0)
    cache = KVCache([spec] * 2, block_size=4, block_count=20, host_block_count=20, device=torch.device(device))
    for tensor in cache.tensors():
        values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * 50
        tensor.copy_(values.to(tensor.dtype))
    return cache


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_come_back_from_wherever_they_were(device, dtype, seed, monkeypatch):
    """Host blocks in one run, in several and in any order; more of them than the staging memory holds at once."""
    rng = Random(seed)
    cache = random_cache(device, dtype, seed)
    block_bytes = sum(tensor[0].nbytes for tensor in cache.tensors())
    monkeypatch.setattr(block_swap, "STAGING_BYTES", 3 * block_bytes)
    swap = BlockSwap(cache)
    before = [tensor.clone() for tensor in cache.tensors()]
    count = rng.randint(1, 12)
    old, new = rng.sample(range(20), count), rng.sample(range(20), count)
    host = list(range(3, 3 + count)) if seed % 2 else rng.sample(range(20), count)
    swap.swap_out(list(zip(old, host, strict=True)))
    swap.swap_in(list(zip(host, new, strict=True)))
    others = [block for block in range(20) if block not in new]
    for tensor, kept in zip(cache.tensors(), before, strict=True):
        assert torch.equal(tensor[new], kept[old])
        assert torch.equal(tensor[others], kept[others])


def test_runs_of_blocks():
    assert block_runs([]) == []
    assert block_runs([4, 5, 6, 2, 3, 3, 9]) == [(0, 4, 3), (3, 2, 2), (5, 3, 1), (6, 9, 1)]
    assert block_runs([3, 2, 1]) == [(0, 3, 1), (1, 2, 1), (2, 1, 1)]


def test_host_memory_is_exactly_as_large_as_asked():
    memory = pinned_bytes(3, 40, pin=False)
    assert memory.shape == (3, 40) and memory.eq(0).all()
    assert pinned_bytes(0, 40, pin=False).shape == (0, 40)


def fixed_order_runner(model, cache, limits, max_model_len, vocabulary) -> CudaRunner:
    """The GPU's runner with the pass whose tokens do not depend on what shares a step."""
    rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    device = cache.key_caches[0].device
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    slots = DeviceSlots(rows, max_model_len, cache.block_size, vocabulary, device)
    forward = FixedOrderForward(model, max_rows=rows, max_tokens=tokens, max_positions=max_model_len + 16)
    return CudaRunner(forward, cache, slots, limits, vocabulary, eager=False)


def slow_down(monkeypatch, ways: str) -> None:
    """Each transfer of these directions starts late by many steps, so whoever does not wait for it is too early."""
    issuing = Direction.issuing

    @contextmanager
    def late(way):
        with issuing(way) as entered:
            if way.stream is not None and way.name in ways:
                torch.cuda._sleep(LONG)
            yield entered

    monkeypatch.setattr(Direction, "issuing", late)


@devices
@pytest.mark.parametrize(("kv_cache_dtype", "late"), [("auto", ""), ("int8", "out in")])
def test_swapped_requests_give_the_tokens_of_a_cache_with_room(
    device, kv_cache_dtype, late, library_products, tiny_model, fused_sizes, monkeypatch
):
    """The real scheduler two steps ahead, blocks for a few sequences only, transfers that end late."""
    if device == "cpu" and late:
        pytest.skip("transfers end at once without a GPU")
    _, folder = tiny_model("Qwen3", **fused_sizes)
    model = load_model(folder, device=torch.device(device), dtype=torch.float32)
    rng = Random(5)
    count, outputs, blocks = (24, 40, 40) if device == "cuda" else (2, 4, 4)
    prompts = [[rng.randrange(3, 131) for _ in range(rng.randint(2, 6))] for _ in range(count)]
    common = {"make_runner": fixed_order_runner, "kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 16, "run_ahead": 2,
              "prefix_cache": "off"}  # fmt: skip
    slow_down(monkeypatch, late)
    roomy = MemoryEngine(model, block_count=400, **common)
    want = roomy.generate(prompts, outputs)
    tight = MemoryEngine(model, block_count=blocks, host_block_count=200, preemption="swap", **common)
    assert tight.generate(prompts, outputs) == want
    assert roomy.swapped_in == 0 < tight.swapped_in
