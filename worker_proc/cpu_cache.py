"""Writing and reading the paged cache on the CPU, 8-bit formats included. Used by `cpu_attention` only.

Blocks of an 8-bit cache (`kernels/kv_format.py`) are dequantised while they are gathered, into the same workspace that
plain blocks are gathered into: as float32 products of element and scale, whatever type the model computes in. Measured
with 1,536 blocks of 16 x 64 on one core, in milliseconds: bfloat16 0.07, float32 0.13, int8 0.18 (0.30 to bfloat16),
fp8 0.35; torch's own conversion of FP8 takes 16.
"""

import torch

from kernels.kv_format import dequantise, quantise
from worker_proc.cpu_plan import AttentionPlan


def store(source: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, plan: AttentionPlan) -> torch.Tensor:
    """Write the step's K or V [T, kv_head, head_dim] where the plan says; returns it as it will be read back."""
    head_dim = cache.shape[-1]
    if scales is None:
        _write(source, cache.view(-1, head_dim), plan)
        return source
    stored, vector_scales = quantise(source, cache.dtype)
    _write(stored.view(torch.int8), cache.view(torch.int8).view(-1, head_dim), plan)
    _write(vector_scales, scales.view(-1), plan)
    return dequantise(stored, vector_scales, source.dtype) if plan.reads_fresh_tokens else source


def _write(source: torch.Tensor, flat_cache: torch.Tensor, plan: AttentionPlan) -> None:
    if plan.stored_tokens is not None:
        source = source[plan.stored_tokens]
    flat_cache.index_copy_(0, plan.store_indices, source.reshape(-1, *flat_cache.shape[1:]))


def read_blocks(cache: torch.Tensor, scales: torch.Tensor | None, block_heads: torch.Tensor, out: torch.Tensor) -> None:
    """Gather blocks of single heads into `out` [n, position * head_dim]; block_heads: int64 [n], block * heads + head.

    Positions that were never written come as they are, NaN included.
    """
    _, _, block_size, head_dim = cache.shape
    if scales is None:
        torch.index_select(cache.view(-1, block_size * head_dim), 0, block_heads, out=out)
        return
    stored = cache.view(torch.int8).view(-1, block_size * head_dim).index_select(0, block_heads)
    factors = scales.view(-1, block_size).index_select(0, block_heads).float()
    wide = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
    if cache.dtype == torch.float8_e4m3fn:
        wide.copy_(_e4m3_over_256(stored))
        factors *= 256.0
    else:
        wide.copy_(stored)
    wide.view(-1, block_size, head_dim).mul_(factors.unsqueeze(-1))
    if wide is not out:
        out.copy_(wide)


def _e4m3_over_256(bits: torch.Tensor) -> torch.Tensor:
    """FP8 numbers, given as int8 bits, divided by 256, as float16: exact, for the exponents' biases differ by eight.

    The fields of e4m3 move to their places in float16, and the sign's copy between them is cleared.
    """
    return bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
