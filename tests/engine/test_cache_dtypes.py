"""Within one type of KV cache, greedy float32 tokens are the same under every condition (rows C5 and C6).

A vector is quantised by itself, so neither chunks nor batches nor pressure nor sharing may change what is read back.
"""

import pytest
import torch

from tests.engine.test_greedy_equality import CONDITIONS
from tests.support import tiny
from tests.support.memory_engine import MemoryEngine
from tests.support.shared_prompts import SHARING_WAYS, shared_prompts
from worker_proc.loader import load_model

OUTPUT_COUNT = 20
WAYS = CONDITIONS | SHARING_WAYS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny.save_model(tmp_path_factory.mktemp("tiny") / "m", "Qwen3", tie_word_embeddings=False)
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(model):
    return shared_prompts(model.config.vocab_size)


@pytest.fixture(scope="module", params=["int8", "fp8"])
def case(request, model, prompts):
    """The cache's type, and each prompt's tokens when it runs alone and in one piece."""
    alone = MemoryEngine(model, kv_cache_dtype=request.param, prefix_cache="off", max_num_seqs=1)
    return request.param, alone.generate(prompts, OUTPUT_COUNT)


@pytest.mark.parametrize("way", WAYS)
def test_no_condition_changes_a_token(model, prompts, case, way):
    kv_cache_dtype, wanted = case
    engine = MemoryEngine(model, kv_cache_dtype=kv_cache_dtype, **WAYS[way])
    assert engine.generate(prompts, OUTPUT_COUNT) == wanted
    if way in ("batch", "radix", "radix-pressure"):
        assert engine.generate(prompts, OUTPUT_COUNT) == wanted, "a second time, with what the prefix cache kept"
    if "pressure" in way or "swap" in way:
        assert engine.core.stats().preemptions > 0


def test_samples_that_share_blocks_copy_their_scales(model, prompts, case):
    kv_cache_dtype, wanted = case
    engine = MemoryEngine(model, kv_cache_dtype=kv_cache_dtype, prefix_cache="radix")
    engine.generate(prompts, OUTPUT_COUNT, n=3)
    for index, tokens in enumerate(wanted):
        assert [engine.samples[index, sample].token_ids for sample in range(3)] == [tokens] * 3, f"prompt {index}"


def test_a_quantised_cache_is_close_to_a_plain_one(model, prompts, case):
    """Most first tokens agree; if none did, something other than precision would be wrong."""
    plain = MemoryEngine(model, prefix_cache="off").generate(prompts, 8)
    agreeing = sum(tokens[0] == others[0] for tokens, others in zip(plain, case[1], strict=True))
    assert agreeing >= 7, f"{agreeing} of 10"
