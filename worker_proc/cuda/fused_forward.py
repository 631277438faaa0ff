"""One forward pass of the Llama family on a GPU with as few launches as the kernels allow.

Per layer: q/k/v product with the norm before it; q/k norm, rotation and K/V store; attention; output product with the
residual; gate and up products with the norm before and SiLU * up after; down product with the residual. That is

- five launches for a few decode rows, where each product takes its neighbours along, and one kernel does all between
  the q/k/v and the output product; of a single row the output product may merge attention, which stays in parts;
- six for as few tokens of prompts;
- up to 256 tokens on a card that was measured, eight: products leave parts, the q/k/v product's are added up as they
  rotate, the others' by the norm that follows, residual included (seven for a few decode rows). Not where the kernel of
  few rows does the gate and up products (kernels/skinny_linear_warps.py), to which a norm costs next to nothing;
- for more nine, where the library does the products; where kernels/gemm.py does them, seven: it applies SiLU and stores
  the heads itself, and norms have launches of their own.

Decode rows beside prompts are one more, since they have an attention of their own.

Of what the last layer gives, a step samples from one token of each row, and later steps read all keys and values. So
where that is worth it (`Bucket.ends_in_rows`) this layer stores K and V of all tokens, gathers queries and residuals of
those rows, and goes on as a step that decodes them. That is one launch more: the head gathers residuals in any case.

It works in buffers that are allocated once, so a call can be captured in a CUDA Graph, and it takes the parameters of a
loaded model as they are.

Knows nothing of requests, plans or sampling. `covered_models` says which models the plain modules must serve instead
(`plain_forward`). Called by the GPU runner.
"""

from copy import copy
from itertools import product
from types import ModuleType

import torch

from kernels import decode_attention as decode
from kernels import fused_decode_attention as fused
from kernels import prefill_attention as prefill
from kernels import prefill_plans
from kernels.embedding import embedding
from kernels.gemm import HeadStore, heads_plan, project_heads
from kernels.launch import capability_major, multiprocessor_count, shared_memory_bytes
from kernels.linear_workspace import MAX_ROWS as MAX_SKINNY_ROWS
from kernels.linear_workspace import Workspace
from kernels.new_token import NewTokens
from kernels.paged_kv import HeadShape
from kernels.qk_norm_rope_store import qk_norm_rope_store
from kernels.rms_norm import rms_norm
from kernels.skinny_linear import linear_of_parts, linear_parts, merges_parts, parts_plan, skinny_linear
from kernels.step_layout import StepInputs
from kernels.tuning import most_library_rows
from worker_proc.cuda.buckets import CHUNK, DECODE, MIXED, Bucket
from worker_proc.cuda.covered_models import head_norms, rope_table
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.kv_cache import KVCache
from worker_proc.layers.norm import RMSNorm
from worker_proc.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer

EARLY_TOKENS = 2048
"""Up to this many tokens the attention of chunks is launched before the kernel ahead has finished, and finds its rows
and blocks meanwhile (docs/log.md says what that gains). Waiting programs slow that kernel down: the plain kernel of
decode attention, which only waits, took 46.8 us so over 32 x 1024 tokens, 36.8 without. It is never launched early; the
Hopper kernel, which has something to do meanwhile, is."""

FEWEST_PARTS_TOKENS = 2
"""Below this many tokens the norms are in the products' prologues: W is read once for one row, whatever does that."""

PREFETCH_TOKENS = 4
"""Below this many rows the products are too short to prefetch behind: measured, 22 us a step slower at one row."""

StoredHeads = tuple[torch.Tensor, prefill_plans.PrefillPlan | None, tuple[torch.Tensor, torch.Tensor] | None]
"""Queries [tokens, head, head_dim] of a layer whose K and V are stored; for attention of the bucket's chunks its plan,
and the step's own keys and values if it wants them."""


class FusedForward:
    """The pass over one model.

    Args:
        max_rows, max_tokens: the largest bucket.
        max_positions: positions that may occur are below this.

    Attributes:
        hidden: [max_tokens, hidden_size], after a pass the residual stream before the last norm, unless that pass ended
            in rows.
        logits: float32 [max_rows, vocab_size], after a pass those of the rows that sample.
    """

    capturable = True
    fixed_order = False

    def __init__(self, model: LlamaForCausalLM, *, max_rows: int, max_tokens: int, max_positions: int) -> None:
        config = model.config
        self.model, self.config = model, config
        self._layers = list(enumerate(model.model.layers))
        self._last_layer, self._is_short = self._layers[-1], False
        weight = model.model.norm.weight
        device, dtype = weight.device, weight.dtype
        self._multiprocessors, self._capability_major = multiprocessor_count(device), capability_major(device)
        self._query_shape = (config.head_count, config.head_dim)
        query_size, kv_size = config.head_count * config.head_dim, config.kv_head_count * config.head_dim

        def buffer(rows: int, columns: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=kind, device=device)

        self.hidden = buffer(max_tokens, config.hidden_size)
        self._qkv = buffer(max_tokens, query_size + 2 * kv_size)
        self._query = buffer(max_tokens, query_size).view(max_tokens, *self._query_shape)
        self._attended = buffer(max_tokens, query_size).view(max_tokens, *self._query_shape)
        self._activated = buffer(max_tokens, config.intermediate_size)
        self._sampled = buffer(max_rows, config.hidden_size)
        self._sampled_query = buffer(max_rows, query_size).view(max_rows, *self._query_shape)
        self.logits = buffer(max_rows, config.vocab_size, torch.float32)
        widest = 2 * config.intermediate_size
        wide_rows = max_tokens
        if not self.fixed_order:
            wide_rows = most_library_rows(device, dtype, max_tokens, widest, config.hidden_size)
        self._workspace = Workspace.allocate(max_tokens, config.hidden_size, widest, dtype, device, wide_rows=wide_rows)
        self._rope_table = rope_table(model, max_positions)
        both = (False, True)
        decode_plans = [
            self._decode_plan(max_rows, quantised, specialised) for quantised, specialised in product(both, both)
        ]
        fused_plans = [self._fused_plan(rows, warps) for rows, warps in product(range(1, fused.MAX_ROWS + 1), both)]
        floats = max(plan.workspace_floats for plan in (*decode_plans, *fused_plans))
        self._partials = torch.empty(floats, device=device)
        self._decode_counters = torch.zeros(decode_plans[0].counter_count, dtype=torch.int32, device=device)
        self._prefill_counters = torch.zeros(prefill.COUNTER_COUNT, dtype=torch.int32, device=device)

    def run(
        self, bucket: Bucket, inputs: StepInputs, cache: KVCache, slots: DeviceSlots, counts: torch.Tensor
    ) -> torch.Tensor:
        """Run the bucket's step; returns the logits, float32 [rows, vocab_size], of `inputs.sample_rows`.

        Args:
            inputs: of the bucket's sizes.
            counts: int32 [3], on the device: rows, decode rows, tokens. Products of many rows end with the last token.
        """
        hidden = self.hidden[: bucket.tokens]
        embedding(inputs.token_ids, self.model.model.embed_tokens.weight, hidden)
        if self._leaves_parts(bucket):
            return self._run_in_parts(hidden, bucket, inputs, cache, slots, counts)
        is_whole = self._is_short or not bucket.ends_in_rows
        for index, layer in self._layers if is_whole else self._layers[:-1]:
            self._attention_block(index, layer, hidden, bucket, inputs, cache, slots, counts)
            self._feed_forward_block(index, layer, hidden, counts[2:3])
        if is_whole:
            logits = self._head(hidden, bucket, inputs)
        return self._end_in_rows(hidden, bucket, inputs, cache, slots, counts) if bucket.ends_in_rows else logits

    def shortened(self) -> "FusedForward":
        """The same pass over one layer of each kind only, which takes every kernel of the whole. Where that ends in
        rows, it first takes those of the same bucket's with every token, too."""
        kinds = {layer.self_attn.sliding_window: (index, layer) for index, layer in reversed(self._layers)}
        short = copy(self)
        short._layers, short._is_short = sorted(kinds.values(), key=lambda item: item[0]), True
        return short

    def token_logits(self, first_token: int, count: int) -> torch.Tensor:
        """Float32 logits [count, vocab_size] of any tokens of the last pass; allocates."""
        return self.model.compute_logits(self.token_hidden(first_token, count))

    def token_hidden(self, first_token: int, count: int) -> torch.Tensor:
        """Hidden states [count, hidden_size] of any tokens of the last pass, after the last norm; allocates."""
        return self.model.model.norm(self.hidden[first_token : first_token + count])

    def _attention_block(
        self, index: int, layer: LlamaLayer, hidden: torch.Tensor, bucket: Bucket, inputs: StepInputs,
        cache: KVCache, slots: DeviceSlots, counts: torch.Tensor,
    ) -> None:  # fmt: skip
        attention, token_count = layer.self_attn, counts[2:3]
        attended, few = self._attended[: bucket.tokens], self._few_rows_plan(bucket, attention, cache)
        if few is None:
            query, plan, fresh = self._stored_heads(index, layer, hidden, bucket, inputs, cache, token_count)
            self._attend(index, attended, query, bucket, inputs, cache, slots, counts[1:2], plan, fresh)
        else:
            qkv, leave = self._qkv_product(layer, hidden, token_count), self._leaves_attention(few, bucket, attention)
            left = self._attend_few(few, index, qkv, bucket, inputs, cache, slots, leave=leave)
            if left is not None:
                linear_of_parts(left, attention.o_proj.weight, hidden, self._workspace, residual=hidden)
                return
        self._output_product(layer, attended, hidden, token_count)

    def _end_in_rows(
        self, hidden: torch.Tensor, bucket: Bucket, inputs: StepInputs, cache: KVCache, slots: DeviceSlots,
        counts: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """The last layer and the head: K and V of all tokens, and what is left as of a step that decodes the rows. One
        that does not sample goes on from zeros."""
        (index, layer), rows = self._last_layer, bucket.rows
        queries, *_ = self._stored_heads(index, layer, hidden, bucket, inputs, cache, counts[2:3])
        query, attended = self._sampled_query[:rows], self._attended[:rows]
        embedding(inputs.sample_rows, queries.flatten(1), query.flatten(1))
        sampled = self._sampled_rows(hidden, bucket, inputs)
        # The gathers let nothing start before all keys and values are stored, as the embedding does for earlier steps.
        decoding = Bucket(DECODE, rows, rows)
        self._attend(index, attended, query, decoding, inputs, cache, slots, counts[:1], None, None)
        if self._leaves_parts(decoding):
            normed = self._workspace.rows("normed", *sampled.shape)
            self._layer_end_in_parts(index, layer, attended, sampled, normed, self.model.model.norm)
            return self._logits_of(normed)
        self._output_product(layer, attended, sampled)
        self._feed_forward_block(index, layer, sampled)
        return self._head(sampled, decoding, inputs)

    def _stored_heads(
        self, index: int, layer: LlamaLayer, hidden: torch.Tensor, bucket: Bucket, inputs: StepInputs, cache: KVCache,
        token_count: torch.Tensor,
    ) -> StoredHeads:  # fmt: skip
        """Heads from hidden states; K and V go to the cache, by the q/k/v product itself where that can."""
        store = self._head_store(index, bucket, inputs, cache)
        if store is None:
            return self._store(index, self._qkv_product(layer, hidden, token_count), bucket, inputs, cache)
        qkv, heads, fresh = self._qkv[: bucket.tokens], self._query[: bucket.tokens], None
        plan = self._chunk_plan(index, bucket, cache)
        if plan is not None and plan.fresh:
            heads, fresh = qkv.view(bucket.tokens, -1, self.config.head_dim), self._own_keys_and_values(qkv)
        normed = self._normed(hidden, layer.input_layernorm, token_count)
        project_heads(normed, layer.self_attn.qkv_proj.weight, heads, store, token_count)
        return heads[:, : self.config.head_count], plan, fresh

    def _qkv_product(self, layer: LlamaLayer, hidden: torch.Tensor, token_count: torch.Tensor) -> torch.Tensor:
        attention, norm, tokens = layer.self_attn, layer.input_layernorm, hidden.shape[0]
        weight, bias, qkv = attention.qkv_proj.weight, attention.qkv_proj.bias, self._qkv[:tokens]
        if bias is None:
            skinny_linear(
                hidden, weight, qkv, self._workspace, norm_weight=norm.weight, eps=norm.eps,
                upcoming=self._ahead(attention.o_proj.weight, tokens), token_count=token_count,
            )  # fmt: skip
        else:
            torch.addmm(bias, self._normed(hidden, norm), weight.T, out=qkv)
        return qkv

    def _normed(self, hidden: torch.Tensor, norm: RMSNorm, token_count: torch.Tensor | None = None) -> torch.Tensor:
        """Rows after a norm, in the workspace until its next use."""
        normed = self._workspace.rows("normed", *hidden.shape)
        rms_norm(hidden, norm.weight, norm.eps, normed, token_count=token_count)
        return normed

    def _output_product(
        self, layer: LlamaLayer, attended: torch.Tensor, hidden: torch.Tensor, token_count: torch.Tensor | None = None
    ) -> None:
        tokens = hidden.shape[0]
        skinny_linear(
            attended.view(tokens, -1), layer.self_attn.o_proj.weight, hidden, self._workspace, residual=hidden,
            upcoming=self._ahead(layer.mlp.gate_up_proj.weight, tokens), token_count=token_count,
        )  # fmt: skip

    def _head_store(self, index: int, bucket: Bucket, inputs: StepInputs, cache: KVCache) -> HeadStore | None:
        """Where the q/k/v product of many tokens puts its heads itself; None if another kernel does it."""
        attention = self.model.model.layers[index].self_attn
        if attention.qkv_proj.bias is not None:
            return None
        new = NewTokens(self._rope_table, **head_norms(attention))
        caches = cache.key_caches[index], cache.value_caches[index]
        scales = cache.key_scales[index], cache.value_scales[index]
        store = HeadStore(*caches, inputs.slot_mapping, inputs.positions, new, *scales)
        shape = (bucket.tokens, self.config.head_count)
        return store if heads_plan(attention.qkv_proj.weight, *shape, store) is not None else None

    def _store_and_attend(
        self, few: fused.FusedDecodePlan | None, index: int, qkv: torch.Tensor, bucket: Bucket, inputs: StepInputs,
        cache: KVCache, slots: DeviceSlots, counts: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Attention's output [tokens, head, head_dim] from the q/k/v product, which may come in parts. `few`: the plan
        for few decode rows, where there is one."""
        attended = self._attended[: bucket.tokens]
        if few is not None:
            self._attend_few(few, index, qkv, bucket, inputs, cache, slots)
            return attended
        query, plan, fresh = self._store(index, qkv, bucket, inputs, cache)
        self._attend(index, attended, query, bucket, inputs, cache, slots, counts[1:2], plan, fresh)
        return attended

    def _store(self, index: int, qkv: torch.Tensor, bucket: Bucket, inputs: StepInputs, cache: KVCache) -> StoredHeads:
        """Heads from the q/k/v product, which may come in parts; K and V go to the cache."""
        query, attention = self._query[: bucket.tokens], self.model.model.layers[index].self_attn
        new = NewTokens(self._rope_table, **head_norms(attention))
        plan = self._chunk_plan(index, bucket, cache)
        qk_norm_rope_store(
            qkv, query, cache.key_caches[index], cache.value_caches[index], inputs.slot_mapping, inputs.positions,
            new.rope_table, new.q_weight, new.k_weight, new.eps, cache.key_scales[index], cache.value_scales[index],
            write_back=plan is not None and plan.fresh,
        )  # fmt: skip
        return query, plan, self._own_keys_and_values(qkv) if plan is not None and plan.fresh else None

    def _chunk_plan(self, index: int, bucket: Bucket, cache: KVCache) -> prefill_plans.PrefillPlan | None:
        """The plan of a layer's attention for the bucket's chunks; None without chunks."""
        if bucket.kind == DECODE:
            return None
        window = self.model.model.layers[index].self_attn.sliding_window or 0
        return self._prefill_plan(bucket, cache.block_size, window, cache.key_scales[index] is not None)

    def _attend_few(
        self, plan: fused.FusedDecodePlan, index: int, qkv: torch.Tensor, bucket: Bucket, inputs: StepInputs,
        cache: KVCache, slots: DeviceSlots, leave: bool = False,
    ) -> fused.AttentionParts | None:  # fmt: skip
        """The same of a few decode rows in one launch; with `leave` the parts in which one row's attention is left."""
        attention, key_cache = self.model.model.layers[index].self_attn, cache.key_caches[index]
        following = min(index + 1, len(cache.key_caches) - 1)
        return fused.fused_decode_attention(
            self._attended[: bucket.rows], qkv, key_cache, cache.value_caches[index], slots.block_tables,
            inputs.row_slots, inputs.context_lengths, self._partials, self._decode_counters, plan,
            NewTokens(self._rope_table, **head_norms(attention)), scale=attention.scale,
            key_scales=cache.key_scales[index], value_scales=cache.value_scales[index],
            next_caches=(cache.key_caches[following], cache.value_caches[following]), leave=leave,
        )  # fmt: skip

    def _leaves_attention(self, plan: fused.FusedDecodePlan, bucket: Bucket, attention: LlamaAttention) -> bool:
        """Whether a row's attention stays in parts, which the output product merges as it reads them."""
        heads = (self.config.head_count, self.config.head_dim)
        is_left = bucket.rows == 1 and plan.leaves_parts
        return is_left and merges_parts(self._workspace, attention.o_proj.weight, *heads)

    def _own_keys_and_values(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's own, as prefill attention takes them: views [token, kv_head, head_dim] of the product's rows."""
        heads = qkv.view(qkv.shape[0], -1, self.config.head_dim)
        _, keys, values = heads.tensor_split((self.config.head_count, -self.config.kv_head_count), dim=1)
        return keys, values

    def _leaves_parts(self, bucket: Bucket) -> bool:
        """Whether the products leave parts: for sizes that the norms in their prologues do not suit, if measured."""
        layer = self.model.model.layers[0]
        attention = layer.self_attn
        if not FEWEST_PARTS_TOKENS <= bucket.tokens <= MAX_SKINNY_ROWS or attention.qkv_proj.bias is not None:
            return False
        gate_up = self._workspace.plan_of(bucket.tokens, layer.mlp.gate_up_proj.weight, has_norm=True, silu_mul=True)
        if gate_up.kernel == "warps":
            return False  # norms cost these next to nothing
        products = (attention.qkv_proj, attention.o_proj, layer.mlp.down_proj)
        return all(parts_plan(bucket.tokens, product.weight) is not None for product in products)

    def _run_in_parts(
        self, hidden: torch.Tensor, bucket: Bucket, inputs: StepInputs, cache: KVCache, slots: DeviceSlots,
        counts: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """The layers and the head with products in parts; `normed` holds the next product's input throughout."""
        workspace, tokens = self._workspace, bucket.tokens
        norms = [layer.input_layernorm for _, layer in self._layers[1:]] + [self.model.model.norm]
        normed = self._normed(hidden, self._layers[0][1].input_layernorm)
        for (index, layer), norm_behind in zip(self._layers, norms, strict=True):
            attention = layer.self_attn
            ahead = self._ahead(attention.o_proj.weight, tokens)
            few = self._few_rows_plan(bucket, attention, cache)
            if few is not None:
                qkv = self._qkv[:tokens]
                skinny_linear(normed, attention.qkv_proj.weight, qkv, workspace, upcoming=ahead)
            else:
                qkv = linear_parts(normed, attention.qkv_proj.weight, workspace, ahead)
            attended = self._store_and_attend(few, index, qkv, bucket, inputs, cache, slots, counts)
            self._layer_end_in_parts(index, layer, attended, hidden, normed, norm_behind)
        return self._logits_of(self._sampled_rows(normed, bucket, inputs))

    def _layer_end_in_parts(
        self, index: int, layer: LlamaLayer, attended: torch.Tensor, hidden: torch.Tensor, normed: torch.Tensor,
        norm_behind: RMSNorm,
    ) -> None:  # fmt: skip
        """What of a layer is behind attention, and the norm that follows: to `hidden` in place, and to `normed`."""
        workspace, mlp, norm, tokens = self._workspace, layer.mlp, layer.post_attention_layernorm, hidden.shape[0]
        activated, ahead = self._activated[:tokens], self._ahead(mlp.gate_up_proj.weight, tokens)
        parts = linear_parts(attended.view(tokens, -1), layer.self_attn.o_proj.weight, workspace, ahead)
        rms_norm(parts, norm.weight, norm.eps, normed, residual=hidden)
        ahead = self._ahead(mlp.down_proj.weight, tokens)
        skinny_linear(normed, mlp.gate_up_proj.weight, activated, workspace, silu_mul=True, upcoming=ahead)
        parts = linear_parts(activated, mlp.down_proj.weight, workspace, self._ahead(self._after(index), tokens))
        rms_norm(parts, norm_behind.weight, norm_behind.eps, normed, residual=hidden)

    def _attend(
        self, index: int, output: torch.Tensor, query: torch.Tensor, bucket: Bucket, inputs: StepInputs,
        cache: KVCache, slots: DeviceSlots, decode_rows: torch.Tensor, plan: prefill_plans.PrefillPlan | None,
        fresh: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:  # fmt: skip
        """Attention from the cache, of as many decode rows as `decode_rows` [1] says on the device; of chunks by
        `plan`, with the step's own keys and values if it wants them."""
        attention = self.model.model.layers[index].self_attn
        shared = (
            output, query, cache.key_caches[index], cache.value_caches[index], slots.block_tables, inputs.row_slots,
            inputs.context_lengths,
        )  # fmt: skip
        options = {
            "scale": attention.scale,
            "sliding_window": attention.sliding_window or 0,
            "decode_row_count": decode_rows,
            "key_scales": cache.key_scales[index],
            "value_scales": cache.value_scales[index],
            "pdl": bucket.kind == CHUNK and bucket.tokens <= EARLY_TOKENS,
        }
        quantised = cache.key_scales[index] is not None
        if bucket.kind != CHUNK:
            heads = (cache.block_size, options["sliding_window"], quantised)
            specialised = self._has_hopper_kernel(decode, *heads)
            decode_plan = self._decode_plan(bucket.rows, quantised, specialised)
            early = {"pdl": specialised and bucket.kind == DECODE}  # in a mixed step others' blocks are written too
            decode.decode_attention(*shared, self._partials, self._decode_counters, decode_plan, **options | early)
        if plan is not None:
            prefill.prefill_attention(
                *shared, inputs.query_starts, self._prefill_counters, plan, fresh=fresh, **options
            )

    def _feed_forward_block(
        self, index: int, layer: LlamaLayer, hidden: torch.Tensor, token_count: torch.Tensor | None = None
    ) -> None:
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        activated = self._activated[: hidden.shape[0]]
        skinny_linear(
            hidden, mlp.gate_up_proj.weight, activated, self._workspace,
            norm_weight=norm.weight, eps=norm.eps, silu_mul=True,
            upcoming=self._ahead(mlp.down_proj.weight, hidden.shape[0]), token_count=token_count,
        )  # fmt: skip
        skinny_linear(
            activated, mlp.down_proj.weight, hidden, self._workspace, residual=hidden,
            upcoming=self._ahead(self._after(index), hidden.shape[0]), token_count=token_count,
        )  # fmt: skip

    def _ahead(self, weight: torch.Tensor, tokens: int) -> torch.Tensor | None:
        """The weight, if bringing it into the level-2 cache ahead of its use pays at this many tokens."""
        return weight if tokens >= PREFETCH_TOKENS else None

    def _after(self, index: int) -> torch.Tensor:
        """The weight that is read after a layer's last one."""
        layers = self.model.model.layers
        if index + 1 < len(layers):
            return layers[index + 1].self_attn.qkv_proj.weight
        return self.model.lm_head.weight

    def _head(self, hidden: torch.Tensor, bucket: Bucket, inputs: StepInputs) -> torch.Tensor:
        """Logits of the sampled rows; a row that does not sample gets those of a zero vector."""
        rows, norm = self._sampled_rows(hidden, bucket, inputs), self.model.model.norm
        logits, weight = self.logits[: bucket.rows], self.model.lm_head.weight
        skinny_linear(rows, weight, logits, self._workspace, norm_weight=norm.weight, eps=norm.eps)
        return logits

    def _sampled_rows(self, tokens: torch.Tensor, bucket: Bucket, inputs: StepInputs) -> torch.Tensor:
        """The rows [row, hidden_size] of `tokens` that sample."""
        if bucket.kind == DECODE:
            return tokens
        rows = self._sampled[: bucket.rows]
        embedding(inputs.sample_rows, tokens, rows)
        return rows

    def _logits_of(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits of rows after the last norm."""
        logits = self.logits[: normed.shape[0]]
        skinny_linear(normed, self.model.lm_head.weight, logits, self._workspace)
        return logits

    def _is_fused(self, bucket: Bucket, attention: LlamaAttention) -> bool:
        """Whether one kernel does all between the products: for few decode rows, where waiting is what costs."""
        if bucket.kind != DECODE or bucket.rows > fused.MAX_ROWS:
            return False
        group = self.config.head_count // self.config.kv_head_count
        return fused.supports(self.config.head_dim, group, self._rope_table.shape[1], attention.sliding_window or 0)

    def _few_rows_plan(self, bucket: Bucket, attention: LlamaAttention, cache: KVCache) -> fused.FusedDecodePlan | None:
        """Of that kernel; None where it does not do it."""
        if not self._is_fused(bucket, attention):
            return None
        return self._fused_plan(bucket.rows, self._takes_warps(bucket.rows, cache.key_caches[0]))

    def _takes_warps(self, rows: int, cache: torch.Tensor) -> bool:
        config, dtype = self.config, self._qkv.dtype
        shape = HeadShape(config.head_count, config.kv_head_count, config.head_dim, cache.shape[2])
        major = self._capability_major
        return fused.takes_warps(rows, shape, dtype, quantised=cache.dtype != dtype, capability_major=major)

    def _has_hopper_kernel(self, plans: ModuleType, block_size: int, sliding_window: int, quantised: bool) -> bool:
        """Whether the kernel for Hopper computes this model's attention here, over a plain or an 8-bit cache.

        `plans`: the module whose `can_specialise` says what the kernel computes, of prefill or of decode.
        """
        config, card = self.config, {"capability_major": self._capability_major}
        shape = HeadShape(config.head_count, config.kv_head_count, config.head_dim, block_size)
        return plans.can_specialise(shape, self.hidden.dtype, sliding_window, quantised=quantised, **card)

    def _fused_plan(self, rows: int, single_warps: bool) -> fused.FusedDecodePlan:
        sizes = (self.config.kv_head_count, self.config.head_dim)
        return fused.launch_plan(rows, *sizes, single_warps=single_warps)

    def _decode_plan(self, rows: int, quantised: bool, specialised: bool) -> decode.DecodePlan:
        config = self.config
        sizes = (config.head_count, config.kv_head_count, config.head_dim, self._multiprocessors)
        return decode.launch_plan(row_class(rows), *sizes, quantised=quantised, specialised=specialised)

    def _prefill_plan(
        self, bucket: Bucket, block_size: int, sliding_window: int, quantised: bool
    ) -> prefill_plans.PrefillPlan:
        config = self.config
        sizes = (config.head_count, config.kv_head_count, config.head_dim, self._multiprocessors)
        chunk_rows = 1 if bucket.kind == MIXED else bucket.rows  # of a mixed bucket most rows are single tokens
        is_large = prefill_plans.is_specialised_size(bucket.tokens, chunk_rows, config.head_count)
        is_specialised = is_large and self._has_hopper_kernel(prefill_plans, block_size, sliding_window, quantised)
        rows = row_class(self.logits.shape[0] if is_specialised else bucket.rows)
        return prefill_plans.launch_plan(
            bucket.tokens, rows, *sizes, specialised=is_specialised, quantised=quantised, chunk_rows=chunk_rows,
            element_bytes=self.hidden.element_size(), shared_bytes=shared_memory_bytes(self.hidden.device),
        )  # fmt: skip


def row_class(rows: int) -> int:
    """What a kernel's tile of rows is rounded up to: few sizes, since each is compiled by itself."""
    return next(size for size in (decode.FEW_ROWS, 256, decode.MAX_ROWS) if size >= rows)
