"""The GPU runner gives transformers' greedy tokens, whatever the chunking, neighbours and unused memory."""

from random import Random

import pytest


def prompt(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 131) for _ in range(count)]


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_greedy_batch_equals_transformers(family, tiny_model, make_gpu_driver, fused_sizes, reference_tokens):
    reference, folder = tiny_model(family, **fused_sizes)
    driver = make_gpu_driver(folder)
    requests = [driver.add(prompt(length, seed=length)) for length in (1, 5, 17)]
    driver.run(requests, 4, chunk=7)
    for request in requests:
        ids = request.tokens[: request.prompt_count]
        assert request.output == reference_tokens(reference, ids, 4), f"prompt of {len(ids)}"
