"""The core against the simulated worker: every request gives what it gives alone, and no block or slot is lost."""

from dataclasses import replace
from random import Random

import pytest

from scheduler_proc.simulation import VOCAB_SIZE, SimulatedEngine, expected_outputs, simple_request
from scheduler_proc.state import Limits

END = (3, 7, 11, 500)


def limits(**changes):
    values = dict(
        max_model_len=200, max_num_seqs=8, max_num_batched_tokens=16, block_size=4, block_count=64, run_ahead=0
    )
    return Limits(**{**values, **changes})


def random_prompt(random, length, shared=()):
    return [*shared, *(random.randrange(VOCAB_SIZE) for _ in range(length - len(shared)))]


def check_outputs(engine, messages, max_len=200):
    wanted = expected_outputs(messages, max_len)
    assert engine.outputs == wanted
    assert set(engine.reasons) == set(wanted)
    for message in messages:
        for index in range(message.params.n):
            ended = wanted[message.request_id, index][-1] in message.end_token_ids
            assert engine.reasons[message.request_id, index] == ("stop" if ended else "length")


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_prefixes_are_found_under_the_same_cache_salt_only(kind):
    engine = SimulatedEngine(limits(prefix_cache=kind))
    for request_id, salt in enumerate(("", "one", "two", "one", "")):
        engine.send(replace(simple_request(request_id, range(21), max_tokens=2), cache_salt=salt))
        engine.run()
    assert list(engine.cached_counts.values()) == [0, 0, 0, 20, 20]


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_a_prompt_does_not_wait_for_an_equal_one_under_another_cache_salt(kind):
    engine = SimulatedEngine(limits(prefix_cache=kind))
    for request_id, salt in enumerate(("one", "two")):
        engine.send(replace(simple_request(request_id, range(50), max_tokens=2), cache_salt=salt))
    assert engine.plan() is not None and engine.core.stats().running_count == 2
    engine.run()
    assert list(engine.cached_counts.values()) == [0, 0]
    assert engine.worker.computed_tokens == 2 * (50 + 1)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16, 64])
@pytest.mark.parametrize("block_count", [8, 12, 64])
def test_requests_give_what_they_give_alone(run_ahead, budget, block_count):
    random = Random(f"{run_ahead}-{budget}-{block_count}")
    engine = SimulatedEngine(limits(max_num_batched_tokens=budget, block_count=block_count, run_ahead=run_ahead))
    shared = random_prompt(random, 9)
    messages = [
        simple_request(
            i,
            random_prompt(random, random.randrange(10, 20), shared if i % 2 else ()),
            random.randrange(1, 12),
            END,
            n=1 + i % 3,
        )
        for i in range(12)
    ]
    for message in messages:
        engine.send(message)
        if random.random() < 0.5:
            engine.step()
    engine.run()
    check_outputs(engine, messages)
