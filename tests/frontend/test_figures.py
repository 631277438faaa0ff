"""What the core counts: histograms against a naive count, and each time of a request where it belongs."""

import itertools
import random
from array import array

import pytest

from common.client_messages import SampleSoFar
from common.messages import EngineStats, SampleFinish, TokensOut
from common.sampling_params import SamplingParams
from frontend import Client
from frontend.core import Core
from frontend.figures import Histogram, percentile, sizes, times
from frontend.request_log import fields_of
from tests.support.frontend_in_memory import Events


@pytest.mark.parametrize("seed", range(5))
def test_a_histogram_counts_like_a_naive_one(seed):
    rng = random.Random(seed)
    histogram = times(-4, 5)
    values = [10 ** rng.uniform(-5, 2) for _ in range(300)] + [0.0, 0.001, 0.0015, 10.0]
    for value in values:
        histogram.add(value)
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(sum(values))
    for bound, count in histogram.cumulated():
        assert count == sum(value <= bound for value in values), f"seed {seed}, bound {bound}"


def test_bounds_ascend_and_the_fine_ones_are_narrow():
    for histogram in (times(-4, 6), times(-3, 7), sizes(1000)):
        assert list(histogram.bounds) == sorted(set(histogram.bounds))
    bounds = times(-4, 6).bounds
    assert max(high / low for low, high in itertools.pairwise(bounds)) < 1.19
    assert sizes(1000).bounds[-1] == 1000


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99])
def test_percentiles_are_as_exact_as_the_buckets(share):
    rng = random.Random(3)
    values = sorted(0.001 * rng.lognormvariate(1, 0.7) for _ in range(4000))
    histogram = times(-4, 6)
    for value in values:
        histogram.add(value)
    exact = values[int(share * len(values))]
    assert percentile(histogram.bounds, histogram.counts, share) == pytest.approx(exact, rel=0.1)


def test_percentiles_at_the_edges():
    histogram = Histogram((1.0, 2.0))
    assert percentile(histogram.bounds, histogram.counts, 0.5) is None
    histogram.add(50.0)
    assert percentile(histogram.bounds, histogram.counts, 0.5) == 2.0


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def timed(memory_engine):
    """A core whose clock the test sets, and a way to give it one step."""
    clock = Clock()
    core = Core(memory_engine.engine.tokenizer, lambda _: None, clock=clock)
    core.handle(memory_engine.core.limits)

    def submit(resumed=None, **params):
        sink = Events()
        return core.submit(array("i", [5, 6, 7]), SamplingParams(max_tokens=50, **params), sink, resumed=resumed)

    def step(at_s, *rows, **more):
        """Rows are (request, sample index, tokens)."""
        clock.now_s = at_s
        core.handle(
            TokensOut(
                request_ids=array("i", [request.request_id for request, _, _ in rows]),
                sample_indices=array("B", [index for _, index, _ in rows]),
                token_counts=array("B", [count for _, _, count in rows]),
                token_ids=array("i", [70] * sum(count for _, _, count in rows)),
                **more,
            )
        )

    return core, submit, step


def test_each_gap_between_tokens_is_counted_once(timed):
    core, submit, step = timed
    first, second = submit(), submit(n=2)
    step(101.0, (first, 0, 1))
    step(101.5, (first, 0, 1), (second, 0, 1), (second, 1, 1))
    step(101.75, (second, 0, 1), (second, 1, 1))
    step(102.5, (first, 0, 2), (second, 0, 1))
    gaps = core.figures.gap_s
    assert gaps.count == 1 + 2 + 2
    assert gaps.total == pytest.approx(0.5 + 2 * 0.25 + 1.0 + 0.75)
    assert core.figures.first_token_s.count == 2, "one for each request, however many samples it has"
    assert core.figures.first_token_s.total == pytest.approx(1.0 + 1.5)


def test_the_times_of_a_request_add_up(timed):
    core, submit, step = timed
    request = submit()
    step(103.0, (request, 0, 1), cached_counts=array("i", [2]), prefill_us=array("i", [1_250_000]))
    step(103.5, (request, 0, 1))
    step(105.0, (request, 0, 1), finishes=(SampleFinish(0, "stop"),))
    figures = core.figures
    assert figures.queue_s.total == pytest.approx(1.75)
    assert figures.prefill_s.total == pytest.approx(1.25)
    assert figures.decode_s.total == pytest.approx(2.0)
    assert figures.inference_s.total == pytest.approx(3.25)
    assert figures.latency_s.total == pytest.approx(5.0)
    assert figures.mean_gap_s.total == pytest.approx(1.0)
    assert (figures.prompt_tokens.total, figures.output_tokens.total, figures.max_tokens.total) == (3, 3, 50)
    assert figures.ended == {"stop": 1}


def test_a_request_without_tokens_has_no_times_but_its_end(timed):
    core, submit, _ = timed
    core.abort(submit().request_id)
    figures = core.figures
    assert (figures.latency_s.count, figures.ended) == (1, {"abort": 1})
    empty = (figures.queue_s, figures.prefill_s, figures.decode_s, figures.first_token_s, figures.gap_s)
    assert [histogram.count for histogram in empty] == [0] * 5


@pytest.mark.parametrize("known", [{}, {0: 1}, {0: 30}, {1: 30}, {0: 3, 1: 40}], ids=str)
def test_the_tokens_of_an_earlier_frontend_count_in_no_time(timed, known):
    """A request that went on behind a lost frontend had a mean time between tokens as if all had come to this one."""
    core, submit, step = timed
    request = submit(n=2, resumed=[SampleSoFar(index, array("i", [70] * count)) for index, count in known.items()])
    for at_s in (102.0, 102.5, 103.0):
        step(at_s, (request, 0, 1), (request, 1, 1))
    step(103.5, (request, 0, 1), (request, 1, 1), finishes=(SampleFinish(0, "stop"), SampleFinish(1, "stop")))
    figures = core.figures
    assert figures.mean_gap_s.total == pytest.approx(0.5) and figures.decode_s.total == pytest.approx(1.5)
    assert figures.gap_s.total == pytest.approx(2 * 1.5)
    assert figures.output_tokens.total == 8 + sum(known.values())
    assert figures.first_token_s.count == figures.latency_s.count == (0 if known else 1)
    assert fields_of(request, "stop")["itl_ms"] == pytest.approx(500)
    assert (fields_of(request, "stop")["ttft_ms"] is None) == bool(known)


def test_one_token_behind_a_lost_frontend_has_no_mean(timed):
    core, submit, step = timed
    request = submit(resumed=[SampleSoFar(0, array("i", [70] * 9))])
    step(102.0, (request, 0, 1), finishes=(SampleFinish(0, "stop"),))
    assert core.figures.mean_gap_s.count == 0 and request.mean_gap_s() is None


def test_preemptions_reach_the_request_by_its_samples(timed):
    _, submit, step = timed
    request = submit(n=2)
    step(101.0, (request, 0, 1), (request, 1, 1))
    step(102.0, (request, 0, 1), (request, 1, 1), preemption_counts=array("B", [0, 2]))
    step(103.0, (request, 0, 1), preemption_counts=array("B", [1]))
    assert request.preemption_count == 3


def test_step_figures_add_up_and_survive_a_scheduler_that_starts_anew(timed):
    core, _, _ = timed
    core.handle(EngineStats(steps=4, parts_us=array("i", [1, 2, 3, 4, 5, 6]), step_sizes=array("i", [3, 1])))
    core.handle(EngineStats(steps=6, parts_us=array("i", [10, 0, 0, 0, 0, 0]), step_sizes=array("i", [0, 0, 2])))
    core.handle(EngineStats(steps=0))
    core.handle(EngineStats(steps=1, parts_us=array("i", [5, 0, 0, 0, 0, 0]), step_sizes=array("i", [1])))
    assert core.figures.step_totals_us()["step_plan_us"] == 4 * 1 + 2 * 10 + 5
    assert core.figures.step_sizes == [4, 1, 2]


def test_an_answer_is_sent_before_it_is_counted_and_counted_before_the_end(run_frontend):
    running, order = run_frontend(), []
    clients, core = running.frontend._clients, running.frontend._engine.core
    send = clients._send
    clients._send = lambda *arguments: order.append("sent") or send(*arguments)
    core.observers.append(lambda request, outcome: order.append(outcome))
    with Client(running.endpoint) as client:
        order.clear()
        client.generate("The sea", {"max_tokens": 4})
        client.ping()
        assert order[:2] == ["sent", "length"]
        running.scheduler.gate.clear()
        client.submit("The sky", {"max_tokens": 400})
        client.ping()
        order.clear()
        running.stop()
    assert order == ["sent", "shutting_down"]
    assert core.figures.ended == {"length": 1, "shutting_down": 1}
