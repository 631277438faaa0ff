"""The Llama family: Llama 3.x, SmolLM2, Mistral, and the frame that Qwen2 and Qwen3 share.

Module names are the checkpoint's, so a weight's name says where it is. Which attention runs, where K and V are and how
rows are packed is left to `attention` and the `ForwardContext`.
"""

from collections.abc import Iterator

import torch
from torch import nn

from worker_proc.attention import attention
from worker_proc.forward_context import ForwardContext
from worker_proc.layers.embedding import Embedding, LmHead
from worker_proc.layers.linear import Linear, MergedLinear
from worker_proc.layers.mlp import GatedMlp
from worker_proc.layers.norm import RMSNorm
from worker_proc.layers.rotary import RotaryAngles, RotaryEmbedding
from worker_proc.model_config import ModelConfig


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_count, self.kv_head_count, self.head_dim = config.head_count, config.kv_head_count, config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_windows[layer_index]
        query_size, kv_size = config.head_count * config.head_dim, config.kv_head_count * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.output_bias)

    def forward(self, x: torch.Tensor, angles: RotaryAngles, context: ForwardContext) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        query_key, value = heads.split((self.head_count + self.kv_head_count, self.kv_head_count), dim=1)
        query_key = angles.apply(self.normalize(query_key))
        query, key = query_key.split((self.head_count, self.kv_head_count), dim=1)
        output = attention(
            query, key, value, self.layer_index, context, scale=self.scale, sliding_window=self.sliding_window
        )
        return self.o_proj(output)

    def normalize(self, query_key: torch.Tensor) -> torch.Tensor:
        """A hook for query and key heads [T, head_count + kv_head_count, head_dim] before the rotation: here none."""
        return query_key


class LlamaLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer_index: int, attention_class: type[LlamaAttention]) -> None:
        super().__init__()
        self.self_attn = attention_class(config, layer_index)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, angles: RotaryAngles, context: ForwardContext) -> torch.Tensor:
        """Adds to `hidden` [T, hidden_size] in place and returns it."""
        hidden += self.self_attn(self.input_layernorm(hidden), angles, context)
        hidden += self.mlp(self.post_attention_layernorm(hidden))
        return hidden


class LlamaDecoder(nn.Module):
    """Embedding, layers and the last norm: everything under `model.` in the checkpoint."""

    def __init__(self, config: ModelConfig, attention_class: type[LlamaAttention]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, index, attention_class) for index in range(config.layer_count))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LlamaForCausalLM(nn.Module):
    """A decoder-only language model over the paged cache. Parameters start uninitialised; a loader fills them.

    Built under the target device and default dtype (see `loader.load_model`).
    """

    attention_class: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaDecoder(config, self.attention_class)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LmHead(config.hidden_size, config.vocab_size, tied=tied)
        self.rotary = RotaryEmbedding(config, self.model.norm.weight.device)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """One step over T packed tokens.

        Args:
            token_ids: int32 [T]; padding tokens hold any valid id.
            positions: int32 or int64 [T]; padding tokens hold any position.

        Returns:
            Hidden states after the last norm, [T, hidden_size]; pass the rows that are sampled to `compute_logits`.
        """
        angles = self.rotary.angles(positions, self._prompt_lengths(positions, context))
        hidden = self.model.embed_tokens(token_ids)
        for layer in self.model.layers:
            hidden = layer(hidden, angles, context)
        return self.model.norm(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of S selected tokens -> float32 logits [S, vocab_size]."""
        return self.lm_head(hidden)

    def checkpoint_targets(self) -> dict[str, torch.Tensor]:
        """Name of every tensor the checkpoint must hold -> the parameter (or rows of a fused one) that it fills."""
        return dict(self._iterate_targets())

    def pack(self) -> None:
        """Repack weights where this device computes faster with another layout. Once, after loading."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def _iterate_targets(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, module in self.named_modules():
            if isinstance(module, Linear | Embedding | RMSNorm):
                yield from module.checkpoint_targets(name)

    def _prompt_lengths(self, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor | None:
        """Prompt length of each token's row [T], for the rotary types that need it."""
        if context.prompt_lengths is None or not self.rotary.length_dependent:
            return None
        return context.prompt_lengths[context.token_rows(positions.shape[0])]
