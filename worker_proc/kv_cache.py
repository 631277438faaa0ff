"""The paged KV cache: how many blocks there are, their tensors, and copying whole blocks.

What a layer keeps is described by a small spec, which turns into bytes per block; the rest of the engine knows only a
number of blocks. The tensors are `[block, kv_head, position in block, head_dim]`, one for K and one for V of each
layer. They start as zeros, since unwritten positions take part in products with weight zero (and zero times NaN would
be NaN). An 8-bit cache (`kernels/kv_format.py`) has its scales beside it, `[block, kv_head, position in block]`, and
they are copied along with their blocks.
"""

import logging
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from common.config import EngineConfig, StepLimits
from common.errors import ConfigError
from common.messages import StepPlan
from kernels.kv_format import SCALE_DTYPE
from worker_proc.attention import KERNEL_HEAD_DIMS
from worker_proc.model_config import ModelConfig
from worker_proc.slots import div_ceil
from worker_proc.transfer import to_device

SAFETY_BYTES = 256 << 20
"""Of a GPU's memory, left alone beside the utilisation asked for: fragmentation, and what the first real steps load."""

ALIGNMENT_BYTES = 64
"""Where a tensor on the CPU may start, so that wide vector instructions load whole lines."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerCacheSpec:
    """What one layer stores per token.

    Attributes:
        kind: `full`, `sliding` (a window of tokens) or `latent` (one compressed vector, no separate V).
        kv_head_count, key_dim, value_dim: numbers a token keeps; value_dim is 0 for `latent`.
        dtype: of the stored elements.
        scale_bytes: bytes of scales per token and head beside K, and beside V.
    """

    kind: str
    kv_head_count: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    scale_bytes: int = 0

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of this layer."""
        kept = (self.key_dim + self.value_dim) * self.dtype.itemsize
        scales = self.scale_bytes * (2 if self.value_dim else 1)
        return block_size * self.kv_head_count * (kept + scales)


QUANTISED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The element types of `--kv-cache-dtype`, apart from `auto`, which is the model's."""

FP8_CAPABILITY = (8, 9)
"""The first NVIDIA compute capability that converts to and from FP8."""


def cache_specs(model: ModelConfig, dtype: torch.dtype, kv_cache_dtype: str) -> list[LayerCacheSpec]:
    """The spec of each layer, for a value of `--kv-cache-dtype` that `check_cache_dtype` has passed."""
    element = QUANTISED_DTYPES.get(kv_cache_dtype, dtype)
    scale_bytes = 0 if kv_cache_dtype == "auto" else SCALE_DTYPE.itemsize
    kinds = ["full" if window is None else "sliding" for window in model.sliding_windows]
    return [
        LayerCacheSpec(kind, model.kv_head_count, model.head_dim, model.head_dim, element, scale_bytes)
        for kind in kinds
    ]


def check_cache_dtype(
    kv_cache_dtype: str, head_dim: int, device: torch.device, capability: tuple[int, int] | None = None
) -> None:
    """Whether the device can serve a cache of this type. A CPU serves all.

    Args:
        capability: of a GPU; None: it is asked.

    Raises:
        ConfigError: it cannot; the text says what is possible.
    """
    if kv_cache_dtype == "auto" or device.type == "cpu":
        return
    if head_dim not in KERNEL_HEAD_DIMS:
        sizes = ", ".join(map(str, KERNEL_HEAD_DIMS))
        raise ConfigError(
            f"--kv-cache-dtype is {kv_cache_dtype}, which a GPU serves for head sizes {sizes}; this model's is "
            f"{head_dim}: use --kv-cache-dtype auto"
        )
    capability = capability or torch.cuda.get_device_capability(device)
    if kv_cache_dtype == "fp8" and capability < FP8_CAPABILITY:
        raise ConfigError(
            f"--kv-cache-dtype is fp8, which needs compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]}; this "
            f"GPU's is {capability[0]}.{capability[1]}: use --kv-cache-dtype int8 or auto"
        )


@dataclass(frozen=True)
class CacheSize:
    """How much the cache holds; see `WorkerReady` for the fields."""

    max_model_len: int
    block_count: int
    host_block_count: int
    block_bytes: int


def choose_size(
    config: EngineConfig, limits: StepLimits, specs: Sequence[LayerCacheSpec], model_limit: int, available_bytes: int
) -> CacheSize:
    """Size the cache: the option's blocks, or what fits in `available_bytes` but no more than all slots can fill.

    Raises:
        ConfigError: no block fits, on the device or in the host's share, or an explicit --max-model-len does not.
    """
    block_size = config.cache.block_size
    block_bytes = sum(spec.block_bytes(block_size) for spec in specs)
    wanted = wanted_length(config.model.max_model_len, model_limit)
    if cut := length_is_cut(config.model.max_model_len, model_limit):
        logger.warning("%s", cut)
    useful = limits.max_num_seqs * div_ceil(wanted, block_size)
    block_count = config.cache.num_kv_blocks or min(available_bytes // block_bytes, useful)
    capacity = block_count * block_size
    if block_count < 1:
        raise ConfigError(f"the KV cache gets {available_bytes} bytes, one block of it needs {block_bytes}")
    if config.model.max_model_len and wanted > capacity:
        raise ConfigError(
            f"--max-model-len is {config.model.max_model_len}, but the KV cache holds {capacity} tokens "
            f"({block_count} blocks of {block_size}); lower it or give the cache more memory"
        )
    host_block_count = config.cache.swap_space_bytes // block_bytes
    if config.cache.swap_space_bytes and not host_block_count:
        raise ConfigError(
            f"--swap-space-bytes is {config.cache.swap_space_bytes}, less than one block of the KV cache needs: "
            f"{block_bytes}"
        )
    return CacheSize(min(wanted, capacity), block_count, host_block_count, block_bytes)


def wanted_length(max_model_len: int, model_limit: int) -> int:
    """Tokens of the longest request that is asked for: --max-model-len, where 0 and too much are the model's limit."""
    return min(max_model_len or model_limit, model_limit)


def length_is_cut(max_model_len: int, model_limit: int) -> str:
    """What to say of a --max-model-len beyond the model's own limit; empty otherwise."""
    if max_model_len <= model_limit:
        return ""
    return f"--max-model-len is {max_model_len}; the model allows {model_limit}, which holds"


def gpu_share_bytes(utilization: float, free_bytes: int, total_bytes: int, later_bytes: int) -> int:
    """What the cache may take of a GPU: the share asked for, less what is used by now and what will be later."""
    return max(0, int(total_bytes * utilization) - (total_bytes - free_bytes) - later_bytes - SAFETY_BYTES)


class KVCache:
    """K and V of every layer, on the device and (for swapped requests) on the host.

    Attributes:
        key_caches, value_caches: one tensor per layer, [block, kv_head, position, head_dim].
        key_scales, value_scales: one per layer, float16 [block, kv_head, position]; None where nothing is quantised.
    """

    def __init__(
        self,
        specs: Sequence[LayerCacheSpec],
        *,
        block_size: int,
        block_count: int,
        host_block_count: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.key_caches, self.value_caches = [], []
        self.key_scales: list[torch.Tensor | None] = []
        self.value_scales: list[torch.Tensor | None] = []
        for spec in specs:
            shape = (block_count, spec.kv_head_count, block_size)
            for dim, caches, scales in (
                (spec.key_dim, self.key_caches, self.key_scales),
                (spec.value_dim, self.value_caches, self.value_scales),
            ):
                caches.append(_zeros((*shape, dim), spec.dtype, device))
                scales.append(_zeros(shape, SCALE_DTYPE, device) if spec.scale_bytes else None)
        self.host_block_count = host_block_count
        self._device = [_movable(tensor) for tensor in self.tensors()]

    def tensors(self) -> list[torch.Tensor]:
        """All device tensors: K of every layer, then V, then the scales that there are."""
        scales = [tensor for tensor in (*self.key_scales, *self.value_scales) if tensor is not None]
        return [*self.key_caches, *self.value_caches, *scales]

    @cached_property
    def _host(self) -> list[torch.Tensor]:
        """The host's blocks of each device tensor; on a GPU `cuda.block_swap` has its own."""
        return [_zeros((self.host_block_count, *cache.shape[1:]), cache.dtype) for cache in self._device]

    def move_blocks(self, plan: StepPlan) -> None:
        """The plan's swap-outs, copies and swap-ins, in this order."""
        if plan.swap_out_block_ids:
            self.swap_out(block_pairs(plan.swap_out_block_ids))
        if plan.copy_block_ids:
            self.copy_blocks(block_pairs(plan.copy_block_ids))
        if plan.swap_in_block_ids:
            self.swap_in(block_pairs(plan.swap_in_block_ids))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks to device blocks, all reads before all writes; pairs are (source, destination)."""
        sources, destinations = to_device(np.array(pairs, dtype=np.int64).T.copy(), self.key_caches[0].device)
        for cache in self._device:
            cache.index_copy_(0, destinations, cache[sources])

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to the host's blocks, at once; pairs are (block, host block). For a cache on the CPU."""
        blocks, host_blocks = torch.tensor(pairs).T
        for cache, host in zip(self._device, self._host, strict=True):
            host[host_blocks] = cache[blocks]

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the host's blocks to blocks, at once; pairs are (host block, block). For a cache on the CPU."""
        host_blocks, blocks = torch.tensor(pairs).T
        for cache, host in zip(self._device, self._host, strict=True):
            cache[blocks] = host[host_blocks]


def block_pairs(ids: "array[int]") -> list[tuple[int, int]]:
    """Flat pairs as tuples."""
    return list(zip(ids[::2], ids[1::2], strict=True))


def _movable(cache: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that all operations for moving blocks support: FP8 as bytes."""
    return cache.view(torch.int8) if cache.dtype == torch.float8_e4m3fn else cache


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Zeros; on the CPU as untouched pages of the system, which cost no time or memory until they are written."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    byte_count = math.prod(shape) * dtype.itemsize
    pages = np.zeros(byte_count + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -pages.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(pages[start : start + byte_count]).view(dtype).view(shape)
