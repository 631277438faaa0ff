"""What is refused on arrival, deadlines, shutdown, figures."""

from dataclasses import replace

from scheduler_proc.admission import Admission
from scheduler_proc.simulation import expected_outputs, simple_request
from tests.support.schedulers import engines_with


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


engine = engines_with(max_model_len=200, max_num_seqs=2, max_num_batched_tokens=16, block_size=4, block_count=100)


def test_a_full_queue_refuses_at_once_with_a_retry_hint():
    run = engine(max_queued=3)
    messages = [simple_request(i, range(5)) for i in range(5)]
    for message in messages:
        run.send(message)
    assert set(run.failures) == {3, 4}
    failure = run.failures[3]
    assert (failure.error_code, failure.status) == ("queue_full", 429)
    assert failure.retry_after_ms >= 100 and "3" in failure.message
    run.run()
    assert run.outputs == expected_outputs(messages[:3])


def test_a_request_for_several_samples_waits_as_one():
    run = engine(max_queued=2, max_queued_tokens=11)
    messages = [simple_request(i, range(5), n=8) for i in range(2)]
    for message in messages:
        run.send(message)
    assert not run.failures
    run.send(simple_request(2, range(1)))
    assert "2 requests wait" in run.failures[2].message
    run.run()
    assert run.outputs == expected_outputs(messages)


def test_the_retry_hint_follows_the_rate_of_finished_requests():
    clock = Clock()
    run = engine(clock, max_queued=1)
    for i in range(100):
        run.send(simple_request(i, range(5), max_tokens=1))
        run.run()
        clock.now += 20.0
    run.send(simple_request(200, range(5)))
    run.send(simple_request(201, range(5)))
    assert 15_000 < run.failures[201].retry_after_ms < 25_000


def test_a_deadline_ends_a_request_wherever_it_stands():
    clock = Clock()
    run = engine(clock, max_num_seqs=1)
    for i, deadline in enumerate((1005.0, 1007.0, None)):
        run.send(replace(simple_request(i, range(i, i + 30), max_tokens=50), deadline_s=deadline))
    run.step()
    assert run.core.next_deadline_s() == 1005.0
    run.tick()
    assert not run.failures
    clock.now = 1006.0
    run.tick()
    assert list(run.failures) == [0]
    assert (run.failures[0].error_code, run.failures[0].status) == ("deadline_exceeded", 408)
    clock.now = 1007.0
    run.tick()
    assert list(run.failures) == [0, 1]
    run.run()
    assert run.reasons == {(2, 0): "length"}
    assert run.core.next_deadline_s() is None


def test_a_deadline_of_a_finished_request_means_nothing():
    clock = Clock()
    run = engine(clock)
    run.send(replace(simple_request(1, range(5)), deadline_s=1005.0))
    run.run()
    for heard in (run.outputs, run.reasons, run.cached_counts):
        heard.clear()  # the id may be given out again
    run.send(simple_request(1, range(9)))
    clock.now = 2000.0
    run.tick()
    run.run()
    assert not run.failures


def test_deadlines_of_ended_requests_are_not_kept():
    """Every request may have a deadline an hour away, and end in a second."""
    clock = Clock()
    run = engine(clock, max_model_len=2000, block_count=500)
    run.send(replace(simple_request(0, range(5), max_tokens=1900), deadline_s=4000.0))
    for request_id in range(1, 200):
        run.send(replace(simple_request(request_id, [1], max_tokens=1), deadline_s=4600.0 + request_id % 7))
        while (request_id, 0) not in run.reasons:
            run.step()
    assert len(run.core._deadlines) < 80
    assert run.core.next_deadline_s() == 4000.0
    clock.now = 4000.0
    run.tick()
    assert list(run.failures) == [0]
    run.run()


def test_an_empty_prompt_is_refused():
    run = engine()
    run.send(simple_request(1, []))
    assert run.failures[1].param == "prompt"


def test_an_id_in_use_changes_nothing():
    run = engine()
    first = simple_request(1, range(5))
    run.send(first)
    run.send(simple_request(1, range(50, 60)))
    run.run()
    assert run.outputs == expected_outputs([first])


def test_fail_all_ends_every_request_once():
    run = engine()
    for i in range(5):
        run.send(simple_request(i, range(i, 30), max_tokens=20, n=2))
    run.step()
    failures = run.core.fail_all("shutting_down", "over")
    assert sorted(failure.request_id for failure in failures) == list(range(5))
    assert run.core.fail_all("shutting_down", "over") == []
    run.run()


def test_figures_add_up():
    run = engine()
    messages = [simple_request(i, range(21), max_tokens=5) for i in range(3)]
    for message in messages:
        run.send(message)
    assert run.core.stats().waiting_count == 3
    run.step()
    assert run.core.stats().running_count == 2
    run.run()
    stats = run.core.stats()
    assert (stats.prompt_tokens, stats.output_tokens, stats.steps) == (63, 15, run.plans)
    assert stats.prefix_hit_tokens == sum(run.cached_counts.values()) > 0
    assert stats.prefix_query_tokens == 63
    assert stats.free_block_count + stats.cached_block_count == stats.total_block_count == 100


def test_a_queue_full_of_tokens_refuses_but_an_empty_one_takes_anything():
    run = engine(max_queued_tokens=50, max_model_len=200)
    messages = [simple_request(i, range(i, i + 40)) for i in range(3)]
    big = simple_request(9, range(100))
    run.send(big)
    for message in messages:
        run.send(message)
    assert set(run.failures) == {0, 1, 2}
    assert "100 prompt tokens" in run.failures[0].message and "50" in run.failures[0].message
    run.run()
    assert run.outputs == expected_outputs([big])


def test_a_burst_does_not_cost_its_square(monkeypatch):
    """The fault: the unfinished prompts of a step were counted anew for each candidate."""
    counted = []
    count = Admission._unfinished_count
    monkeypatch.setattr(Admission, "_unfinished_count", lambda *known: counted.append(1) or count(*known))
    run = engine(max_num_seqs=64, max_num_batched_tokens=512, block_count=1000)
    messages = [simple_request(i, range(5), max_tokens=2) for i in range(64)]
    for message in messages:
        run.send(message)
    run.run()
    assert run.outputs == expected_outputs(messages)
    assert len(counted) < 16


def test_two_prompts_at_most_stay_unfinished_after_a_step():
    run = engine(max_num_seqs=4)
    messages = [simple_request(i, range(100 * i, 100 * i + length)) for i, length in enumerate((20, 50, 50))]
    for message in messages:
        run.send(message)
    assert list(run.plan().chunk_token_counts) == [12, 4], "the third waits: two are unfinished already"
    second = run.plan()
    assert second.chunk_token_counts[0] == 8 and list(second.chunk_samples) == [1, 0, 0], "the first has ended"
    run.run()
    assert run.outputs == expected_outputs(messages)
