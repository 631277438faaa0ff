"""Of the last layer of a step with chunks only what is used: K and V of all tokens, the rest of rows that sample."""

from dataclasses import replace

import pytest
import torch

from common.messages import SlotSampling
from kernels import prefill_attention, skinny_linear, tuning
from kernels.gemm import project_heads_reference
from kernels.tuning import LinearPlan
from tests.worker_proc.cuda.test_runner import devices, interpreted, prompt
from worker_proc.cuda import buckets, fused_forward
from worker_proc.cuda.buckets import CHUNK, MIXED, Bucket
from worker_proc.cuda.fused_forward import FusedForward

WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
"""On the last of two layers only."""

ERRORS = {
    ("cpu", torch.float32): 2**-18, ("cuda", torch.float32): 2**-9,
    ("cpu", torch.float16): 2**-9, ("cuda", torch.float16): 2**-9,
}  # fmt: skip
"""Of a line of logits, relative: 32 roundings of float32, of TF32 on a GPU, and two of float16."""


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """Passes of few tokens may end in rows too; the buckets of those that did."""
    monkeypatch.setattr(buckets, "FEWEST_ENDING_TOKENS", 1)
    found, end = [], FusedForward._end_in_rows
    monkeypatch.setattr(FusedForward, "_end_in_rows", lambda pass_, *a: found.append(a[1]) or end(pass_, *a))
    return found


def check_against_whole(monkeypatch, error: float) -> None:
    """Have every pass that ends in rows followed by a whole one of the same step, and compare them."""
    run = FusedForward.run

    def run_both(pass_, bucket, inputs, cache, slots, counts):
        logits = run(pass_, bucket, inputs, cache, slots, counts)
        if not bucket.ends_in_rows:
            return logits
        ended, stored = logits.clone(), [tensor.float() for tensor in cache.tensors()]
        whole = run(pass_, bucket._replace(every_token=True), inputs, cache, slots, counts)
        sampling = inputs.sample_rows >= 0
        assert 0 < sampling.sum() < int(counts[0]) < bucket.rows, "rows that sample, rows that do not, and padding"
        difference = (ended - whole)[sampling].norm(dim=1) / whole[sampling].norm(dim=1)
        assert difference.max() < error and ended[: counts[0]].isfinite().all()
        for before, after in zip(stored, cache.tensors(), strict=True):
            torch.testing.assert_close(after.float(), before, rtol=0, atol=0, equal_nan=True)
        return ended

    monkeypatch.setattr(FusedForward, "run", run_both)


@devices
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("Llama", {}, {}),
        ("Qwen2", WINDOW, {}),
        ("Qwen3", {}, {"kv_cache_dtype": "int8"}),
        ("Qwen3", {}, {"kv_cache_dtype": "fp8"}),
        ("Llama", {"head_dim": 80}, {"dtype": torch.float16}),
    ],
    ids=str,
)
def test_rows_that_sample_get_the_logits_of_a_whole_pass(
    device, family, sizes, options, ended, library_products, quick_stores, tiny_model, make_gpu_driver, fused_sizes,
    monkeypatch,
):  # fmt: skip
    """And K and V of all tokens are the same, also those of rows that do not sample."""
    _, folder = tiny_model(family, **fused_sizes | sizes)
    check_against_whole(monkeypatch, ERRORS[device, options.get("dtype", torch.float32)])
    driver = make_gpu_driver(folder, device, padded=True, eager=True, **options)
    long, short = driver.add(prompt(22)), driver.add(prompt(6, seed=1))
    driver.step([(long, 9), (short, 6)])
    driver.step([(short, 1), (long, 12)])
    assert ended == [Bucket(CHUNK, 4, 16), Bucket(MIXED, 4, 16)]


@interpreted
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("fresh", [False, True])
def test_heads_that_the_product_stores_are_gathered_too(
    device, fresh, ended, library_products, quick_stores, tiny_model, make_gpu_driver, fused_sizes, monkeypatch
):
    """kernels/gemm.py's product of many tokens, here the reference's; also where queries lie between keys and values,
    since attention wants these where the product is. Here it is made to read the cache all the same."""

    def project_heads(x, weight, heads, store, token_count):
        heads.fill_(float("nan"))
        heads[:, :2] = project_heads_reference(x, weight, 2, store)

    attend, plan_of = prefill_attention.prefill_attention, FusedForward._chunk_plan
    monkeypatch.setattr(
        prefill_attention, "prefill_attention",
        lambda *a, **o: attend(*a[:-1], replace(a[-1], fresh=False), **o | {"fresh": None}),
    )  # fmt: skip
    monkeypatch.setattr(FusedForward, "_chunk_plan", lambda *a: replace(plan_of(*a), fresh=fresh))
    monkeypatch.setattr(fused_forward, "heads_plan", lambda *_: LinearPlan("gemm"))
    monkeypatch.setattr(fused_forward, "project_heads", project_heads)
    _, folder = tiny_model("Qwen3", **fused_sizes)
    check_against_whole(monkeypatch, ERRORS[device, torch.float32])
    driver = make_gpu_driver(folder, device, padded=True)
    driver.step([(driver.add(prompt(22)), 9), (driver.add(prompt(6, seed=1)), 6)])
    assert ended == [Bucket(CHUNK, 4, 16)] and driver.forward._qkv[:15].isnan().any() == fresh


@devices
def test_rows_take_the_products_of_a_step_that_decodes_them(
    device, ended, quick_stores, tiny_model, make_gpu_driver, fused_sizes, monkeypatch
):
    """Where these leave parts, which the card's table says by the number of rows."""
    plan = LinearPlan("small_m", block_n=64, block_k=32, num_stages=2, split_k=2)
    rows_in_parts, leave = [], skinny_linear.linear_parts
    monkeypatch.setattr(tuning, "measured_plan", lambda *_: tuning.LIBRARY)
    monkeypatch.setattr(
        skinny_linear, "measured_plan",
        lambda device, dtype, rows, key: plan if rows <= 4 and key.endswith("_parts") else None,
    )  # fmt: skip
    monkeypatch.setattr(fused_forward, "linear_parts", lambda x, *a: rows_in_parts.append(len(x)) or leave(x, *a))
    _, folder = tiny_model("Llama", **fused_sizes)
    check_against_whole(monkeypatch, ERRORS[device, torch.float32])
    driver = make_gpu_driver(folder, device, padded=True, eager=True)
    driver.step([(driver.add(prompt(22)), 9), (driver.add(prompt(6, seed=1)), 6)])
    assert ended == [Bucket(CHUNK, 4, 16)] and rows_in_parts == [4, 4], "the output and the down product"


@devices
def test_a_rehearsal_launches_what_the_step_launches(
    device, ended, library_products, quick_stores, tiny_model, make_gpu_driver, fused_sizes, monkeypatch
):
    """Attention of prompts on either kind of layer, of decoding on the last; and what a step with every token launches,
    here prompts' attention on the last layer, and a head with a norm."""
    launches, product = [], fused_forward.skinny_linear
    monkeypatch.setattr(fused_forward, "parts_plan", lambda rows, _: tuning.LIBRARY if rows == 2 else None)
    monkeypatch.setattr(
        fused_forward, "skinny_linear",
        lambda x, weight, *a, **o: launches.append(("product", len(x), *weight.shape, "norm_weight" in o))
        or product(x, weight, *a, **o),
    )  # fmt: skip
    for name in ("decode", "prefill"):
        module, function = getattr(fused_forward, name), f"{name}_attention"
        monkeypatch.setattr(module, function, lambda *_, name=name, **o: launches.append((name, o["sliding_window"])))
    _, folder = tiny_model("Qwen3", **fused_sizes | {"num_hidden_layers": 4} | WINDOW | {"max_window_layers": 3})
    program = make_gpu_driver(folder, device, eager=True).runner.program
    found = []
    with torch.inference_mode():
        for bucket in (Bucket(CHUNK, 2, 16), Bucket(CHUNK, 2, 16, every_token=True)):
            for act in (program.rehearse, program.run):
                act(bucket)
                found.append(launches[:])
                launches.clear()
    rehearsed, ran, rehearsed_whole, ran_whole = map(set, found)
    assert {launch for launch in ran if "product" not in launch} == {("prefill", 0), ("decode", 5)}
    assert {launch for launch in ran_whole if "product" not in launch} == {("prefill", 0), ("prefill", 5)}
    assert {rows[-1] for rows in ran ^ ran_whole if rows[:3] == ("product", 2, 131)} == {False, True}
    assert ran | ran_whole == rehearsed and ran_whole == rehearsed_whole


@devices
def test_prompts_log_probabilities_and_embeddings_are_of_every_token(
    device, ended, library_products, quick_stores, tiny_model, make_gpu_driver, make_driver, fused_sizes,
    reference_embedding,
):  # fmt: skip
    """In steps beside rows that only sample. The log probabilities of what is sampled need no other token."""
    reference, folder = tiny_model("Qwen3", **fused_sizes)
    found = []
    for driver in (make_gpu_driver(folder, device, padded=True), make_driver(folder)):
        asking, likely, pooled = (
            driver.add(prompt(7, seed=seed), SlotSampling(temperature=0.0, **asked))
            for seed, asked in enumerate(({"prompt_logprobs": 0}, {"logprobs": 0}, {"pooling": "mean"}))
        )
        plain = driver.add(prompt(9, seed=3))
        driver.step([(plain, 4), (asking, 7)])
        driver.step([(plain, 4), (pooled, 7)])
        assert not ended
        driver.step([(plain, 1), (likely, 7)])
        entries = [*asking.prompt_logprobs, *likely.logprobs]
        found.append(torch.tensor([entry.logprob for entry in entries]))
        tokens = [request.output for request in (asking, likely, plain)]
        error = 2e-6 if device == "cpu" else 1e-3
        expected = reference_embedding(reference, prompt(7, seed=2), "mean")
        torch.testing.assert_close(torch.tensor(pooled.embedding), expected, rtol=0, atol=error)
        if len(found) == 1:
            assert set(ended) == {Bucket(MIXED, 4, 16)}  # on a GPU rehearsed, too
            ended.clear()
            on_gpu = tokens
    assert tokens == on_gpu and len(found[0]) == 7
    torch.testing.assert_close(*found, rtol=0, atol=1e-4 if device == "cpu" else 1e-2)
