"""The runner gives transformers' greedy tokens, whatever the chunking, the neighbours and the state of unused memory.

Most run twice: on the CPU's runner, and on the GPU's in Triton's interpreter.
"""

from array import array
from random import Random

import numpy as np
import pytest
import torch

from common.messages import NewSlots, SlotInit, SlotSampling, StepPlan
from worker_proc.cuda.attention import cuda_attention
from worker_proc.cuda.plain_forward import PlainForward

BLOCK = 4
both_runners = pytest.mark.parametrize("kernels", [False, True], ids=["cpu", "kernels"])


def prompt(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 131) for _ in range(count)]


@pytest.mark.parametrize("chunk", [1, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_greedy_equals_transformers_for_every_chunk_size(chunk, tiny_model, make_driver, reference_tokens):
    reference, folder = tiny_model("Llama")
    driver = make_driver(folder)
    request = driver.add(prompt(19))
    driver.run([request], 64, chunk)
    assert request.output == reference_tokens(reference, prompt(19), 64)


@both_runners
def test_batch_of_unequal_requests_equals_transformers(kernels, tiny_model, make_driver, reference_tokens):
    reference, folder = tiny_model("Qwen3")
    driver = make_driver(folder, kernels=kernels)
    requests = [driver.add(prompt(length, seed=length)) for length in (1, 3, 4, 5, 16, 31)]
    count = 6 if kernels else 24
    driver.run(requests, count, chunk=7)
    for request in requests:
        ids = request.tokens[: request.prompt_count]
        assert request.output == reference_tokens(reference, ids, count), f"prompt of {len(ids)}"


SAMPLED = [
    SlotSampling(temperature=0.9, seed=5),
    SlotSampling(temperature=0.0, repetition_penalty=1.7, logprobs=3),
    SlotSampling(temperature=1.3, top_k=7, top_p=0.8, seed=2**63 + 11, frequency_penalty=0.6),
    SlotSampling(temperature=0.7, min_p=0.05, presence_penalty=0.4, seed=9, logprobs=0),
    SlotSampling(
        temperature=1.0, seed=3, bias_token_ids=array("i", [7, 8]), bias_values=array("f", [5.0, -50.0]),
        bad_token_ids=((7,), (20, 21), tuple(range(3, 13))), end_token_ids=(2, 30), min_output_count=4,
    ),
    SlotSampling(temperature=1.0, seed=4, allowed_token_ids=array("i", range(40, 60))),
    SlotSampling(temperature=0.0, masked=True, logprobs=2),
    SlotSampling(temperature=1.2, seed=8, masked=True, top_p=0.9, presence_penalty=0.5),
]  # fmt: skip


def test_the_kernels_sample_what_the_cpu_samples(tiny_model, make_driver):
    _, folder = tiny_model("Llama")
    outputs = []
    for kernels in (False, True):
        driver = make_driver(folder, kernels=kernels, vocab=120)
        requests = [driver.add(prompt(4 + index, seed=index), sampling) for index, sampling in enumerate(SAMPLED)]
        driver.run(requests, 6, chunk=8)
        outputs.append(requests)
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.output == theirs.output, ours.sampling
        assert max(ours.output) < 120
        for cpu, kernel in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (cpu.rank, cpu.top_token_ids) == (kernel.rank, kernel.top_token_ids)
            np.testing.assert_allclose(kernel.logprob, cpu.logprob, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(kernel.top_logprobs, cpu.top_logprobs, rtol=1e-4, atol=1e-4)


@both_runners
def test_masked_rows_sample_what_each_step_allows(kernels, tiny_model, make_driver, masked_ids):
    _, folder = tiny_model("Llama")
    driver = make_driver(folder, kernels=kernels)
    free = driver.add(prompt(5))
    masked = [driver.add(prompt(3 + i), SlotSampling(temperature=1.0, seed=i, masked=True)) for i in range(3)]
    driver.run([free, *masked], 5, chunk=2)
    for request in masked:
        for place in range(request.prompt_count, len(request.tokens)):
            assert request.tokens[place] in masked_ids(place)
    alone = make_driver(folder)
    other = alone.add(prompt(5))
    alone.run([other], 5)
    assert free.output == other.output, "a row without a mask is not touched"


@pytest.mark.parametrize(("depth", "kernels"), [(1, False), (2, False), (2, True)])
def test_run_ahead_gives_the_same_tokens_with_penalties_and_bad_words(depth, kernels, tiny_model, make_driver):
    """FAULTS B10: no placeholder may reach penalties or bad words."""
    _, folder = tiny_model("Llama")
    results = []
    for ahead in (0, depth):
        driver = make_driver(folder, kernels=kernels)
        requests = [driver.add(prompt(5, seed=index), sampling) for index, sampling in enumerate(SAMPLED)]
        driver.run_ahead(requests, 4 if kernels else 7, ahead)
        results.append([request.output for request in requests])
    assert results[0] == results[1]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_the_plain_pass_reads_an_8_bit_cache_as_the_cpu_does(kv_cache_dtype, tiny_model, make_driver, monkeypatch):
    """Models that the fused pass does not cover, here for a bias, with the GPU's attention kernels."""
    _, folder = tiny_model("Llama", num_hidden_layers=1, head_dim=64, attention_bias=True)
    outputs = []
    for kernels in (False, True):
        driver = make_driver(folder, kernels=kernels, kv_cache_dtype=kv_cache_dtype)
        if kernels:
            assert isinstance(driver.runner.program._forward, PlainForward)
            monkeypatch.setattr("worker_proc.attention.cpu_attention", cuda_attention)
        requests = [driver.add(prompt(length, seed=length)) for length in (3, 9)]
        driver.run(requests, 3, chunk=5)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]


@both_runners
def test_prompt_logprobs_equal_transformers_over_chunks(kernels, tiny_model, make_driver):
    reference, folder = tiny_model("Llama")
    driver = make_driver(folder, kernels=kernels)
    sampling = SlotSampling(temperature=0.0, prompt_logprobs=2, logprobs=2)
    request, other = driver.add(prompt(11), sampling), driver.add(prompt(9, seed=1))
    driver.run([request, other], 3, chunk=4)
    with torch.no_grad():
        expected = reference(torch.tensor([request.tokens])).logits[0].log_softmax(-1)
    assert [entry.row_index for entry in request.prompt_logprobs] == list(range(1, 11))
    assert not other.prompt_logprobs
    for place, entry in enumerate(request.prompt_logprobs + request.logprobs, 1):
        row, token = expected[place - 1], request.tokens[place]
        assert entry.rank == 1 + int((row > row[token]).sum())
        assert list(entry.top_token_ids) == row.topk(2).indices.tolist()
        np.testing.assert_allclose(entry.logprob, row[token].item(), rtol=2e-4)
        np.testing.assert_allclose(entry.top_logprobs, row.topk(2).values.tolist(), rtol=2e-4)


@both_runners
def test_prompt_logprobs_leave_out_ids_that_the_tokenizer_lacks(kernels, tiny_model, make_driver):
    reference, folder = tiny_model("Llama")
    driver = make_driver(folder, kernels=kernels, vocab=90)
    tokens = [token % 90 for token in prompt(8)]
    request = driver.add(tokens, SlotSampling(temperature=0.0, prompt_logprobs=131))
    driver.run([request], 1, chunk=5)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0, :, :90].log_softmax(-1)
    assert len(request.prompt_logprobs) == 7
    for place, entry in enumerate(request.prompt_logprobs, 1):
        np.testing.assert_allclose(entry.logprob, expected[place - 1, tokens[place]].item(), rtol=2e-4)
        assert sorted(entry.top_token_ids[:90]) == list(range(90))
        assert entry.rank <= 90


def test_padding_rows_and_poisoned_free_blocks_change_nothing(tiny_model, make_driver, monkeypatch):
    """FAULTS F1, F2 and check 4: the driver's cache is NaN wherever nothing was written."""
    _, folder = tiny_model("Qwen3")
    plain, padded = make_driver(folder), make_driver(folder)
    inputs = padded.runner._inputs
    bucket = type(inputs).bucket
    monkeypatch.setattr(padded.runner, "_inputs", Padded(inputs, bucket))
    outputs = []
    for driver in (plain, padded):
        requests = [driver.add(prompt(length, seed=length)) for length in (5, 9, 2)]
        driver.run(requests, 12, chunk=4)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]
    written = sum(
        -(-(len(tokens) - 1) // BLOCK) for tokens in (requests[0].tokens, requests[1].tokens, requests[2].tokens)
    )
    touched = sum(bool(block.isfinite().any()) for block in padded.cache.key_caches[0])
    assert touched == written


class Padded:
    """Step inputs that give every step two rows and five tokens of padding."""

    def __init__(self, inputs, bucket) -> None:
        self._inputs, self._bucket = inputs, bucket

    def bucket(self, row_count: int, token_count: int):
        return self._bucket(self._inputs, row_count + 2, token_count + 5)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy, in Triton's interpreter
@both_runners
def test_logits_that_are_not_numbers_fail_their_request_alone(kernels, tiny_model, make_driver):
    _, folder = tiny_model("Llama")
    driver = make_driver(folder, kernels=kernels)
    good, bad = driver.add(prompt(6)), driver.add(prompt(6, seed=1), SlotSampling(temperature=0.8, logprobs=1))
    driver.run([good, bad], 2)
    for cache in driver.cache.value_caches:
        cache[bad.blocks[0]] = float("nan")
    driver.step([(good, 1), (bad, 1)])
    assert bad.output[-1] == -1
    assert -9999 <= bad.logprobs[-1].logprob <= 0
    driver.step([(good, 1), (bad, 1)])
    alone = make_driver(folder)
    again = alone.add(prompt(6))
    alone.run([again], 4)
    assert good.output == again.output


@both_runners
@pytest.mark.parametrize("way", ["copy", "swap"])
def test_a_request_goes_on_from_moved_blocks(way, kernels, tiny_model, make_driver):
    _, folder = tiny_model("Llama")
    driver = make_driver(folder, kernels=kernels)
    request = driver.add(prompt(6))
    driver.run([request], 8)
    expected, known = list(request.tokens), 10
    held = -(-(known - 1) // BLOCK)
    old, new, host = request.blocks[:held], [90, 91, 92][:held], [0, 1, 2][:held]
    pairs = {
        "copy": [{"copy_block_ids": flat(old, new)}],
        "swap": [{"swap_out_block_ids": flat(old, host)}, {"swap_in_block_ids": flat(host, new)}],
    }[way]
    init = SlotInit(
        slot=request.slot, token_ids=array("i", expected[:known]), prompt_count=6, computed_count=known - 1,
        block_ids=array("i", new), sampling=request.sampling,
    )  # fmt: skip
    plans = [StepPlan(step_id=100 + index, **moves) for index, moves in enumerate(pairs)]
    chunk = {
        "chunk_slots": array("H", [request.slot]), "chunk_token_counts": array("i", [1]),
        "chunk_samples": array("B", [1]), "chunk_block_counts": array("i", [0]),
    }  # fmt: skip
    resumed = StepPlan(
        step_id=110, new_slots=NewSlots.of(init), cleared_slots=array("H", [request.slot]), **pairs[-1], **chunk
    )
    for plan in plans[:-1]:
        assert not driver._execute(plan).token_ids
    for cache in driver.cache.tensors():
        cache[new] = float("nan")
    assert list(driver._execute(resumed).token_ids) == [expected[known]]


@both_runners
@pytest.mark.parametrize(("block_size", "max_model_len", "tokens"), [(1, 1, 1), (16, 1, 256), (4, 200, 2), (16, 8, 1)])
def test_the_first_steps_fit_the_smallest_limits(block_size, max_model_len, tokens, kernels, tiny_model, make_driver):
    _, folder = tiny_model("Llama")
    limits = {"slot_count": 1, "block_count": 1, "block_size": block_size, "max_model_len": max_model_len}
    runner = make_driver(folder, token_limit=tokens, kernels=kernels, **limits).runner
    runner.warm_up()
    assert runner.mirror.sampling == [None]


def flat(first: list[int], second: list[int]) -> "array[int]":
    return array("i", [number for pair in zip(first, second, strict=True) for number in pair])
