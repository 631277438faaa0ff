"""Shared, copied and swapped blocks with the real runner: the tokens are those of a run that shares nothing."""

from functools import partial

import pytest
import torch

from tests.support import tiny
from tests.support.memory_engine import MemoryEngine
from tests.support.shared_prompts import SHARING_WAYS, shared_prompts
from worker_proc.loader import load_model
from worker_proc.runner import CpuRunner

OUTPUT_COUNT = 20
WAYS = SHARING_WAYS | {"hash-pressure": {"prefix_cache": "hash", "block_count": 60}}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A tiny model, prompts that share starts of all lengths, and their tokens without any sharing."""
    folder = tiny.save_model(tmp_path_factory.mktemp("tiny") / "m")
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    prompts = shared_prompts(model.config.vocab_size)
    return model, prompts, MemoryEngine(model, prefix_cache="off").generate(prompts, OUTPUT_COUNT)


@pytest.mark.parametrize("way", WAYS)
def test_sharing_changes_no_token(case, way):
    model, prompts, wanted = case
    engine = MemoryEngine(model, **WAYS[way])
    for sample_count in (1, 3):
        first = len({request_id for request_id, _ in engine.samples})
        engine.generate(prompts, OUTPUT_COUNT, n=sample_count)
        for index, tokens in enumerate(wanted):
            found = [engine.samples[first + index, sample].token_ids for sample in range(sample_count)]
            assert found == [tokens] * sample_count, f"prompt {index}, {sample_count} samples"
    stats = engine.core.stats()
    assert (stats.preemptions > 0) == ("block_count" in WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_sharing_changes_no_bit_with_deterministic(case, way):
    """Fault F7 to the last bit: cached prefixes, copied blocks and both kinds of preemption, beside others."""
    model, prompts, _ = case
    options = {"make_runner": partial(CpuRunner, deterministic=True)}
    alone = {}
    for index, prompt in enumerate(prompts):
        quiet = MemoryEngine(model, prefix_cache="off", **options)
        quiet.generate([prompt], OUTPUT_COUNT, logprobs=2)
        alone[index] = quiet.samples[0, 0]
    engine = MemoryEngine(model, **WAYS[way], **options)
    for first in (0, len(prompts)):  # the second time from the cache, where there is one
        engine.generate(prompts, OUTPUT_COUNT, logprobs=2)
        for index, wanted in alone.items():
            found = engine.samples[first + index, 0]
            assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs), f"prompt {index}"
    assert len(alone[0].logprobs) == OUTPUT_COUNT
    assert (engine.core.stats().preemptions > 0) == ("block_count" in WAYS[way])


def test_a_step_that_only_swaps(case):
    model, prompts, _ = case
    short = [prompt[:7] for prompt in prompts[5:7]]
    wanted = MemoryEngine(model, prefix_cache="off").generate(short, 8)
    engine = MemoryEngine(model, prefix_cache="off", run_ahead=0, block_count=4, host_block_count=10, preemption="swap")
    assert engine.generate(short, 8) == wanted
    assert engine.core.stats().preemptions > 0
