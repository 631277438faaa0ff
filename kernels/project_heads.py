"""The q/k/v product of a prompt's tokens, up to attention: product, q/k norm, rotation, and the store of K and V.

    qkv       = x W^T                                            accumulated in float32, and not rounded
    q, k, v   = its heads; norm and rotation of q and k, and the store of k and v, as in kernels/qk_norm_rope_store.py

In one launch of kernels/gemm_hopper.py: what the product leaves in registers is never written as it is. It saves the
step's largest intermediate result a way to memory and back, and the kernel that would read it.

| tensor       | axes                          | dtype               | notes                                            |
|--------------|-------------------------------|---------------------|--------------------------------------------------|
| x            | [T, K]                        | bfloat16 or float16 | rows of 16-byte multiples                        |
| weight       | [(hq + 2 hkv) d, K]           | as x                | q's rows, then k's, then v's                     |
| q_out        | [T, hq, d]                    | as x                | contiguous                                       |
| caches       | [block, kv head, position, d] | as x                | same strides in both; positions adjacent          |
| slot_mapping | [T]                           | int64               | -1: K and V of this token are not stored         |
| positions    | [T]                           | int32 or int64      | below max_position                               |

`heads_plan` says where this pays and is possible: on Hopper, from some hundred tokens on, where all of a head rotates.
"""

from dataclasses import dataclass

import torch

from kernels.checks import check_head_inputs, check_tensor
from kernels.launch import capability_major, launch_options, multiprocessor_count, takes_gluon
from kernels.new_token import NewTokens
from kernels.qk_norm_rope_store import qk_norm_rope_store_reference
from kernels.tuning import LinearPlan, gemm_plan


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


def project_heads_reference(x: torch.Tensor, weight: torch.Tensor, query_heads: int, store: HeadStore) -> torch.Tensor:
    """Store K and V in place and return q [T, hq, d], all arithmetic in float32."""
    new = store.new
    return qk_norm_rope_store_reference(
        x.float() @ weight.float().T, store.key_cache, store.value_cache, store.slot_mapping, store.positions,
        new.rope_table, query_heads, new.q_weight, new.k_weight, new.eps,
    )  # fmt: skip


def flops(token_count: int, outputs: int, inputs: int) -> int:
    """Multiplications and additions of the product."""
    return 2 * token_count * outputs * inputs


def heads_plan(weight: torch.Tensor, token_count: int, query_heads: int, store: HeadStore) -> LinearPlan | None:
    """The plan by which `project_heads` runs here; None where the product and `qk_norm_rope_store` have to."""
    cache, values = store.key_cache, store.value_cache
    head_dim = cache.shape[3]
    is_plain = cache.dtype == weight.dtype and weight.dtype.itemsize == 2
    if not is_plain or not takes_gluon(capability_major(weight.device)):
        return None
    plan = gemm_plan(token_count, *weight.shape, multiprocessor_count(weight.device), fused=True)
    if plan is None:
        return None
    is_whole = all(columns % plan.block_n == 0 for columns in (query_heads * head_dim, store.columns))
    rotates = store.new.rope_table.shape[1] == head_dim and head_dim >= 16 and plan.block_n % head_dim == 0
    adjacent = cache.stride() == values.stride() and cache.stride(2) == head_dim
    return plan if is_whole and rotates and adjacent else None


def project_heads(x: torch.Tensor, weight: torch.Tensor, q_out: torch.Tensor, store: HeadStore) -> None:
    """Write q to `q_out`, and K and V to their places. Shapes: the module's table.

    Raises ValueError for a shape, dtype, stride or device that differs from the table, and where `heads_plan` has none.
    """
    cache, new = store.key_cache, store.new
    token_count, query_heads, head_dim = q_out.shape
    check_tensor("x", x, (token_count, weight.shape[1]), weight.dtype, like=weight)
    check_tensor("q_out", q_out, (None, None, cache.shape[3]), x.dtype, like=x)
    check_tensor("weight", weight, (query_heads * head_dim + 2 * store.columns, None), x.dtype)
    check_tensor("key_cache", cache, (None, None, None, None), x.dtype, like=x)
    check_tensor("value_cache", store.value_cache, cache.shape, x.dtype, like=x)
    check_tensor("slot_mapping", store.slot_mapping, (token_count,), torch.int64, like=x)
    check_tensor("positions", store.positions, (token_count,), (torch.int32, torch.int64), like=x)
    check_head_inputs(new.rope_table, new.q_weight, new.k_weight, head_dim, like=x)
    if not q_out.is_contiguous():
        raise ValueError(f"q_out: wanted a contiguous tensor, got strides {q_out.stride()}")
    plan = heads_plan(weight, token_count, query_heads, store)
    if plan is None:
        raise ValueError(f"weight: no plan for {token_count} tokens and {list(weight.shape)} in {weight.dtype}")
    from kernels import gemm_hopper  # needs a Triton that older installations lack

    gemm_hopper.launch(
        x, weight, q_out.view(token_count, -1), tile_n=plan.block_n, programs=multiprocessor_count(x.device),
        store=store, pdl=launch_options(x)["PDL"],
    )  # fmt: skip
