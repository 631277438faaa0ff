"""What the fused pass decides from the model and the card, without either."""

import itertools
import math
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from kernels import fused_decode_attention as fused
from kernels import prefill_plans, skinny_linear, tuning
from kernels.decode_attention import DecodePlan
from kernels.prefill_plans import PrefillPlan
from kernels.qk_norm_rope_store import launch_plan
from kernels.step_layout import StepInputs
from kernels.tuning import LIBRARY, LinearPlan
from tests.support.poison import poison
from worker_proc.cuda import fused_forward
from worker_proc.cuda.buckets import CHUNK, DECODE, MIXED, Bucket, bucket_of, compiled_buckets
from worker_proc.cuda.fused_forward import EARLY_TOKENS, FusedForward
from worker_proc.kv_cache import KVCache, cache_specs
from worker_proc.loader import load_model


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


@pytest.mark.parametrize(
    ("rows", "block_size", "capability", "possible"),
    [(1, 16, 9, False), (2, 16, 9, True), (16, 16, 9, True), (2, 4, 9, False), (2, 16, 8, False), (2, 16, 0, False)],
)
def test_few_rows_are_left_to_single_warps_where_these_are_faster(rows, block_size, capability, possible, monkeypatch):
    """A pass knows its card from the start: nothing here asks for it, layer by layer."""
    monkeypatch.setattr(fused, "can_take_warps", partial(fused.can_take_warps, triton_version="3.6.0"))
    pass_ = SimpleNamespace(
        config=SimpleNamespace(head_count=16, kv_head_count=8, head_dim=128), _capability_major=capability,
        _qkv=torch.empty(0, dtype=torch.bfloat16),
    )  # fmt: skip
    cache = torch.empty(1, 8, block_size, 128, dtype=torch.bfloat16)
    assert FusedForward._takes_warps(pass_, rows, cache) is possible


def attention_variants(bucket: Bucket, max_rows: int, is_hopper: bool) -> set:
    """What the attention of a bucket's step is compiled for: plans, and whether each is launched early."""
    layer = SimpleNamespace(self_attn=SimpleNamespace(scale=0.1, sliding_window=None))
    pass_ = SimpleNamespace(
        config=SimpleNamespace(head_count=16, kv_head_count=8, head_dim=128), _multiprocessors=132,
        model=SimpleNamespace(model=SimpleNamespace(layers=[layer])), _has_hopper_kernel=lambda *_: is_hopper,
        logits=torch.empty(max_rows, 0), hidden=torch.empty(0, dtype=torch.bfloat16),
        _partials=None, _decode_counters=None, _prefill_counters=None,
    )  # fmt: skip
    pass_._decode_plan = partial(FusedForward._decode_plan, pass_)
    plan = None
    if bucket.kind != DECODE:
        plan = FusedForward._prefill_plan(pass_, bucket, block_size=16, sliding_window=0, quantised=False)
    nothing = SimpleNamespace(row_slots=None, context_lengths=None, query_starts=None, block_tables=None)
    cache = SimpleNamespace(
        key_caches=[None], value_caches=[None], key_scales=[None], value_scales=[None], block_size=16
    )
    found = set()

    def launch(*arguments, pdl: bool, **_: object) -> None:
        [used] = [each for each in arguments if isinstance(each, DecodePlan | PrefillPlan)]
        found.add((replace(used, program_count=0) if isinstance(used, PrefillPlan) else used, pdl))

    modules = fused_forward.decode, fused_forward.prefill
    with patch.object(modules[0], "decode_attention", launch), patch.object(modules[1], "prefill_attention", launch):
        FusedForward._attend(pass_, 0, None, None, bucket, nothing, cache, nothing, torch.zeros(1), plan, None)
        if bucket.ends_in_rows:
            rows = Bucket(DECODE, bucket.rows, bucket.rows)
            FusedForward._attend(pass_, 0, None, None, rows, nothing, cache, nothing, torch.zeros(1), None, None)
    return found


@pytest.mark.parametrize(
    ("bucket", "is_hopper", "early"),
    [
        (Bucket(DECODE, 64, 64), True, [True]),
        (Bucket(DECODE, 64, 64), False, [False]),
        (Bucket(MIXED, 16, 64), True, [False, False]),
        (Bucket(CHUNK, 1, EARLY_TOKENS, every_token=True), True, [True]),
        (Bucket(CHUNK, 1, EARLY_TOKENS + 256, every_token=True), False, [False]),
    ],
    ids=str,
)
def test_attention_is_launched_early_where_it_has_something_to_do(bucket, is_hopper, early):
    assert [pdl for _, pdl in attention_variants(bucket, 256, is_hopper)] == early


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


MODEL_SIZES = {
    "qwen3-0.6b": (1024, 16, 8, 128, 3072), "qwen3-8b": (4096, 32, 8, 128, 12_288),
    "llama-3.2-1b": (2048, 32, 8, 64, 8192), "llama-3.1-8b": (4096, 32, 8, 128, 14_336),
    "qwen2.5-0.5b": (896, 14, 2, 64, 4864), "qwen2.5-7b": (3584, 28, 4, 128, 18_944),
}  # fmt: skip
"""Hidden size, query heads, K/V heads, their size, and the feed-forward block's."""


def product_variants(bucket: Bucket, has_bias: bool, sizes: tuple[int, ...]) -> set:
    """What the products of a bucket's step and their neighbours are compiled for, by rule, on an H200."""
    hidden, heads, kv_heads, head_dim, inter = sizes
    tokens, query = bucket.tokens, heads * head_dim
    columns = query + 2 * kv_heads * head_dim
    part = math.gcd(query, kv_heads * head_dim)
    qkv = None if has_bias else tuning.gemm_plan(tokens, columns, hidden, 132, fused=True, part=part)
    store = launch_plan(tokens, heads, kv_heads, head_dim)
    chunk_rows = 1 if bucket.kind == MIXED else bucket.rows
    keeps = bucket.kind != DECODE and prefill_plans.is_specialised_size(tokens, chunk_rows, heads)
    found = {("heads", qkv or (store.query_heads, store.num_warps), keeps)}
    for rows in {tokens, bucket.rows} if bucket.ends_in_rows else {tokens}:
        found.add(("silu_mul", tuning.gemm_plan(rows, 2 * inter, hidden, 132, fused=True)))
        found |= {("residual", tuning.gemm_plan(rows, hidden, inputs, 132)) for inputs in (query, inter)}
    return found


@pytest.mark.parametrize("limits", [(1, 512), (64, 2048), (256, 8192), (512, 4096), (1024, 16_384)], ids=str)
@pytest.mark.parametrize("name", MODEL_SIZES)
def test_start_up_compiles_the_products_of_every_step(name, limits):
    """As of attention: which tiles a product takes follows from how many tokens there are, up and down. With 7 tiles of
    columns, as Qwen2.5-0.5B has them, only steps of 4,352 to 4,736 and 6,528 to 7,040 tokens take some; and up to 1,792
    tokens of many rows, attention reads no keys and values of the step's own, which the kernel that stores them keeps
    for fewer."""
    variants = partial(product_variants, has_bias=name.startswith("qwen2.5"), sizes=MODEL_SIZES[name])
    max_rows, max_tokens = limits
    ready = set().union(*map(variants, compiled_buckets(*limits)))
    for tokens in range(1, max_tokens + 1, 16):
        for rows in {1, min(64, tokens, max_rows), min(tokens, max_rows)}:
            bucket = bucket_of(0, rows, tokens, max_rows=max_rows, max_tokens=max_tokens)
            assert variants(bucket) <= ready, bucket


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


@pytest.mark.parametrize(
    ("tokens", "kernel", "measured", "leaves"),
    [(1, "small_m", True, False), (2, "small_m", True, True), (2, "small_m", False, False), (2, "warps", True, False)],
)
def test_products_leave_parts_where_that_was_measured_and_norms_cost_something(
    tokens, kernel, measured, leaves, monkeypatch
):
    """Few rows' products on Hopper multiply by the norm's weight in passing: three launches less a layer."""
    monkeypatch.setattr(fused_forward, "parts_plan", lambda *_: LIBRARY if measured else None)
    asked = []
    product = SimpleNamespace(weight=torch.empty(64, 64), bias=None)
    layer = SimpleNamespace(
        self_attn=SimpleNamespace(qkv_proj=product, o_proj=product),
        mlp=SimpleNamespace(gate_up_proj=product, down_proj=product),
    )
    pass_ = SimpleNamespace(
        model=SimpleNamespace(model=SimpleNamespace(layers=[layer])),
        _workspace=SimpleNamespace(plan_of=lambda *a, **fusion: asked.append(fusion) or LinearPlan(kernel)),
    )
    assert FusedForward._leaves_parts(pass_, Bucket(DECODE, tokens, tokens)) is leaves
    assert asked == [{"has_norm": True, "silu_mul": True}] * (tokens > 1)


@pytest.mark.parametrize(
    ("bias", "plan", "stores"), [(None, LIBRARY, True), (torch.zeros(4), LIBRARY, False), (None, None, False)]
)
def test_a_product_with_a_bias_or_without_a_plan_stores_no_heads(bias, plan, stores, monkeypatch):
    monkeypatch.setattr(fused_forward, "heads_plan", lambda *_: plan)
    attention = SimpleNamespace(qkv_proj=SimpleNamespace(weight=torch.empty(64, 64), bias=bias))
    pass_ = SimpleNamespace(
        model=SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(self_attn=attention)])),
        config=SimpleNamespace(head_count=2), _rope_table=None,
    )  # fmt: skip
    cache = SimpleNamespace(key_caches=["keys"], value_caches=["values"], key_scales=["of keys"], value_scales=["of v"])
    inputs = SimpleNamespace(slot_mapping="slots", positions="positions")
    store = FusedForward._head_store(pass_, 0, Bucket(CHUNK, 1, 512), inputs, cache)
    assert (store is not None) is stores
    if store is not None:
        found = (store.key_cache, store.value_cache, store.key_scales, store.value_scales)
        assert found == ("keys", "values", "of keys", "of v")


class OnePrompt:
    """A prompt's rows of queries, keys and values, and a pass of one layer whose attention takes them in pieces.

    What no step has written is NaN: in the cache, and in the rows past each step's own.
    """

    def __init__(self, folder, device: str, kv_cache_dtype: str, length: int) -> None:
        place = torch.device(device)
        model = load_model(folder, device=place, dtype=torch.bfloat16)
        config = model.config
        self.cache = KVCache(
            cache_specs(config, torch.bfloat16, kv_cache_dtype), block_size=16, block_count=64, host_block_count=0,
            device=place,
        )  # fmt: skip
        poison(self.cache)
        self.forward = FusedForward(model, max_rows=4, max_tokens=320, max_positions=length)
        self.rows = torch.randn(length, (config.head_count + 2 * config.kv_head_count) * config.head_dim)
        self.free = list(torch.randperm(64))

    def attended(self, cuts: list[int], shared: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the tokens from the first cut on, a step from each to the next; and the prompt's blocks, of
        which the first may be another's."""
        device = self.forward.hidden.device
        owned = [] if shared is None else [*shared.tolist()]
        table = torch.tensor([*owned, *(self.free.pop() for _ in range(-(-cuts[-1] // 16) - len(owned)))])
        found = []
        for start, end in itertools.pairwise(cuts):
            tokens = -(-(end - start) // 64) * 64
            positions = torch.arange(start, end)
            inputs = StepInputs.allocate(1, tokens, device)
            inputs.positions[: end - start] = positions
            inputs.slot_mapping[: end - start] = table[positions // 16] * 16 + positions % 16
            for field, values in ("row_slots", [0]), ("context_lengths", [end]), ("query_starts", [0, end - start]):
                getattr(inputs, field).copy_(torch.tensor(values))
            rows = torch.full((tokens, self.rows.shape[1]), float("nan"), dtype=torch.bfloat16, device=device)
            rows[: end - start] = self.rows[start:end]
            slots = SimpleNamespace(block_tables=table[None].int().to(device))
            counts = torch.tensor([1, 0], dtype=torch.int32, device=device)
            bucket = Bucket(CHUNK, 1, tokens)
            output = self.forward._store_and_attend(None, 0, rows, bucket, inputs, self.cache, slots, counts)
            found.append(output[: end - start].clone())
        return torch.cat(found), table


@pytest.mark.parametrize("device", [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
])  # fmt: skip
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_a_prompts_attention_has_the_same_bits_however_it_is_cut(
    device, kv_cache_dtype, fresh_plans, tiny_model, fused_sizes
):
    """Keys are read as bfloat16 in the step that computes them, and from the cache in later ones and by others."""
    _, folder = tiny_model("Qwen3", **fused_sizes | {"head_dim": 128, "num_hidden_layers": 1})
    with torch.no_grad():
        prompt = OnePrompt(folder, device, kv_cache_dtype, length=200)
        whole, blocks = prompt.attended([0, 200])
        in_tiles, _ = prompt.attended([0, 64, 192, 200])
        anywhere, _ = prompt.attended([0, 70, 200])
        behind, _ = prompt.attended([128, 200], shared=blocks[:8])
    assert all(fresh_plans) and len(fresh_plans) == 7
    assert torch.isfinite(whole).all()
    assert torch.equal(in_tiles, whole) and torch.equal(behind, whole[128:])
    torch.testing.assert_close(anywhere, whole, rtol=2**-6, atol=2**-9)  # tiles of other queries


@pytest.mark.parametrize(
    ("rows", "quantised", "num_warps"), [(64, True, 4), (17, True, 4), (65, True, 1), (64, False, 1)]
)
def test_few_rows_over_8_bit_caches_are_decoded_by_teams_of_warps(rows, quantised, num_warps):
    sizes = SimpleNamespace(head_count=16, kv_head_count=8, head_dim=128)
    forward = SimpleNamespace(config=sizes, _multiprocessors=132)
    plan = FusedForward._decode_plan(forward, rows, quantised, True)
    assert plan.num_warps == num_warps and plan.rows_tile >= rows
