"""The cost model of a step, and what a target for time between tokens makes of it."""

import pytest

from benchmarks.step_cost import H200
from common.messages import StepPlan
from scheduler_proc.simulation import SimulatedEngine, expected_outputs, simple_request
from scheduler_proc.state import Limits
from scheduler_proc.step_time import LEAST_CHUNK, STEP_LIMIT_S, StepTime


def test_without_a_target_steps_of_a_fast_device_are_not_limited():
    times = StepTime(0.0)
    times.note(0.1, 4096)
    assert times.chunk_budget(8192) == 8192 and times.admits()
    assert times.may_run_ahead(2, 8192)
    times.note(0.004, 0)
    assert times.chunk_budget(8192) == times.chunk_budget(8192, decodes=False) == 8192
    assert times.may_run_ahead(3, 0)


def test_a_slow_device_gets_short_steps_and_none_ahead():
    """Whoever aborts waits for the steps that are under way: on a CPU three of 512 tokens, ten seconds."""
    times = StepTime(0.0)
    times.note(0.1, 0)
    times.note(0.1 + 512 * 0.005, 512)
    budget = times.chunk_budget(512)
    assert times.decode_s + budget * times.token_s == pytest.approx(STEP_LIMIT_S, rel=0.02)
    assert times.may_run_ahead(1, 0) and not times.may_run_ahead(1, budget)
    assert not times.may_run_ahead(3, 0), "three steps of decoding take too long as well"


def test_prompts_get_as_long_as_decoding_takes_where_that_is_too_long_already():
    times = StepTime(0.0)
    times.note(2.0, 0)
    times.note(2.0 + 100 * 0.02, 100)
    assert times.chunk_budget(512) == 100


def test_the_first_prompt_is_cut_by_a_guess():
    times = StepTime(0.0, token_s=0.004)
    assert times.chunk_budget(512) == 100 and not times.may_run_ahead(1, 100)
    times.note(0.04, 100)
    assert times.token_s == pytest.approx(0.0004, rel=0.1)
    assert times.chunk_budget(512) == 512


@pytest.mark.parametrize("chunk_s", [0.02, 0.05], ids=["shorter than a decode step", "as long"])
@pytest.mark.parametrize("decodes", [False, True])
def test_many_short_prompts_after_many_decodes_leave_usable_estimates(decodes, chunk_s):
    """The token time halved with each of them, until a division by it had no finite result: the scheduler ended."""
    times = StepTime(0.01, token_s=0.004)
    times.note(0.05, 0)
    for _ in range(5000):
        times.note(chunk_s, 5, decodes=decodes)
        assert LEAST_CHUNK <= times.chunk_budget(512, decodes=decodes) <= 512
        assert times.may_run_ahead(1, 5)


@pytest.mark.parametrize("decode_s", [0.05, 0.5, 5.0])
def test_prompts_that_nobody_decodes_beside_get_short_steps_whatever_decoding_took(decode_s):
    times = StepTime(0.0, token_s=0.004)
    for _ in range(20):
        times.note(decode_s, 0)
    for _ in range(200):
        count = times.chunk_budget(4096, decodes=False)
        assert count * 0.004 <= STEP_LIMIT_S
        times.note(count * 0.004, count, decodes=False)


@pytest.mark.parametrize("target_s", [0.0, 0.05])
@pytest.mark.parametrize("before", [1, 30])
def test_a_stalled_step_is_forgotten_though_all_others_have_chunks(before, target_s):
    """The decode time was measured on steps without chunks alone: a stall in one counted while prompts went on."""
    times = StepTime(target_s, token_s=0.0005)
    for _ in range(before):
        times.note(0.02, 0)
    times.note(5.0, 0)
    spans_s = []
    for _ in range(100):
        count = times.chunk_budget(8192)
        spans_s.append(0.02 + count * 0.0005)
        times.note(spans_s[-1], count)
    assert max(spans_s) < 2 * STEP_LIMIT_S
    assert spans_s[-1] == pytest.approx(target_s or STEP_LIMIT_S, rel=0.1)


def test_a_decode_time_of_nothing_is_no_end():
    """Two results that are taken in together."""
    times = StepTime(0.0)
    times.note(0.0, 0)
    for _ in range(50):
        times.note(0.1, 0)
    assert times.decode_s == pytest.approx(0.1, rel=0.01)


def test_before_anything_is_known_nothing_is_limited():
    assert StepTime(0.01).chunk_budget(8192) == 8192 and StepTime(0.01).admits()


def test_learns_the_two_times_and_divides_the_target():
    times = StepTime(0.010)
    for _ in range(50):
        times.note(0.004, 0)
        times.note(0.004 + 512 * 10e-6, 512)
    assert times.decode_s == pytest.approx(0.004) and times.token_s == pytest.approx(10e-6)
    assert times.chunk_budget(8192) == pytest.approx(600, abs=2)
    assert times.chunk_budget(100) == 100
    assert times.chunk_budget(8192, decodes=False) == 8192, "nobody waits for a next token"


def test_a_short_chunk_says_little_about_the_time_of_a_token():
    """Preemption `auto` compares it with the link: the fixed time of a step must not count as that of a few tokens."""
    times = StepTime(0.0)
    assert times.token_s is None
    times.note(0.002, 0)
    times.note(0.002 + 8000 * 5e-6, 8000)
    times.note(0.003, 10)
    assert times.token_s == pytest.approx(5e-6, rel=0.05)


def test_a_missed_target_leaves_the_least_chunk_and_admits_nobody():
    times = StepTime(0.001)
    times.note(0.002, 0)
    times.note(0.003, 100)
    assert times.chunk_budget(8192) == LEAST_CHUNK and times.chunk_budget(5) == 5
    assert not times.admits()


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_wall_clock_that_is_set_changes_no_step_time(jump_s):
    wall_s, monotonic_s = [1e9], [50.0]
    limits = Limits(
        max_model_len=100, max_num_seqs=4, max_num_batched_tokens=64, block_size=16, block_count=20, run_ahead=0
    )
    run = SimulatedEngine(limits, lambda: wall_s[0], lambda: monotonic_s[0])
    run.send(simple_request(0, range(20), max_tokens=10))
    while run.plan() is not None:
        monotonic_s[0] += 0.25
        wall_s[0] += jump_s
        run.deliver()
    times = run.core.state.step_time
    assert times.decode_s == 0.25 and times.token_s == 0.25 / 20


def test_nothing_is_planned_behind_a_long_step():
    now_s = [0.0]
    limits = Limits(
        max_model_len=400, max_num_seqs=4, max_num_batched_tokens=64, block_size=16, block_count=40, run_ahead=2
    )
    run = SimulatedEngine(limits, lambda: now_s[0])
    messages = [simple_request(i, range(i, 300 + i), max_tokens=2) for i in range(2)]
    run.send(messages[0])
    assert all(run.plan() is not None for _ in range(3)), "nothing is known yet"
    while run.core.state.in_flight:
        now_s[0] += 0.5
        run.deliver()
    assert run.plan() is not None and run.plan() is None
    run.send(messages[1])
    run.run()
    assert run.outputs == expected_outputs(messages)


class TimedRun:
    """A simulated engine whose steps take the time that a machine would need."""

    def __init__(self, target_itl_s: float) -> None:
        self.now_s = 0.0
        limits = Limits(
            max_model_len=20_000, max_num_seqs=64, max_num_batched_tokens=4096, block_size=16, block_count=5000,
            run_ahead=0, target_itl_s=target_itl_s, prefix_cache="off",
        )  # fmt: skip
        self.engine = SimulatedEngine(limits, lambda: self.now_s)

    def step(self) -> StepPlan | None:
        plan = self.engine.plan()
        if plan is not None:
            self.now_s += H200.of_plan(self.engine.core, plan)
            self.engine.deliver()
        return plan


def longest_decode_step(target_itl_s):
    """Seconds of the longest step with decode rows, once the first long prompt has been seen."""
    run = TimedRun(target_itl_s)
    messages = [simple_request(0, range(40), max_tokens=100)]
    messages += [simple_request(i, range(i, 3000 + i), max_tokens=2) for i in range(1, 5)]
    run.engine.send(messages[0])
    for _ in range(10):
        run.step()
    longest = 0.0
    for number, message in enumerate(messages[1:]):
        run.engine.send(message)
        while run.engine.core.state.waiting or run.engine.core.state.prefilling:
            before_s = run.now_s
            plan = run.step()
            if number > 0 and plan.decode_slots:
                longest = max(longest, run.now_s - before_s)
    run.engine.run()
    assert run.engine.outputs == expected_outputs(messages)
    return longest


def test_the_target_bounds_the_time_between_tokens():
    unlimited, limited = longest_decode_step(0.0), longest_decode_step(0.002)
    assert unlimited > 0.008
    assert limited < 0.003
