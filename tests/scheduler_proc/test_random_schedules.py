"""Random requests, aborts and result orders against the simulated worker.

The invariants hold after each step, every request ends exactly once, and its output is the same as when it runs alone.

Each schedule is drawn from one integer; a failure names it, and `replay(seed)` runs it again. `ScheduleMachine` takes
the same actions in any order that hypothesis comes up with, and a failure is shrunk to the few that it needs.
"""

from array import array
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.messages import AbortRequests, AbortSamples, AddRequest, FlushCache, StepResult
from scheduler_proc import prefix_cache
from scheduler_proc.simulation import VOCAB_SIZE, SimulatedEngine, expected_outputs, simple_request
from scheduler_proc.state import Limits

BLOCK_SIZE = 4
BUDGETS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 12, 64)


class Schedule:
    """One random run.

    Args:
        seed: everything follows from it.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.limits = self.draw_limits()
        self.now_s = 0.0
        self.engine = SimulatedEngine(self.limits, lambda: self.now_s)
        self.messages: dict[int, AddRequest] = {}
        self.aborted: set[int] = set()
        self.aborted_samples: set[tuple[int, int]] = set()
        self.broken: set[tuple[int, int]] = set()
        self.prompts: list[list[int]] = []

    def draw_limits(self) -> Limits:
        pick = self.random.choice
        return Limits(
            max_model_len=pick((24, 60)),
            max_num_seqs=pick((1, 2, 5, 16)),
            max_num_batched_tokens=pick(BUDGETS),
            block_size=BLOCK_SIZE,
            block_count=pick((3, 6, 10, 20, 60)),
            run_ahead=pick((0, 1, 2)),
            host_block_count=pick((0, 5, 40)),
            preemption=pick(("recompute", "swap", "swap", "auto")),
            target_itl_s=pick((0.0, 0.0, 0.5, 2.0)),
            policy=pick(("fcfs", "priority", "fair")),
            prefix_cache=pick(("hash", "hash", "radix", "radix", "off")),
        )

    def run(self) -> None:
        for _ in range(self.random.randrange(5, 150)):
            self.act()
            self.engine.core.check()
        self.engine.run()
        self.judge()

    def act(self) -> None:
        draw = self.random.random()
        self.now_s += self.random.choice((0.0, 0.1, 1.0))
        if draw < 0.15 and len(self.messages) < 25:
            self.add()
        elif draw < 0.19 and self.messages:
            self.abort()
        elif draw < 0.20:
            self.engine.send(FlushCache())
        elif draw < 0.21:
            self.abort_sample()
        elif draw < 0.215:
            self.restart()
        elif draw < 0.23:
            self.engine.tick()
        elif draw < 0.65:
            self.engine.plan()
        elif draw < 0.67:
            self.engine.deliver(self.break_one)
        else:
            self.engine.deliver()

    def add(self) -> None:
        random = self.random
        message = simple_request(
            len(self.messages),
            self.draw_prompt(),
            max_tokens=random.randrange(1, 14),
            end=random.sample(range(VOCAB_SIZE), random.choice((0, 40))),
            n=random.choice((1, 1, 1, 2, 4)),
            min_tokens=random.choice((0, 0, 1)),
            logprobs=random.choice((None, None, 0)),
            prompt_logprobs=random.choice((None, None, None, 0)),
        )
        message = replace(
            message,
            cache_salt=random.choice(("", "", "salt")),
            priority=random.randrange(3),
            client_key=random.choice("ab"),
            deadline_s=random.choice((None, None, None, self.now_s + 10.0)),
        )
        self.messages[message.request_id] = message
        self.engine.send(message)

    def draw_prompt(self) -> list[int]:
        """A new prompt, or one that starts like an earlier request's prompt or prompt and output."""
        random = self.random
        prompt: list[int] = []
        if self.prompts and random.random() < 0.6:
            prompt = random.choice(self.prompts)
            key = (random.randrange(len(self.messages)), 0)
            if key in self.engine.outputs and random.random() < 0.5:
                prompt = [*self.messages[key[0]].prompt_token_ids, *self.engine.outputs[key]]
            prompt = prompt[: random.randrange(1, len(prompt) + 1)]
            if random.random() < 0.3:
                return prompt
        alphabet = random.choice((VOCAB_SIZE, VOCAB_SIZE, 1))  # of one letter: equal blocks at different places
        prompt = prompt + [random.randrange(alphabet) for _ in range(random.randrange(1, 20))]
        self.prompts.append(prompt)
        return prompt

    def abort(self) -> None:
        ids = self.random.choices([*self.messages, 999], k=self.random.choice((1, 1, 2)))
        self.aborted.update(ids)
        self.engine.send(AbortRequests(array("i", ids)))

    def abort_sample(self) -> None:
        """The frontend aborts single samples only while others of their request go on."""
        keys = [(i, index) for i, message in self.messages.items() for index in range(message.params.n)]
        is_open = [key not in self.aborted_samples and key not in self.engine.reasons for key in keys]
        open_counts = Counter(request_id for (request_id, _), going_on in zip(keys, is_open, strict=True) if going_on)
        several = [key for key in keys if open_counts[key[0]] > 1]
        if not several:
            return
        request_id, sample_index = self.random.choice(several)
        self.aborted_samples.add((request_id, sample_index))
        self.engine.send(AbortSamples(array("i", [request_id, 998]), array("B", [sample_index, 0])))

    def restart(self) -> None:
        live = [message for request_id, message in self.messages.items() if request_id not in self.aborted]
        self.engine.restart(live, self.aborted_samples)

    def break_one(self, result: StepResult) -> StepResult:
        """One sample's logits were not numbers."""
        if not result.token_ids:
            return result
        index = self.random.randrange(len(result.token_ids))
        sequence = self.engine.core.state.in_flight[0].sampled[index]
        self.broken.add((sequence.request_id, sequence.sample_index))
        tokens = array("i", result.token_ids)
        tokens[index] = -1
        logprobs = tuple(entry for entry in result.logprobs if entry.row_index != index)
        return replace(result, token_ids=tokens, logprobs=logprobs)

    def judge(self) -> None:
        """Each request has its one end, and its tokens are those it has alone."""
        engine, pool_limit = self.engine, self.limits.block_count * BLOCK_SIZE + 1
        longest = min(self.limits.max_model_len, pool_limit)
        for request_id, message in self.messages.items():
            prompt_count = len(message.prompt_token_ids)
            failure = engine.failures.get(request_id)
            if failure is not None and failure.error_code == "deadline_exceeded":
                assert message.deadline_s is not None
                self.aborted.add(request_id)
            else:
                assert (failure is not None) == (prompt_count + 1 > longest)
                assert failure is None or failure.error_code == "context_length_exceeded"
            if prompt_count + 1 > longest:
                continue
            for key, wanted in expected_outputs([message], longest).items():
                self.judge_sample(key, message, wanted)

    def judge_sample(self, key: tuple[int, int], message: AddRequest, wanted: list[int]) -> None:
        engine = self.engine
        found, reason = engine.outputs.get(key, []), engine.reasons.get(key)
        aborted = key[0] in self.aborted or key in self.aborted_samples
        if (key in self.broken and reason == "error") or (aborted and reason is None):
            assert found == wanted[: len(found)]
            return
        assert found == wanted, f"request {key} gives {found}, alone {wanted}"
        assert reason == ("stop" if wanted[-1] in message.end_token_ids else "length")
        if message.params.logprobs is not None:
            assert len(engine.logprobs[key]) == len(wanted)
        if message.params.prompt_logprobs is not None and key[1] == 0:
            positions = [entry.row_index for entry in engine.prompt_logprobs.get(key, ())]
            assert positions == list(range(1, len(message.prompt_token_ids)))


def replay(seed: int) -> Schedule:
    """Run one schedule, which checks itself all along; a failure says how to run it again."""
    schedule = Schedule(seed)
    try:
        schedule.run()
    except Exception as error:
        error.add_note(f"replay with test_random_schedules.replay({seed}); limits {schedule.limits}")
        raise
    return schedule


def assert_nothing_is_left(schedule: Schedule) -> None:
    """All requests have ended, and every block is free or held by the prefix cache alone."""
    stats = schedule.engine.core.stats()
    assert schedule.engine.core.is_idle, stats
    assert stats.free_block_count + stats.cached_block_count == stats.total_block_count, stats


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_random_schedules(seed):
    assert_nothing_is_left(replay(seed))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_colliding_hashes_are_not_mistaken(seed):
    bad_hashes = [lambda content, seed: 42, lambda content, seed: content[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "hash_block", bad_hashes[seed % 2])
        assert_nothing_is_left(replay(seed))


SEEDS = st.integers(0, 2**16)


class ScheduleMachine(RuleBasedStateMachine):
    """A schedule whose actions hypothesis chooses; at its end everything that was added has its one end."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule | None = None

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed):
        self.schedule = Schedule(seed)

    @rule(seed=SEEDS, action=st.sampled_from(("add", "add", "abort", "abort_sample", "restart")))
    def client(self, seed, action):
        self.schedule.random = Random(seed)
        if action == "add" or self.schedule.messages:
            getattr(self.schedule, action)()

    @rule()
    def flush(self):
        self.schedule.engine.send(FlushCache())

    @rule(seconds=st.sampled_from((0.1, 1.0, 20.0)))
    def wait(self, seconds):
        self.schedule.now_s += seconds
        self.schedule.engine.tick()

    @rule(count=st.integers(1, 4))
    def plan(self, count):
        for _ in range(count):
            self.schedule.engine.plan()

    @rule(count=st.integers(1, 4))
    def deliver(self, count):
        for _ in range(count):
            self.schedule.engine.deliver()

    @precondition(lambda self: self.schedule.engine.results)
    @rule(seed=SEEDS)
    def deliver_broken(self, seed):
        self.schedule.random = Random(seed)
        self.schedule.engine.deliver(self.schedule.break_one)

    @invariant()
    def holds(self):
        if self.schedule is not None:
            self.schedule.engine.core.check()

    def teardown(self):
        if self.schedule is not None:
            self.schedule.engine.run()
            self.schedule.judge()
            assert_nothing_is_left(self.schedule)


TestScheduleMachine = pytest.mark.timeout(400)(ScheduleMachine.TestCase)  # hypothesis shrinks a failure for up to 300 s
TestScheduleMachine.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
