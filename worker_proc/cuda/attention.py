"""Attention of the plain torch modules on a GPU: the same kernels as the fused pass, with workspaces per step.

Imported only where a GPU is used. Called by `worker_proc.attention`.
"""

from dataclasses import dataclass

import torch

from kernels import decode_attention as decode
from kernels import prefill_attention as prefill
from kernels import prefill_plans
from kernels.launch import multiprocessor_count, shared_memory_bytes
from worker_proc.forward_context import ForwardContext


@dataclass(frozen=True)
class AttentionPlans:
    """Plans and workspaces that the layers of a step share."""

    decode_plan: decode.DecodePlan
    partials: torch.Tensor
    decode_counters: torch.Tensor
    prefill_plan: prefill_plans.PrefillPlan
    prefill_counters: torch.Tensor

    @classmethod
    def of(
        cls, token_count: int, row_count: int, head_count: int, cache: torch.Tensor, element_bytes: int
    ) -> "AttentionPlans":
        """For a step of that size over `cache` [block, kv_head, position, head_dim]; `element_bytes`: of the query."""
        _, kv_head_count, _, head_dim = cache.shape
        sizes = (row_count, head_count, kv_head_count, head_dim, multiprocessor_count(cache.device))
        quantised = cache.dtype.itemsize == 1
        decode_plan = decode.launch_plan(*sizes, quantised=quantised)
        prefill_plan = prefill_plans.launch_plan(
            token_count, *sizes, quantised=quantised, element_bytes=element_bytes,
            shared_bytes=shared_memory_bytes(cache.device),
        )  # fmt: skip
        integers = {"dtype": torch.int32, "device": cache.device}
        return cls(
            decode_plan,
            torch.empty(decode_plan.workspace_floats, device=cache.device),
            torch.zeros(decode_plan.counter_count, **integers),
            prefill_plan,
            torch.zeros(prefill.COUNTER_COUNT, **integers),
        )


def cuda_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer_index: int, context: ForwardContext,
    *, scale: float, sliding_window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Store this step's K and V, then attend; see `worker_proc.attention.attention`."""
    from worker_proc.attention import store_reference

    (key_cache, key_scales), (value_cache, value_scales) = (
        context.layer_keys(layer_index), context.layer_values(layer_index)
    )  # fmt: skip
    store_reference(key, key_cache, context.slot_mapping, key_scales)
    store_reference(value, value_cache, context.slot_mapping, value_scales)
    plans = context.plans.get("attention")
    if plans is None:
        plans = AttentionPlans.of(query.shape[0], context.row_count, query.shape[1], key_cache, query.element_size())
        context.plans["attention"] = plans
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    shared = (output, query, key_cache, value_cache, context.block_tables, context.row_slots, context.context_lengths)
    options = {
        "scale": scale, "sliding_window": sliding_window or 0, "decode_row_count": context.device_decode_row_count,
        "key_scales": key_scales, "value_scales": value_scales,
    }  # fmt: skip
    decode.decode_attention(*shared, plans.partials, plans.decode_counters, plans.decode_plan, **options)
    prefill.prefill_attention(*shared, context.query_starts, plans.prefill_counters, plans.prefill_plan, **options)
    return output.flatten(1)
