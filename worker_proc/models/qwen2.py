"""Qwen2 and Qwen2.5: the Llama frame with a bias on q, k and v (which `ModelConfig.qkv_bias` carries)."""

from worker_proc.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 and Qwen2.5 models."""
