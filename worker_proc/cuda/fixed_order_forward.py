"""The forward pass of `--deterministic`: a token's bits depend on its own request alone.

The fused pass picks kernels by the size of the step, and each adds up in an order of its own. Here every token takes
the same way whatever the step holds: one product kernel whose sums run over k in one order, one attention kernel for
prompts and decoding alike, whose key tiles lie at fixed positions of the context and are taken one after the other,
and one plan for the norms of heads. So it matters neither what runs beside a request, nor how its prompt was cut into
chunks, nor whether it was preempted and computed again, nor whether a prefix came from the cache.

The price: a decode row's context is not split over the card, and library products are faster for many rows. Called by
the GPU runner in place of `FusedForward`, whose buffers it takes.
"""

from dataclasses import replace

import torch

from kernels import prefill_attention as prefill
from kernels.embedding import embedding
from kernels.fixed_order_linear import fixed_order_linear
from kernels.qk_norm_rope_store import qk_norm_rope_store
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from kernels.step_layout import StepInputs
from worker_proc.cuda.buckets import DECODE, Bucket
from worker_proc.cuda.fused_forward import EARLY_TOKENS, FusedForward, _head_norms, _row_class
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.kv_cache import KVCache
from worker_proc.layers.linear import Linear
from worker_proc.layers.norm import RMSNorm
from worker_proc.models.llama import LlamaLayer

FEW_TOKENS = 1
"""Whose attention tiles all steps take."""


class FixedOrderForward(FusedForward):
    """The pass over one model; arguments and attributes as `FusedForward` has them."""

    fixed_order = True

    def token_logits(self, first_token: int, count: int) -> torch.Tensor:
        """Float32 logits [count, vocab_size] of any tokens of the last pass; allocates."""
        logits = torch.empty(count, self.config.vocab_size, dtype=torch.float32, device=self.hidden.device)
        return self._logits_of(self.hidden[first_token : first_token + count], logits)

    def _attention_block(
        self, index: int, layer: LlamaLayer, hidden: torch.Tensor, bucket: Bucket, inputs: StepInputs,
        cache: KVCache, slots: DeviceSlots, counts: torch.Tensor,
    ) -> None:  # fmt: skip
        attention, tokens = layer.self_attn, hidden.shape[0]
        qkv, query, attended = self._qkv[:tokens], self._query[:tokens], self._attended[:tokens]
        self._product(self._normed(hidden, layer.input_layernorm), attention.qkv_proj, qkv)
        key_cache, value_cache = cache.key_caches[index], cache.value_caches[index]
        key_scales, value_scales = cache.key_scales[index], cache.value_scales[index]
        qk_norm_rope_store(
            qkv, query, key_cache, value_cache, inputs.slot_mapping, inputs.positions, self._rope_table,
            k_scales=key_scales, v_scales=value_scales, one_plan=True, **_head_norms(attention),
        )  # fmt: skip
        prefill.prefill_attention(
            attended, query, key_cache, value_cache, slots.block_tables, inputs.row_slots, inputs.context_lengths,
            inputs.query_starts, self._prefill_counters, self._one_prefill_plan(bucket, key_scales is not None),
            scale=attention.scale, sliding_window=attention.sliding_window or 0,
            key_scales=key_scales, value_scales=value_scales,
            pdl=hidden.device.type == "cuda" and tokens <= EARLY_TOKENS,
        )  # fmt: skip
        self._product(attended.view(tokens, -1), attention.o_proj, hidden, residual=hidden)

    def _feed_forward_block(self, index: int, layer: LlamaLayer, hidden: torch.Tensor) -> None:
        mlp, tokens = layer.mlp, hidden.shape[0]
        wide = self._workspace.rows("wide", tokens, 2 * self.config.intermediate_size)
        self._product(self._normed(hidden, layer.post_attention_layernorm), mlp.gate_up_proj, wide)
        silu_mul(wide, self._activated[:tokens])
        self._product(self._activated[:tokens], mlp.down_proj, hidden, residual=hidden)

    def _head(self, hidden: torch.Tensor, bucket: Bucket, inputs: StepInputs) -> torch.Tensor:
        rows = hidden
        if bucket.kind != DECODE:
            rows = self._sampled[: bucket.rows]
            embedding(inputs.sample_rows, hidden, rows)
        return self._logits_of(rows, self.logits[: bucket.rows])

    def _logits_of(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        fixed_order_linear(self._normed(hidden, self.model.model.norm), self.model.lm_head.weight, logits)
        return logits

    def _normed(self, hidden: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        normed = self._workspace.rows("normed", *hidden.shape)
        rms_norm(hidden, norm.weight, norm.eps, normed)
        return normed

    def _product(
        self, x: torch.Tensor, linear: Linear, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        fixed_order_linear(x, linear.weight, out, bias=linear.bias, residual=residual)

    def _one_prefill_plan(self, bucket: Bucket, quantised: bool) -> prefill.PrefillPlan:
        """The tiles of a small step, whatever the size; only the grid follows the bucket."""
        config = self.config
        sizes = (config.head_count, config.kv_head_count, config.head_dim, self._multiprocessors)
        rows = _row_class(self.logits.shape[0])
        one = prefill.launch_plan(FEW_TOKENS, rows, *sizes, quantised=quantised, one_loop=True)
        grid = prefill.launch_plan(bucket.tokens, rows, *sizes, quantised=quantised, tile_rows=one.tile_rows)
        return replace(one, program_count=grid.program_count)
