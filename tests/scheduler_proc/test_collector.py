"""Results: what is taken, what is dropped, what is refused."""

from array import array
from dataclasses import replace

import pytest

from common.messages import AbortRequests, StepResult
from scheduler_proc.collector import ResultError
from scheduler_proc.simulation import SimulatedEngine, expected_outputs, simple_request
from tests.support.schedulers import engines_with

engine = engines_with(
    max_model_len=200, max_num_seqs=4, max_num_batched_tokens=64, block_size=4, block_count=50, run_ahead=1
)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (StepResult(step_id=2, token_ids=array("i", [1])), "reports step 2; the oldest in flight is 1"),
        (StepResult(step_id=1, token_ids=array("i")), "0 tokens for step 1, which samples 1"),
        (StepResult(step_id=1, token_ids=array("i", [1, 2])), "2 tokens for step 1"),
        (StepResult(step_id=1, token_ids=array("i", [1]), token_counts=array("B", [1, 0])), "1 tokens for step 1"),
    ],
)
def test_a_result_that_fits_no_plan_is_refused(result, message):
    run = engine()
    run.send(simple_request(1, range(5)))
    run.plan()
    with pytest.raises(ResultError, match=message):
        run.core.handle_result(result)


def test_a_result_without_a_plan_is_refused():
    with pytest.raises(ResultError, match="0: none"):
        engine().core.handle_result(StepResult(step_id=1, token_ids=array("i")))


def test_counts_of_one_mean_the_same_as_none():
    run = engine()
    messages = [simple_request(i, range(i, 9)) for i in range(3)]
    for message in messages:
        run.send(message)
    while not run.core.is_idle:
        run.plan()
        run.deliver(lambda result: replace(result, token_counts=array("B", bytes([1])) * len(result.token_ids)))
    assert run.outputs == expected_outputs(messages)


def test_a_sample_that_is_not_a_number_ends_alone():
    run = engine()
    messages = [simple_request(i, range(i, 9)) for i in range(3)]
    for message in messages:
        run.send(message)
    run.plan()
    run.deliver()
    run.plan()
    run.deliver(lambda result: replace(result, token_ids=array("i", [result.token_ids[0], -1, result.token_ids[2]])))
    run.run()
    expected = expected_outputs(messages)
    assert run.outputs == {**expected, (1, 0): expected[1, 0][:1]}
    assert run.reasons == {(0, 0): "length", (1, 0): "error", (2, 0): "length"}


def not_numbers(result):
    return replace(result, token_ids=array("i", [-1]) * len(result.token_ids))


@pytest.mark.parametrize("kind", ["hash", "radix"])
@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_nobody_finds_what_was_computed_for_a_sample_that_is_not_a_number(kind, run_ahead, aborted, n):
    """Its K/V may hold NaN: a prompt that starts alike would take it over."""
    run = engine(prefix_cache=kind, run_ahead=run_ahead)
    message = simple_request(1, range(21), max_tokens=20, n=n)
    run.send(message)
    for _ in range(3):
        run.step()
    while run.plan() is not None:
        pass
    if aborted:
        run.send(AbortRequests(array("i", [1])))
    run.deliver(not_numbers)
    again = replace(message, request_id=2)
    run.send(again)
    run.run()
    assert run.cached_counts[2, 0] == 0
    assert {key: run.outputs[key] for key in run.outputs if key[0] == 2} == expected_outputs([again])


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_a_sample_that_is_not_a_number_leaves_others_what_they_read(kind):
    run = engine(prefix_cache=kind)
    run.send(simple_request(1, range(20), max_tokens=30))
    run.step()
    run.send(simple_request(2, [*range(20), *range(50, 60)], max_tokens=30))
    run.step()
    run.step()
    while run.plan() is not None:
        pass
    run.deliver(lambda result: replace(result, token_ids=array("i", [result.token_ids[0], -1])))
    assert run.reasons == {(2, 0): "error"}
    run.send(simple_request(3, [*range(20), *range(50, 60)], max_tokens=2))
    run.run()
    assert run.cached_counts[3, 0] == 20


def test_logprobs_follow_their_tokens_when_others_are_dropped():
    run = engine(run_ahead=2)
    messages = [simple_request(i, range(i, 9), max_tokens=10, logprobs=0) for i in range(3)]
    alone = []
    for message in messages:
        single = engine()
        single.send(message)
        single.run()
        alone.append(single.logprobs[message.request_id, 0])
    end = expected_outputs(messages)[1, 0][3]
    for message in messages:
        run.send(replace(message, end_token_ids=(end,)) if message.request_id == 1 else message)
    run.run()
    for request_id in (0, 2):
        found = [(entry.logprob, list(entry.top_token_ids)) for entry in run.logprobs[request_id, 0]]
        assert found == [(entry.logprob, list(entry.top_token_ids)) for entry in alone[request_id]]
    assert len(run.logprobs[1, 0]) == len(run.outputs[1, 0]) == 4


class Timed(SimulatedEngine):
    """A simulation in which every step takes a second from its plan to its result.

    Attributes:
        prefills: (request id, sample) -> microseconds; resumed: -> times that it was preempted.
    """

    def __init__(self, **limits):
        self.now_s = 10.0
        self.prefills, self.resumed = {}, {}
        super().__init__(replace(engine(run_ahead=0).core.limits, **limits), lambda: self.now_s)

    def deliver(self, *arguments):
        self.now_s += 1
        return super().deliver(*arguments)

    def _hear_tokens(self, out):
        super()._hear_tokens(out)
        samples = out.sample_indices or array("B", bytes(len(out.request_ids)))
        for key, prefill_us in zip(zip(out.request_ids, samples, strict=True), out.prefill_us, strict=False):
            if prefill_us >= 0:
                assert key not in self.prefills, f"{key} is told twice how long its prompt took"
                self.prefills[key] = prefill_us
        for key, count in zip(zip(out.request_ids, samples, strict=True), out.preemption_counts, strict=False):
            if count:
                self.resumed[key] = count


def test_a_prompts_time_counts_from_its_first_chunk_and_not_from_its_arrival():
    run = Timed(max_num_batched_tokens=8, max_num_seqs=1)
    run.send(simple_request(1, range(20), max_tokens=3))  # three chunks
    run.send(simple_request(2, range(50, 55), max_tokens=2, n=2))
    run.run()
    assert run.prefills == {(1, 0): 3_000_000, (2, 0): 1_000_000, (2, 1): 1_000_000}
    assert run.resumed == {}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_every_preemption_is_told_when_the_sample_runs_again(preemption):
    run = Timed(block_count=8, host_block_count=16, preemption=preemption, run_ahead=2)
    messages = [simple_request(i, range(i, i + 7), max_tokens=18) for i in range(4)]
    for message in messages:
        run.send(message)
    run.run()
    assert run.outputs == expected_outputs(messages)
    assert sum(run.resumed.values()) == run.core.stats().preemptions > 0
    assert len(run.prefills) == 4
