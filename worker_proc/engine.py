"""Puts a worker's parts together: device, model, cache, runner. What the process does with them is in `worker.py`."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import EngineConfig, StepLimits, step_limits
from common.errors import ConfigError
from worker_proc.kv_cache import CacheSize, KVCache, LayerCacheSpec, cache_specs, check_cache_dtype, choose_size
from worker_proc.loader import load_model, resolve_dtype
from worker_proc.model_config import ModelConfig, read_model_config
from worker_proc.models.llama import LlamaForCausalLM
from worker_proc.runner import CpuRunner, Runner
from worker_proc.vocabulary import tokenizer_vocab_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """A worker that can run steps."""

    runner: Runner
    size: CacheSize
    vocab_size: int
    device_name: str
    dtype_name: str


@dataclass(frozen=True)
class RunnerParts:
    """What a runner is made of, before the cache has its size.

    sampled_ids: token ids that the tokenizer has; those beyond are never sampled.
    """

    config: EngineConfig
    model: LlamaForCausalLM
    specs: list[LayerCacheSpec]
    limits: StepLimits
    sampled_ids: int
    device: torch.device

    @property
    def model_limit(self) -> int:
        """Tokens that the model was made for."""
        return self.model.config.context_limit

    def make_runner(self, block_count: int, host_block_count: int, max_model_len: int) -> Runner:
        """A runner with a cache of that size, all zeros."""
        cache = KVCache(
            self.specs, block_size=self.config.cache.block_size, block_count=block_count,
            host_block_count=host_block_count, device=self.device,
        )  # fmt: skip
        if self.device.type == "cpu":
            return CpuRunner(self.model, cache, self.limits, max_model_len, self.sampled_ids)
        from worker_proc.cuda_runner import CudaRunner

        return CudaRunner(
            self.model, cache, self.limits, max_model_len=max_model_len, tokenizer_vocab_size=self.sampled_ids,
            device=self.device,
        )  # fmt: skip


def load_engine(config: EngineConfig) -> Engine:
    """Load the model, size the cache, run once.

    Raises:
        ConfigError: the device, the model or the sizes asked for are not to be had; one line says which.
    """
    device = choose_device(config.model.device)
    name = device_name(device)
    set_threads(config.worker.cpu_threads)
    model_config, dtype, sampled_ids = _read_configuration(config, device)
    with timed("loaded the weights"):
        model = load_model(
            Path(config.model_dir), device=device, dtype=dtype, load_format=config.model.load_format,
            seed=config.model.seed,
        )  # fmt: skip
    specs = cache_specs(model_config, dtype, config.cache.kv_cache_dtype)
    parts = RunnerParts(config, model, specs, step_limits(config.scheduler, name), sampled_ids, device)
    size = choose_size(config, parts.limits, specs, parts.model_limit, _available_bytes(parts))
    with timed("allocated the KV cache"):
        runner = parts.make_runner(size.block_count, size.host_block_count, size.max_model_len)
    with timed("ran a first forward pass"):
        runner.warm_up()
    return Engine(runner, size, model_config.vocab_size, name, str(dtype).removeprefix("torch."))


def _read_configuration(config: EngineConfig, device: torch.device) -> tuple[ModelConfig, torch.dtype, int]:
    with timed("read the model's configuration"):
        model_config = read_model_config(Path(config.model_dir))
        if config.model.max_model_len > model_config.context_limit:
            logger.warning(
                "--max-model-len is %d; the model was made for %d tokens, which is the limit",
                config.model.max_model_len, model_config.context_limit,
            )  # fmt: skip
        dtype = resolve_dtype(config.model.dtype, model_config, device)
        check_cache_dtype(config.cache.kv_cache_dtype, model_config.head_dim, device)
        tokenizer_dir = Path(config.tokenizer_dir or config.model_dir)
        return model_config, dtype, tokenizer_vocab_size(tokenizer_dir, model_config.vocab_size)


def _available_bytes(parts: RunnerParts) -> int:
    """Memory for the KV cache: an option on the CPU, what a trial step leaves free on a GPU."""
    if parts.device.type == "cpu":
        return parts.config.cache.cpu_kv_cache_bytes
    if parts.config.cache.num_kv_blocks:
        return 0
    from worker_proc.gpu_memory import measure_free_bytes

    with timed("measured the memory of the largest step"):
        return measure_free_bytes(parts)


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU if there is one, else the CPU.

    Raises:
        ConfigError: `cuda` was asked for and is not there.
    """
    available = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("--device is cuda, but this machine has no usable CUDA device; use --device cpu or auto")
    return torch.device("cuda:0" if available else "cpu")


def device_name(device: torch.device) -> str:
    """`cpu`, or the GPU's name."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def set_threads(count: int) -> None:
    """Threads of torch's own pool; 0 takes the cores that this process may use."""
    torch.set_num_threads(count or usable_cores())


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Log how long the block took."""
    start = time.monotonic()
    yield
    logger.info("%s in %.2f s", what, time.monotonic() - start)
