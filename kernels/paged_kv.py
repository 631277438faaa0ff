"""What the attention kernels share about the paged K/V cache: layout, checks, the float32 reference, row location.

Layout of one layer's cache, for K and for V alike:

| tensor          | axes                                          | dtype        | notes                           |
|-----------------|-----------------------------------------------|--------------|---------------------------------|
| key_cache       | [block_count, kv_heads, block_size, head_dim] | as the query | contiguous; block_size a power  |
| value_cache     | as key_cache                                  | as key_cache | of two <= 128                   |
| key_scales,     | [block_count, kv_heads, block_size]           | float16      | contiguous; None, unless the    |
| value_scales    |                                               |              | caches are int8 or fp8 (e4m3)   |
| block_tables    | [slot_count, max_blocks_per_slot]             | int32        | row stride free; entries past a |
|                 |                                               |              | row's last block are not read   |
| row_slots       | [max_rows]                                    | int32        | the row's line in block_tables; |
|                 |                                               |              | -1: padding row, does nothing   |
| context_lengths | [max_rows]                                    | int32        | tokens in the cache, this       |
|                 |                                               |              | step's included; 0: padding     |
| query_starts    | [max_rows + 1]                                | int32        | row r's query tokens are from   |
|                 |                                               |              | [r] up to, not with, [r + 1]    |

Queries are bf16, f16 or f32, and so are caches that are not quantised (`kv_format.py` has the other formats). No kernel
makes a floating copy of a quantised cache: a tile is converted in registers, the scale of a key multiplies its scores,
and the scale of a value multiplies its weights.

Position p of a row lives in block `block_tables[slot, p // block_size]` at `p % block_size`. Positions at or past the
row's context length may hold anything, NaN included; so may their scales. Offsets into the caches are 64-bit.

Knows no kernel; called by all attention kernels.

Sources: 1. W. Kwon et al., PagedAttention, arXiv:2309.06180 (blocks and tables). 2. J. Ainslie et al., arXiv:2305.13245
(query heads that share a K/V head). 3. I. Beltagy et al., Longformer, arXiv:2004.05150 (sliding windows). 4. Gemma 2,
arXiv:2408.00118 (soft caps).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.kv_format import TOPS, dequantise
from kernels.kv_quant import check_scales
from kernels.launch import takes_gluon

LOG2_E = 1.4426950408889634
LOG2_E_CONSTANT = tl.constexpr(LOG2_E)  # the same inside kernels
HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_BLOCK_SIZE = 128
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class HeadShape:
    """The sizes an attention kernel is compiled for, read off its tensors by `check_paged_inputs`."""

    query_heads: int
    kv_heads: int
    head_dim: int
    block_size: int

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.query_heads // self.kv_heads


def gluon_attends(
    shape: HeadShape, dtype: torch.dtype, most_group: int, head_dims: tuple[int, ...] = (64, 128), *,
    quantised: bool, capability_major: int, triton_version: str,
) -> bool:  # fmt: skip
    """Whether attention by the kernels in Gluon is possible: what these have in common, and two limits of each.

    `dtype` is the query's; `quantised`: the cache holds 8-bit elements.
    """
    is_size = shape.head_dim in head_dims and 8 <= shape.block_size <= 128 and shape.group <= most_group
    dtypes = (torch.bfloat16,) if quantised else (torch.bfloat16, torch.float16)
    return is_size and dtype in dtypes and takes_gluon(capability_major, triton_version)


def wanted(condition: bool, name: str, want: object, got: object) -> None:
    """Raise ValueError naming the argument, what was wanted and what came, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}: wanted {want}, got {got}")


def check_paged_inputs(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> HeadShape:
    """Check shapes, dtypes and strides of what both kernels take; return the sizes. Reads no device memory."""
    wanted(query.dim() == 3, "query", "[token_count, query_heads, head_dim]", list(query.shape))
    wanted(key_cache.dim() == 4, "key_cache", "[block_count, kv_heads, block_size, head_dim]", list(key_cache.shape))
    _, query_heads, head_dim = query.shape
    _, kv_heads, block_size, cache_dim = key_cache.shape
    wanted(head_dim in HEAD_DIMS, "head_dim", f"one of {HEAD_DIMS}", head_dim)
    wanted(cache_dim == head_dim, "key_cache head_dim", head_dim, cache_dim)
    wanted(query_heads % kv_heads == 0, "query_heads", f"a multiple of {kv_heads} kv heads", query_heads)
    is_power = block_size & (block_size - 1) == 0
    wanted(is_power and 1 <= block_size <= MAX_BLOCK_SIZE, "block_size", "a power of two of 1..128", block_size)
    wanted(query.dtype in CACHE_DTYPES, "query dtype", CACHE_DTYPES, query.dtype)
    wanted(output.dtype == query.dtype, "output dtype", query.dtype, output.dtype)
    cache_dtypes = (query.dtype, *TOPS)
    wanted(key_cache.dtype in cache_dtypes, "key_cache dtype", f"one of {cache_dtypes}", key_cache.dtype)
    wanted(value_cache.dtype == key_cache.dtype, "value_cache dtype", key_cache.dtype, value_cache.dtype)
    check_scales(key_cache, key_scales=key_scales, value_scales=value_scales)
    wanted(value_cache.shape == key_cache.shape, "value_cache shape", list(key_cache.shape), list(value_cache.shape))
    wanted(key_cache.is_contiguous(), "key_cache strides", "contiguous", key_cache.stride())
    wanted(value_cache.is_contiguous(), "value_cache strides", "contiguous", value_cache.stride())
    wanted(output.shape == query.shape, "output shape", list(query.shape), list(output.shape))
    for name, tensor in (("output", output), ("query", query)):
        wanted(tensor.stride()[1:] == (head_dim, 1), f"{name} strides", f"(any, {head_dim}, 1)", tensor.stride())
    for name, tensor in (
        ("block_tables", block_tables),
        ("row_slots", row_slots),
        ("context_lengths", context_lengths),
    ):
        wanted(tensor.dtype == torch.int32, f"{name} dtype", torch.int32, tensor.dtype)
        wanted(tensor.stride(-1) == 1, f"{name} last stride", 1, tensor.stride(-1))
    wanted(block_tables.dim() == 2, "block_tables", "[slot_count, max_blocks_per_slot]", list(block_tables.shape))
    wanted(row_slots.dim() == 1, "row_slots", "[max_rows]", list(row_slots.shape))
    wanted(context_lengths.shape == row_slots.shape, "context_lengths shape", row_slots.shape, context_lengths.shape)
    return HeadShape(query_heads, kv_heads, head_dim, block_size)


def check_rows(
    max_rows: int, rows_tile: int, counters: torch.Tensor, counter_count: int, query_starts: torch.Tensor | None = None
) -> None:
    """That a plan has room for the rows, its counters are there, and `query_starts`, where it is taken, fits."""
    wanted(max_rows <= rows_tile, "max_rows", f"<= the plan's {rows_tile}", max_rows)
    wanted(counters.dtype == torch.int32, "counters dtype", torch.int32, counters.dtype)
    wanted(counters.numel() >= counter_count, "counters", f">= {counter_count}", counters.numel())
    if query_starts is not None:
        wanted(query_starts.dtype == torch.int32, "query_starts dtype", torch.int32, query_starts.dtype)
        wanted(query_starts.shape == (max_rows + 1,), "query_starts shape", [max_rows + 1], list(query_starts.shape))


def check_partials(partials: torch.Tensor, float_count: int) -> None:
    """That the workspace of partial results is as large as the plan wants it."""
    wanted(partials.dtype == torch.float32, "partials dtype", torch.float32, partials.dtype)
    wanted(partials.numel() >= float_count, "partials", f">= {float_count}", partials.numel())


def check_options(scale: float, sliding_window: int, soft_cap: float) -> None:
    """`scale` > 0; `sliding_window` and `soft_cap` >= 0, where 0 means none."""
    wanted(scale > 0, "scale", "> 0", scale)
    wanted(sliding_window >= 0, "sliding_window", ">= 0 (0: none)", sliding_window)
    wanted(soft_cap >= 0, "soft_cap", ">= 0 (0: none)", soft_cap)


def compile_options(max_registers: int | None, pdl: bool = False) -> dict[str, int | bool]:
    """Compiler options that older Triton does not know, left out where they say nothing."""
    options: dict[str, int | bool] = {}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    if pdl:
        options["launch_pdl"] = True
    return options


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of all rows, row by row, in `dtype` throughout: what the attention kernels are tested against.

    Returns [token_count, query_heads, head_dim]; zeros for tokens of padding rows and of no row. Synchronises.
    """
    result = torch.zeros(query.shape, dtype=dtype, device=query.device)
    starts = query_starts.tolist()
    for row, (slot, length) in enumerate(zip(row_slots.tolist(), context_lengths.tolist(), strict=True)):
        start, end = starts[row], starts[row + 1]
        if slot < 0 or length == 0 or start == end:
            continue
        key, value = (
            _gather_row(cache, block_tables[slot], length, dtype, scales)
            for cache, scales in ((key_cache, key_scales), (value_cache, value_scales))
        )
        result[start:end] = _attend_row(
            query[start:end], key, value, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
        )
    return result


def _gather_row(
    cache: torch.Tensor, table_row: torch.Tensor, length: int, dtype: torch.dtype, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """A row's first `length` positions as [kv_heads, length, head_dim] in `dtype`."""
    block_size = cache.shape[2]
    blocks = table_row[: -(-length // block_size)].long()
    tokens = cache[blocks] if scales is None else dequantise(cache[blocks], scales[blocks])
    return tokens.transpose(0, 1).reshape(cache.shape[1], -1, cache.shape[3])[:, :length].to(dtype)


def _attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """Attention of a row's last query tokens on all its keys, in the keys' dtype.

    query [query_count, query_heads, head_dim], key and value [kv_heads, length, head_dim]; token i of the query sits at
    position length - query_count + i and sees keys at positions p with 0 <= position - p (< sliding_window if > 0).
    Returns [query_count, query_heads, head_dim] in the dtype of the keys.
    """
    query_count, query_heads, _ = query.shape
    kv_heads, length, _ = key.shape
    group = query_heads // kv_heads
    scores = torch.einsum("qhd,hkd->hqk", query.to(key.dtype), key.repeat_interleave(group, dim=0)) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(length - query_count, length, device=query.device)[:, None]
    distance = position - torch.arange(length, device=query.device)[None, :]
    seen = distance >= 0
    if sliding_window:
        seen &= distance < sliding_window
    probabilities = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return torch.einsum("hqk,hkd->qhd", probabilities, value.repeat_interleave(group, dim=0))


@triton.jit
def soft_capped(scores, cap):
    """cap * tanh(scores / cap) for scores in natural units."""
    half = 1.0 / (1.0 + tl.exp2(scores * (-2.0 * LOG2_E_CONSTANT) / cap))
    return cap * (2.0 * half - 1.0)


@triton.jit
def row_of_work(work, ends, weight):
    """The row that work item `work` belongs to, and the first item of that row.

    `ends` [rows] holds the rows' inclusive running sums of units, each unit being `weight` items.
    """
    before = ends * weight <= work
    return tl.sum(before.to(tl.int32)), tl.max(tl.where(before, ends, 0)) * weight
