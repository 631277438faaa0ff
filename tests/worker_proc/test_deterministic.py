"""`--deterministic`: a request's tokens and log probabilities have the same bits whatever happens around it.

Fault F7, claimed to the last bit: alone, beside others, in chunks of any size, after a preemption that computes its
tokens again through prefill, and with a part of them from the prefix cache. The GPU's pass runs in Triton's interpreter
where there is no GPU; the CPU's runner everywhere.
"""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from common.config import StepLimits
from common.messages import SlotSampling
from tests.support.ordered_product import use_ordered_products
from tests.support.poison import poison
from worker_proc.kv_cache import KVCache, cache_specs
from worker_proc.loader import load_model
from worker_proc.runner import CpuRunner

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU in this process")
REAL_SIZES = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "num_hidden_layers": 2, "max_position_embeddings": 2048, "initializer_range": 0.05,
}  # fmt: skip
TINY_SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 1,
}
GREEDY = SlotSampling(temperature=0.0, logprobs=3, prompt_logprobs=2)
SAMPLED = SlotSampling(temperature=0.9, top_p=0.9, seed=7, logprobs=1)


def prompt(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 131) for _ in range(count)]


SMALL = {"cpu": (43, 12, (1, 15, 17, 16, 5), (9, 30, 4)), "kernels": (6, 2, (4,), (3,))}
"""Prompt length, output length, chunk sizes, the neighbours' prompt lengths."""


class Case:
    """A runner's driver, a prompt, and how much to generate.

    Attributes:
        chunks: sizes that the prompt is cut into.
        neighbours: lengths of the prompts beside it.
    """

    def __init__(self, make, count, output_count, chunks, neighbours) -> None:
        self.make, self.ids, self.output_count = make, prompt(count), output_count
        self.chunks, self.neighbours = chunks, neighbours

    def outcome(self, request) -> tuple:
        """Everything that the client sees, compared by bits."""
        entries = [*request.logprobs, *request.prompt_logprobs]
        return request.output, [(e.logprob, e.rank, list(e.top_token_ids), list(e.top_logprobs)) for e in entries]

    def alone(self, sampling: SlotSampling, chunk: int = 1 << 20) -> tuple:
        driver = self.make()
        request = driver.add(self.ids, sampling)
        driver.run([request], self.output_count, chunk)
        return self.outcome(request)

    def beside_others(self, sampling: SlotSampling) -> tuple:
        """Others start before it, run beside it with their own sampling, and stop before it."""
        driver = self.make()
        others = [driver.add(prompt(length, seed=length), SlotSampling(temperature=0.7, seed=length))
                  for length in self.neighbours]  # fmt: skip
        request = driver.add(self.ids, sampling)
        driver.run(others, 1, chunk=self.chunks[-1])
        driver.run([*others, request], self.output_count - 1, chunk=self.chunks[0])
        driver.run([request], self.output_count)
        return self.outcome(request)

    def preempted(self, sampling: SlotSampling) -> tuple:
        """Half of the output is computed by decoding, then all of it again by prefill, in another slot."""
        driver = self.make()
        first = driver.add(self.ids, sampling)
        driver.run([first], self.output_count // 2)
        driver.remove(first)
        second = driver.add(first.tokens, sampling, prompt_count=len(self.ids))
        driver.run([second], self.output_count, chunk=self.chunks[0])
        tokens, entries = self.outcome(second)
        assert tokens[: len(first.output)] == first.output
        return tokens, self.outcome(first)[1][: len(first.output)] + entries


def make_runner(kind: str, model, cache: KVCache, limits: StepLimits, max_len: int):
    """The runner of `--deterministic` on a CPU, or the GPU's."""
    vocabulary = model.config.vocab_size
    if kind == "cpu":
        return CpuRunner(model, cache, limits, max_len, vocabulary, deterministic=True)
    from worker_proc.cuda.fixed_order_forward import FixedOrderForward
    from worker_proc.cuda.runner import CudaRunner
    from worker_proc.cuda.slots import DeviceSlots

    if kind == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    slots = DeviceSlots(rows, max_len, cache.block_size, vocabulary, cache.key_caches[0].device)
    forward = FixedOrderForward(model, max_rows=rows, max_tokens=tokens, max_positions=max_len + 16)
    return CudaRunner(forward, cache, slots, limits, vocabulary, eager=False)


@pytest.fixture
def case(request, runner, tiny_model, plan_driver, monkeypatch):
    """A case at the runner's size: real shapes in bfloat16 on a GPU, tiny ones in float32 elsewhere."""
    kind, _, is_split = runner.partition("-")
    is_real = kind == "cuda"
    device, dtype = torch.device("cuda" if is_real else "cpu"), torch.bfloat16 if is_real else torch.float32
    if kind == "kernels":
        use_ordered_products(monkeypatch)
    monkeypatch.setattr("worker_proc.cuda.fixed_order_forward.SPLIT_CONTEXTS", bool(is_split))
    _, folder = tiny_model("Qwen3", **(REAL_SIZES if is_real else TINY_SIZES))
    model = load_model(folder, device=device, dtype=dtype)
    slot_count, block_count, block_size, tokens, max_len = (
        (40, 1600, 16, 2048, 1200) if is_real else (5, 80, 4, 128, 96)
    )

    def make():
        cache = KVCache(
            cache_specs(model.config, dtype, request.param), block_size=block_size, block_count=block_count,
            host_block_count=0, device=device,
        )  # fmt: skip
        poison(cache)
        made = make_runner(kind, model, cache, StepLimits(slot_count, tokens), max_len)
        return plan_driver(lambda plan: made.execute(plan).result(), slot_count, block_count, block_size)

    sizes = (700, 40, (15, 333, 17, 64), tuple(range(5, 800, 37))) if is_real else SMALL[kind]
    return Case(make, *sizes)


@pytest.mark.parametrize(
    ("runner", "case", "sampling"),
    [
        *(("cpu", kind, how) for kind in ("auto", "int8") for how in (GREEDY, SAMPLED)),
        pytest.param("kernels", "auto", GREEDY, marks=interpreted),
        pytest.param("kernels-split", "auto", GREEDY, marks=interpreted),
        pytest.param("cuda", "auto", GREEDY, marks=pytest.mark.gpu),
        pytest.param("cuda-split", "auto", SAMPLED, marks=pytest.mark.gpu),
        pytest.param("cuda", "int8", GREEDY, marks=pytest.mark.gpu),
        pytest.param("cuda-split", "int8", GREEDY, marks=pytest.mark.gpu),
    ],
    indirect=["case"],
)
def test_nothing_around_a_request_changes_a_bit(case, sampling):
    want = case.alone(sampling)
    for chunk in case.chunks:
        assert case.alone(sampling, chunk) == want, f"in chunks of {chunk}"
    assert case.beside_others(sampling) == want, "beside others"
    plain = replace(sampling, prompt_logprobs=-1)  # a request that asks for them computes its whole prompt again
    assert case.preempted(plain) == case.alone(plain), "after a preemption"


@pytest.mark.parametrize(
    ("runner", "case"),
    [
        ("cpu", "auto"),
        pytest.param("kernels", "auto", marks=interpreted),
        pytest.param("cuda", "auto", marks=pytest.mark.gpu),
    ],
    indirect=["case"],
)
@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_nothing_around_a_prompt_changes_a_bit_of_its_embedding(case, pooling):
    sampling = SlotSampling(temperature=0.0, pooling=pooling)

    def embedding(chunk: int, *neighbours: int) -> bytes:
        driver = case.make()
        others = [driver.add(prompt(length, seed=length), sampling) for length in neighbours]
        request = driver.add(case.ids, sampling)
        driver.run([*others, request], 1, chunk)
        return np.asarray(request.embedding, np.float32).tobytes()

    want = embedding(1 << 20)
    for chunk in case.chunks:
        assert embedding(chunk) == want, f"in chunks of {chunk}"
    assert embedding(case.chunks[-1], 3, 7, len(case.ids)) == want, "beside others, of which one ends in its step"
