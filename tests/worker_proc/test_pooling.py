"""Embeddings equal the pooled hidden states of transformers, whatever the chunks and neighbours, on both runners."""

from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.messages import SlotSampling
from worker_proc.pooling import Pooler
from worker_proc.step_inputs import PooledRows

both_runners = pytest.mark.parametrize("kernels", [False, True], ids=["cpu", "kernels"])
MEAN, LAST, FIRST = (SlotSampling(temperature=0.0, pooling=pooling) for pooling in ("mean", "last", "cls"))


def prompt(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 131) for _ in range(count)]


@both_runners
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 1000])
def test_embeddings_equal_transformers_for_every_chunk_size(
    chunk, kernels, tiny_model, make_driver, reference_embedding
):
    reference, folder = tiny_model("Llama")
    driver = make_driver(folder, kernels=kernels, slot_count=12)
    lengths = (1, 4, 11) if kernels else (1, 4, 19, 33)
    requests = [driver.add(prompt(n, seed=n), sampling) for n in lengths for sampling in (MEAN, LAST, FIRST)]
    driver.run(requests, 1, chunk)
    for request in requests:
        ids, pooling = request.tokens[: request.prompt_count], request.sampling.pooling
        expected = reference_embedding(reference, ids, pooling)
        np.testing.assert_allclose(request.embedding, expected, atol=2e-6, err_msg=f"{pooling} of {len(ids)} tokens")


@pytest.mark.parametrize("exact", [False, True])
def test_a_large_chunk_is_added_up_in_parts(exact, monkeypatch):
    monkeypatch.setattr("worker_proc.pooling.SUM_TOKENS", 4)
    hidden = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    pooler = Pooler(lambda first, count: hidden[first : first + count], exact=exact)
    embeddings = pooler.pool([PooledRows(0, first_token=1, count=10, is_last=True, pooling="mean")])
    np.testing.assert_allclose(embeddings.vectors[0], F.normalize(hidden[1:11].sum(0), dim=0), atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_each_embedding_is_normed_by_itself(pooling, monkeypatch):
    """However many end in one step: the order in which a GPU adds up depends on how many rows it is given."""
    shapes, normalize = [], F.normalize
    monkeypatch.setattr(F, "normalize", lambda x, **options: shapes.append(tuple(x.shape)) or normalize(x, **options))
    hidden = torch.arange(1.0, 25.0).view(6, 4)
    pooler = Pooler(lambda first, count: hidden[first : first + count], exact=True)
    embeddings = pooler.pool([PooledRows(slot, 2 * slot, 2, True, pooling) for slot in range(3)])
    assert shapes == [(4,)] * 3
    assert np.linalg.norm(embeddings.vectors, axis=1) == pytest.approx(np.ones(3))


@pytest.mark.parametrize(("pooling", "wanted"), [("mean", [4.0, 0.0, 1.0, 6.0]), ("cls", [1.0, 1.0, 1.0, 1.0])])
def test_what_a_slot_keeps_outlives_its_step(pooling, wanted):
    """On a GPU the next step writes its hidden states over those of the last one."""
    hidden = torch.ones(2, 4)
    pooler = Pooler(lambda first, count: hidden[first : first + count], exact=False)
    assert pooler.pool([PooledRows(0, 0, 2, False, pooling)]) is None
    hidden[:] = torch.tensor([3.0, -1.0, 0.0, 5.0])
    embeddings = pooler.pool([PooledRows(0, 0, 2, True, pooling)])
    np.testing.assert_allclose(embeddings.vectors[0], F.normalize(torch.tensor(wanted), dim=0), atol=1e-6)


@both_runners
def test_neighbours_get_their_tokens_and_no_embedding(kernels, tiny_model, make_driver, reference_tokens):
    reference, folder = tiny_model("Llama")
    driver = make_driver(folder, kernels=kernels)
    others = [driver.add(prompt(length, seed=length)) for length in (3, 7)]
    driver.run(others, 1)
    embedded = [driver.add(prompt(9, seed=5), MEAN), driver.add(prompt(6, seed=6), LAST)]
    while not all(request.embedding for request in embedded):
        rows = [(r, min(5, r.prompt_count - r.computed)) for r in embedded if r.embedding is None]
        driver.step([*((other, 1) for other in others), *rows])
    for other in others:
        ids = other.tokens[: other.prompt_count]
        assert other.output == reference_tokens(reference, ids, len(other.output))
        assert other.embedding is None


@both_runners
def test_a_slot_forgets_the_sum_of_a_request_that_went(kernels, tiny_model, make_driver, reference_embedding):
    """As after an abort in the middle of a prompt, or a preemption."""
    reference, folder = tiny_model("Llama")
    driver = make_driver(folder, kernels=kernels, slot_count=1)
    gone = driver.add(prompt(9), MEAN)
    driver.step([(gone, 4)])
    driver.remove(gone)
    request = driver.add(prompt(7, seed=1), MEAN)
    driver.run([request], 1, chunk=3)
    np.testing.assert_allclose(request.embedding, reference_embedding(reference, prompt(7, seed=1), "mean"), atol=2e-6)


@both_runners
def test_a_model_that_the_fused_pass_does_not_cover(kernels, tiny_model, make_driver, reference_embedding):
    reference, folder = tiny_model("Llama", num_hidden_layers=1, attention_bias=True)
    driver = make_driver(folder, kernels=kernels)
    request = driver.add(prompt(9), MEAN)
    driver.run([request], 1, chunk=5)
    np.testing.assert_allclose(request.embedding, reference_embedding(reference, prompt(9), "mean"), atol=2e-6)


@both_runners
def test_an_embedding_of_what_is_not_a_number_says_so(kernels, tiny_model, make_driver):
    _, folder = tiny_model("Llama")
    driver = make_driver(folder, kernels=kernels)
    request = driver.add(prompt(9), LAST)
    driver.step([(request, 4)])
    for cache in driver.cache.value_caches:
        cache[request.blocks[0]] = float("nan")
    driver.step([(request, 5)])
    assert request.output == [-1]
    assert not np.isfinite(request.embedding).any()
