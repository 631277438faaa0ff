"""What breaks off in the frontend for want of memory costs one request, or the process: nobody waits for what was lost.

An allocation that fails raises MemoryError; in the tokenizer it is a panic, which is no Exception.
"""

import threading
from array import array
from types import SimpleNamespace

import pytest

from common import messages as m
from common.errors import RequestError, TriremeError
from common.sampling_params import SamplingParams
from frontend import Client, client_server, main
from frontend.events import Final
from frontend.text_work import started_threads
from frontend.tokenizer import Tokenizer
from tests.support.frontend_in_memory import Events

TWO_TOKENS = m.TokensOut(request_ids=array("i", [0, 1]), token_ids=array("i", [40, 41]))
TWO_ENDS = m.TokensOut(
    request_ids=array("i", [0, 1]),
    token_ids=array("i", [40, 41]),
    finishes=(m.SampleFinish(0, "length"), m.SampleFinish(1, "length")),
)


LONG_TEXT = "the sea " * 1000
"""Encoded in a thread."""


class Panic(BaseException):
    """As pyo3's PanicException."""


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError


def panic(*_: object, **__: object) -> None:
    raise Panic("The global thread pool has not been initialized")


@pytest.fixture
def two_requests(memory_engine):
    events = [Events() for _ in range(2)]
    for each in events:
        each.request = memory_engine.core.submit(array("i", [5, 6]), SamplingParams(max_tokens=9), each)
    return events


@pytest.mark.parametrize("fault", [no_memory, panic])
@pytest.mark.parametrize(("part", "step"), [("_detokenizer.push", TWO_TOKENS), ("result", TWO_ENDS)])
def test_a_sample_costs_its_own_request(memory_engine, two_requests, monkeypatch, part, step, fault):
    """The end of one that could not be put together came to nobody: the request was over, and its client waited."""
    broken, good = two_requests
    owner = broken.request.samples[0]
    *path, name = part.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(type(getattr(owner, path[0]) if path else owner), name, fault)
        memory_engine.core.handle(m.TokensOut(request_ids=step.request_ids[:1], token_ids=step.token_ids[:1],
                                              finishes=step.finishes[:1]))  # fmt: skip
    assert (broken.end.code, broken.end.status) == ("internal_error", 500)
    assert list(memory_engine.sent[-1].request_ids) == [0]
    memory_engine.core.handle(step)
    assert good.deltas and memory_engine.core.live_count == (0 if step.finishes else 1)


def test_an_abort_ends_its_request_all_the_same(memory_engine, two_requests, monkeypatch):
    aborted, other = two_requests
    with monkeypatch.context() as patch:
        patch.setattr(type(aborted.request), "final", no_memory)
        memory_engine.core.abort(0)
    assert aborted.end.code == "internal_error"
    assert 0 in memory_engine.sent[-1].request_ids
    memory_engine.core.abort(1)
    assert isinstance(other.end, Final)


def test_a_request_that_could_not_be_sent_is_not_live(memory_engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(m.AddRequest, "to_wire", no_memory)
        with pytest.raises(MemoryError):
            memory_engine.core.submit(array("i", [5]), SamplingParams(), Events())
    assert (memory_engine.core.live_count, memory_engine.sent) == (0, [])


def test_an_end_that_may_not_have_reached_its_client_is_not_passed_over(memory_engine, two_requests, monkeypatch):
    monkeypatch.setattr(two_requests[0], "on_final", no_memory)
    with pytest.raises(MemoryError):
        memory_engine.core.handle(TWO_ENDS)


def on_loop(running, call) -> None:
    """Have the frontend's loop call something, as for a timer or a socket."""
    running.frontend._ended.get_loop().call_soon_threadsafe(call)


@pytest.mark.parametrize("fault", [no_memory, panic])
@pytest.mark.parametrize("text", ["hello", LONG_TEXT], ids=["on the loop", "in a thread"])
def test_a_text_costs_its_own_request(frontend, monkeypatch, text, fault):
    """A client was told nothing of the panic, and waited."""
    with Client(frontend.endpoint, timeout_s=20) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "encode", fault)
            with pytest.raises(RequestError, match="internal error") as caught:
                client.generate(text, SamplingParams(max_tokens=3))
            assert caught.value.status == 500
        assert client.generate("hello", SamplingParams(max_tokens=3)).completion_tokens == 3
    assert frontend.frontend._engine.core.live_count == 0


@pytest.mark.parametrize("where", ["decoding", "handling", "elsewhere"])
def test_a_message_that_is_lost_ends_every_request_and_the_process(frontend, monkeypatch, where):
    with Client(frontend.endpoint, timeout_s=20) as client:
        frontend.scheduler.gate.clear()
        stream = client.generate("hello", SamplingParams(max_tokens=50), stream=True)
        frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count)
        if where == "decoding":
            monkeypatch.setattr(main, "decode_for_frontend", no_memory)
        elif where == "handling":
            monkeypatch.setattr(frontend.frontend._engine.core.figures, "note_gaps", no_memory)
        else:
            on_loop(frontend, panic)
        frontend.scheduler.gate.set()
        with pytest.raises(TriremeError, match="MemoryError|Panic: The global"):
            list(stream)
    frontend.join(20)
    assert frontend.exit_code == 1 and frontend.link.detail.startswith(("MemoryError", "Panic: The global"))


def test_a_failure_while_requests_finish_is_no_good_end(frontend):
    """They had their error, and the process ended as if it had been told so."""
    with Client(frontend.endpoint, timeout_s=20) as client:
        frontend.scheduler.gate.clear()
        stream = client.generate("hello", SamplingParams(max_tokens=50), stream=True)
        frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count)
        frontend.link.order(m.Stop(600_000))
        on_loop(frontend, no_memory)
        with pytest.raises(TriremeError, match="MemoryError"):
            list(stream)
    frontend.join(20)
    assert (frontend.exit_code, frontend.link.detail) == (1, "MemoryError")


def test_other_errors_that_nobody_caught_are_logged_and_no_more(frontend, caplog):
    def mistake() -> None:
        raise ZeroDivisionError

    on_loop(frontend, mistake)
    with Client(frontend.endpoint, timeout_s=20) as client:
        assert client.generate("hello", SamplingParams(max_tokens=3)).completion_tokens == 3
    assert "ZeroDivisionError" in caplog.text


def test_a_clients_message_that_finds_no_memory_is_answered(shared_frontend, monkeypatch):
    with Client(shared_frontend.endpoint, timeout_s=20) as client:
        monkeypatch.setattr(client_server.wire, "decode_from_client", no_memory)
        with pytest.raises(RequestError, match="there is no memory for this message") as caught:
            client.generate("hello", SamplingParams(max_tokens=3))
        assert caught.value.status == 500


def test_threads_are_there_before_memory_is_short():
    """Starting one later would have the loop wait for it, for ever if it finds no memory."""
    before = set(threading.enumerate())
    pool = started_threads(2, "early")
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert [thread.name.startswith("early") for thread in started] == [True, True]
    assert sorted(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]
    assert {thread for thread in threading.enumerate() if thread not in before} == set(started)
    pool.shutdown()


def test_the_tokenizers_threads_too():
    texts: list[str] = []
    main._warm_up(SimpleNamespace(encode=texts.append, chat_template=""))
    assert texts
