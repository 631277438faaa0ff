"""Rows of the embedding table for a batch of token ids, launched early like its neighbours.

    out[t] = table[token_ids[t]]

| tensor    | axes   | dtype                        | strides     | notes                                            |
|-----------|--------|------------------------------|-------------|--------------------------------------------------|
| token_ids | [T]    | int32                        | 1           | an id outside the table gives a row of zeros     |
| table     | [V, H] | bfloat16, float16 or float32 | last axis 1 |                                                  |
| out       | [T, H] | as table                     | last axis 1 |                                                  |

A torch gather would be the one launch of a decode step that cannot overlap its neighbours, and it wants 64-bit ids.
Measured on an H200 at commit 1356a8c by `python -m benchmarks.kernels.bench_embedding`: 1.5 us for one row of
1,024 (torch 2.3); 11.1 us for 8,192 (torch 11.3).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import FLOATS, check_tensor
from kernels.launch import launch_options, let_next_start, wait_for_inputs

MAX_BLOCK = 2048


def embedding_reference(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The gathered rows; zeros where an id is outside the table."""
    known = (token_ids >= 0) & (token_ids < table.shape[0])
    rows = table[torch.where(known, token_ids, 0).long()]
    return torch.where(known[:, None], rows, torch.zeros_like(rows))


@dataclass(frozen=True)
class EmbeddingPlan:
    """One program a token and a block of columns."""

    grid: tuple[int, int]
    block: int
    num_warps: int


def launch_plan(token_count: int, hidden: int) -> EmbeddingPlan:
    """The grid and tile for `token_count` rows of `hidden` elements."""
    block = min(MAX_BLOCK, max(triton.next_power_of_2(hidden), 16))
    return EmbeddingPlan((token_count, triton.cdiv(hidden, block)), block, num_warps=max(block // 512, 1))


def bytes_moved(token_count: int, hidden: int, element_bytes: int) -> int:
    """The fewest bytes that the operation reads and writes."""
    return token_count * (2 * hidden * element_bytes + 4)


@triton.jit
def _embedding_kernel(
    token_ids, table, out, table_stride, out_stride, VOCABULARY, HIDDEN, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN  # the row's end
    wait_for_inputs(PDL)
    let_next_start(PDL)  # after the wait: kernels behind this one may read the step's inputs before their own wait
    token_id = tl.load(token_ids + token).to(tl.int64)
    known = (token_id >= 0) & (token_id < VOCABULARY)  # ids outside the table
    row = tl.load(table + token_id * table_stride + column, mask=inside & known, other=0.0)
    tl.store(out + token * out_stride + column, row, mask=inside)


def embedding(token_ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Write the table's rows for `token_ids` to `out`. Shapes: the module's table; ValueError for any other."""
    check_tensor("token_ids", token_ids, (None,), torch.int32)
    check_tensor("table", table, (None, None), FLOATS, like=token_ids)
    hidden = table.shape[1]
    check_tensor("out", out, (token_ids.shape[0], hidden), table.dtype, like=token_ids)
    if out.numel() == 0:
        return
    plan = launch_plan(token_ids.shape[0], hidden)
    _embedding_kernel[plan.grid](
        token_ids, table, out, table.stride(0), out.stride(0), table.shape[0], hidden,
        BLOCK=plan.block, num_warps=plan.num_warps, **launch_options(out),
    )  # fmt: skip
