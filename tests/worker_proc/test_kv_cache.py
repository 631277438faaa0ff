"""How the KV cache is sized, and that whole blocks move as told."""

import pytest
import torch

from common.config import CacheOptions, EngineConfig, ModelOptions, StepLimits
from common.errors import ConfigError
from worker_proc.kv_cache import KVCache, LayerCacheSpec, choose_size

SPECS = [LayerCacheSpec("full", 2, 8, 8, torch.float32), LayerCacheSpec("sliding", 2, 8, 8, torch.bfloat16)]
BLOCK_BYTES = 16 * 2 * 16 * (4 + 2)


def config(max_model_len: int = 0, **cache) -> EngineConfig:
    return EngineConfig(model=ModelOptions(max_model_len=max_model_len), cache=CacheOptions(**cache))


def size(config: EngineConfig, available: int = 1 << 30, slots: int = 4, limit: int = 100):
    return choose_size(config, StepLimits(slots, 64), SPECS, limit, available)


def test_block_bytes_count_every_layer_dtype_and_scale():
    assert sum(spec.block_bytes(16) for spec in SPECS) == BLOCK_BYTES
    assert LayerCacheSpec("full", 2, 8, 8, torch.int8, scale_bytes=2).block_bytes(16) == 16 * 2 * (16 + 4)
    assert LayerCacheSpec("latent", 1, 576, 0, torch.bfloat16).block_bytes(16) == 16 * 576 * 2


def test_no_more_blocks_than_all_slots_can_fill():
    assert size(config()).block_count == 4 * 7
    assert size(config(max_model_len=33)).block_count == 4 * 3


def test_memory_bounds_blocks_and_blocks_bound_the_length():
    chosen = size(config(), available=5 * BLOCK_BYTES + 1)
    assert (chosen.block_count, chosen.max_model_len, chosen.block_bytes) == (5, 80, BLOCK_BYTES)
    assert size(config(num_kv_blocks=3), available=0).max_model_len == 48
    assert size(config(num_kv_blocks=1000)).block_count == 1000


def test_the_option_never_exceeds_the_models_limit():
    assert size(config(max_model_len=400)).max_model_len == 100
    assert size(config(max_model_len=40)).max_model_len == 40


def test_host_blocks_come_from_swap_space():
    assert size(config(swap_space_bytes=3 * BLOCK_BYTES + 5)).host_block_count == 3


@pytest.mark.parametrize(
    ("options", "available", "text"),
    [
        ({"max_model_len": 90}, 5 * BLOCK_BYTES, "--max-model-len is 90, but the KV cache holds 80 tokens"),
        ({}, BLOCK_BYTES - 1, f"gets {BLOCK_BYTES - 1} bytes, one block of it needs {BLOCK_BYTES}"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(options, available, text):
    with pytest.raises(ConfigError, match=text):
        size(config(**options), available=available)


def test_blocks_move_as_told():
    cache = KVCache(SPECS, block_size=4, block_count=4, host_block_count=2, device=torch.device("cpu"))
    for tensor in cache.tensors():
        assert tensor.eq(0).all()
        for block in range(4):
            tensor[block] = block + 1
    cache.copy_blocks([(0, 1), (1, 2)])  # block 2 gets what block 1 held before
    cache.swap_out([(3, 1)])
    cache.copy_blocks([(0, 3)])
    cache.swap_in([(1, 0)])
    for tensor in cache.tensors():
        assert [tensor[block].unique().tolist() for block in range(4)] == [[4.0], [1.0], [2.0], [1.0]]
