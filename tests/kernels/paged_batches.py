"""Paged batches for the attention tests: shuffled blocks, and NaN wherever no kernel may look."""

from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
import torch

from benchmarks.kernels.paged_inputs import PagedInputs
from kernels.decode_attention import DecodePlan
from kernels.fixed_order_attention import FixedOrderAttentionPlan
from kernels.kv_format import quantise
from kernels.prefill_plans import PrefillPlan

Plan = TypeVar("Plan", DecodePlan, FixedOrderAttentionPlan, PrefillPlan)

# On a CPU the kernels run in the interpreter, which computes bf16 products wrongly; on a GPU they run as they are.
DEVICES = [
    pytest.param(("cpu", torch.float32), id="cpu-float32"),
    pytest.param(("cuda", torch.bfloat16), id="cuda-bfloat16", marks=pytest.mark.gpu),
]
MULTIPROCESSORS = 3  # of the plans in the interpreter: few programs, so that pieces are cut in every way


def skip_unless_here(device: str) -> None:
    """Without a GPU only the interpreter's cases run, with one only the GPU's."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    if device != here:
        pytest.skip(f"kernels run on {here} here")


@dataclass
class PagedBatch(PagedInputs):
    """Inputs whose tensors can be listed."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that are there, in the order of the fields."""
        return [*self.prefill_inputs, *(tensor for tensor in self.scales.values() if tensor is not None)]


def make_batch(
    rows: list[tuple[int, int]],
    device: str,
    dtype: torch.dtype,
    *,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    padding: tuple[int, ...] = (),
    spare_tokens: int = 0,
    seed: int = 0,
) -> PagedBatch:
    """A batch with one row for each (query tokens, context length); rows named in `padding` get slot -1.

    Blocks are handed out in random order; table entries past a row's last block point outside the cache; every cache
    position that no row owns is NaN; queries of padding rows and of the `spare_tokens` past the last row are NaN. A
    table is a multiple of 16 wide: for others there would be one more kernel of each kind, and the runner's tests have
    them.
    """
    generator = torch.Generator().manual_seed(seed)
    block_counts = [-(-length // block_size) for _, length in rows]
    total = sum(block_counts) + 3
    order = torch.randperm(total, generator=generator)
    slots = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)]
    columns = (max([*block_counts, 1]) // 16 + 1) * 16
    tables = torch.full((len(rows) + 2, columns), 2**31 - 1, dtype=torch.int32)
    caches = [torch.full((total, kv_heads, block_size, head_dim), float("nan")) for _ in range(2)]
    used = 0
    for row, (_, length) in enumerate(rows):
        blocks = order[used : used + block_counts[row]]
        used += block_counts[row]
        tables[slots[row], : len(blocks)] = blocks.int()
        if row in padding:
            continue
        for cache in caches:
            tokens = torch.full((kv_heads, len(blocks) * block_size, head_dim), float("nan"))
            tokens[:, :length] = torch.randn(kv_heads, length, head_dim, generator=generator)
            cache[blocks] = tokens.view(kv_heads, len(blocks), block_size, head_dim).transpose(0, 1)
    starts = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0)
    query = torch.randn(int(starts[-1]) + spare_tokens, query_heads, head_dim, generator=generator)
    query[int(starts[-1]) :] = float("nan")
    for row in padding:
        query[starts[row] : starts[row + 1]] = float("nan")
        slots[row] = -1
    return PagedBatch(
        query.to(device, dtype),
        *(cache.to(device, dtype) for cache in caches),
        tables.to(device),
        slots.int().to(device),
        torch.tensor([length for _, length in rows], dtype=torch.int32, device=device),
        starts.int().to(device),
    )


def usual_rows(plan: Plan, device: torch.device) -> Plan:
    """The plan as an engine has it on a GPU: with room for 64 rows at least, so that batches of all sizes take one
    compiled kernel; in the interpreter as it is, with room for as many rows as there are."""
    return replace(plan, rows_tile=max(plan.rows_tile, 64)) if device.type == "cuda" else plan


def quantise_caches(batch: PagedBatch, dtype: torch.dtype) -> PagedBatch:
    """The batch over 8-bit caches; what no row owns holds NaN in the scales, and the bits of FP8's NaN in the elements.

    The first stored token of each head is all zeros, as padding of a prompt may make it.
    """
    parts = []
    for cache in (batch.key_cache, batch.value_cache):
        unused = cache.isnan().all(-1)
        first = (~unused).nonzero()[0].tolist() if not unused.all() else None
        if first is not None:
            cache[first[0], :, first[2]] = 0
        stored, scales = quantise(cache.nan_to_num(0.0), dtype)
        stored.view(torch.uint8)[unused] = 0x7F
        parts.append((stored, scales.masked_fill(unused, float("nan"))))
    (key_cache, key_scales), (value_cache, value_scales) = parts
    return replace(
        batch, key_cache=key_cache, value_cache=value_cache, key_scales=key_scales, value_scales=value_scales
    )


def room_for(batches: list[PagedBatch]) -> PagedBatch:
    """Zeroed tensors large enough to hold any of the batches, for a graph to be captured on."""
    pairs = zip(*(batch.tensors for batch in batches), strict=True)
    return PagedBatch(*(tensors[0].new_zeros(_largest_shape(tensors)) for tensors in pairs))


def put(batch: PagedBatch, room: PagedBatch) -> None:
    """Copy a batch into the leading part of each of the room's tensors."""
    for target, source in zip(room.tensors, batch.tensors, strict=True):
        target[tuple(slice(0, size) for size in source.shape)].copy_(source)


def _largest_shape(tensors: tuple[torch.Tensor, ...]) -> list[int]:
    return [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]


def assert_as_exact_as_torch(
    result: torch.Tensor, same_dtype: torch.Tensor, exact: torch.Tensor, factor: float
) -> None:
    """The error against float64 is at most `factor` times that of the same computation in torch in the same dtype."""
    assert torch.isfinite(result).all(), "the result holds NaN or infinity"
    scale = exact.norm() + 1e-30
    error, allowed = ((tensor.double() - exact).norm() / scale for tensor in (result, same_dtype))
    assert error <= factor * allowed + 1e-7, f"relative error {error:.3g}, torch in the same dtype {allowed:.3g}"
