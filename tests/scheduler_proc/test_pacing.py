"""When the scheduler plans at once, and when it waits for requests that are on their way: its loop, turn by turn."""

from array import array
from collections import deque
from types import SimpleNamespace

import pytest

from common.messages import AbortRequests, AddRequest, ForFrontend, MoreFollows, QueueNews, StepPlan, StepResult, Stop
from scheduler_proc import pacing
from scheduler_proc.core import SchedulerCore
from scheduler_proc.grammar import Compilation, Grammars
from scheduler_proc.main import Clocks, Loop
from scheduler_proc.pacing import BUSY_INTAKE, FIRST_WAIT_S, HOLD_S, LEAD_S, LONGEST_WAIT_S, REQUEST_LEAD_S
from scheduler_proc.simulation import simple_request
from scheduler_proc.state import Limits

TOKEN_S = 0.0001
"""What a prompt token takes as long as none has been computed."""
LIMITS = Limits(max_model_len=200, max_num_seqs=32, max_num_batched_tokens=64, block_size=4, block_count=64)
GOOD, FULL = 24, 64
"""Tokens of a step that is good enough to begin with, and of one that can hold no more."""
MORE, NO_MORE = MoreFollows(), MoreFollows(follows=False)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    monkeypatch.setattr(pacing, "GOOD_STEP_TOKENS", GOOD)


class Turns:
    """A transport of turns that are given by hand, each with the time that has passed since the one before; then the
    order to stop. What a turn's intake leaves comes first in the next.

    Attributes:
        plans: for each turn, the plans that were sent in it.
        waits_ms: for each turn, how long the loop would have waited for it.
        told: what the frontend heard.
    """

    def __init__(self, *turns: dict) -> None:
        self.plans: list[list[StepPlan]] = []
        self.waits_ms: list[float | None] = []
        self.told: list[ForFrontend] = []
        self.inbox: deque = deque()
        self.now_s = 1.0
        self._left = list(turns)
        self._turn: dict = {}

    def wait(self, timeout_ms):
        self._turn = self._left.pop(0) if self._left else {"orders": [Stop(0)]}
        self.now_s += self._turn.get("after_s", 0.0)
        self.inbox.extend(self._turn.get("requests", ()))
        self.plans.append([])
        self.waits_ms.append(timeout_ms)
        return "orders" in self._turn

    def orders(self):
        return self._turn["orders"]

    def requests(self, limit):
        for _ in range(min(limit, len(self.inbox))):
            yield self.inbox.popleft()

    def results(self, limit=64):
        return iter(self._turn.get("results", ()))

    def send_plan(self, plan):
        self.plans[-1].append(plan)

    def send_out(self, message):
        self.told.append(message)

    def run(self, token_s: float = 0.0) -> list[list[StepPlan]]:
        """The plans, turn by turn, without the last.

        Args:
            token_s: what the scheduler takes a prompt token to need; 0 for unknown.
        """

        def clock() -> float:
            return self.now_s

        limits = Limits(**{**vars(LIMITS), "token_s": token_s})
        core, link = SchedulerCore(limits, clock), SimpleNamespace(progress=0, state="")
        traces, clocks = SimpleNamespace(step=lambda: None), Clocks(clock, clock)
        Loop(core, Compilation(Grammars("", 0)), self, link, clocks, traces, None).run()
        return self.plans[:-1]


def request(request_id: int, prompt_count: int) -> AddRequest:
    return simple_request(request_id, range(10 * request_id, 10 * request_id + prompt_count), max_tokens=9)


def requests(*ids: int) -> dict:
    return {"requests": [request(request_id, request_id + 3) for request_id in ids]}


def some(count: int, *then: MoreFollows, first_id: int = 0, size: int = 4) -> dict:
    """So many requests of one size, and what is said behind them."""
    return {"requests": [*(request(first_id + place, size) for place in range(count)), *then]}


def chunk_counts(turns: list[list[StepPlan]]) -> list[list[int]]:
    """How many prompts begin in each plan of each turn."""
    return [[len(plan.chunk_slots) for plan in plans] for plans in turns]


def test_prompts_right_behind_the_first_share_the_second_step():
    """Two steps of the first one's decoding came before them."""
    turns = Turns(requests(0), {"after_s": HOLD_S / 2, **requests(1, 2)}, {"after_s": HOLD_S}, requests(3))
    first, held, rest, full = turns.run()
    assert [list(plan.chunk_token_counts) for plan in first + held + rest + full] == [[3], [4, 5], []]
    assert ([len(first), len(held), len(rest), len(full)], len(rest[0].decode_slots)) == ([1, 0, 2, 0], 1)


def test_a_first_result_ends_the_wait_for_prompts_behind_it():
    result = StepResult(step_id=1, token_ids=array("i", [7]))
    first, then = Turns(requests(0), {"results": [result]}).run()
    assert (len(first), [len(plan.decode_slots) for plan in then]) == (1, [1, 1, 1])


def test_a_worker_that_decodes_gets_prompts_without_a_wait():
    result = StepResult(step_id=1, token_ids=array("i", [7]))
    results = {"results": [StepResult(step_id=2, token_ids=array("i", [7]))]}
    *_, last = Turns(requests(0), {"results": [result]}, requests(1), results).run()
    assert [list(plan.chunk_token_counts) for plan in last] == [[4]]


# ---- an idle worker


def test_a_part_of_a_small_batch_waits_for_the_rest():
    """Its requests share their steps; the first ones ran alone."""
    turns = Turns(some(2, MORE), some(2, MORE, first_id=2), some(1, first_id=4))
    assert chunk_counts(turns.run()) == [[], [], [5]]
    assert turns.waits_ms[1:3] == pytest.approx([FIRST_WAIT_S * 1000] * 2)


def test_a_worker_is_not_kept_waiting_for_what_does_not_come():
    turns = Turns(some(1, MORE), {"after_s": FIRST_WAIT_S / 2}, {"after_s": FIRST_WAIT_S}, {"after_s": HOLD_S})
    assert [len(plans) for plans in turns.run()] == [0, 0, 1, 2]


def test_a_batch_whose_parts_take_their_time_stays_together():
    """Texts are encoded one after another, and each part begins the wait anew."""
    later = 0.9 * FIRST_WAIT_S
    parts = [{"after_s": later, **some(1, *more, first_id=place)} for place, more in enumerate([(MORE,)] * 3 + [()])]
    assert chunk_counts(Turns(*parts).run()) == [[], [], [], [4]]


def test_a_batch_whose_rest_was_refused_runs_at_once():
    assert chunk_counts(Turns(some(2, MORE), {"requests": [NO_MORE]}).run()) == [[], [2]]


@pytest.mark.parametrize(
    "turns",
    [[{"requests": [MORE]}, requests(7)], [{"requests": [MORE]}, {"requests": [NO_MORE]}, requests(8)]],
    ids=["a request", "none"],
)
def test_a_promise_holds_until_the_next_request(turns):
    """One that was kept in mind delayed every single request that came later."""
    assert chunk_counts(Turns(*turns).run()) == [*[[]] * (len(turns) - 1), [1]]


def test_what_is_no_request_leaves_a_promise_alone():
    """Another client's abort in the middle of a batch had its first requests planned alone."""
    abort = {"requests": [AbortRequests(array("i", [99]))]}
    assert chunk_counts(Turns(some(2, MORE), abort, some(1, first_id=2)).run()) == [[], [], [3]]


def test_nobody_waits_for_ever_for_others_who_always_have_more():
    """Each word of more began the wait anew, also of a client whose requests are all refused."""
    later = {"after_s": 0.9 * FIRST_WAIT_S, "requests": [MORE]}
    turns = Turns(some(1, MORE), *[later] * (int(LONGEST_WAIT_S / later["after_s"]) + 1))
    assert chunk_counts(turns.run()) == [*[[]] * (len(turns.plans) - 2), [1]]


def test_nobody_waits_for_requests_that_no_slot_is_free_for(monkeypatch):
    """A worker without run-ahead, or with grammars, has nothing in flight while it decodes: it waited then too."""
    monkeypatch.setattr(pacing, "GOOD_STEP_TOKENS", FULL)
    slots = LIMITS.max_num_seqs
    assert chunk_counts(Turns(some(slots, MORE, size=1), {}).run()[:1]) == [[slots]]


@pytest.mark.parametrize("size", [4, 8, GOOD])
def test_a_good_step_goes_out_while_others_wait_to_be_read(size):
    """The worker had nothing to do until all of them had been read."""
    turns = Turns(some(20, size=size), {})
    first = turns.run()[0]
    assert [sum(plan.chunk_token_counts) for plan in first] == [GOOD]
    assert turns.waits_ms[1] == 0.0, "what is left comes next"


def test_many_short_prompts_make_a_good_step(monkeypatch):
    monkeypatch.setattr(pacing, "GOOD_STEP_REQUESTS", 3)
    assert chunk_counts(Turns(some(5, MORE, size=1), {}).run()[:1]) == [[3]]


# ---- a worker that computes


def test_a_batchs_second_step_holds_all_that_comes_in_time():
    """Decode steps of the first requests delayed the prompts of the others."""
    spare_s = GOOD * TOKEN_S - LEAD_S - 4 * REQUEST_LEAD_S
    in_time = {"after_s": spare_s - 1e-5, **some(2, MORE, first_id=10)}
    turns = Turns(some(6, MORE), {"after_s": 1e-6, **some(2, MORE, first_id=8)}, in_time, {"after_s": 2e-5})
    assert chunk_counts(turns.run(TOKEN_S)) == [[6], [], [], [4]]
    assert turns.waits_ms[3] == pytest.approx(0.01, abs=0.002), "until a moment before the worker has nothing to do"


def test_a_full_step_does_not_wait_for_more():
    full = some(FULL // 8, MORE, size=8, first_id=8)
    assert chunk_counts(Turns(some(6, MORE), full).run(TOKEN_S))[1][:1] == [8]


def test_a_promise_that_was_not_kept_does_not_hold_the_steps_that_follow():
    """Its client had gone: until the next message, decode steps waited for what did not come."""
    decode_s = 2 * FIRST_WAIT_S
    results = [
        {"after_s": decode_s, "results": [StepResult(step_id=step, token_ids=array("i", [7]))]} for step in range(1, 5)
    ]
    plans = Turns(some(1), {"requests": [MORE]}, *results).run(TOKEN_S)
    assert [len(each) for each in plans[3:]] == [1, 1, 1]


def test_the_end_of_a_batch_ends_the_wait():
    turns = Turns(some(6, MORE), some(2, MORE, first_id=8), {"after_s": HOLD_S, **some(1, first_id=10)})
    assert chunk_counts(turns.run(TOKEN_S)) == [[6], [], [3, 0]]


def test_a_busy_workers_results_do_not_wait_for_a_long_intake():
    result = StepResult(step_id=1, token_ids=array("i", [7]))
    turns = Turns(some(1), {"results": [result]}, some(3 * BUSY_INTAKE, size=1, first_id=1))
    turns.run()
    assert len(turns.inbox) == BUSY_INTAKE, "two turns have taken in the rest"
    assert turns.waits_ms[3] == 0.0


def test_nothing_is_waited_for_once_as_much_is_planned_as_may_be():
    """With a moment to plan that had passed, the loop went round and round."""
    result = StepResult(step_id=1, token_ids=array("i", [7]))
    turns = Turns(some(1), {"results": [result]}, {"after_s": 1.0, **some(1, MORE, first_id=1)}, {"after_s": 1.0}, {})
    turns.run()
    assert turns.waits_ms[4] is None or turns.waits_ms[4] > 0


# ---- what is said of it


def test_nobody_is_told_of_requests_that_wait_for_others_alone():
    turns = Turns(some(2, MORE), some(1, first_id=2))
    assert chunk_counts(turns.run()) == [[], [3]]
    assert not any(isinstance(message, QueueNews) for message in turns.told)
