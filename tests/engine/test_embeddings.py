"""Embeddings through the real scheduler and runner: the same under every condition, and nobody is disturbed."""

from random import Random

import numpy as np
import pytest
import torch
import transformers

from common.sampling_params import SamplingParams
from tests.support import tiny
from tests.support.memory_engine import EMBEDDING, MemoryEngine
from tests.support.shared_prompts import shared_prompts
from worker_proc.loader import load_model

TOLERANCE = 2e-6
WAYS = {
    "one by one": {"prefix_cache": "off", "max_num_seqs": 1},
    "hash": {"prefix_cache": "hash"},
    "radix": {"prefix_cache": "radix"},
    "chunked": {"prefix_cache": "radix", "max_num_batched_tokens": 5},
    "no run-ahead": {"run_ahead": 0, "max_num_batched_tokens": 7},
    "pressure": {"block_count": 45},
    "swap": {"block_count": 45, "host_block_count": 100, "preemption": "swap"},
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A tiny model, prompts that share starts, and transformers' hidden states of each."""
    folder = tiny.save_model(tmp_path_factory.mktemp("tiny") / "m")
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = shared_prompts(model.config.vocab_size)
    with torch.no_grad():
        states = [reference.model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    return model, prompts, states


def expected(states: list[torch.Tensor], pooling: str) -> list[torch.Tensor]:
    pooled = [{"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling] for hidden in states]
    return [torch.nn.functional.normalize(vector, dim=0) for vector in pooled]


def check(found, states: list[torch.Tensor], pooling: str) -> None:
    for index, (ours, theirs) in enumerate(zip(found, expected(states, pooling), strict=True)):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, err_msg=f"{pooling} of prompt {index}")


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize("way", WAYS)
def test_embeddings_are_the_same_under_every_condition(case, way, pooling):
    """Cold, with everything in the prefix cache, and beside requests that generate and take the blocks away."""
    model, prompts, states = case
    engine = MemoryEngine(model, **WAYS[way])
    check(engine.embed(prompts, pooling), states, pooling)
    check(engine.embed(prompts, pooling), states, pooling)
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    generating = [engine.add(prompt, greedy) for prompt in prompts]
    embedding = [engine.add(prompt, EMBEDDING, pooling=pooling) for prompt in prompts]
    engine.run()
    check([engine.samples[request_id, 0].embedding for request_id in embedding], states, pooling)
    alone = MemoryEngine(model, prefix_cache="off").generate(prompts, 20)
    assert [engine.samples[request_id, 0].token_ids for request_id in generating] == alone
    assert (engine.core.stats().preemptions > 0) == ("block_count" in WAYS[way])


def test_a_mean_reads_nothing_from_the_cache_and_the_last_state_does(case):
    model, prompts, _ = case
    engine = MemoryEngine(model)
    engine.embed([prompts[-1]], "mean")
    engine.embed([prompts[-1]], "mean")
    engine.embed([prompts[-1]], "last")
    cached = [sample.cached_count for sample in engine.samples.values()]
    assert cached[:2] == [0, 0]
    assert cached[2] >= len(prompts[-1]) - 1 - engine.limits.block_size, "what a mean has computed is there for others"


def test_what_is_sampled_beside_an_embedding_is_counted_nowhere(case):
    model, prompts, _ = case
    engine = MemoryEngine(model)
    engine.embed(prompts, "mean")
    assert engine.core.stats().output_tokens == 0
    engine.generate(prompts[:2], 3)
    assert engine.core.stats().output_tokens == 6


@pytest.mark.parametrize("seed", range(5))
def test_aborts_in_any_state_leave_nothing_behind(case, seed):
    model, prompts, states = case
    choose = Random(seed)
    engine = MemoryEngine(model, max_num_batched_tokens=8, block_count=40)
    ids = []
    for _ in range(30):
        at = choose.randrange(len(prompts))
        ids.append((at, engine.add(prompts[at], EMBEDDING, pooling=choose.choice(["mean", "last", "cls"]))))
        for _ in range(choose.randrange(4)):
            engine.step()
        if choose.random() < 0.4:
            engine.abort(choose.choice(ids)[1])
    engine.run()  # and recount
    check(engine.embed(prompts, "mean"), states, "mean")


def test_a_prompt_that_can_never_fit_is_refused_with_the_number(case):
    model, _, _ = case
    engine = MemoryEngine(model, block_count=4)
    long = engine.add(list(range(20)), EMBEDDING, pooling="mean")
    [short] = engine.embed([[5, 6]], "mean")
    assert "holds 16" in engine.failures[long].message
    assert short is not None


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("step_count", range(0, 12, 2))
def test_an_embedding_outlives_the_scheduler_and_the_worker(case, step_count, pooling):
    """Both are lost in the middle of prompts; what is computed anew is the same."""
    model, prompts, states = case
    engine = MemoryEngine(model, max_num_batched_tokens=16)
    ids = [engine.add(prompt, EMBEDDING, pooling=pooling) for prompt in prompts]
    for _ in range(step_count):
        engine.step()
    engine.restart()
    engine.run()
    check([engine.samples[request_id, 0].embedding for request_id in ids], states, pooling)
