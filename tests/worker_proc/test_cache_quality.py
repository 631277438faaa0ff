"""What an 8-bit cache does to a model whose keys are hard to quantise (fault F11, row C7)."""

import pytest
import torch

from kernels.kv_format import TOPS
from tests.support import tiny
from worker_proc.forward_context import ForwardContext
from worker_proc.kv_cache import KVCache, cache_specs
from worker_proc.loader import load_model

BLOCK_SIZE, TURNS, QUESTION, ANSWER = 8, 5, 37, 11


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Qwen2, whose keys have biases, with biases as large models of the family have them: a few far above the rest."""
    folder = tiny.save_model(tmp_path_factory.mktemp("tiny") / "m", "Qwen2", initializer_range=0.2)
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    config = model.config
    query_size, key_size = config.head_count * config.head_dim, config.kv_head_count * config.head_dim
    for layer in model.model.layers:
        projection = layer.self_attn.qkv_proj
        query, key = slice(0, query_size), slice(query_size, query_size + key_size)
        projection.weight.data[query] *= 0.01
        projection.bias.data[query] = 0
        projection.weight.data[key] *= 30
        projection.bias.data[key] = 0
        projection.bias.data[key].view(config.kv_head_count, -1)[:, 7::8] = 900.0
    return model


def conversation_logits(model, kv_cache_dtype: str) -> torch.Tensor:
    """Log probabilities [tokens, vocab] over a conversation: each turn a chunk, then tokens one by one."""
    count = TURNS * (QUESTION + ANSWER)
    tokens = torch.randint(model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(1))
    blocks = -(-count // BLOCK_SIZE)
    specs = cache_specs(model.config, torch.float32, kv_cache_dtype)
    cache = KVCache(specs, block_size=BLOCK_SIZE, block_count=blocks, host_block_count=0, device=torch.device("cpu"))
    parts, done = [], 0
    for size in [QUESTION, *[1] * ANSWER] * TURNS:
        positions = torch.arange(done, done + size)
        done += size
        context = ForwardContext(
            slot_mapping=positions, row_slots=torch.tensor([0]), query_starts=torch.tensor([0, size]),
            context_lengths=torch.tensor([done]), block_tables=torch.arange(blocks)[None],
            key_caches=cache.key_caches, value_caches=cache.value_caches, block_size=BLOCK_SIZE,
            decode_row_count=int(size == 1), key_scales=cache.key_scales, value_scales=cache.value_scales,
        )  # fmt: skip
        with torch.inference_mode():
            parts.append(model.compute_logits(model(tokens[positions].int(), positions, context)))
    return torch.cat(parts).log_softmax(-1)


def divergence(model, kv_cache_dtype: str) -> float:
    """Mean Kullback-Leibler divergence from the plain cache's predictions, in nats."""
    plain, found = (conversation_logits(model, name) for name in ("auto", kv_cache_dtype))
    return float((plain.exp() * (plain - found)).sum(-1).mean())


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_f11_keys_beyond_the_range_of_fp8_leave_a_long_conversation_intact(model, kv_cache_dtype):
    assert divergence(model, kv_cache_dtype) < 0.02


def test_f11_shows_without_scales(model, monkeypatch):
    """The fault itself: elements cast to FP8 as they are, so that large ones are cut off at 448."""

    def cast(vectors, dtype):
        return vectors.clamp(-TOPS[dtype], TOPS[dtype]).to(dtype), torch.ones(vectors.shape[:-1], dtype=torch.float16)

    monkeypatch.setattr("worker_proc.cpu_cache.quantise", cast)
    assert divergence(model, "fp8") > 0.1
