"""Assembles a worker's parts: device, model, cache, runner. `worker.py` is the process around them."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from common.config import EngineConfig, step_limits
from common.errors import ConfigError
from common.messages import StepPlan
from common.processors import granted_threads
from kernels.compile_process import CompileProcess
from worker_proc.fixed_order_model import aligned_threads
from worker_proc.kernels_on_disk import compile_process
from worker_proc.kv_cache import CacheSize, KVCache, cache_specs, check_cache_dtype, choose_size
from worker_proc.loader import resolve_dtype, unfilled_model
from worker_proc.model_config import ModelConfig, read_model_config
from worker_proc.pending import PendingStep
from worker_proc.runner import CpuRunner
from worker_proc.swap_speed import Swap, measured_link_bytes_per_s
from worker_proc.vocabulary import tokenizer_vocab_size

KERNEL_MAX_BLOCK_SIZE = 128
"""Tokens per block that the GPU's kernels take; a test holds this to `kernels.paged_kv.MAX_BLOCK_SIZE`."""

KERNEL_MAX_ROWS = 1024
"""Rows per step that they take; a test holds this to `kernels.decode_attention.MAX_ROWS`."""

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """Runs step plans: `CpuRunner`, or on a GPU `cuda.runner.CudaRunner`."""

    @property
    def unprepared_count(self) -> int:
        """For how many sizes of steps `prepare_next` has yet to prepare."""

    def execute(self, plan: StepPlan) -> PendingStep:
        """Carry out a plan; on a GPU, only issue it."""

    def prepare_next(self) -> bool:
        """Prepare something that steps may need later; True if there is more to prepare."""


@dataclass(frozen=True)
class Engine:
    """A worker that can run steps; `link_bytes_per_s` is how fast it swaps blocks, 0 without host blocks."""

    runner: StepRunner
    size: CacheSize
    vocab_size: int
    device_name: str
    dtype_name: str
    link_bytes_per_s: int = 0


def load_engine(config: EngineConfig, compiler: CompileProcess | None = None) -> Engine:
    """Load the model, size the cache, run once.

    Args:
        compiler: what compiles kernels for a GPU, if it was made before; closed here, or once it has nothing to do.

    Raises:
        ConfigError: the device, the model or the requested sizes are not available; one line says which.
    """
    compiler = compiler or compile_process(config)
    try:
        return _load_engine(config, compiler)
    except BaseException:
        compiler.close()
        raise


def _load_engine(config: EngineConfig, compiler: CompileProcess) -> Engine:
    device = choose_device(config.model.device)
    check_options(config, device)
    name = device_name(device)
    set_threads(config.worker.cpu_threads)
    model_config, dtype, sampled_ids = _read_configuration(config, device)
    model, fill = unfilled_model(
        Path(config.model_dir), device=device, dtype=dtype, load_format=config.model.load_format,
        seed=config.model.seed,
    )  # fmt: skip
    specs = cache_specs(model_config, dtype, config.cache.kv_cache_dtype)
    limits = step_limits(config.scheduler, name)
    if device.type == "cuda":
        from worker_proc.cuda.engine import CudaStart  # brings Triton, which a CPU worker does without

        for target in model.checkpoint_targets().values():
            target.zero_()
        start = CudaStart(config, limits, model, specs, sampled_ids, compiler)
        with timed("loaded the weights"):
            fill()
        with timed("prepared the GPU"):
            gpu_runner, size = start.finish()
        return _engine(gpu_runner, size, model_config, name, dtype, gpu_runner.swap, torch.cuda.synchronize)
    compiler.close()
    with timed("loaded the weights"):
        fill()
    if config.worker.deterministic:
        torch.set_num_threads(aligned_threads(model_config, torch.get_num_threads()))
    size = choose_size(config, limits, specs, model_config.context_limit, config.cache.cpu_kv_cache_bytes)
    with timed("allocated the KV cache"):
        cache = KVCache(
            specs, block_size=config.cache.block_size, block_count=size.block_count,
            host_block_count=size.host_block_count, device=device,
        )  # fmt: skip
        runner = CpuRunner(
            model, cache, limits, size.max_model_len, sampled_ids, deterministic=config.worker.deterministic
        )
    with timed("ran a first forward pass"):
        runner.warm_up()
    return _engine(runner, size, model_config, name, dtype, cache, lambda: None)


def _engine(
    runner: StepRunner, size: CacheSize, model: ModelConfig, device_name: str, dtype: torch.dtype, swap: Swap,
    wait: Callable[[], None],
) -> Engine:  # fmt: skip
    link = measured_link_bytes_per_s(swap, size.block_count, size.host_block_count, size.block_bytes, wait)
    if link:
        logger.info("blocks move to and from the host at %.1f GB/s", link / 1e9)
    return Engine(runner, size, model.vocab_size, device_name, str(dtype).removeprefix("torch."), link)


def _read_configuration(config: EngineConfig, device: torch.device) -> tuple[ModelConfig, torch.dtype, int]:
    with timed("read the model's configuration"):
        model_config = read_model_config(Path(config.model_dir))
        dtype = resolve_dtype(config.model.dtype, model_config, device)
        check_cache_dtype(config.cache.kv_cache_dtype, model_config.head_dim, device)
        tokenizer_dir = Path(config.tokenizer_dir or config.model_dir)
        return model_config, dtype, tokenizer_vocab_size(tokenizer_dir, model_config.vocab_size)


def check_options(config: EngineConfig, device: torch.device) -> None:
    """Refuse options that cannot work with any model, before one is loaded.

    Raises:
        ConfigError: blocks or batches are larger than the GPU's kernels support.
    """
    if device.type == "cpu":
        return
    block_size, max_num_seqs = config.cache.block_size, config.scheduler.max_num_seqs
    if block_size > KERNEL_MAX_BLOCK_SIZE:
        raise ConfigError(f"--block-size is {block_size}; at most {KERNEL_MAX_BLOCK_SIZE} are supported on a GPU")
    if max_num_seqs > KERNEL_MAX_ROWS:
        raise ConfigError(f"--max-num-seqs is {max_num_seqs}; at most {KERNEL_MAX_ROWS} are supported on a GPU")


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU if there is one, else the CPU.

    Raises:
        ConfigError: `cuda` was requested but is not available.
    """
    available = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("--device is cuda, but this machine has no usable CUDA device; use --device cpu or auto")
    return torch.device("cuda:0" if available else "cpu")


def device_name(device: torch.device) -> str:
    """`cpu`, or the GPU's name."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def set_threads(count: int) -> None:
    """Threads of torch's own pool; 0 takes one for each core that this process is granted."""
    torch.set_num_threads(count or granted_threads())


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Log how long the block took."""
    start = time.monotonic()
    yield
    logger.info("%s in %.2f s", what, time.monotonic() - start)
