"""How the KV cache is sized, and that whole blocks move as told."""

from dataclasses import fields
from random import Random
from types import SimpleNamespace

import pytest
import torch

from common.config import CacheOptions, EngineConfig, ModelOptions, StepLimits
from common.errors import ConfigError
from kernels.paged_kv import HEAD_DIMS
from worker_proc.attention import KERNEL_HEAD_DIMS
from worker_proc.kv_cache import (
    QUANTISED_DTYPES,
    KVCache,
    LayerCacheSpec,
    cache_specs,
    check_cache_dtype,
    choose_size,
)

KV_CACHE_DTYPES = next(item for item in fields(CacheOptions) if item.name == "kv_cache_dtype").metadata["choices"]

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


def test_the_option_never_exceeds_the_models_limit_and_that_is_said(caplog):
    assert size(config(max_model_len=40)).max_model_len == 40
    assert not caplog.records
    assert size(config(max_model_len=400)).max_model_len == 100
    assert caplog.messages == ["--max-model-len is 400; the model allows 100, which holds"]


def test_host_blocks_come_from_swap_space():
    assert size(config(swap_space_bytes=3 * BLOCK_BYTES + 5)).host_block_count == 3


@pytest.mark.parametrize(
    ("options", "available", "text"),
    [
        ({"max_model_len": 90}, 5 * BLOCK_BYTES, "--max-model-len is 90, but the KV cache holds 80 tokens"),
        ({}, BLOCK_BYTES - 1, f"gets {BLOCK_BYTES - 1} bytes, one block of it needs {BLOCK_BYTES}"),
        ({"swap_space_bytes": 9}, 1 << 30, f"--swap-space-bytes is 9, less than one block .*: {BLOCK_BYTES}"),
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


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scales_move_with_their_blocks(dtype):
    specs = [LayerCacheSpec("full", 2, 8, 8, dtype, scale_bytes=2)] * 2
    cache = KVCache(specs, block_size=4, block_count=4, host_block_count=2, device=torch.device("cpu"))
    assert [tensor.shape for tensor in (cache.key_caches[1], cache.key_scales[1])] == [(4, 2, 4, 8), (4, 2, 4)]
    assert cache.value_scales[0].dtype == torch.float16
    assert len(cache.tensors()) == 8
    for tensor in cache.tensors():
        for block in range(4):
            tensor[block] = block + 1
    cache.copy_blocks([(0, 1), (1, 2)])
    cache.swap_out([(3, 1)])
    cache.copy_blocks([(0, 3)])
    cache.swap_in([(1, 0)])
    for tensor in cache.tensors():
        assert [tensor[block].float().unique().tolist() for block in range(4)] == [[4.0], [1.0], [2.0], [1.0]]


@pytest.mark.parametrize("seed", range(6))
def test_swapped_blocks_come_back_from_wherever_they_were(seed):
    """Host blocks in one run, in several, and in any order; other blocks keep what they hold."""
    rng = Random(seed)
    cache = KVCache(
        [LayerCacheSpec("full", 2, 8, 8, torch.float32)] * 2,
        block_size=4, block_count=20, host_block_count=20, device=torch.device("cpu"),
    )  # fmt: skip
    for tensor in cache.tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    before = [tensor.clone() for tensor in cache.tensors()]
    count = rng.randint(1, 12)
    old, new = rng.sample(range(20), count), rng.sample(range(20), count)
    host = list(range(3, 3 + count)) if seed % 2 else rng.sample(range(20), count)
    cache.swap_out(list(zip(old, host, strict=True)))
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(cache.tensors(), before, strict=True))
    cache.swap_in(list(zip(host, new, strict=True)))
    others = [block for block in range(20) if block not in new]
    for tensor, kept in zip(cache.tensors(), before, strict=True):
        assert torch.equal(tensor[new], kept[old])
        assert torch.equal(tensor[others], kept[others])


MODEL = SimpleNamespace(sliding_windows=[None, 64], kv_head_count=8, head_dim=128)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_an_8_bit_block_takes_130_of_256_bytes_of_a_bfloat16_block(kv_cache_dtype):
    plain, small = (cache_specs(MODEL, torch.bfloat16, name) for name in ("auto", kv_cache_dtype))
    assert [spec.kind for spec in small] == ["full", "sliding"]
    assert [spec.block_bytes(16) * 256 for spec in small] == [spec.block_bytes(16) * 130 for spec in plain]
    allocated = KVCache(small, block_size=16, block_count=3, host_block_count=0, device=torch.device("cpu"))
    held = sum(tensor.numel() * tensor.element_size() for tensor in allocated.tensors())
    assert held == 3 * sum(spec.block_bytes(16) for spec in small)


def test_every_cache_type_has_a_spec():
    assert set(QUANTISED_DTYPES) | {"auto"} == set(KV_CACHE_DTYPES)
    assert KERNEL_HEAD_DIMS == HEAD_DIMS


@pytest.mark.parametrize(
    ("kv_cache_dtype", "head_dim", "capability", "text"),
    [
        ("fp8", 128, (8, 0), r"fp8, which needs compute capability 8\.9; this GPU's is 8\.0: use .* int8 or auto"),
        (
            "int8",
            24,
            (9, 0),
            "int8, which a GPU serves for head sizes 64, 80, 96, 128, 256; this model's is 24",
        ),
    ],
)
def test_a_cache_type_that_the_gpu_cannot_serve_is_refused(kv_cache_dtype, head_dim, capability, text):
    gpu = torch.device("cuda:0")
    with pytest.raises(ConfigError, match=text) as caught:
        check_cache_dtype(kv_cache_dtype, head_dim, gpu, capability)
    assert "\n" not in str(caught.value)
    check_cache_dtype("auto", head_dim, gpu, capability)
    check_cache_dtype(kv_cache_dtype, head_dim, torch.device("cpu"))
    check_cache_dtype(kv_cache_dtype, 128, gpu, (8, 9))
    check_cache_dtype("int8", 64, gpu, (7, 5))
