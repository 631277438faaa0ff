"""Puts the GPU worker's parts together: forward pass, slots, cache sized by what is left of the card, runner.

In two parts, since kernels can be compiled while weights are loaded. Called by `worker_proc.engine`.
"""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from common.config import EngineConfig, StepLimits
from common.errors import ConfigError
from kernels.compile_ahead import (
    KernelMissing,
    KernelsAhead,
    KernelsBehind,
    NeededKernel,
    from_disk_only,
    launches_left_out,
    name_alike,
)
from kernels.compile_process import CompileProcess, Job
from kernels.launch import shared_memory_bytes
from kernels.step_layout import PlanLayout
from worker_proc.cuda.buckets import (
    DECODE,
    Bucket,
    compiled_buckets,
    first_buckets,
    largest_buckets,
    slowest_to_compile,
)
from worker_proc.cuda.covered_models import unsupported_reason
from worker_proc.cuda.fixed_order_forward import FixedOrderForward
from worker_proc.cuda.fused_forward import FusedForward
from worker_proc.cuda.plain_forward import PlainForward
from worker_proc.cuda.runner import CudaRunner
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.cuda.step_program import GRAPH_LIMIT, Forward, StepProgram
from worker_proc.kernels_on_disk import compile_process, kernels_left, note_kernels
from worker_proc.kv_cache import CacheSize, KVCache, LayerCacheSpec, choose_size, gpu_share_bytes, wanted_length
from worker_proc.models.llama import LlamaForCausalLM
from worker_proc.slots import TOKEN_MARGIN

logger = logging.getLogger(__name__)

THREAD_SWITCH_S = 2e-4
"""How long the thread that issues steps may keep the interpreter while the reporter has a result to send."""


def cuda_runner(
    config: EngineConfig, limits: StepLimits, model: LlamaForCausalLM, specs: list[LayerCacheSpec], vocabulary: int
) -> tuple[CudaRunner, CacheSize]:
    """The whole start of a model whose weights are there; see `CudaStart`."""
    compiler = compile_process(config)
    try:
        return CudaStart(config, limits, model, specs, vocabulary, compiler).finish()
    except BaseException:
        compiler.close()
        raise


class CudaStart:
    """The start of a GPU worker. Once this is made, its kernels are there or are being compiled; `finish` follows.

    Args:
        model: on the GPU. Its weights may come later, but must be numbers: the library's products are made with them.
        compiler: started if no kernels are expected on disk. It is closed once it has nothing more to do, which may
            be after the start, or by the caller if that fails.

    Raises:
        ConfigError: --deterministic with a model that it does not cover.
    """

    def __init__(
        self, config: EngineConfig, limits: StepLimits, model: LlamaForCausalLM, specs: list[LayerCacheSpec],
        vocabulary: int, compiler: CompileProcess,
    ) -> None:  # fmt: skip
        self._config, self._limits, self._specs, self._vocabulary = config, limits, specs, vocabulary
        self._model_limit = model.config.context_limit
        prepare_thread()
        name_alike()  # also what is compiled at its first use: a later start finds it
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        max_len = wanted_length(config.model.max_model_len, self._model_limit)
        device = model.model.norm.weight.device
        with torch.inference_mode():
            self._forward = _forward(model, limits, max_len, fixed_order=config.worker.deterministic)
            self._slots = DeviceSlots(
                limits.max_num_seqs, max_len, config.cache.block_size, model.config.vocab_size, device
            )
            self._trial = Trial(self._forward, self._slots, limits, specs, vocabulary)
            self._compiler, self._kernels = compiler, KernelsAhead(compiler)
            pads_steps = self._forward.capturable and not config.worker.enforce_eager
            self._first = first_buckets if pads_steps else compiled_buckets
            self._is_on_disk = not compiler.started and self._trial.load(self._first)
            if not self._is_on_disk:
                self._compile()

    def _compile(self) -> None:
        """Order what the start waits for, what takes longest first."""
        self._compiler.start()
        self._kernels.begin_early(self._trial.needed_kernels(slowest_to_compile))
        self._kernels.begin(self._trial.needed_kernels(self._first))

    def finish(self) -> tuple[CudaRunner, CacheSize]:
        """A runner that is ready for the first requests, and the size of its cache; once, and with the weights there.

        Raises:
            ConfigError: no memory left for the cache.
        """
        start = time.monotonic()
        config, limits = self._config, self._limits
        behind = self._kernels_behind()
        logger.info("kernels ready after another %.2f s", time.monotonic() - start)
        with torch.inference_mode():
            graph_bytes = self._trial.graph_bytes()
        del self._trial  # gives its memory back
        available = available_bytes(config.cache.gpu_memory_utilization, graph_bytes)
        size = choose_size(config, limits, self._specs, self._model_limit, available)
        cache = KVCache(
            self._specs, block_size=config.cache.block_size, block_count=size.block_count,
            host_block_count=size.host_block_count, device=self._slots.device,
        )  # fmt: skip
        runner = CudaRunner(
            self._forward, cache, self._slots, limits, self._vocabulary, behind, eager=config.worker.enforce_eager
        )
        runner.warm_up()
        if self._compiler.started:
            behind.begin()
        torch.cuda.synchronize()
        logger.info("%d graphs captured, %.2f s after the weights were loaded", runner.program.graph_count,
                    time.monotonic() - start)  # fmt: skip
        return runner, size

    def _kernels_behind(self) -> KernelsBehind:
        """Have all kernels that the start needs; returns the others."""
        config, card = self._config, card_of(self._slots.device)
        left = kernels_left(config, card) if self._is_on_disk else None
        if left is None:
            left = self._compile_the_rest(card)
        return KernelsBehind(self._compiler, left, lambda failed: note_kernels(config, card, failed))

    def _compile_the_rest(self, card: str) -> list[Job]:
        """Wait for what has been ordered, if anything has, and list meanwhile what else has to be compiled."""
        with torch.inference_mode():
            left = self._kernels.jobs_left(self._trial.needed_kernels(compiled_buckets))
        self._kernels.finish()
        note_kernels(self._config, card, left)
        return left


class Trial:
    """Steps over a cache of one block: which kernels they need, and how much memory they take."""

    def __init__(
        self, forward: Forward, slots: DeviceSlots, limits: StepLimits, specs: list[LayerCacheSpec], vocabulary: int
    ) -> None:
        self._forward, self._slots = forward, slots
        self._sizes = (limits.max_num_seqs, limits.max_num_batched_tokens)
        self._layout = PlanLayout(limits.max_num_seqs, 1)
        self._cache = KVCache(
            specs, block_size=slots.block_size, block_count=1, host_block_count=0, device=slots.device
        )
        self._plan = torch.zeros(self._layout.size, dtype=torch.int32, device=slots.device)
        self._options = {"max_tokens": limits.max_num_batched_tokens, "vocabulary": vocabulary}
        self._eager = self._program(eager=True)

    def load(self, buckets: Callable[[int, int], list[Bucket]]) -> bool:
        """Bring the kernels of such buckets, of the largest number of rows and of tokens, from disk into this process;
        whether all of them are there."""
        with suppress(KernelMissing), from_disk_only():
            for bucket in buckets(*self._sizes):
                self._eager.rehearse(bucket)
            return True
        return False

    def needed_kernels(self, buckets: Callable[[int, int], list[Bucket]]) -> list[NeededKernel]:
        """Those of such buckets that are not in this process yet."""
        with launches_left_out() as needed:
            for bucket in buckets(*self._sizes):
                self._eager.rehearse(bucket)
        return needed

    def graph_bytes(self) -> int:
        """Run the largest steps, so that whatever they allocate is there; the bytes to set aside for graphs, from those
        of one."""
        for bucket in largest_buckets(*self._sizes):
            self._eager.run(bucket)
        if not self._forward.capturable:
            return 0
        before = torch.cuda.mem_get_info()[0]
        graphs = self._program(eager=False)
        graphs.run(Bucket(DECODE, 1, 1))
        torch.cuda.synchronize()
        return GRAPH_LIMIT * max(0, before - torch.cuda.mem_get_info()[0])

    def _program(self, *, eager: bool) -> StepProgram:
        arguments = (self._forward, self._cache, self._slots, self._plan, self._layout)
        return StepProgram(*arguments, **self._options, eager=eager)


def card_of(device: torch.device) -> str:
    """All that kernels and their plans depend on of a card."""
    if device.type != "cuda":
        return device.type
    card = torch.cuda.get_device_properties(device)
    parts = (card.name, card.major, card.minor, card.multi_processor_count, shared_memory_bytes(device))
    return " ".join(map(str, parts))


def prepare_thread() -> None:
    """This thread issues steps: on a stream of its own, since graphs cannot be captured on the default one, and behind
    what that one still has to do for the model."""
    sys.setswitchinterval(THREAD_SWITCH_S)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(stream)


def not_fused(model: LlamaForCausalLM, *, fixed_order: bool) -> str:
    """What to say of a model that only the plain pass can serve; empty for one that the fused pass covers.

    Raises:
        ConfigError: it should be served with --deterministic, for which there is no plain pass.
    """
    reason = unsupported_reason(model)
    if reason is None:
        return ""
    if fixed_order:
        raise ConfigError(f"--deterministic does not cover this model on a GPU ({reason}); leave the option out")
    return f"the fused forward pass does not cover this model ({reason}): slower, and without CUDA Graphs"


def _forward(model: LlamaForCausalLM, limits: StepLimits, max_len: int, *, fixed_order: bool = False) -> Forward:
    if reason := not_fused(model, fixed_order=fixed_order):
        logger.warning("%s", reason)
        return PlainForward(model)
    kind = FixedOrderForward if fixed_order else FusedForward
    return kind(
        model,
        max_rows=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        max_positions=max_len + 2 * TOKEN_MARGIN,
    )


def available_bytes(utilization: float, graph_bytes: int) -> int:
    """What the cache may take: the share asked for, less what is used by now and what graphs will use."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    available = gpu_share_bytes(utilization, free, total, graph_bytes)
    logger.info("GPU memory: %.1f GiB in use, %.2f GiB for graphs, %.1f GiB for the KV cache", (total - free) / 2**30,
                graph_bytes / 2**30, available / 2**30)  # fmt: skip
    return available
