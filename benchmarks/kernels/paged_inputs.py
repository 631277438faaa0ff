"""Random paged batches for the attention benchmarks, blocks in random order. Called by bench_*_attention.py and by
the attention tests, which make other batches of the same class."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.kernels.harness import has_cuda
from benchmarks.kernels.shapes import AttentionShape


@dataclass
class PagedInputs:
    """Inputs of both attention operations (layouts: kernels/paged_kv.py)."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    row_slots: torch.Tensor
    context_lengths: torch.Tensor
    query_starts: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        """As the kernels take them by name; None beside a plain cache."""
        return {"key_scales": self.key_scales, "value_scales": self.value_scales}

    @property
    def decode_inputs(self) -> tuple[torch.Tensor, ...]:
        """What decode attention reads, in the order of its arguments."""
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.row_slots,
            self.context_lengths,
        )

    @property
    def prefill_inputs(self) -> tuple[torch.Tensor, ...]:
        """What prefill attention reads, in the order of its arguments."""
        return (*self.decode_inputs, self.query_starts)


def device_and_dtype() -> tuple[str, torch.dtype]:
    """bf16 on the GPU; float32 in the interpreter, which computes bf16 products wrongly."""
    return ("cuda", torch.bfloat16) if has_cuda() else ("cpu", torch.float32)


def cache_dtype_of(shape: AttentionShape) -> torch.dtype:
    """The element type of the shape's cache."""
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(shape.cache, device_and_dtype()[1])


def make_inputs(shape: AttentionShape) -> PagedInputs:
    """Fresh random tensors for one shape."""
    device, dtype = device_and_dtype()
    blocks_per_row = -(-shape.context // shape.block_size)
    cache_size = (shape.batch * blocks_per_row, shape.kv_heads, shape.block_size, shape.head_dim)
    query = torch.randn(shape.batch * shape.query_tokens, shape.query_heads, shape.head_dim, device=device, dtype=dtype)
    tables = torch.randperm(cache_size[0], device=device).int().view(shape.batch, blocks_per_row)
    rows = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
    caches = [_random_cache(cache_size, cache_dtype_of(shape)) for _ in range(2)]
    has_scales = shape.cache != "auto"
    scales = [torch.rand(cache_size[:3], device=device).half() if has_scales else None for _ in range(2)]
    return PagedInputs(
        query=query,
        key_cache=caches[0],
        value_cache=caches[1],
        block_tables=tables,
        row_slots=rows[:-1].clone(),
        context_lengths=torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device),
        query_starts=rows * shape.query_tokens,
        key_scales=scales[0],
        value_scales=scales[1],
    )


def _random_cache(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    device = device_and_dtype()[0]
    if dtype == torch.int8:
        return torch.randint(-127, 128, size, device=device, dtype=dtype)
    return torch.randn(size, device=device, dtype=device_and_dtype()[1]).to(dtype)


def multiprocessor_count() -> int:
    """Of the card at hand; 2 in the interpreter."""
    return torch.cuda.get_device_properties(0).multi_processor_count if has_cuda() else 2
