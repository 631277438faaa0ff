"""Which models the kernels of the passes cover, and what these take of a model beside its weights.

Knows nothing of steps. Called by the passes on a GPU, and where one is chosen.
"""

from typing import Any

import torch

from kernels.paged_kv import HEAD_DIMS
from worker_proc.models.llama import LlamaAttention, LlamaForCausalLM
from worker_proc.models.qwen3 import Qwen3Attention


def unsupported_reason(model: LlamaForCausalLM) -> str | None:
    """Why the fused pass cannot serve the model; None if it can."""
    config = model.config
    if model.rotary.length_dependent:
        return f"rope type {config.rope.rope_type} has frequencies that depend on the length"
    if config.output_bias or config.mlp_bias:
        return "biases on the output, gate, up or down projections"
    if config.head_dim not in HEAD_DIMS:
        return f"head_dim {config.head_dim} is not one of {HEAD_DIMS}"
    return None


def head_norms(attention: LlamaAttention) -> dict[str, Any]:
    """The norms of query and key heads as the kernels take them; nothing for models without."""
    if not isinstance(attention, Qwen3Attention):
        return {}
    return {
        "q_weight": attention.q_norm.weight, "k_weight": attention.k_norm.weight, "eps": attention.q_norm.eps
    }  # fmt: skip


def rope_table(model: LlamaForCausalLM, max_positions: int) -> torch.Tensor:
    """Cosines, then sines, of every position's angles: float32 [max_positions, head_dim], attention factor included."""
    half = model.config.head_dim // 2
    positions = torch.arange(max_positions, device=model.model.norm.weight.device)
    angles = model.rotary.angles(positions)
    return torch.cat((angles.cos[:, 0, :half], angles.signed_sin[:, 0, half:]), dim=1).contiguous()
