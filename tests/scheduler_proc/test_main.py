"""What the scheduler process reports of its steps, apart from its sockets."""

from array import array
from random import Random

from common.messages import EngineStats
from scheduler_proc.main import StepFigures


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
