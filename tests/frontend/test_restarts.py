"""Lost processes as the frontend's core sees them: who goes on, who waits, who is the cause, and whose time is up."""

from array import array
from dataclasses import replace

import pytest

from benchmarks.fake_scheduler import LIMITS
from common import messages as m
from common.errors import RequestError
from common.sampling_params import SamplingParams
from frontend.core import Core
from frontend.engine import Health
from frontend.events import Final
from tests.support.frontend_in_memory import Events

SOON_S = 1e-9


def test_a_deadline_holds_while_there_is_no_scheduler(memory_engine):
    core = memory_engine.core

    def submit(timeout_s=None):
        events = Events()
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


@pytest.fixture
def restart(memory_engine):
    """Loses scheduler and worker and starts them again; gives what the new scheduler is told."""

    def make(session: int = 1) -> list:
        memory_engine.core.suspend("worker-0 was killed", session)
        del memory_engine.sent[:]
        memory_engine.core.handle(LIMITS)
        return memory_engine.sent

    return make


def test_a_restart_sends_every_request_once_more_with_what_it_has(memory_engine, submit, restart):
    first, second = submit("the sea", n=2, seed=5, stop="!"), submit("the sky", timeout_s=60)
    memory_engine.say(first, "a!")
    memory_engine.say(first, "bc", sample_index=1)
    old = {message.request_id: message for message in memory_engine.sent if isinstance(message, m.AddRequest)}
    known = memory_engine.engine.tokenizer.encode("bc")
    assert restart() == [replace(old[0], outputs=(None, known)), replace(old[1], outputs=(array("i"),))]
    memory_engine.say(first, "de", sample_index=1, finish="length")
    memory_engine.say(second, "x", finish="length")
    assert [sample.text for sample in first.end.samples] == ["a", "bcde"] and first.text(1) == "bcde"
    assert second.end.samples[0].text == "x"


def test_what_comes_during_a_restart_waits(memory_engine, submit):
    core = memory_engine.core
    gone, old = submit("old"), submit("older")
    core.suspend("worker-0 was killed", 1)
    assert (memory_engine.engine.health().state, memory_engine.engine.health().ok) == ("restarting", False)
    del memory_engine.sent[:]
    new, dropped = submit("new"), submit("dropped")
    core.abort(gone.request.request_id)
    core.abort(dropped.request.request_id)
    core.flush_cache()
    assert memory_engine.sent == [], "the new scheduler knows nothing of the old one's requests"
    core.handle(LIMITS)
    assert [(sent.request_id, sent.outputs) for sent in memory_engine.sent] == [
        (old.request.request_id, (array("i"),)),
        (new.request.request_id, ()),
    ]
    assert memory_engine.engine.health() == Health("serving", "", 1)
    assert gone.end.samples[0].finish_reason == dropped.end.samples[0].finish_reason == "abort"


def test_no_more_wait_for_a_restart_than_may_be_queued(byte_tokenizer, submit):
    core = Core(byte_tokenizer, lambda data: None, held_limit=2)
    core.handle(LIMITS)
    core.suspend("scheduler was killed", 1)
    for _ in range(2):
        core.submit(array("i", [5]), SamplingParams(), Events())
    with pytest.raises(
        RequestError, match="being started again, and many requests wait for it: scheduler was killed"
    ) as caught:
        core.submit(array("i", [5]), SamplingParams(), Events())
    assert (caught.value.code, caught.value.status, caught.value.retry_after_ms) == ("restarting", 503, 1000)


def test_a_request_that_may_be_the_cause_is_not_sent_for_ever(memory_engine, submit, restart):
    """A request whose step kills the worker would do so after every restart."""
    poison, good = submit("poison"), submit("good")
    memory_engine.say(poison, "a")
    for session in (1, 2, 3):
        assert poison.ends == [], session
        restart(session)
        memory_engine.say(good, "b")
    assert poison.end.code == "engine_restarted"
    assert good.ends == []


def test_who_waits_is_not_the_cause(memory_engine, submit, restart):
    """A queue behind long requests was thrown away with the second loss, though nothing in it had ever run."""
    running, queued, begun, late = (submit(text) for text in ("runs", "waits", "has begun", "is not known to wait"))
    ids = array("i", [queued.request.request_id, begun.request.request_id])
    for session in (1, 2, 3):
        memory_engine.core.handle(m.QueueNews(ids, array("i")))
        memory_engine.core.handle(m.QueueNews(array("i"), ids[1:]))
        restart(session)
        memory_engine.say(running, "b")
        assert (begun.ends, late.ends) == ([], []) or session > 1
    assert begun.end.code == late.end.code == "engine_restarted"
    assert running.ends == queued.ends == []
    memory_engine.core.handle(m.QueueNews(array("i", [99]), array("i", [99])))  # one that has ended meanwhile
    memory_engine.core.handle(m.QueueNews(ids[:1], array("i")))
    memory_engine.say(queued, "x", finish="length")
    assert isinstance(queued.end, Final)


def test_losses_while_the_engine_loads_are_nobodys_fault(memory_engine, submit, restart):
    events = submit("x")
    for session in range(1, 9):
        memory_engine.core.suspend("worker-0 was killed", session)
    restart(9)
    assert events.ends == []


def test_a_drain_during_a_restart_lets_requests_finish(memory_engine, submit):
    events = submit("x")
    memory_engine.core.suspend("worker-0 was killed", 1)
    memory_engine.core.drain()
    memory_engine.core.handle(LIMITS)
    assert memory_engine.engine.health().state == "draining"
    memory_engine.say(events, "y", finish="length")
    assert events.end.samples[0].text == "y"
