"""Puts a worker's parts together: device, model, cache, runner. What the process does with them is in `worker.py`."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import EngineConfig, step_limits
from common.errors import ConfigError
from worker_proc.kv_cache import CacheSize, KVCache, cache_specs, choose_size
from worker_proc.loader import load_model, resolve_dtype
from worker_proc.model_config import read_model_config
from worker_proc.runner import CpuRunner
from worker_proc.vocabulary import tokenizer_vocab_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """A worker that can run steps."""

    runner: CpuRunner
    size: CacheSize
    vocab_size: int
    device_name: str
    dtype_name: str


def load_engine(config: EngineConfig) -> Engine:
    """Load the model, size the cache, run once.

    Raises:
        ConfigError: the device, the model or the sizes asked for are not to be had; one line says which.
    """
    device = choose_device(config.model.device)
    name = device_name(device)
    set_threads(config.worker.cpu_threads)
    limits = step_limits(config.scheduler, name)
    model_dir = Path(config.model_dir)
    with _timed("read the model's configuration"):
        model_config = read_model_config(model_dir)
        dtype = resolve_dtype(config.model.dtype, model_config, device)
        sampled_ids = tokenizer_vocab_size(Path(config.tokenizer_dir or model_dir), model_config.vocab_size)
    with _timed("loaded the weights"):
        model = load_model(
            model_dir, device=device, dtype=dtype, load_format=config.model.load_format, seed=config.model.seed
        )
    specs = cache_specs(model_config, dtype, config.cache.kv_cache_dtype)
    available = config.cache.cpu_kv_cache_bytes
    size = choose_size(config, limits, specs, model_config.max_position_embeddings, available)
    cache = KVCache(
        specs, block_size=config.cache.block_size, block_count=size.block_count,
        host_block_count=size.host_block_count, device=device,
    )  # fmt: skip
    runner = CpuRunner(model, cache, limits, size.max_model_len, sampled_ids)
    with _timed("ran a first forward pass"):
        runner.warm_up()
    return Engine(runner, size, model_config.vocab_size, name, str(dtype).removeprefix("torch."))


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU if there is one, else the CPU.

    Raises:
        ConfigError: `cuda` was asked for and is not there.
    """
    available = torch.cuda.is_available() if name != "cpu" else False
    if name == "cuda" and not available:
        raise ConfigError("--device is cuda, but this machine has no usable CUDA device; use --device cpu or auto")
    return torch.device("cuda:0" if available else "cpu")


def device_name(device: torch.device) -> str:
    """`cpu`, or the GPU's name."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def set_threads(count: int) -> None:
    """Threads of torch's own pool; 0 takes the cores that this process may use."""
    torch.set_num_threads(count or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count or 1)


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    logger.info("%s in %.2f s", what, time.monotonic() - start)
