"""What the scheduler process reports of its steps, apart from its sockets."""

from array import array
from random import Random
from types import SimpleNamespace

from common.messages import EngineStats, StepPlan, StepResult, Stop
from scheduler_proc.core import SchedulerCore
from scheduler_proc.grammar import Compilation, Grammars
from scheduler_proc.main import HOLD_S, Clocks, Loop, StepFigures
from scheduler_proc.simulation import simple_request
from scheduler_proc.state import Limits

LIMITS = Limits(max_model_len=200, max_num_seqs=8, max_num_batched_tokens=64, block_size=4, block_count=64)


class Turns:
    """A transport of turns that are given by hand, each with the time that has passed since the one before; then the
    order to stop.

    Attributes:
        plans: for each turn, the plans that were sent in it.
    """

    def __init__(self, *turns: dict) -> None:
        self.plans: list[list[StepPlan]] = []
        self.now_s = 1.0
        self._left = list(turns)
        self._turn: dict = {}

    def wait(self, timeout_ms):
        self._turn = self._left.pop(0) if self._left else {"orders": [Stop(0)]}
        self.now_s += self._turn.get("after_s", 0.0)
        self.plans.append([])
        return "orders" in self._turn

    def orders(self):
        return self._turn["orders"]

    def requests(self, limit):
        return iter(self._turn.get("requests", ()))

    def results(self, limit=64):
        return iter(self._turn.get("results", ()))

    def send_plan(self, plan):
        self.plans[-1].append(plan)

    def send_out(self, message):
        pass

    def run(self) -> list[list[StepPlan]]:
        """The plans, turn by turn, without the last."""

        def clock() -> float:
            return self.now_s

        core, link = SchedulerCore(LIMITS, clock), SimpleNamespace(progress=0, state="")
        traces, clocks = SimpleNamespace(step=lambda: None), Clocks(clock, clock)
        Loop(core, Compilation(Grammars("", 0)), self, link, clocks, traces, None).run()
        return self.plans[:-1]


def requests(*ids: int) -> dict:
    return {
        "requests": [
            simple_request(request_id, range(10 * request_id, 11 * request_id + 3), max_tokens=9) for request_id in ids
        ]
    }


def test_times_of_steps_reach_the_report_whenever_their_results_come():
    """A long step's result comes when nothing is planned any more, and a mean leaves parts of microseconds over."""
    rng, figures = Random(0), StepFigures()
    added, reported = [0] * 6, [0] * 6
    for _ in range(200):
        for _ in range(rng.choice((0, 0, 1, 3))):
            plan_us, wire_us = rng.randrange(100), rng.randrange(100)
            figures.add_plan(rng.randrange(1, 9000), plan_us, wire_us)
            added[:2] = added[0] + plan_us, added[1] + wire_us
        for _ in range(rng.choice((0, 1, 2))):
            parts_us = array("i", [rng.randrange(1_000_000) for _ in range(4)])
            figures.add_result(parts_us)
            added[2:] = [before + part for before, part in zip(added[2:], parts_us, strict=True)]
        stats = figures.add_to(EngineStats())
        steps = sum(stats.step_sizes)
        reported = [before + mean * steps for before, mean in zip(reported, stats.parts_us, strict=True)]
    figures.add_plan(1, 0, 0)
    last = figures.add_to(EngineStats())
    assert [before + mean for before, mean in zip(reported, last.parts_us, strict=True)] == added
    assert list(figures.add_to(EngineStats()).parts_us) == [0] * 6


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
