"""Matrix products of prompts, y = x W^T, with what follows inside: SiLU * up, a residual, or heads and their store.

`gemm`, plain or with one of:

    out       = residual + y                                     residual may be out
              | SiLU(y[:, :N/2]) * y[:, N/2:]                    with silu_mul

`project_heads`, the q/k/v product up to attention:

    q, k, v   = heads of y; norm and rotation of q and k, and the store of k and v, as in kernels/qk_norm_rope_store.py

Prompts are bound by arithmetic, and, on a card that runs hot, by energy: what a product leaves in registers is not
written and read again, which is what a kernel of its own would do. kernels/gemm_hopper.py has the kernel, which needs
compute capability 9 and Triton 3.6. Everything is accumulated in float32, and rounded once, where it is stored.

| tensor       | axes                           | dtype               | notes                               |
|--------------|--------------------------------|---------------------|-------------------------------------|
| x            | [M, K]                         | bfloat16 or float16 | K a multiple of 64                  |
| weight       | [N, K]                         | as x                | q's, k's, v's rows; or gate's, up's |
| out          | [M, N], or [M, N/2] (silu_mul) | as x                |                                     |
| residual     | [M, N]                         | as x                |                                     |
| heads_out    | [M, heads of q, d], or with    | as x                | contiguous                          |
|              | those of k and v after them    |                     |                                     |
| caches       | [block, kv head, position, d]  | as x                | same strides; positions adjacent    |
| slot_mapping | [M]                            | int64               | -1: K and V are not stored          |
| positions    | [M]                            | int32 or int64      | below max_position                  |
| token_count  | [1]                            | int32               | optional; 0 or more, also above M   |

Matrices begin, and their rows lie, at multiples of 16 bytes. N is a multiple of the plan's columns; with heads so are
the columns of q and of k. M may be 0 without heads.

With a `token_count` only the first so many rows count, M at most: a graph is captured for M rows, and padding in it
costs no products. The kernel reads it before it has waited for the kernel ahead (rule 4 of kernels/launch.py). Rows of
out and heads_out from there on hold anything afterwards, and their K and V are not stored.

Measured on an H200 (docs/log.md, 2026-11-30): a layer's products with their norms and what follows, for 8,192 tokens of
Qwen3-0.6B, take 435 us, by the library and the kernels around it 497. `python -m benchmarks.kernels.bench_gemm`
measures each product.
"""

import math
from dataclasses import dataclass

import torch

from kernels.checks import check_head_inputs, check_tensor, copies_boxes
from kernels.launch import capability_major, launch_options, multiprocessor_count, takes_gluon
from kernels.new_token import NewTokens
from kernels.qk_norm_rope_store import qk_norm_rope_store_reference
from kernels.tuning import LinearPlan, gemm_plan

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HeadStore:
    """What becomes of the heads: caches, each token's place and position, and how heads are normed and rotated."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    new: NewTokens

    @property
    def columns(self) -> int:
        """Of k in the product."""
        return self.key_cache.shape[1] * self.key_cache.shape[3]


def gemm_reference(
    x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None, silu_mul: bool = False
) -> torch.Tensor:  # fmt: skip
    """The product and what follows in float32, not rounded."""
    y = x.float() @ weight.float().T
    if silu_mul:
        gate, up = y.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.float()


def project_heads_reference(x: torch.Tensor, weight: torch.Tensor, query_heads: int, store: HeadStore) -> torch.Tensor:
    """Store K and V in place and return q [M, hq, d], all arithmetic in float32."""
    new = store.new
    return qk_norm_rope_store_reference(
        x.float() @ weight.float().T, store.key_cache, store.value_cache, store.slot_mapping, store.positions,
        new.rope_table, query_heads, new.q_weight, new.k_weight, new.eps,
    )  # fmt: skip


def flops(rows: int, outputs: int, inputs: int) -> int:
    """Multiplications and additions of a product; what follows is not counted."""
    return 2 * rows * outputs * inputs


def heads_plan(weight: torch.Tensor, rows: int, query_heads: int, store: HeadStore) -> LinearPlan | None:
    """The plan by which `project_heads` runs here; None where the product and `qk_norm_rope_store` have to."""
    cache, values = store.key_cache, store.value_cache
    head_dim = cache.shape[3]
    is_plain = cache.dtype == weight.dtype and weight.dtype in HALVES
    if not is_plain or not takes_gluon(capability_major(weight.device)):
        return None
    rotates = store.new.rope_table.shape[1] == head_dim and head_dim in (16, 32, 64, 128)  # wider ones spill
    adjacent = cache.stride() == values.stride() and cache.stride(2) == head_dim
    if not (rotates and adjacent):
        return None
    part = math.gcd(query_heads * head_dim, store.columns)
    return gemm_plan(rows, *weight.shape, multiprocessor_count(weight.device), fused=True, part=part)


def project_heads(
    x: torch.Tensor, weight: torch.Tensor, heads_out: torch.Tensor, store: HeadStore,
    token_count: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write q to `heads_out`, and K and V to their places, and to `heads_out` too if it has room for them. Shapes: the
    module's table.

    Raises ValueError for a shape, dtype, stride or device that differs from the table, and where `heads_plan` has none.
    """
    cache, new = store.key_cache, store.new
    rows, head_count, head_dim = heads_out.shape
    query_heads = weight.shape[0] // head_dim - 2 * cache.shape[1]
    check_tensor("x", x, (rows, None), HALVES)
    check_tensor("weight", weight, (query_heads * head_dim + 2 * store.columns, x.shape[1]), x.dtype, like=x)
    check_tensor("heads_out", heads_out, (None, None, cache.shape[3]), x.dtype, like=x)
    if head_count not in (query_heads, query_heads + 2 * cache.shape[1]):
        raise ValueError(
            f"heads_out: wanted the {query_heads} heads of q, or with those of k and v "
            f"{query_heads + 2 * cache.shape[1]}, got {head_count}"
        )
    check_tensor("key_cache", cache, (None, None, None, None), x.dtype, like=x)
    check_tensor("value_cache", store.value_cache, cache.shape, x.dtype, like=x)
    check_tensor("slot_mapping", store.slot_mapping, (rows,), torch.int64, like=x)
    check_tensor("positions", store.positions, (rows,), (torch.int32, torch.int64), like=x)
    check_head_inputs(new.rope_table, new.q_weight, new.k_weight, head_dim, like=x)
    _check_count(token_count, x)
    if not heads_out.is_contiguous():
        raise ValueError(f"heads_out: wanted a contiguous tensor, got strides {heads_out.stride()}")
    plan = heads_plan(weight, rows, query_heads, store)
    if plan is None:
        raise ValueError(f"weight: no plan for {rows} rows and {list(weight.shape)} in {weight.dtype}")
    _check_boxes(x=x, weight=weight, heads_out=heads_out)
    _launch(plan, x, weight, heads_out.view(rows, -1), store=store, token_count=token_count)


def gemm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, plan: LinearPlan, *,
    residual: torch.Tensor | None = None, silu_mul: bool = False, token_count: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The product by a plan of the kind "gemm". Shapes: the module's table.

    Raises ValueError for a shape, dtype, stride or device that differs from the table, and for a plan of another kind.
    """
    check_tensor("x", x, (None, None), HALVES)
    rows, outputs = x.shape[0], weight.shape[0]
    check_tensor("weight", weight, (None, x.shape[1]), x.dtype, like=x)
    check_tensor("out", out, (rows, outputs // 2 if silu_mul else outputs), x.dtype, like=x)
    if residual is not None:
        check_tensor("residual", residual, out.shape, x.dtype, like=x)
        if silu_mul:
            raise ValueError("residual and silu_mul: wanted at most one of them, got both")
    _check_count(token_count, x)
    if plan.kernel != "gemm":
        raise ValueError(f"plan: wanted the kind gemm, got {plan.kernel}")
    if x.shape[1] % 64 or outputs % plan.block_n:
        raise ValueError(f"weight: wanted multiples of [{plan.block_n}, 64], got {list(weight.shape)}")
    if rows == 0:
        return
    _check_boxes(x=x, weight=weight, out=out, **({} if residual is None else {"residual": residual}))
    _launch(plan, x, weight, out, residual=residual, silu_mul=silu_mul, token_count=token_count)


def _check_count(token_count: torch.Tensor | None, x: torch.Tensor) -> None:
    if token_count is not None:
        check_tensor("token_count", token_count, (1,), torch.int32, like=x)


def _check_boxes(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not copies_boxes(tensor):
            raise ValueError(
                f"{name}: wanted rows at multiples of 16 bytes, got strides {tensor.stride()} of {tensor.dtype} "
                f"from {tensor.data_ptr() % 16} bytes on"
            )


def _launch(plan: LinearPlan, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, **rest) -> None:
    from kernels import gemm_hopper  # needs a Triton that older installations lack

    programs = multiprocessor_count(x.device)
    gemm_hopper.launch(x, weight, out, tile_n=plan.block_n, programs=programs, pdl=launch_options(x)["PDL"], **rest)
