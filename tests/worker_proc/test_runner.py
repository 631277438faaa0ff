"""The runner gives transformers' greedy tokens, whatever the chunking, the neighbours and the state of unused memory."""

from random import Random

import pytest

BLOCK = 4


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


def test_batch_of_unequal_requests_equals_transformers(tiny_model, make_driver, reference_tokens):
    reference, folder = tiny_model("Qwen3")
    driver = make_driver(folder)
    requests = [driver.add(prompt(length, seed=length)) for length in (1, 3, 4, 5, 16, 31)]
    driver.run(requests, 24, chunk=7)
    for request in requests:
        ids = request.tokens[: request.prompt_count]
        assert request.output == reference_tokens(reference, ids, 24), f"prompt of {len(ids)}"
