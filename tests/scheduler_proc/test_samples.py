"""n samples of one prompt: computed once, shared, and copied where they part."""

from array import array

import pytest

from common.messages import AbortRequests
from scheduler_proc.simulation import expected_outputs, simple_request
from tests.support.schedulers import engines_with, watched_lookups

KINDS = pytest.mark.parametrize("kind", ["hash", "radix", "off"])


engine = engines_with(max_model_len=200, max_num_seqs=16, max_num_batched_tokens=64, block_size=4, block_count=100)


@KINDS
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 20, 21])
def test_the_prompt_is_computed_once(kind, run_ahead, length):
    run = engine(prefix_cache=kind, run_ahead=run_ahead)
    message = simple_request(1, range(length), max_tokens=6, n=4)
    run.send(message)
    run.run()
    assert run.outputs == expected_outputs([message])
    assert len({tuple(tokens) for tokens in run.outputs.values()}) == 4
    assert run.worker.computed_tokens == length + 3 + 4 * 5
    assert run.worker.copied_blocks == (3 if length % 4 != 1 else 0)


@KINDS
def test_the_samples_hold_the_prompts_blocks_together(kind):
    run = engine(prefix_cache=kind)
    run.send(simple_request(1, range(42), max_tokens=2, n=8))
    held = []
    while run.step():
        held.append(run.core.state.pool.held_count)
    assert max(held) == 10 + 8  # ten full blocks together, and a last one each


@KINDS
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_samples_survive_preemption(kind, run_ahead):
    run = engine(prefix_cache=kind, run_ahead=run_ahead, block_count=9)
    messages = [simple_request(i, range(i, i + 10), max_tokens=15, n=3) for i in range(3)]
    for message in messages:
        run.send(message)
    run.run()
    assert run.core.stats().preemptions > 0
    assert run.outputs == expected_outputs(messages)


def test_an_abort_ends_all_samples():
    run = engine()
    run.send(simple_request(1, range(20), max_tokens=30, n=5))
    for _ in range(4):
        run.step()
    run.send(AbortRequests(array("i", [1])))
    assert not run.core.state.requests
    run.run()
    assert not run.reasons


def test_samples_count_as_one_lookup_and_no_hit():
    run = engine()
    run.send(simple_request(1, range(20), max_tokens=3, n=5))
    run.run()
    assert set(run.cached_counts.values()) == {0}
    stats = run.core.stats()
    assert (stats.prompt_tokens, stats.prefix_query_tokens, stats.prefix_hit_tokens) == (20, 20, 0)


def test_samples_are_not_looked_up_while_the_first_computes_the_prompt():
    run = engine(max_num_batched_tokens=8)
    lookups = watched_lookups(run)
    message = simple_request(1, range(150), max_tokens=3, n=8)
    run.send(message)
    run.run()
    assert run.outputs == expected_outputs([message])
    assert run.plans > 150 // 8 and len(lookups) == 8


def test_prompt_logprobs_come_with_the_first_sample():
    run = engine()
    run.send(simple_request(1, range(20), max_tokens=3, n=3, prompt_logprobs=0))
    run.run()
    assert list(run.prompt_logprobs) == [(1, 0)] and len(run.prompt_logprobs[1, 0]) == 19
