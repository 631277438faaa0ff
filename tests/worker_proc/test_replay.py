"""What the worker's replay leaves out of a recording."""

import time
from pathlib import Path

from benchmarks.stub_worker import SIZE, VOCAB_SIZE, StubRunner
from common.config import EngineConfig
from common.messages import StepPlan, Unprepared
from common.recording import Direction, Link, Record, Recording
from worker_proc import engine, worker
from worker_proc.replay import Replay


def test_what_was_prepared_in_pauses_is_no_difference(monkeypatch):
    """In a replay there is no pause; and the plans behind such a word have their results all the same."""
    loaded = engine.Engine(StubRunner(0, 0), SIZE, VOCAB_SIZE, "a card", "none")
    monkeypatch.setattr(engine, "load_engine", lambda config: loaded)
    config = EngineConfig()
    ready = worker.ready_message(config, loaded, 0).to_wire()
    plans = [StepPlan(step_id=step_id) for step_id in (1, 2)]
    results = [loaded.runner.execute(plan).result().to_wire() for plan in plans]
    sent = [ready, Unprepared(3).to_wire(), results[0], Unprepared(2).to_wire(), Unprepared(0).to_wire(), results[1]]
    records = [Record(0, Link.RESULTS, Direction.OUT, data) for data in sent]
    for place, plan in ((3, plans[1]), (2, plans[0])):
        records.insert(place, Record(0, Link.PLANS, Direction.IN, plan.to_wire()))
    work = Replay(Recording(Path("x.rec"), "worker-0", time.time_ns(), config, records), 0)
    work.run()
    work.comparison.finish()
    assert (work.comparison.equal_count, work.comparison.different_count, len(work.step_ns)) == (3, 0, 2)
