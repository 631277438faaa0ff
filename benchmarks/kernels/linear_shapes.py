"""The linear layers of the benchmarked models, as `kernels.skinny_linear` sees them: for tuner and benchmark."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BLOCK_SIZE = 16


@dataclass(frozen=True)
class LinearShape:
    """One fused product: W is [outputs, inputs], `fusion` any of norm, silu, residual; `float32_out` for logits.

    With "parts" it leaves parts, and what reads them counts as its own: "rope" the store of q, k and v, or "add_norm".
    """

    name: str
    outputs: int
    inputs: int
    fusion: tuple[str, ...] = ()
    float32_out: bool = False

    @property
    def out_columns(self) -> int:
        """Of the product's result: half of W's rows with SiLU."""
        return self.outputs // 2 if "silu" in self.fusion else self.outputs

    @property
    def weight_bytes(self) -> int:
        """Of W in 16 bits."""
        return 2 * self.outputs * self.inputs


def layer_shapes(hidden: int, qkv: int, attention: int, intermediate: int) -> tuple[LinearShape, ...]:
    """The four products of a decoder layer in their order."""
    return (
        LinearShape("qkv", qkv, hidden, ("norm",)),
        LinearShape("o", hidden, attention, ("residual",)),
        LinearShape("gate_up", 2 * intermediate, hidden, ("norm", "silu")),
        LinearShape("down", hidden, intermediate, ("residual",)),
    )


def layer_shapes_in_parts(hidden: int, qkv: int, attention: int, intermediate: int) -> tuple[LinearShape, ...]:
    """The same for batches of more rows, where products that need a norm behind them leave parts."""
    return (
        LinearShape("qkv", qkv, hidden, ("parts", "rope")),
        LinearShape("o", hidden, attention, ("parts", "add_norm")),
        LinearShape("gate_up", 2 * intermediate, hidden, ("silu",)),
        LinearShape("down", hidden, intermediate, ("parts", "add_norm")),
    )


@dataclass(frozen=True)
class ModelShape:
    """A model's linear layers and how many layers it has; the same layers for batches of more rows; its heads."""

    name: str
    layer_count: int
    layer: tuple[LinearShape, ...]
    lm_head: LinearShape
    in_parts: tuple[LinearShape, ...]
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def alone(self) -> LinearShape:
        """The q/k/v product with nothing beside it: what the fused decode attention reads."""
        return LinearShape("qkv", self.layer[0].outputs, self.layer[0].inputs)


def model_shape(
    name: str, layer_count: int, vocabulary: int, *, hidden: int, qkv: int, attention: int, intermediate: int,
    head_dim: int = 128,
) -> ModelShape:  # fmt: skip
    """The shape of a model whose layers have these sizes: `qkv` heads' elements of a token, `attention` of q alone."""
    sizes = (hidden, qkv, attention, intermediate)
    lm_head = LinearShape("lm_head", vocabulary, hidden, ("norm",), float32_out=True)
    heads = (attention // head_dim, (qkv - attention) // 2 // head_dim, head_dim)
    return ModelShape(name, layer_count, layer_shapes(*sizes), lm_head, layer_shapes_in_parts(*sizes), *heads)


MODELS = {
    model.name: model
    for model in (
        model_shape("qwen3-0.6b", 28, 151_936, hidden=1024, qkv=4096, attention=2048, intermediate=3072),
        model_shape("llama-3.1-8b", 32, 128_256, hidden=4096, qkv=6144, attention=4096, intermediate=14_336),
        model_shape("smollm2-135m", 30, 49_152, hidden=576, qkv=960, attention=576, intermediate=1536, head_dim=64),
    )
}


def make_arguments(shape: LinearShape, rows: int, dtype: torch.dtype, device: str) -> dict:
    """Random arguments of `run_plan`, but for the plan and the workspace."""
    x = torch.randn(rows, shape.inputs, dtype=dtype, device=device)
    weight = torch.randn(shape.outputs, shape.inputs, dtype=dtype, device=device) * shape.inputs**-0.5
    out_dtype = torch.float32 if shape.float32_out else dtype
    out = torch.empty(rows, shape.out_columns, dtype=out_dtype, device=device)
    return {
        "x": x,
        "weight": weight,
        "out": out,
        "norm_weight": torch.rand(shape.inputs, dtype=dtype, device=device) if "norm" in shape.fusion else None,
        "eps": 1e-6,
        "residual": torch.randn_like(out) if "residual" in shape.fusion else None,
        "silu_mul": "silu" in shape.fusion,
    }


def make_reader(shape: LinearShape, rows: int, dtype: torch.dtype, device: str) -> Callable[[torch.Tensor], Any]:
    """A call that reads the shape's parts, on tensors of its own; q heads of 128 are twice the k heads."""
    from kernels.qk_norm_rope_store import qk_norm_rope_store
    from kernels.rms_norm import rms_norm

    if "add_norm" in shape.fusion:
        residual, normed = (torch.randn(rows, shape.outputs, dtype=dtype, device=device) for _ in range(2))
        gain = torch.rand(shape.outputs, dtype=dtype, device=device)
        return lambda parts: rms_norm(parts, gain, 1e-6, normed, residual)
    head_dim = 128 if shape.outputs % 512 == 0 else 64
    heads = shape.outputs // head_dim
    kv_heads = heads // 4 if heads % 4 == 0 else heads // 5
    query_heads = heads - 2 * kv_heads
    blocks = rows // BLOCK_SIZE + 1
    caches = [torch.zeros(blocks, kv_heads, BLOCK_SIZE, head_dim, dtype=dtype, device=device) for _ in range(2)]
    q_out = torch.empty(rows, query_heads, head_dim, dtype=dtype, device=device)
    slots = torch.randperm(blocks * BLOCK_SIZE, device=device)[:rows]
    positions = torch.randint(4096, (rows,), dtype=torch.int32, device=device)
    table = torch.randn(4096, head_dim, device=device)
    gains = [torch.rand(head_dim, dtype=dtype, device=device) for _ in range(2)]
    return lambda parts: qk_norm_rope_store(parts, q_out, *caches, slots, positions, table, *gains)
