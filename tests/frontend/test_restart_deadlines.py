"""The frontend keeps deadlines while there is no scheduler that does."""

from array import array

from benchmarks.fake_scheduler import LIMITS
from common.sampling_params import SamplingParams

SOON_S = 1e-9


def test_a_deadline_holds_while_there_is_no_scheduler(memory_engine, helpers):
    core = memory_engine.core

    def submit(timeout_s=None):
        events = helpers.Events()
        events.request = core.submit(array("i", [5, 6]), SamplingParams(), events, timeout_s=timeout_s)
        return events

    late, soon, never = submit(60), submit(SOON_S), submit()
    assert not core.end_overdue() and soon.ends == [], "the scheduler does it"
    core.suspend("worker-0 was killed", 1)
    soon_too = submit(SOON_S)
    assert core.end_overdue()
    assert (soon.end.code, soon.end.status) == (soon_too.end.code, soon_too.end.status) == ("deadline_exceeded", 408)
    assert late.ends == never.ends == []
    del memory_engine.sent[:]
    core.handle(LIMITS)
    assert [sent.request_id for sent in memory_engine.sent] == [late.request.request_id, never.request.request_id]
