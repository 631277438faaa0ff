"""Qwen3 dense: the Llama frame with a norm on every query and key head before the rotation."""

import torch

from worker_proc.layers.norm import RMSNorm
from worker_proc.model_config import ModelConfig
from worker_proc.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen3Attention(LlamaAttention):
    """Grouped-query attention with per-head RMSNorm of queries and keys."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def normalize(self, query_key: torch.Tensor) -> torch.Tensor:
        """Norm over head_dim, one weight for all query heads and one for all key heads."""
        query, key = query_key.split((self.head_count, self.kv_head_count), dim=1)
        return torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 dense models."""

    attention_class = Qwen3Attention
