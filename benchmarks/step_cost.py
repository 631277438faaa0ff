"""Estimates how long a step takes on a given machine, by arithmetic: for simulations on a virtual clock.

    step = fixed + max(weight bytes / bandwidth, linear FLOPs / FLOP rate)
                 + KV bytes that decode rows read / bandwidth + attention FLOPs of the chunks / FLOP rate

Bandwidth and FLOP rate are measured on the machine, not taken from its data sheet.
"""

from dataclasses import dataclass

from common.messages import StepPlan
from scheduler_proc.core import SchedulerCore


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A model on a machine.

    Attributes:
        fixed_s: what every step costs: launches, sampling, communication.
        weight_bytes: read once a step.
        bytes_per_s, flops_per_s: what the machine reaches.
        linear_flops: per computed token.
        attention_flops: per computed token and token of context.
        kv_bytes: per token of context.
        block_tokens: tokens that the KV cache holds.
    """

    fixed_s: float
    weight_bytes: float
    bytes_per_s: float
    flops_per_s: float
    linear_flops: float
    attention_flops: float
    kv_bytes: float
    cache_tokens: int

    def seconds(self, token_count: int, decode_context: int, chunk_products: int) -> float:
        """A step's time.

        Args:
            token_count: tokens that it computes.
            decode_context: context lengths of the decode rows, summed.
            chunk_products: tokens times mean context, summed over the chunks.
        """
        linear = max(self.weight_bytes / self.bytes_per_s, token_count * self.linear_flops / self.flops_per_s)
        reading = decode_context * self.kv_bytes / self.bytes_per_s
        return self.fixed_s + linear + reading + chunk_products * self.attention_flops / self.flops_per_s

    def of_plan(self, core: SchedulerCore, plan: StepPlan) -> float:
        """The time of the step that `core` has just planned."""
        flight = core.state.in_flight[-1]
        decode_context = sum([s.computed_count for s in flight.sampled[: flight.decode_count]])
        products = 0
        for slot, count in zip(plan.chunk_slots, plan.chunk_token_counts, strict=True):
            products += count * (flight.chunk_sequences[slot].computed_count - count // 2)
        return self.seconds(plan.token_count, decode_context, products)


# Qwen3-0.6B: 28 layers, 16 query heads and 8 KV heads of 128, 0.6 G parameters, bfloat16
H200 = StepCost(
    fixed_s=200e-6,
    weight_bytes=1.2e9,
    bytes_per_s=4.2e12,
    flops_per_s=450e12,
    linear_flops=1.2e9,
    attention_flops=4 * 28 * 16 * 128,
    kv_bytes=2 * 28 * 8 * 128 * 2,
    cache_tokens=1_000_000,
)
# Llama-3.1-70B on eight of them by tensor parallelism: 80 layers, 64 query heads and 8 KV heads of 128
H200_X8 = StepCost(
    fixed_s=2.5e-3,
    weight_bytes=141e9,
    bytes_per_s=8 * 3.8e12,
    flops_per_s=8 * 400e12,
    linear_flops=141e9,
    attention_flops=4 * 80 * 64 * 128,
    kv_bytes=2 * 80 * 8 * 128 * 2,
    cache_tokens=2_500_000,
)
MACHINES = {"h200": H200, "8xh200": H200_X8}
