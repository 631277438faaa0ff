"""Random paged batches for the attention benchmarks, blocks in random order. Called by bench_*_attention.py, by
attention_trials and by the attention tests, which make other batches of the same class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import torch

from benchmarks.kernels.harness import has_cuda
from benchmarks.kernels.shapes import AttentionShape
from kernels.kv_format import quantise


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

    def fresh(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' new keys and values as prefill attention takes them: what the cache holds of them.

        Views of rows of queries, keys and values, as a step's product gives them; NaN for tokens of no row.
        """
        from kernels.kv_format import read_back

        token_count, query_heads, head_dim = self.query.shape
        kv_heads, block_size = self.key_cache.shape[1:3]
        tokens = torch.arange(token_count, device=self.query.device)
        rows = (tokens[:, None] >= self.query_starts[None, 1:]).sum(1)
        is_owned = rows < len(self.row_slots)
        rows = rows.clamp(max=len(self.row_slots) - 1)
        is_owned &= (self.row_slots[rows] >= 0) & (self.context_lengths[rows] > 0)
        positions = (self.context_lengths[rows] - self.query_starts[rows + 1] + tokens) * is_owned
        blocks = self.block_tables[self.row_slots[rows].clamp(min=0), positions // block_size].long() * is_owned
        heads = self.query.new_full((token_count, query_heads + 2 * kv_heads, head_dim), float("nan"))
        parts = heads[:, query_heads:-kv_heads], heads[:, -kv_heads:]
        stored = ((self.key_cache, self.key_scales), (self.value_cache, self.value_scales))
        for part, (cache, scales) in zip(parts, stored, strict=True):
            vectors = cache[blocks, :, positions % block_size]
            if scales is not None:
                vectors = read_back(vectors, scales[blocks, :, positions % block_size])
            part.copy_(vectors.masked_fill(~is_owned[:, None, None], float("nan")))
        return parts

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
    """Fresh random tensors for one shape: keys and values are normal vectors, as the type of cache stores them."""
    device, dtype = device_and_dtype()
    blocks_per_row = -(-shape.context // shape.block_size)
    cache_size = (shape.batch * blocks_per_row, shape.kv_heads, shape.block_size, shape.head_dim)
    query = torch.randn(shape.batch * shape.query_tokens, shape.query_heads, shape.head_dim, device=device, dtype=dtype)
    tables = torch.randperm(cache_size[0], device=device).int().view(shape.batch, blocks_per_row)
    rows = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
    (keys, key_scales), (values, value_scales) = (random_cache(cache_size, cache_dtype_of(shape)) for _ in range(2))
    return PagedInputs(
        query=query,
        key_cache=keys,
        value_cache=values,
        block_tables=tables,
        row_slots=rows[:-1].clone(),
        context_lengths=torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device),
        query_starts=rows * shape.query_tokens,
        key_scales=key_scales,
        value_scales=value_scales,
    )


def random_cache(size: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normal vectors as a cache holds them, and their scales; a card's speed depends a little on the numbers."""
    device, plain = device_and_dtype()
    vectors = torch.randn(size, device=device, dtype=plain)
    return (vectors, None) if dtype == plain else quantise(vectors, dtype)


SPARE_BLOCKS = 3
BEYOND = 2**31 - 1
"""A block id that no cache holds: in a table where a kernel must not look."""


def make_poisoned_inputs(rows: Sequence[tuple[int, int]], shape: AttentionShape, seed: int = 0) -> PagedInputs:
    """A batch with a row for each (new tokens, context), where what no row owns is NaN, and 8-bit scales too.

    The sizes are those of `shape`: so many rows, the last of them padding with slot -1, query tokens of which some may
    be past the last row, and tables wide enough for its context. Reads no tensor, so that it needs no device memory.
    """
    device, dtype = device_and_dtype()
    block_size, heads = shape.block_size, (shape.kv_heads, shape.block_size, shape.head_dim)
    counts = [-(-context // block_size) for _, context in rows]
    total = sum(counts) + SPARE_BLOCKS
    order = list(range(total))
    Random(seed).shuffle(order)
    width = -(-shape.context // (16 * block_size)) * 16
    tables, owned = [[BEYOND] * width for _ in range(shape.batch)], [0] * total
    for row, (end, count, (_, context)) in enumerate(zip(accumulate(counts), counts, rows, strict=True)):
        blocks = order[end - count : end]
        tables[row][:count] = blocks
        for index, block in enumerate(blocks):
            owned[block] = min(block_size, context - index * block_size)
    padding = shape.batch - len(rows)

    def integers(values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    nobody = (torch.arange(block_size, device=device) >= integers(owned)[:, None])[:, None, :]
    caches = [_poisoned_cache((total, *heads), cache_dtype_of(shape), nobody) for _ in range(2)]
    query = torch.randn(shape.batch * shape.query_tokens, shape.query_heads, shape.head_dim, device=device, dtype=dtype)
    return PagedInputs(
        query=query,
        key_cache=caches[0][0],
        value_cache=caches[1][0],
        block_tables=integers(tables),
        row_slots=integers([*range(len(rows)), *[-1] * padding]),
        context_lengths=integers([*(context for _, context in rows), *[0] * padding]),
        query_starts=integers([0, *accumulate([*(count for count, _ in rows), *[0] * padding])]),
        key_scales=caches[0][1],
        value_scales=caches[1][1],
    )


def _poisoned_cache(
    size: tuple[int, ...], dtype: torch.dtype, nobody: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A cache and its scales, with NaN in the positions [blocks, 1, block_size] of `nobody`."""
    cache, scales = random_cache(size, dtype)
    if scales is None:
        return cache.masked_fill_(nobody[..., None], float("nan")), None
    cache.view(torch.uint8).masked_fill_(nobody[..., None], 0x7F)  # the bits of FP8's NaN
    return cache, scales.masked_fill_(nobody, float("nan"))


def card_major() -> int:
    """The first number of the compute capability of the card that is measured, 9 for Hopper; 0 for the interpreter."""
    from kernels.launch import capability_major

    return capability_major(torch.device(device_and_dtype()[0]))


def multiprocessor_count() -> int:
    """Of the card at hand; 2 in the interpreter."""
    from kernels import launch

    return launch.multiprocessor_count(torch.device(device_and_dtype()[0]))
