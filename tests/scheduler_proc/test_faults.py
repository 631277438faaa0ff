"""Faults that schedulers have had (FAULTS: C1 to C12), each as the smallest run that shows it."""

from array import array
from random import Random

import pytest

from common.messages import AbortRequests
from scheduler_proc.sequence import Status
from scheduler_proc.simulation import expected_outputs, simple_request
from tests.support.schedulers import engines_with, prompt_of

RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1, 2])


engine = engines_with(
    max_model_len=2000, max_num_seqs=8, max_num_batched_tokens=64, block_size=16, block_count=49, run_ahead=2
)


def abort(*request_ids):
    return AbortRequests(array("i", request_ids))


@RUN_AHEAD
def test_c1_a_prompt_larger_than_the_cache_is_refused_and_blocks_nobody(run_ahead):
    run = engine(run_ahead=run_ahead)
    small = simple_request(2, prompt_of(20))
    run.send(simple_request(1, prompt_of(1000)))
    run.send(small)
    run.run()
    assert run.failures[1].error_code == "context_length_exceeded"
    assert "1000" in run.failures[1].message and "784" in run.failures[1].message
    assert run.outputs == expected_outputs([small])


def test_c1_a_prompt_beyond_the_context_is_refused_with_both_numbers():
    run = engine(max_model_len=100, block_count=100)
    run.send(simple_request(1, prompt_of(100)))
    run.send(simple_request(2, prompt_of(99), max_tokens=50))
    run.run()
    assert "100 tokens" in run.failures[1].message and "context length of 100" in run.failures[1].message
    assert len(run.outputs[2, 0]) == 1 and run.reasons[2, 0] == "length"


@RUN_AHEAD
def test_c1_a_request_that_outgrows_the_cache_alone_ends_with_length(run_ahead):
    run = engine(run_ahead=run_ahead, block_count=4)
    message = simple_request(1, prompt_of(60), max_tokens=500)
    run.send(message)
    run.run()
    assert run.reasons == {(1, 0): "length"}
    assert run.outputs == expected_outputs([message], max_len=4 * 16 + 1)
    assert run.core.stats().preemptions == 0


@RUN_AHEAD
@pytest.mark.parametrize("kind", ["hash", "off"])
@pytest.mark.parametrize("length", [31, 32, 33])
def test_c2_a_cached_prompt_recomputes_at_least_one_token(run_ahead, kind, length):
    run = engine(run_ahead=run_ahead, prefix_cache=kind)
    messages = [simple_request(i, prompt_of(length)) for i in range(2)]
    for message in messages:
        run.send(message)
        before = run.worker.computed_tokens
        run.run()
    assert run.outputs == expected_outputs(messages)
    cached = 0 if kind == "off" else {31: 16, 32: 31, 33: 32}[length]
    assert run.cached_counts == {(0, 0): 0, (1, 0): cached}
    if run_ahead == 0:
        assert run.worker.computed_tokens - before == length - cached + 7


@RUN_AHEAD
def test_c2_a_wholly_cached_prompt_runs_while_its_blocks_are_shared(run_ahead):
    """The recomputed last token goes to a copy: another request still reads the original."""
    run = engine(run_ahead=run_ahead)
    messages = [simple_request(i, prompt_of(32), max_tokens=20) for i in range(3)]
    for message in messages:
        run.send(message)
        run.step()
        run.step()
    run.run()
    assert run.outputs == expected_outputs(messages)
    assert run.worker.copied_blocks == 2


def test_c2_a_wholly_cached_prompt_that_fills_the_cache_does_without_the_copy():
    run = engine(block_count=2)
    messages = [simple_request(i, prompt_of(32), max_tokens=1) for i in range(2)]
    for message in messages:
        run.send(message)
        run.run()
    assert run.outputs == expected_outputs(messages)
    assert run.cached_counts[1, 0] == 16


@RUN_AHEAD
def test_c3_many_requests_in_a_tiny_cache_all_finish(run_ahead):
    run = engine(run_ahead=run_ahead, block_size=4, block_count=16, max_num_seqs=16)
    shared = prompt_of(9)
    messages = [simple_request(i, shared + prompt_of(i % 13 + 1, seed=i), max_tokens=12) for i in range(256)]
    for message in messages:
        run.send(message)
    run.run()
    assert run.outputs == expected_outputs(messages)
    assert run.core.stats().preemptions > 20


@RUN_AHEAD
@pytest.mark.parametrize("first_to_end", [0, 1])
def test_c4_equal_prompts_in_one_step_share_and_end_in_either_order(run_ahead, first_to_end):
    run = engine(run_ahead=run_ahead, max_num_batched_tokens=4096, block_count=200)
    messages = [simple_request(i, prompt_of(1000), max_tokens=4 if i == first_to_end else 20) for i in range(2)]
    for message in messages:
        run.send(message)
    run.run()
    again = simple_request(7, prompt_of(1000), max_tokens=4)
    run.send(again)
    run.run()
    assert run.outputs == expected_outputs([*messages, again])
    assert run.cached_counts[0, 0] == 0 and run.cached_counts[1, 0] == run.cached_counts[7, 0] == 992


@RUN_AHEAD
def test_c5_random_aborts_leak_nothing(run_ahead):
    random = Random(run_ahead)
    run = engine(run_ahead=run_ahead, block_size=4, block_count=40)
    messages = [
        simple_request(i, prompt_of(random.randrange(1, 40), seed=i % 7), max_tokens=10, n=1 + i % 2)
        for i in range(1000)
    ]
    ends = []
    for message in messages:
        run.send(message)
        ends.append(message.request_id)
        if random.random() < 0.8:
            run.send(abort(ends.pop(random.randrange(len(ends)))))
        if random.random() < 0.7:
            run.plan() if random.random() < 0.5 else run.deliver()
    run.run()
    assert {key[0] for key in run.reasons} >= set(ends)
    expected = expected_outputs(messages)
    assert all(tokens == expected[key][: len(tokens)] for key, tokens in run.outputs.items())


@RUN_AHEAD
def test_c7_aborts_of_finished_unknown_and_aborted_requests_do_nothing(run_ahead):
    run = engine(run_ahead=run_ahead)
    messages = [simple_request(1, prompt_of(20)), simple_request(2, prompt_of(30), max_tokens=30)]
    run.send(abort(1, 2, 2**31 - 1))
    for message in messages:
        run.send(message)
    while (1, 0) not in run.reasons:
        run.step()
    run.send(abort(1, 1, 99))
    run.run()
    run.send(abort(1, 2))
    assert run.outputs == expected_outputs(messages)


@RUN_AHEAD
def test_c8_tokens_in_flight_at_a_preemption_are_delivered_once(run_ahead):
    run = engine(run_ahead=run_ahead, block_size=4, block_count=8)
    messages = [simple_request(i, prompt_of(9, seed=i), max_tokens=14) for i in range(3)]
    for message in messages:
        run.send(message)
    in_flight_at_preemption = 0
    state = run.core.state
    while not run.core.is_idle:
        while run.plan() is not None:
            pass
        in_flight_at_preemption += sum(s.last_step > state.completed_step for s in state.preempted)
        run.deliver()
    assert run.core.stats().preemptions > 0
    assert (in_flight_at_preemption > 0) == (run_ahead > 0)
    assert run.outputs == expected_outputs(messages)


@RUN_AHEAD
def test_c12_prompt_logprobs_are_the_same_with_a_warm_cache(run_ahead):
    run = engine(run_ahead=run_ahead)
    for request_id in range(2):
        run.send(simple_request(request_id, prompt_of(33), prompt_logprobs=0))
        run.run()
    assert len(run.prompt_logprobs[0, 0]) == 32
    assert run.prompt_logprobs[0, 0] == run.prompt_logprobs[1, 0]
    assert run.cached_counts[1, 0] == 0


@RUN_AHEAD
def test_an_end_token_drops_what_was_computed_past_it(run_ahead):
    plain = simple_request(1, prompt_of(20), max_tokens=30)
    end = expected_outputs([plain])[1, 0][9]
    message = simple_request(1, prompt_of(20), max_tokens=30, end=[end])
    run = engine(run_ahead=run_ahead)
    run.send(message)
    run.run()
    assert run.outputs == expected_outputs([message]) and run.outputs[1, 0][-1] == end
    assert run.reasons == {(1, 0): "stop"}
    assert run.core.stats().output_tokens == len(run.outputs[1, 0])


@RUN_AHEAD
def test_nothing_is_planned_past_the_last_token(run_ahead):
    run = engine(run_ahead=run_ahead)
    run.send(simple_request(1, prompt_of(20), max_tokens=5))
    run.run()
    assert run.worker.computed_tokens == 20 + 4


def test_statuses_along_the_way():
    run = engine(run_ahead=0, max_num_batched_tokens=16)
    run.send(simple_request(1, prompt_of(20), max_tokens=2))
    sequence = run.core.state.requests[1].sequences[0]
    seen = [sequence.status]
    while run.plan() is not None:
        seen.append(sequence.status)
        run.deliver()
    assert seen == [Status.WAITING, Status.RUNNING, Status.RUNNING, Status.DRAINING]
    assert sequence.status is Status.DONE
