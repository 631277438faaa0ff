"""What the fused pass decides from the model and the card, without either."""

from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
import torch

from kernels import fused_decode_attention as fused
from kernels import prefill_plans, skinny_linear, tuning
from kernels.tuning import LIBRARY, LinearPlan
from worker_proc.cuda.buckets import CHUNK, DECODE, Bucket, bucket_of, compiled_buckets
from worker_proc.cuda.fused_forward import EARLY_TOKENS, FusedForward


@pytest.mark.parametrize(
    ("block_size", "capability", "possible"), [(16, 9, True), (4, 9, False), (128, 9, True), (16, 8, False)]
)
def test_the_hopper_kernel_is_asked_about_the_blocks_that_there_are(block_size, capability, possible, monkeypatch):
    """Its copies start at eight positions: with smaller blocks the plain kernel has to do."""
    monkeypatch.setattr(prefill_plans, "can_specialise", partial(prefill_plans.can_specialise, triton_version="3.6.0"))
    pass_ = SimpleNamespace(
        config=SimpleNamespace(head_count=16, kv_head_count=8, head_dim=128), _capability_major=capability,
        hidden=torch.empty(0, dtype=torch.bfloat16),
    )  # fmt: skip
    assert FusedForward._has_hopper_kernel(pass_, prefill_plans, block_size, 0, quantised=False) is possible


@pytest.mark.parametrize(("capability", "is_on"), [(9, True), (8, True), (0, True), (9, False)])
def test_single_warps_are_taken_where_the_card_has_them_and_they_are_on(capability, is_on, monkeypatch):
    """A pass knows its card from the start: nothing here asks for it, layer by layer."""
    monkeypatch.setattr(fused, "SINGLE_WARPS", is_on)
    monkeypatch.setattr(fused, "can_take_warps", partial(fused.can_take_warps, triton_version="3.6.0"))
    pass_ = SimpleNamespace(
        config=SimpleNamespace(head_count=16, kv_head_count=8), _capability_major=capability,
        _qkv=torch.empty(0, dtype=torch.bfloat16),
    )  # fmt: skip
    cache = torch.empty(1, 8, 16, 128, dtype=torch.bfloat16)
    assert FusedForward._takes_warps(pass_, cache) is (is_on and capability == 9)


def attention_variants(bucket: Bucket, max_rows: int, is_hopper: bool) -> set:
    """What the attention of a bucket's step is compiled for, early launch included."""
    pass_ = SimpleNamespace(
        config=SimpleNamespace(head_count=16, kv_head_count=8, head_dim=128), _multiprocessors=132,
        logits=torch.empty(max_rows, 0), hidden=torch.empty(0, dtype=torch.bfloat16),
        _has_hopper_kernel=lambda *_: is_hopper,
    )  # fmt: skip
    found = set()
    if bucket.kind != CHUNK:
        found.add(FusedForward._decode_plan(pass_, bucket.rows))
    if bucket.kind != DECODE:
        plan = FusedForward._prefill_plan(pass_, bucket, block_size=16, sliding_window=0, quantised=False)
        found.add((replace(plan, program_count=0), bucket.kind == CHUNK and bucket.tokens <= EARLY_TOKENS))
    return found


@pytest.mark.parametrize("is_hopper", [True, False])
@pytest.mark.parametrize("limits", [(1, 16), (48, 64), (100, 1000), (256, 8192), (300, 512), (512, 4096), (1024, 8192)])
def test_start_up_compiles_the_attention_of_every_step(limits, is_hopper):
    """Otherwise a step among many has to wait for the compiler, on a machine where it is the first of its kind."""
    max_rows, max_tokens = limits
    ready = set().union(*(attention_variants(bucket, max_rows, is_hopper) for bucket in compiled_buckets(*limits)))
    rng = Random(0)
    for _ in range(500):
        rows = rng.choice((rng.randint(1, max_rows), min(max_rows, rng.choice((1, 16, 17, 64, 65, 128, 129)))))
        chunks = rng.choice((0, 1, rows // 2, rows))
        tokens = rows if chunks == 0 else min(max_tokens, rows + int(2 ** rng.uniform(0, 13)))
        bucket = bucket_of(rows - chunks, chunks, tokens, max_rows=max_rows, max_tokens=max_tokens)
        assert attention_variants(bucket, max_rows, is_hopper) <= ready, bucket


@pytest.mark.parametrize("measured", ["n40_k64", "n40_k64_norm"])
def test_the_head_takes_the_plan_of_the_product_that_it_is(measured, monkeypatch):
    """Behind products in parts the rows are normed already, and the product without a norm has a plan of its own."""
    chosen, plan = [], LinearPlan("small_m", block_n=16, block_k=32)
    monkeypatch.setattr(tuning, "measured_plan", lambda *key: plan if key[3] == measured else LIBRARY)
    monkeypatch.setattr(skinny_linear, "run_plan", lambda plan, *_: chosen.append(plan.kernel))
    norm = SimpleNamespace(weight=torch.ones(64), eps=1e-6)
    forward = SimpleNamespace(
        model=SimpleNamespace(model=SimpleNamespace(norm=norm), lm_head=SimpleNamespace(weight=torch.zeros(40, 64))),
        logits=torch.zeros(3, 40),
        _workspace=skinny_linear.Workspace.allocate(3, 64, 80, torch.float32, torch.device("cpu")),
        _sampled_rows=lambda tokens, *_: tokens,
    )
    FusedForward._logits_of(forward, torch.zeros(3, 64))
    FusedForward._head(forward, torch.zeros(3, 64), Bucket(DECODE, 3, 3), None)
    assert chosen == (["small_m", "library"] if measured == "n40_k64" else ["library", "small_m"])
