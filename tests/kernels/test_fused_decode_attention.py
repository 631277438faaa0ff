"""The fused decode attention against its float32 reference: lengths around tiles and splits, padding, poison, norms."""

import pytest
import torch

from kernels.fused_decode_attention import fused_decode_attention, fused_decode_attention_reference, launch_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16


def run(lengths: list[int], *, query_heads: int = 4, kv_heads: int = 2, head_dim: int = 64, norm: bool = True):
    """(kernel's output, reference, caches of both); length 0 is a padding row; NaN wherever nothing was written."""
    torch.manual_seed(0)
    rows, blocks = len(lengths), 16
    tables = torch.randperm(rows * blocks, dtype=torch.int32).view(rows, blocks).to(DEVICE)
    caches = [torch.full((rows * blocks, kv_heads, BLOCK, head_dim), float("nan"), device=DEVICE) for _ in range(2)]
    for row, length in enumerate(lengths):
        for position in range(length - 1):
            for cache in caches:
                cache[tables[row, position // BLOCK], :, position % BLOCK] = torch.randn(kv_heads, head_dim)
    qkv = torch.randn(rows, (query_heads + 2 * kv_heads) * head_dim, device=DEVICE)
    rope = torch.randn(blocks * BLOCK, head_dim, device=DEVICE)
    numbers = [row if length else -1 for row, length in enumerate(lengths)]
    slots = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    contexts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    weights = {name: torch.rand(head_dim, device=DEVICE) + 0.5 for name in ("q_weight", "k_weight")} if norm else {}
    plan = launch_plan(rows, kv_heads, head_dim)
    partials = torch.full((plan.workspace_floats,), float("nan"), device=DEVICE)
    counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=DEVICE)
    output = torch.full((rows, query_heads, head_dim), float("nan"), device=DEVICE)
    mine = [cache.clone() for cache in caches]
    shared = (tables, slots, contexts, rope)
    fused_decode_attention(output, qkv, *mine, *shared, partials, counters, plan, scale=0.2, **weights)
    reference = fused_decode_attention_reference(qkv, *caches, *shared, query_heads, scale=0.2, **weights)
    assert not counters.any(), "the counters are not zero after the call"
    return output, reference, mine, caches


@pytest.mark.parametrize("lengths", [[1], [2, 64, 65], [66, 129, 200, 0], [16, 17, 255]])
def test_equals_the_reference(lengths):
    output, reference, mine, caches = run(lengths)
    torch.testing.assert_close(output, reference, rtol=1e-5, atol=1e-5)
    for cache, wanted in zip(mine, caches, strict=True):
        torch.testing.assert_close(cache, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("shape", [{"query_heads": 2, "kv_heads": 2}, {"query_heads": 5, "kv_heads": 1}])
def test_groups_and_models_without_head_norms(shape):
    output, reference, _, _ = run([70, 3], norm=False, **shape)
    torch.testing.assert_close(output, reference, rtol=1e-5, atol=1e-5)


def test_long_rows_give_a_split_several_tiles():
    plan = launch_plan(8, 16, 64)
    assert plan.splits == 2, plan
    output, reference, _, _ = run([250, 0, 1, 0, 0, 0, 0, 0], query_heads=16, kv_heads=16)
    torch.testing.assert_close(output, reference, rtol=1e-5, atol=1e-5)
