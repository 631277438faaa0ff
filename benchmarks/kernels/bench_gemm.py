"""The products of prompts with what follows inside: operations a second against the matrix limit of the same run.

    python -m benchmarks.kernels.bench_gemm --output benchmarks/results/gemm.jsonl

Beside each the library's product and the kernels that would follow it. A card in long use runs at its power limit, at a
lower clock than in the run that measures the limit: ours and the library's replays take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.kernels import harness
from benchmarks.kernels.runner import device_and_dtype
from kernels import interpreter

LAYER_COUNT, SMOKE_LAYER_COUNT = 16, 2
"""Layers whose weights calls take in turn: the smallest, of 4 MiB, are together more than the level-2 cache holds."""


@dataclass(frozen=True)
class Layer:
    """A model's shape: the sizes of its products."""

    name: str
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    has_head_norms: bool


QWEN = Layer("qwen3-0.6b", 1024, 16, 8, 128, 3072, True)
LLAMA = Layer("llama-3.1-8b", 4096, 32, 8, 128, 14_336, False)
CASES = [(QWEN, 512), (QWEN, 1024), (QWEN, 2048), (QWEN, 4096), (QWEN, 8192), (LLAMA, 2048), (LLAMA, 8192)]
SMOKE_CASES = [(Layer("small", 64, 2, 1, 32, 64, True), 8)]


class Products:
    """The products of a layer for that many tokens; calls by number of the layer whose weights they take."""

    def __init__(self, layer: Layer, tokens: int, layer_count: int) -> None:
        from kernels.gemm import HeadStore
        from kernels.linear_workspace import Workspace
        from kernels.new_token import NewTokens

        device, dtype = device_and_dtype()
        self.layer, self.tokens, self.layer_count = layer, tokens, layer_count
        head_dim, wide = layer.head_dim, 2 * layer.intermediate

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        def weights(outputs: int, inputs: int) -> list[torch.Tensor]:
            return [random(outputs, inputs) / inputs**0.5 for _ in range(layer_count)]

        heads = layer.query_heads + 2 * layer.kv_heads
        self.weights = {
            "qkv": weights(heads * head_dim, layer.hidden), "o": weights(layer.hidden, layer.query_heads * head_dim),
            "gate_up": weights(wide, layer.hidden), "down": weights(layer.hidden, layer.intermediate),
        }  # fmt: skip
        self.hidden, self.attended = random(tokens, layer.hidden), random(tokens, layer.query_heads * head_dim)
        self.activated, self.residual = random(tokens, layer.intermediate), random(tokens, layer.hidden)
        self.qkv, self.query = random(tokens, heads * head_dim), random(tokens, layer.query_heads, head_dim)
        self.workspace = Workspace.allocate(tokens, layer.hidden, wide, dtype, torch.device(device))
        blocks = -(-tokens // 16)
        caches = [random(blocks, layer.kv_heads, 16, head_dim) for _ in range(2)]
        angles = torch.rand(tokens, head_dim // 2, device=device)
        norms = [random(head_dim) for _ in range(2)] if layer.has_head_norms else [None, None]
        new = NewTokens(torch.cat((angles.cos(), angles.sin()), 1).contiguous(), *norms)
        slots = torch.randperm(blocks * 16, device=device)[:tokens]
        self.store = HeadStore(*caches, slots, torch.arange(tokens, device=device, dtype=torch.int32), new)

    def flops(self, name: str) -> int:
        """Of one call."""
        from kernels.gemm import flops

        return flops(self.tokens, *self.weights[name][0].shape)

    def ours(self, name: str, index: int) -> None:
        """As the worker computes it here."""
        from kernels.gemm import heads_plan, project_heads
        from kernels.skinny_linear import skinny_linear

        weight = self.weights[name][index]
        if name == "qkv" and heads_plan(weight, self.tokens, self.layer.query_heads, self.store) is not None:
            project_heads(self.hidden, weight, self.query, self.store)
        elif name == "qkv":
            skinny_linear(self.hidden, weight, self.qkv, self.workspace)
            self._store_heads()
        elif name == "gate_up":
            skinny_linear(self.hidden, weight, self.activated, self.workspace, silu_mul=True)
        else:
            x = self.attended if name == "o" else self.activated
            skinny_linear(x, weight, self.residual, self.workspace, residual=self.residual)

    def by_library(self, name: str, index: int) -> None:
        """The library's product, and the kernel behind it."""
        from kernels.silu_mul import silu_mul

        weight = self.weights[name][index]
        if name == "qkv":
            torch.mm(self.hidden, weight.T, out=self.qkv)
            self._store_heads()
        elif name == "gate_up":
            wide = self.workspace.rows("wide", self.tokens, weight.shape[0])
            torch.mm(self.hidden, weight.T, out=wide)
            silu_mul(wide, self.activated)
        else:
            x = self.attended if name == "o" else self.activated
            torch.addmm(self.residual, x, weight.T, out=self.residual)

    def _store_heads(self) -> None:
        from kernels.qk_norm_rope_store import qk_norm_rope_store

        store, new = self.store, self.store.new
        qk_norm_rope_store(
            self.qkv, self.query, store.key_cache, store.value_cache, store.slot_mapping, store.positions,
            new.rope_table, new.q_weight, new.k_weight, new.eps,
        )  # fmt: skip

    def calls(self, way: Callable[[str, int], None], name: str) -> list[Callable[[], None]]:
        """One call for each layer's weights."""
        return [partial(way, name, index) for index in range(self.layer_count)]


def main() -> None:
    """Measure the cases that `--only` names, all by default."""
    arguments = harness.argument_parser(__doc__).parse_args()
    report = harness.Report("gemm")
    cases, layer_count = (SMOKE_CASES, SMOKE_LAYER_COUNT) if arguments.smoke else (CASES, LAYER_COUNT)
    for layer, tokens in cases:
        products = Products(layer, tokens, layer_count)
        for name in products.weights:
            label = f"{layer.name}_{name}_t{tokens}"
            if arguments.only not in label:
                continue
            ways = [products.calls(products.ours, name), products.calls(products.by_library, name)]
            ours, library = harness.time_in_turn_us(ways, inner=layer_count)
            report.add(label, ours, flops=products.flops(name))
            report.add(label, library, flops=products.flops(name), engine="torch")
    report.write(arguments.output)


if __name__ == "__main__":
    if not harness.has_cuda():
        interpreter.enable()
    main()
