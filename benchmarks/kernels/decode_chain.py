"""A chain of decoder layers' products with the attention of decoding rows between them, as in a step of the engine.

What attention costs in a step is not what it takes alone: it starts while the product ahead still runs, and the product
behind starts while it runs. So a way to do it is timed as the difference of two chains of layers, each with its own
weights and its own cache, with attention and without. Called by bench_fused_decode_attention,
attention_trials and tune_skinny_linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch

from benchmarks.kernels.paged_inputs import card_major, multiprocessor_count, random_cache
from benchmarks.kernels.runner import device_and_dtype

if TYPE_CHECKING:
    from kernels.fused_decode_attention import AttentionParts, FusedDecodePlan
    from kernels.paged_kv import HeadShape

BLOCK_SIZE = 16
EPS = 1e-6
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class ChainShape:
    """Sizes of the layers."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int


QWEN3_06B = ChainShape(28, 16, 8, 128, 1024, 3072)
SMOKE = ChainShape(1, 2, 1, 64, 64, 96)

Attend = Callable[["DecodeChain", int], "AttentionParts | None"]  # what it leaves for the output product to merge


def mixed_lengths(step: int) -> list[int]:
    """Contexts of the requests of workload `w1_nano256` that still run after so many decode steps."""
    generator = Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(generator.randint(100, 1024))
        for _ in range(prompts[-1]):  # the workload draws its tokens from the same generator
            generator.randint(0, 10_000)
    outputs = [generator.randint(100, 1024) for _ in range(256)]
    return [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]


class DecodeChain:
    """Inputs of all layers; blocks in random order.

    Args:
        lengths: each row's context, the new token included.
        cache: `auto`, `int8` or `fp8`.
    """

    def __init__(self, lengths: list[int], cache: str, shape: ChainShape = QWEN3_06B) -> None:
        from kernels.linear_workspace import Workspace
        from kernels.new_token import NewTokens

        device, dtype = device_and_dtype()
        self.lengths, self.cache, self.shape, self.rows = lengths, cache, shape, len(lengths)
        self.scale = shape.head_dim**-0.5
        self.multiprocessors = multiprocessor_count()
        integers = {"dtype": torch.int32, "device": device}
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        order = iter(torch.randperm(sum(counts)).tolist())
        width = -(-max(counts) // 16) * 16
        tables = [[next(order) if column < count else 0 for column in range(width)] for count in counts]
        self.tables = torch.tensor(tables, **integers)
        self.context_lengths = torch.tensor(lengths, **integers)
        self.slots = torch.arange(self.rows, **integers)
        self.positions = self.context_lengths - 1
        blocks = self.tables.gather(1, (self.positions // BLOCK_SIZE).long()[:, None])[:, 0].long()
        self.slot_mapping = blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.row_count = torch.tensor([self.rows], **integers)
        self.caches = [[self._cache(sum(counts), dtype) for _ in range(2)] for _ in range(shape.layers)]
        head_dim, attention = shape.head_dim, shape.query_heads * shape.head_dim
        table = torch.randn(-(-max(lengths) // 1024) * 1024, head_dim, device=device)
        self.new = NewTokens(table, *(torch.ones(head_dim, device=device, dtype=dtype) for _ in range(2)), EPS)
        columns = attention + 2 * shape.kv_heads * head_dim
        sizes = (
            (columns, shape.hidden), (shape.hidden, attention), (2 * shape.intermediate, shape.hidden),
            (shape.hidden, shape.intermediate),
        )  # fmt: skip
        self.weights = [
            [torch.randn(size, device=device, dtype=dtype) * 0.01 for size in sizes] for _ in range(shape.layers)
        ]
        self.norm = torch.ones(shape.hidden, device=device, dtype=dtype)
        self.workspace = Workspace.allocate(
            self.rows, shape.hidden, 2 * shape.intermediate, dtype, torch.device(device)
        )  # fmt: skip
        self.hidden = torch.randn(self.rows, shape.hidden, device=device, dtype=dtype)
        self.qkv = torch.randn(self.rows, columns, device=device, dtype=dtype)
        self.query = torch.empty(self.rows, shape.query_heads, head_dim, device=device, dtype=dtype)
        self.attended = torch.zeros_like(self.query)
        self.activated = torch.empty(self.rows, shape.intermediate, device=device, dtype=dtype)
        self.partials = torch.empty(1 << 24, device=device)
        self.counters = torch.zeros(self.rows * shape.kv_heads, **integers)

    def _cache(self, blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        size = (blocks, self.shape.kv_heads, BLOCK_SIZE, self.shape.head_dim)
        return random_cache(size, CACHE_DTYPES.get(self.cache, dtype))

    @property
    def bytes_moved(self) -> int:
        """Of one layer's attention, queries and outputs included."""
        from kernels.decode_attention import bytes_moved

        element_bytes = self.hidden.dtype.itemsize
        heads = (self.shape.query_heads, self.shape.kv_heads, self.shape.head_dim)
        return bytes_moved(self.lengths, *heads, element_bytes, CACHE_DTYPES.get(self.cache))

    def run(self, attend: Attend | None) -> None:
        """All layers once."""
        from kernels.skinny_linear import linear_of_parts, skinny_linear

        for index, (qkv, output, gate_up, down) in enumerate(self.weights):
            norm = {"norm_weight": self.norm, "eps": EPS}
            skinny_linear(self.hidden, qkv, self.qkv, self.workspace, **norm, upcoming=self._ahead(output))
            parts = attend(self, index) if attend is not None else None
            if parts is not None:
                linear_of_parts(parts, output, self.hidden, self.workspace, residual=self.hidden)
            else:
                skinny_linear(
                    self.attended.view(self.rows, -1), output, self.hidden, self.workspace, residual=self.hidden,
                    upcoming=self._ahead(gate_up),
                )  # fmt: skip
            skinny_linear(
                self.hidden, gate_up, self.activated, self.workspace, **norm, silu_mul=True, upcoming=self._ahead(down)
            )  # fmt: skip
            following = self.weights[(index + 1) % self.shape.layers][0]
            skinny_linear(
                self.activated, down, self.hidden, self.workspace, residual=self.hidden,
                upcoming=self._ahead(following),
            )  # fmt: skip

    def _ahead(self, weight: torch.Tensor) -> torch.Tensor | None:
        return weight if self.rows >= 4 else None


def two_launches(chain: DecodeChain, index: int) -> None:
    """Norm, rotation and store; then attention, launched early where the engine does that."""
    from kernels.decode_attention import decode_attention
    from kernels.qk_norm_rope_store import qk_norm_rope_store

    (keys, key_scales), (values, value_scales) = chain.caches[index]
    new = chain.new
    qk_norm_rope_store(
        chain.qkv, chain.query, keys, values, chain.slot_mapping, chain.positions, new.rope_table, new.q_weight,
        new.k_weight, new.eps, key_scales, value_scales,
    )  # fmt: skip
    plan = _line_plan(chain)
    decode_attention(
        chain.attended, chain.query, keys, values, chain.tables, chain.slots, chain.context_lengths, chain.partials,
        chain.counters, plan, scale=chain.scale, decode_row_count=chain.row_count,
        key_scales=key_scales, value_scales=value_scales, pdl=plan.specialised,
    )  # fmt: skip


def takes_warps(rows: int, heads: HeadShape, quantised: bool) -> bool:
    """Whether the engine computes so few rows by single warps here."""
    from kernels import fused_decode_attention

    dtype, major = device_and_dtype()[1], card_major()
    return fused_decode_attention.takes_warps(rows, heads, dtype, quantised=quantised, capability_major=major)


def is_specialised(heads: HeadShape, quantised: bool) -> bool:
    """Whether the engine takes the Hopper kernel of decode attention here."""
    from kernels import decode_attention

    dtype, major = device_and_dtype()[1], card_major()
    return decode_attention.can_specialise(heads, dtype, quantised=quantised, capability_major=major)


def few_rows(chain: DecodeChain, index: int, plan: FusedDecodePlan | None = None) -> AttentionParts | None:
    """One launch of the kernel for few rows, by the plan that ships or by another; one row may be left in parts."""
    from kernels.fused_decode_attention import fused_decode_attention, launch_plan
    from kernels.paged_kv import HeadShape
    from kernels.skinny_linear import merges_parts

    (keys, key_scales), (values, value_scales) = chain.caches[index]
    (next_keys, _), (next_values, _) = chain.caches[(index + 1) % chain.shape.layers]
    kv_heads, head_dim = chain.shape.kv_heads, chain.shape.head_dim
    heads = HeadShape(chain.shape.query_heads, kv_heads, head_dim, BLOCK_SIZE)
    plan = plan or launch_plan(
        chain.rows, kv_heads, head_dim, single_warps=takes_warps(chain.rows, heads, chain.cache != "auto")
    )
    sizes = (chain.weights[index][1], chain.shape.query_heads, head_dim)
    leave = chain.rows == 1 and plan.leaves_parts and merges_parts(chain.workspace, *sizes)
    return fused_decode_attention(
        chain.attended, chain.qkv, keys, values, chain.tables, chain.slots, chain.context_lengths, chain.partials,
        chain.counters, plan, chain.new, scale=chain.scale, key_scales=key_scales, value_scales=value_scales,
        next_caches=(next_keys, next_values), leave=leave,
    )  # fmt: skip


def _line_plan(chain: DecodeChain):
    from kernels.decode_attention import launch_plan
    from kernels.paged_kv import HeadShape
    from worker_proc.cuda.fused_forward import row_class

    heads, quantised = (chain.shape.query_heads, chain.shape.kv_heads, chain.shape.head_dim), chain.cache != "auto"
    options = {"quantised": quantised, "specialised": is_specialised(HeadShape(*heads, BLOCK_SIZE), quantised)}
    return launch_plan(row_class(chain.rows), *heads, chain.multiprocessors, **options)
