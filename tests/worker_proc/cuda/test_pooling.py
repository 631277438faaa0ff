"""Embeddings of the GPU's runner with the fused pass, padded buckets and graphs, against transformers in float32."""

from random import Random

import numpy as np
import pytest
import torch

from common.messages import SlotSampling

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU in this process")
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
ATOL = {"cpu": 2e-6, "cuda": 1e-3}
"""Of numbers around an eighth; on a GPU float32 products may round like TF32, to 2^-11 of each factor."""


@devices
def test_embeddings_equal_transformers(
    device, library_products, tiny_model, make_gpu_driver, fused_sizes, reference_embedding
):
    reference, folder = tiny_model("Qwen3", **fused_sizes)
    driver = make_gpu_driver(folder, device, padded=True)
    rng = Random(0)
    prompts = {pooling: [rng.randrange(3, 131) for _ in range(11)] for pooling in ("mean", "last")}
    requests = [driver.add(ids, SlotSampling(temperature=0.0, pooling=pooling)) for pooling, ids in prompts.items()]
    generating = driver.add([5, 6, 7])
    driver.run([*requests, generating], 1, chunk=4)
    for request, (pooling, ids) in zip(requests, prompts.items(), strict=True):
        expected = reference_embedding(reference, ids, pooling)
        np.testing.assert_allclose(request.embedding, expected, atol=ATOL[device], err_msg=pooling)
    assert generating.embedding is None
