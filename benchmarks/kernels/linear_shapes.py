"""The linear layers of the benchmarked models, as `kernels.skinny_linear` sees them: for tuner and benchmark."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LinearShape:
    """One fused product: W is [outputs, inputs], `fusion` any of norm, silu, residual; `float32_out` for logits."""

    name: str
    outputs: int
    inputs: int
    fusion: tuple[str, ...] = ()
    float32_out: bool = False

    @property
    def out_columns(self) -> int:
        return self.outputs // 2 if "silu" in self.fusion else self.outputs

    @property
    def weight_bytes(self) -> int:
        return 2 * self.outputs * self.inputs


def layer_shapes(hidden: int, qkv: int, attention: int, intermediate: int) -> tuple[LinearShape, ...]:
    """The four products of a decoder layer in their order."""
    return (
        LinearShape("qkv", qkv, hidden, ("norm",)),
        LinearShape("o", hidden, attention, ("residual",)),
        LinearShape("gate_up", 2 * intermediate, hidden, ("norm", "silu")),
        LinearShape("down", hidden, intermediate, ("residual",)),
    )


@dataclass(frozen=True)
class ModelShape:
    """A model's linear layers and how many layers it has."""

    name: str
    layer_count: int
    layer: tuple[LinearShape, ...]
    lm_head: LinearShape


MODELS = {
    model.name: model
    for model in (
        ModelShape(
            "qwen3-0.6b",
            28,
            layer_shapes(1024, 4096, 2048, 3072),
            LinearShape("lm_head", 151_936, 1024, ("norm",), float32_out=True),
        ),
        ModelShape(
            "llama-3.1-8b",
            32,
            layer_shapes(4096, 6144, 4096, 14_336),
            LinearShape("lm_head", 128_256, 4096, ("norm",), float32_out=True),
        ),
        ModelShape(
            "smollm2-135m",
            30,
            layer_shapes(576, 960, 576, 1536),
            LinearShape("lm_head", 49_152, 576, ("norm",), float32_out=True),
        ),
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
