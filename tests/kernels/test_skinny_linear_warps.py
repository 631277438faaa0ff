"""Products of few rows by the kernel that holds W as the tensor cores' operand, and of attention left in parts."""

import itertools
from dataclasses import replace

import pytest
import torch

from kernels import skinny_linear_warps, tuning
from kernels.fused_decode_attention import (
    AttentionParts,
    fused_decode_attention,
    fused_decode_attention_reference,
    launch_plan,
)
from kernels.kv_format import quantise
from kernels.linear_workspace import Workspace, plan_key
from kernels.new_token import NewTokens
from kernels.skinny_linear import linear_of_parts, run_plan, skinny_linear, skinny_linear_reference
from kernels.tuning import LIBRARY, LinearPlan, default_plan, find_plan
from tests.kernels.closeness import DEVICE, assert_as_exact, assert_replay_equals_eager, random_tensor
from tests.kernels.gluon_emulator import KernelAhead, emulate

FUSIONS = ["plain", "norm", "residual", "norm_silu", "silu"]
PLANS = [
    LinearPlan("warps", 16, 64, 1),
    LinearPlan("warps", 16, 32, 2, max_registers=192),
    LinearPlan("warps", 32, 64, 4),
    LinearPlan("warps", 64, 32, 8),
]


@pytest.fixture
def device(hopper_device, monkeypatch):
    """The card, or the CPU with the kernel emulated."""
    if hopper_device == "cpu":
        emulate(monkeypatch, skinny_linear_warps, "_warps_kernel")
    return hopper_device


def make_case(rows, outputs, inputs, dtype, fusion):
    """Arguments of `run_plan` after the plan, without the workspace; the output is poisoned, and x lies in NaN."""
    silu = "silu" in fusion
    around = torch.full((rows + 2, inputs), float("nan"), dtype=dtype, device=DEVICE)
    x = around[1 : rows + 1]
    x.copy_(random_tensor(rows, inputs, dtype=dtype, seed=1))
    weight = random_tensor(outputs, inputs, dtype=dtype, seed=2, scale=inputs**-0.5)
    norm_weight = random_tensor(inputs, dtype=dtype, seed=3) if "norm" in fusion else None
    out = torch.full((rows, outputs // 2 if silu else outputs), float("nan"), dtype=dtype, device=DEVICE)
    residual = random_tensor(rows, outputs, dtype=dtype, seed=4) if fusion == "residual" else None
    return x, weight, out, norm_weight, 1e-6, residual, silu


def workspace_for(dtype):
    return Workspace.allocate(16, 512, 512, dtype, torch.device(DEVICE))


def reference(x, weight, out, norm_weight, eps, residual, silu):
    return skinny_linear_reference(x, weight, norm_weight=norm_weight, eps=eps, residual=residual, silu_mul=silu)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"n{plan.block_n}w{plan.num_warps}")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype"),
    [
        (1, 128, 512, torch.bfloat16),
        (3, 72, 256, torch.float16),  # outputs in no whole tile
        (8, 64, 512, torch.bfloat16),
        (16, 72, 256, torch.bfloat16),
    ],
)
def test_matches_float32(rows, outputs, inputs, dtype, plan, fusion, device):
    if not skinny_linear_warps.fits(plan, inputs):
        plan = replace(plan, block_k=32)
    case = make_case(rows, outputs, inputs, dtype, fusion)
    run_plan(plan, *case, workspace_for(dtype))
    assert_as_exact(case[2], reference(*case), steps=3)  # the normed row is rounded for the tensor cores


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 576), (7, 24, 1536), (9, 100, 576), (16, 34, 768)])
def test_rows_that_lie_apart_in_wider_ones(rows, outputs, inputs, fusion, device):
    """As views, all that is beside them NaN, which stays there; by the plans of the rule."""
    case = make_case(rows, outputs, inputs, torch.float16, fusion)
    apart = [in_wider_rows(each) if torch.is_tensor(each) and each.dim() == 2 else each for each in case]
    plan = default_plan(rows, outputs, inputs, case[-1], by_warps=True)
    assert plan.kernel == "warps"
    run_plan(plan, *apart, workspace_for(torch.float16))
    assert_as_exact(apart[2], reference(*case), steps=3)
    apart[2].fill_(float("nan"))
    assert apart[2]._base.isnan().all()


def in_wider_rows(rows):
    """The same rows as a view of longer ones, with a row before and one behind."""
    wide = torch.full((rows.shape[0] + 2, rows.shape[1] + 24), float("nan"), dtype=rows.dtype, device=rows.device)
    wide[1:-1, 8:-16].copy_(rows)
    return wide[1:-1, 8:-16]


@pytest.mark.parametrize("rows", [2, 9])
def test_a_row_of_nan_stays_alone_and_the_residual_may_be_the_output(rows, device):
    for fusion in ("residual", "norm"):
        x, weight, out, norm_weight, eps, residual, silu = make_case(rows, 64, 256, torch.float16, fusion)
        x[1] = float("nan")
        stream = out if residual is None else residual.clone()
        run_plan(
            PLANS[2], x, weight, stream, norm_weight, eps, stream if fusion == "residual" else None, silu,
            workspace_for(torch.float16),
        )  # fmt: skip
        others = [row for row in range(rows) if row != 1]
        want = skinny_linear_reference(x, weight, norm_weight=norm_weight, eps=eps, residual=residual)
        assert stream[1].isnan().all()
        assert_as_exact(stream[others], want[others], steps=3)


def test_logits_in_float32(device):
    x, weight, _, norm_weight, eps, _, _ = make_case(2, 64, 256, torch.bfloat16, "norm")
    out = torch.full((2, 64), float("nan"), device=DEVICE)
    run_plan(PLANS[2], x, weight, out, norm_weight, eps, None, False, workspace_for(torch.bfloat16))
    want = skinny_linear_reference(x, weight, norm_weight=norm_weight, eps=eps)
    assert_as_exact(out.to(torch.bfloat16), want, steps=3)


@pytest.mark.skipif(DEVICE == "cuda", reason="the emulator's, which knows what is early")
@pytest.mark.parametrize("fusion", ["norm_silu", "residual", "parts"])
def test_what_the_kernel_ahead_writes_is_read_after_it(fusion, monkeypatch):
    x, weight, out, *others = case = make_case(3, 64, 256, torch.float16, fusion)
    partials, row = left_parts(100)
    residual = others[-2]
    written = partials if fusion == "parts" else x if residual is None else residual
    emulate(monkeypatch, skinny_linear_warps, "_warps_kernel", KernelAhead(x, written))
    if fusion == "parts":
        stream = torch.zeros(1, 64, dtype=torch.float16)
        skinny_linear_warps.launch_on_parts(PARTS_PLAN, parts_of(partials, 100), weight, stream, stream, True)
        assert_as_exact(stream, row.float()[None] @ weight.float().T, steps=3)
    else:
        skinny_linear_warps.launch(PLANS[2], x, weight, out, *others, True)
        assert_as_exact(out, reference(*case), steps=3)


PARTS_PLAN = LinearPlan("warps", 32, 64, 2)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def left_parts(length, splits=32, tile=16, head_rows=16, dtype=torch.float16):
    """Random parts of a row as `fused_decode_parts_kernel` leaves them, in a workspace of NaN; and the row they are."""
    cached = length - 1
    tiles = -(-cached // tile)
    share = max(-(-tiles // (splits - 1)), 1)
    count, group = -(-tiles // share) + 1, HEADS // KV_HEADS
    room = KV_HEADS * splits * head_rows
    workspace = torch.full((room * (HEAD_DIM + 2),), float("nan"))
    places = workspace.view(dtype)[: room * HEAD_DIM].view(KV_HEADS, splits, head_rows, HEAD_DIM)
    places[:, :count, :group] = random_tensor(KV_HEADS, count, group, HEAD_DIM, dtype=dtype, seed=5).cpu()
    statistics = workspace[room * HEAD_DIM :].view(KV_HEADS, splits, 2, head_rows)
    statistics[:, :count, 0, :group] = 8 * random_tensor(KV_HEADS, count, group, seed=6).cpu()
    weights = torch.exp2(statistics[:, :count, 0, :group].double())
    row = (weights[..., None] * places[:, :count, :group]).sum(1) / weights.sum(1)[..., None]
    return workspace.to(DEVICE), row.flatten().to(DEVICE)


def parts_of(workspace, length, slot=0, splits=32, tile=16, head_rows=16, dtype=torch.float16):
    integers = {"dtype": torch.int32, "device": DEVICE}
    places = torch.tensor([slot], **integers), torch.tensor([length], **integers)
    heads = (HEADS, KV_HEADS, HEAD_DIM)
    return AttentionParts(workspace.view(dtype), workspace, *places, splits, tile, head_rows, *heads)


@pytest.mark.parametrize("length", [1, 2, 17, 18, 16 * 8, 16 * 8 + 2, 16 * 31 + 1, 16 * 31 + 2, 16 * 200])
def test_parts_are_merged_as_they_are_read(length, device):
    partials, row = left_parts(length)
    weight = random_tensor(64, HEADS * HEAD_DIM, dtype=torch.float16, seed=8, scale=0.1)
    stream = random_tensor(1, 64, dtype=torch.float16, seed=9)
    want = row.float() @ weight.float().T + stream.float()
    skinny_linear_warps.launch_on_parts(
        PARTS_PLAN, parts_of(partials, length), weight, stream, stream, device == "cuda"
    )  # fmt: skip
    assert_as_exact(stream, want, steps=2)


@pytest.mark.parametrize(("slot", "length"), [(-1, 40), (3, 0)])
def test_a_padding_row_adds_nothing(slot, length, device):
    partials = torch.full((KV_HEADS * 32 * 16 * (HEAD_DIM + 2),), float("nan"), device=DEVICE)
    weight = random_tensor(64, HEADS * HEAD_DIM, dtype=torch.float16, seed=8)
    stream = random_tensor(1, 64, dtype=torch.float16, seed=9)
    before = stream.clone()
    parts = parts_of(partials, length, slot)
    skinny_linear_warps.launch_on_parts(PARTS_PLAN, parts, weight, stream, stream, device == "cuda")
    assert torch.equal(stream, before)


@pytest.mark.parametrize("length", [1, 2, 33, 100])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=["plain", "int8", "fp8"])
def test_attention_left_in_parts_is_attention(length, cache_dtype, device):
    """The whole way: keys and values in blocks, the decode kernel without its merge, the product that merges."""
    dtype, block_size = torch.float16, 16
    qkv = random_tensor(1, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype, seed=10)
    caches = [random_tensor(12, KV_HEADS, block_size, HEAD_DIM, dtype=dtype, seed=seed) for seed in (11, 12)]
    scales = {}
    if cache_dtype is not None:
        stored = [quantise(cache, cache_dtype) for cache in caches]
        caches = [cache for cache, _ in stored]
        scales = {"key_scales": stored[0][1], "value_scales": stored[1][1]}
    copies, copied = [cache.clone() for cache in caches], {name: each.clone() for name, each in scales.items()}
    integers = {"dtype": torch.int32, "device": DEVICE}
    places = (
        torch.randperm(12, generator=torch.Generator().manual_seed(13))[None].to(**integers),
        torch.zeros(1, **integers), torch.tensor([length], **integers),
    )  # fmt: skip
    plan = replace(launch_plan(1, KV_HEADS, HEAD_DIM, is_apart=True), tile=16)
    partials = torch.full((plan.workspace_floats,), float("nan"), device=DEVICE)
    counters = torch.zeros(KV_HEADS, **integers)
    output = torch.full((1, HEADS, HEAD_DIM), float("nan"), dtype=dtype, device=DEVICE)
    new = NewTokens(random_tensor(128, HEAD_DIM, seed=14))
    inputs = (partials, counters, plan, new)
    parts = fused_decode_attention(output, qkv, *caches, *places, *inputs, scale=0.125, leave=True, **scales)
    weight = random_tensor(64, HEADS * HEAD_DIM, dtype=dtype, seed=8, scale=0.1)
    stream, workspace = torch.zeros(1, 64, dtype=dtype, device=DEVICE), workspace_for(dtype)
    workspace.plans[plan_key(1, *weight.shape)] = PARTS_PLAN
    linear_of_parts(parts, weight, stream, workspace, residual=stream)
    attended = fused_decode_attention_reference(qkv, *copies, *places, new.rope_table, HEADS, scale=0.125, **copied)
    steps = 3 if cache_dtype is None else 12  # a card may round what it stores to the next level
    assert_as_exact(stream, attended.reshape(1, -1).float() @ weight.float().T, steps=steps)
    assert output.isnan().all() and not counters.any()
    if cache_dtype is None:
        assert all(torch.equal(*pair) for pair in zip(caches, copies, strict=True))


def test_what_leaves_no_parts_is_refused():
    integers = {"dtype": torch.int32, "device": DEVICE}
    plan = launch_plan(2, 1, 64)
    tensors = (
        torch.empty(2, 1, 64, device=DEVICE), torch.empty(2, 192, device=DEVICE),
        *(torch.empty(4, 1, 16, 64, device=DEVICE) for _ in range(2)), torch.zeros(2, 2, **integers),
        *(torch.ones(2, **integers) for _ in range(2)), torch.empty(plan.workspace_floats, device=DEVICE),
        torch.zeros(2, **integers),
    )  # fmt: skip
    with pytest.raises(ValueError, match="leave: wanted one row"):
        fused_decode_attention(*tensors, plan, NewTokens(torch.empty(8, 64, device=DEVICE)), scale=1.0, leave=True)
    partials = torch.empty(1 << 14, device=DEVICE)
    parts = replace(parts_of(partials, 4, dtype=torch.float32), query_heads=3)
    weight, out = torch.empty(8, 192, device=DEVICE), torch.empty(1, 8, device=DEVICE)
    with pytest.raises(ValueError, match="merges 3 heads"):
        linear_of_parts(parts, weight, out, workspace_for(torch.float32), residual=out)


def test_which_plans_fit():
    plan = LinearPlan("warps", 16, 64, 8)
    assert skinny_linear_warps.fits(plan, 3072) and not skinny_linear_warps.fits(plan, 3072 + 64)
    assert not skinny_linear_warps.fits(replace(plan, num_warps=2), 3072), "384 registers of W"
    assert AttentionParts.can_merge(16, 128, 8) and AttentionParts.can_merge(16, 128, 4)
    assert not AttentionParts.can_merge(9, 64, 2) and not AttentionParts.can_merge(16, 128, 1)


def test_plans_by_rule_fit_and_cover_the_usual_sizes():
    sizes = (576, 768, 896, 1024, 1536, 2048, 2304, 2560, 3072, 4096)
    for rows, outputs, inputs, silu in itertools.product((1, 16), sizes, sizes, (False, True)):
        plan = default_plan(rows, outputs, inputs, silu, by_warps=True)
        if plan.kernel == "warps":
            assert skinny_linear_warps.fits(plan, inputs), plan
        assert plan.kernel == "warps", (outputs, inputs)
    assert default_plan(17, 1024, 1024, False, by_warps=True) == LIBRARY
    assert default_plan(8, 28_672, 4096, True, by_warps=True) == LIBRARY
    assert default_plan(1, 1024, 1024, False).kernel == "matvec"


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
@pytest.mark.parametrize(("largest", "gain"), [(30_000, 4), (1e-3, 1e-3), (65_504, 1), (1e-6, 1)])
def test_float16_has_room_for_a_row_before_its_norm(rows, largest, gain, device, monkeypatch):
    """30,000 times 4 was infinity, and a millionth had a tenth of its digits."""
    monkeypatch.setattr(tuning, "takes_gluon", lambda _: True)
    x, weight, out, norm_weight, eps, _, _ = make_case(rows, 64, 256, torch.float16, "norm")
    x.mul_(largest / float(x.abs().max()))
    norm_weight.fill_(gain)
    skinny_linear(x, weight, out, workspace_for(torch.float16), norm_weight=norm_weight, eps=eps)
    assert_as_exact(out, skinny_linear_reference(x, weight, norm_weight=norm_weight, eps=eps), steps=3)


@pytest.mark.parametrize(("dtype", "is_apart"), [(torch.bfloat16, False), (torch.float16, True)])
def test_by_rule_float16_has_its_norms_apart(dtype, is_apart, monkeypatch):
    monkeypatch.setattr(tuning, "takes_gluon", lambda _: True)
    for has_norm in (True, False):
        sizes = (torch.device("cpu"), dtype, 4, 1024, 1024)
        plan = find_plan(*sizes, silu_mul=False, has_norm=has_norm)
        assert (plan.kernel, plan.norm_apart) == ("warps", has_norm and is_apart)


@pytest.mark.parametrize(
    ("norm_dtype", "largest", "is_apart"), [(torch.float16, 1e4, True), (torch.float32, 1.0, False)]
)
def test_a_norm_of_its_own_launch_suits_any_range_and_weight(norm_dtype, largest, is_apart, device):
    """10,000 times a weight of 30 is no float16, nor are pairs of float16 multiplied by float32."""
    x, weight, out, norm_weight, *others = make_case(3, 64, 256, torch.float16, "norm")
    x *= largest / x.abs().max()
    norm_weight = (30 * norm_weight).to(norm_dtype)
    case = (x, weight, out, norm_weight, *others)
    run_plan(replace(PLANS[2], norm_apart=is_apart), *case, workspace_for(torch.float16))
    assert_as_exact(out, reference(*case), steps=3)


def test_more_rows_or_registers_than_there_are_are_not_launched():
    case, workspace = make_case(17, 64, 256, torch.float16, "plain"), workspace_for(torch.float16)
    with pytest.raises(AssertionError, match="17 rows of 256 columns are not for"):
        run_plan(PLANS[2], *case, workspace)
    with pytest.raises(AssertionError, match="1 rows of 256 columns are not for"):
        run_plan(replace(PLANS[2], block_k=128), *make_case(1, 64, 256, torch.float16, "plain"), workspace)


@pytest.mark.gpu
def test_replay_equals_eager():
    case = make_case(3, 256, 256, torch.bfloat16, "norm_silu")
    workspace = workspace_for(torch.bfloat16)
    assert_replay_equals_eager(lambda: run_plan(PLANS[2], *case, workspace), case[2])
