"""How much GPU memory the KV cache may take: measured, by running the largest step that the limits allow.

Called once by `engine.py`, after the weights are loaded.
"""

import gc
import logging
from array import array
from typing import TYPE_CHECKING

import torch

from common.messages import SlotInit, SlotSampling, StepPlan
from worker_proc.slots import div_ceil

if TYPE_CHECKING:
    from worker_proc.engine import RunnerParts

RESERVE_BYTES = 512 << 20
"""Left free beside everything measured: for fragments, and for what libraries take later."""

logger = logging.getLogger(__name__)


def measure_free_bytes(parts: "RunnerParts") -> int:
    """Bytes that remain for the KV cache of what `--gpu-memory-utilization` allows.

    Subtracts what is taken now (weights, other programs), the slots' state, and the most that a step needs on top.
    """
    device = parts.device
    wanted = min(parts.config.model.max_model_len or parts.model_limit, parts.model_limit)
    step_bytes, slot_bytes = _run_largest_step(parts, wanted)
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    allowed = int(total_bytes * parts.config.cache.gpu_memory_utilization) - (total_bytes - free_bytes)
    available = max(0, allowed - step_bytes - slot_bytes - RESERVE_BYTES)
    logger.info(
        "GPU memory: %.2f GiB free of %.2f, %.2f for a step, %.2f for slots, %.2f for the KV cache",
        *(count / 2**30 for count in (free_bytes, total_bytes, step_bytes, slot_bytes, available)),
    )
    return available


def _run_largest_step(parts: "RunnerParts", wanted: int) -> tuple[int, int]:
    """Bytes that the largest step allocates on top of its buffers, and bytes of the slots' state for that length."""
    device, limits = parts.device, parts.limits
    block_size = parts.config.cache.block_size
    before = torch.cuda.memory_allocated(device)
    lengths = row_lengths(limits.max_num_batched_tokens, wanted, limits.max_num_seqs)
    block_count = sum(div_ceil(length, block_size) for length in lengths)
    runner = parts.make_runner(block_count, 0, wanted)
    cache_bytes = sum(spec.block_bytes(block_size) for spec in parts.specs) * block_count
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    runner.execute(largest_step(lengths, block_size)).result()
    dtype = parts.model.model.norm.weight.dtype
    hidden = torch.zeros(limits.max_num_seqs, parts.model.config.hidden_size, dtype=dtype, device=device)
    with torch.inference_mode():
        parts.model.compute_logits(hidden)
    peak = torch.cuda.max_memory_allocated(device)
    return peak - allocated, max(0, allocated - before - cache_bytes)


def row_lengths(token_count: int, max_model_len: int, row_limit: int) -> list[int]:
    """Prompts that together fill a step: as long as allowed, the last one with the rest."""
    lengths = [max_model_len] * min(token_count // max_model_len, row_limit)
    rest = token_count - sum(lengths)
    return [*lengths, rest] if rest and len(lengths) < row_limit else lengths


def largest_step(lengths: list[int], block_size: int) -> StepPlan:
    """A plan with a new request of each length, computed whole."""
    inits, first = [], 0
    for slot, length in enumerate(lengths):
        blocks = range(first, first + div_ceil(length, block_size))
        first = blocks.stop
        inits.append(
            SlotInit(
                slot=slot, token_ids=array("i", bytes(4 * length)), prompt_count=length, computed_count=0,
                block_ids=array("i", blocks), sampling=SlotSampling(),
            )
        )  # fmt: skip
    return StepPlan(
        step_id=1,
        new_slots=tuple(inits),
        chunk_slots=array("H", range(len(lengths))),
        chunk_token_counts=array("i", lengths),
        chunk_samples=array("B", [1] * len(lengths)),
        chunk_block_counts=array("i", bytes(4 * len(lengths))),
    )
