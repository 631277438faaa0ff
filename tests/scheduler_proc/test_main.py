"""What the scheduler process reports of its steps, apart from its sockets."""

from array import array
from random import Random
from types import SimpleNamespace

import pytest

from common.messages import EngineReady, EngineStats, Stop, Unprepared
from scheduler_proc.core import SchedulerCore
from scheduler_proc.grammar import Compilation, Grammars
from scheduler_proc.main import Clocks, Loop, StepFigures
from scheduler_proc.state import Limits


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


@pytest.mark.parametrize(("said", "told"), [([], [132]), ([131], [132, 131]), ([131, 130, 0], [132, 0])])
def test_the_frontend_hears_what_the_worker_has_yet_to_prepare(said, told):
    """From the first figures on, before it hears that requests may come; later with the figures that are due."""
    limits = Limits(max_model_len=200, max_num_seqs=8, max_num_batched_tokens=64, block_size=4, block_count=9)
    ready = EngineReady(max_model_len=200, max_num_seqs=8, block_size=4, block_count=9, vocab_size=997)
    heard, orders = [], [[], [Stop(0)]]
    transport = SimpleNamespace(
        wait=lambda timeout_ms: True, orders=lambda: orders.pop(0), send_out=heard.append,
        results=lambda: [Unprepared(count) for count in said], requests=lambda limit: iter(()),
    )  # fmt: skip
    link, traces = SimpleNamespace(progress=0, state=""), SimpleNamespace(step=lambda: None)
    clocks, compilation = Clocks(lambda: 1.0, lambda: 1.0), Compilation(Grammars("", 0))
    loop = Loop(SchedulerCore(limits, lambda: 1.0), compilation, transport, link, clocks, traces, ready, 132)
    loop.announce()
    loop.run()
    assert heard[1] == ready and len(heard) == len(told) + 1
    stats = [message for message in heard if isinstance(message, EngineStats)]
    assert [(each.unprepared_count, each.free_block_count) for each in stats] == [(count, 9) for count in told]
