"""Decode attention that makes the new tokens itself, for any number of rows: everything between the qkv product and the
output product in one launch.

What kernels/qk_norm_rope_store.py and kernels/decode_attention.py do one after the other. The kernel is
kernels/decode_attention_hopper.py: while the product ahead still runs it asks for cached keys and values; then each
program norms and rotates the queries of its piece of the work, and the one that has a row's end makes, stores and
attends to the row's new key and value. So the rotation takes no launch of its own, whose programs read what the product
has just written and are waited for: measured on an H200, 4.9 us a layer at 64 rows, with attention itself 17.6.

| tensor             | axes                      | dtype       | notes                                               |
|--------------------|---------------------------|-------------|-----------------------------------------------------|
| qkv                | [(P,) R, (hq + 2 hkv) d]  | any float   | q heads, k, then v; P parts are added up            |
| output             | [R, hq, d]                | bf16 or f16 | rows of slot -1 or length 0 get zeros               |
| rope_table         | [max_position, d]         | float32     | cosines, then sines                                 |
| q_weight, k_weight | [d]                       | any float   | both or neither                                     |

The other tensors are those of kernels/decode_attention.py. Caches, block_tables, row_slots and context_lengths must
have been written by kernels that had completed before the kernel ahead of this one started, as for
kernels/fused_decode_attention.py, whose reference is this one's too. Limits: rotation of whole heads, and
`can_specialise` of kernels/decode_attention.py.
"""

from __future__ import annotations

import torch

from kernels.checks import FLOATS, check_head_inputs, check_tensor
from kernels.decode_attention import (
    DecodePlan,
    can_specialise,
    check_workspace,
    common_constants,
)
from kernels.launch import launch_options
from kernels.new_token import NewTokens
from kernels.paged_kv import LOG2_E, check_options, check_paged_inputs, wanted


def decode_new_tokens(
    output: torch.Tensor,
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    partials: torch.Tensor,
    counters: torch.Tensor,
    plan: DecodePlan,
    new: NewTokens,
    *,
    scale: float,
    decode_row_count: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Store the new tokens' K and V and write their attention to `output`. Shapes: the module's table.

    `plan` is `launch_plan(..., specialised=True)` of kernels/decode_attention.py for the bucket; `decode_row_count` as
    there. Neither allocates nor synchronises. Raises ValueError naming the argument, what was wanted and what came.
    """
    shape = check_paged_inputs(
        output, output, key_cache, value_cache, block_tables, row_slots, context_lengths, key_scales, value_scales
    )
    check_options(scale, 0, 0.0)
    rows = output.shape[0]
    columns = (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim
    check_tensor("qkv", qkv, (None,) * (qkv.dim() - 2) + (rows, columns), FLOATS, like=output)
    check_head_inputs(new.rope_table, new.q_weight, new.k_weight, shape.head_dim, like=output)
    wanted(new.rope_table.shape[1] == shape.head_dim, "rope_table", "angles of whole heads", new.rope_table.shape)
    wanted(plan.specialised, "plan", "launch_plan(..., specialised=True)", plan)
    wanted(plan.start_tiles > 0, "start_tiles", "at least 1: the new token's work", plan.start_tiles)
    is_possible = can_specialise(shape, output.dtype, quantised=key_scales is not None)
    wanted(is_possible, "specialised plan", "only where can_specialise(...)", (shape, output.dtype))
    check_workspace(plan, rows, shape.kv_heads, partials, counters)
    from kernels import decode_attention_hopper

    decode_attention_hopper.launch(
        output, qkv, key_cache, value_cache, block_tables, row_slots, context_lengths, decode_row_count, partials,
        counters, key_scales, value_scales, plan, scale * LOG2_E, common_constants(shape, plan),
        launch_options(output)["PDL"], new,
    )  # fmt: skip
