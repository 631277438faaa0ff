"""What the scheduler is sent at once, and what it is told of what follows."""

from types import SimpleNamespace

import pytest

from benchmarks.fake_scheduler import LIMITS
from common.messages import AddRequest, FlushCache, MoreFollows, decode_for_scheduler
from frontend.outbox import GROUP_SIZE, Outbox


def test_a_gathered_request_is_sent_before_its_abort(memory_engine, submit):
    memory_engine.core.gather()
    submit()
    assert not memory_engine.sent
    memory_engine.core.abort(0)
    assert [type(message).__name__ for message in memory_engine.sent] == ["AddRequest", "AbortRequests"]
    submit()
    assert memory_engine.sent[2].request_id == 1


def gathered(memory_engine, submit, *kinds):
    """What is sent when these have come together: requests, and what turns out to be none."""
    for kind in kinds:
        memory_engine.core.gather()
        if kind == "request":
            submit()
    memory_engine.core.send_gathered()
    return [m.follows if isinstance(m, MoreFollows) else m.request_id for m in memory_engine.sent]


def test_the_first_of_many_requests_do_not_wait_for_the_last(memory_engine, submit):
    """The scheduler had nothing to do until all had been read; now it has some, and knows that they are not all."""
    sent = gathered(memory_engine, submit, *["request"] * (2 * GROUP_SIZE + 1))
    ids = list(range(2 * GROUP_SIZE + 1))
    assert sent == [*ids[:GROUP_SIZE], True, *ids[GROUP_SIZE : 2 * GROUP_SIZE], True, ids[-1]]


@pytest.mark.parametrize("count", [1, GROUP_SIZE - 1, GROUP_SIZE])
def test_few_requests_go_together_and_nothing_else_is_said(memory_engine, submit, count):
    assert gathered(memory_engine, submit, *["request"] * count) == list(range(count))


def test_what_a_client_says_of_more_is_passed_on_until_it_says_no_more(memory_engine, submit):
    """The next may come when the first has been handled; the first ones were planned alone."""
    core, sent = memory_engine.core, memory_engine.sent
    for _ in range(2):  # and once more without a message: the scheduler's messages are handled in between
        core.gather()
        core.promise("a client", True)
        submit()
        core.send_gathered()
        core.send_gathered()
    assert [type(message) for message in sent] == [AddRequest, MoreFollows] * 2
    core.promise("a client", False)
    core.send_gathered()
    core.send_gathered()
    assert sent[4:] == [MoreFollows(follows=False)]


def test_what_was_to_follow_and_is_no_request_is_taken_back(memory_engine, submit):
    """The scheduler waited for it."""
    sent = gathered(memory_engine, submit, *["request"] * GROUP_SIZE, "ping")
    assert sent == [*range(GROUP_SIZE), True, False]
    assert gathered(memory_engine, submit, "request")[len(sent) :] == [GROUP_SIZE]


def test_a_promise_ends_with_the_scheduler_that_it_was_made_to(memory_engine, submit):
    """The next one was told first of all that nothing follows, while nothing was to be sent."""
    core, sent = memory_engine.core, memory_engine.sent
    core.gather()
    core.promise("a client", True)
    submit()
    core.send_gathered()
    core.promise("a client", False)
    core.suspend("lost", 1)
    core.send_gathered()
    core.handle(LIMITS)
    core.send_gathered()
    assert [type(message) for message in sent] == [AddRequest, MoreFollows, AddRequest]


@pytest.mark.parametrize("gathers", [True, False], ids=["on the client socket", "over HTTP"])
@pytest.mark.parametrize("says", ["nothing", "no more"])
def test_another_senders_requests_take_no_word_of_more_back(memory_engine, submit, gathers, says):
    """A batch whose parts came before and behind them did not share its first step."""
    core, sent = memory_engine.core, memory_engine.sent
    core.promise("a client", True)
    if gathers:
        core.gather()
    if says == "no more":
        core.promise("another", False)
    submit()
    core.send_gathered()
    assert [type(message) for message in sent] == [AddRequest, MoreFollows]
    assert sent[1].follows


@pytest.mark.parametrize("late_s", [0.0, 1e-6])
def test_word_of_more_is_believed_for_a_while_only(late_s):
    """A client that had ended in the middle of a batch kept the others' requests waiting, each for a few ms."""
    now_s, sent = [1.0], []
    outbox = Outbox(lambda data, more=False: sent.append(decode_for_scheduler(data)), lambda: now_s[0])
    request = SimpleNamespace(
        request_id=7, output_count=0, timings=SimpleNamespace(submitted_s=0.0), continued_message=FlushCache
    )
    outbox.promise("a client", True)
    outbox.request(request)
    now_s[0] += MoreFollows.BELIEVED_S + late_s - 1e-7
    outbox.flush()
    outbox.request(request)
    follows = [message.follows for message in sent if isinstance(message, MoreFollows)]
    assert follows == ([True, False] if late_s else [True, True])


def test_senders_are_forgotten_with_their_words():
    """Clients of which each said so once, and sent no request that could be read, were all remembered."""
    now_s = [1.0]
    outbox = Outbox(lambda *_: None, lambda: now_s[0])
    for number in range(9):
        outbox.promise(number, True)
        now_s[0] += 0.4 * MoreFollows.BELIEVED_S
    assert sorted(outbox._promised_until_s) == [6, 7, 8]
