"""The forward pass of `--deterministic`: a token's bits depend on its own request alone.

The fused pass picks kernels by the size of the step, and each adds up in an order of its own. Here every token takes
the same way whatever the step holds: products whose sums run over k in one order, attention whose spans of keys lie at
fixed positions of the context, for prompts and decoding alike, and one plan for the norms of heads. So it matters
neither what runs beside a request, nor how its prompt was cut into chunks, nor whether it was preempted and computed
again, nor whether a prefix came from the cache.

The price: fewer things are fused, and library products are faster. Called by the GPU runner in place of `FusedForward`,
whose buffers it takes.
"""

from dataclasses import replace

import torch

from kernels import fixed_order_attention as spans
from kernels import prefill_attention as prefill
from kernels import prefill_plans
from kernels.embedding import embedding
from kernels.fixed_order_linear import fixed_order_linear
from kernels.qk_norm_rope_store import qk_norm_rope_store
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from kernels.step_layout import StepInputs
from worker_proc.cuda.buckets import DECODE, Bucket
from worker_proc.cuda.covered_models import head_norms
from worker_proc.cuda.fused_forward import EARLY_TOKENS, FusedForward, row_class
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.kv_cache import KVCache
from worker_proc.layers.linear import Linear
from worker_proc.layers.norm import RMSNorm
from worker_proc.models.llama import LlamaForCausalLM, LlamaLayer

SPLIT_CONTEXTS = False
"""Attention in spans of keys that the card shares, rather than by the prefill kernel, one tile of keys after the other.
The two give different bits, each the same every time."""


class FixedOrderForward(FusedForward):
    """The pass over one model; arguments and attributes as `FusedForward` has them."""

    fixed_order = True

    def __init__(self, model: LlamaForCausalLM, *, max_rows: int, max_tokens: int, max_positions: int) -> None:
        super().__init__(model, max_rows=max_rows, max_tokens=max_tokens, max_positions=max_positions)
        if SPLIT_CONTEXTS:
            device, config = self.hidden.device, self.config
            plan = spans.launch_plan(1, max_rows, config.head_count, config.kv_head_count, config.head_dim, 1)
            self._span_sums = torch.empty(plan.workspace_floats, device=device)
            self._span_counters = torch.zeros(max_rows * config.kv_head_count, dtype=torch.int32, device=device)

    def run(
        self, bucket: Bucket, inputs: StepInputs, cache: KVCache, slots: DeviceSlots, counts: torch.Tensor
    ) -> torch.Tensor:
        """See `FusedForward.run`."""
        hidden = self.hidden[: bucket.tokens]
        embedding(inputs.token_ids, self.model.model.embed_tokens.weight, hidden)
        for index, layer in self._layers:
            self._attention_block(index, layer, hidden, bucket, inputs, cache, slots, counts)
            self._feed_forward_block(index, layer, hidden)
        return self._head(hidden, bucket, inputs)

    def token_logits(self, first_token: int, count: int) -> torch.Tensor:
        """Float32 logits [count, vocab_size] of any tokens of the last pass; allocates."""
        logits = torch.empty(count, self.config.vocab_size, dtype=torch.float32, device=self.hidden.device)
        return self._put_logits(self.hidden[first_token : first_token + count], logits)

    def token_hidden(self, first_token: int, count: int) -> torch.Tensor:
        """Hidden states [count, hidden_size] of any tokens of the last pass, after the last norm; allocates."""
        return self._normed(self.hidden[first_token : first_token + count], self.model.model.norm).clone()

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
            key_scales=key_scales, value_scales=value_scales, one_plan=True, **head_norms(attention),
        )  # fmt: skip
        self._attend_in_order(index, attended, query, bucket, inputs, cache, slots, counts)
        self._product(attended.view(tokens, -1), attention.o_proj, hidden, residual=hidden)

    def _feed_forward_block(self, index: int, layer: LlamaLayer, hidden: torch.Tensor) -> None:
        mlp, tokens = layer.mlp, hidden.shape[0]
        wide = self._workspace.rows("wide", tokens, 2 * self.config.intermediate_size)
        self._product(self._normed(hidden, layer.post_attention_layernorm), mlp.gate_up_proj, wide)
        silu_mul(wide, self._activated[:tokens])
        self._product(self._activated[:tokens], mlp.down_proj, hidden, residual=hidden)

    def _head(self, hidden: torch.Tensor, bucket: Bucket, inputs: StepInputs) -> torch.Tensor:
        return self._put_logits(self._sampled_rows(hidden, bucket, inputs), self.logits[: bucket.rows])

    def _put_logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        fixed_order_linear(self._normed(hidden, self.model.model.norm), self.model.lm_head.weight, logits)
        return logits

    def _normed(self, hidden: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        normed = self._workspace.rows("normed", *hidden.shape)
        rms_norm(hidden, norm.weight, norm.eps, normed, one_plan=True)
        return normed

    def _product(
        self, x: torch.Tensor, linear: Linear, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        fixed_order_linear(x, linear.weight, out, bias=linear.bias, residual=residual)

    def _attend_in_order(
        self, index: int, output: torch.Tensor, query: torch.Tensor, bucket: Bucket, inputs: StepInputs,
        cache: KVCache, slots: DeviceSlots, counts: torch.Tensor,
    ) -> None:  # fmt: skip
        attention, config = self.model.model.layers[index].self_attn, self.config
        shared = (
            output, query, cache.key_caches[index], cache.value_caches[index], slots.block_tables, inputs.row_slots,
            inputs.context_lengths, inputs.query_starts,
        )  # fmt: skip
        options = {
            "scale": attention.scale,
            "sliding_window": attention.sliding_window or 0,
            "key_scales": cache.key_scales[index],
            "value_scales": cache.value_scales[index],
            "pdl": bucket.tokens <= EARLY_TOKENS,
        }
        rows = row_class(self.logits.shape[0])
        sizes = (rows, config.head_count, config.kv_head_count, config.head_dim, self._multiprocessors)
        if SPLIT_CONTEXTS:
            plan = spans.launch_plan(bucket.tokens, *sizes)
            has_chunks = bucket.kind != DECODE
            spans.fixed_order_attention(
                *shared, self._span_sums, self._span_counters, plan, has_chunks=has_chunks, **options
            )
            return
        tiles = prefill_plans.launch_plan(1, *sizes, quantised=cache.key_scales[index] is not None, one_loop=True)
        grid = prefill_plans.launch_plan(bucket.tokens, *sizes, tile_rows=tiles.tile_rows)
        prefill.prefill_attention(
            *shared, self._prefill_counters, replace(tiles, program_count=grid.program_count), **options
        )
