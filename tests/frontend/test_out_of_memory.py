"""An allocation that fails in the frontend costs one request, or the process: nobody waits for what was lost."""

from array import array

import pytest

from common import messages as m
from common.errors import RequestError, TriremeError
from common.sampling_params import SamplingParams
from frontend import Client, client_server, main
from frontend.events import Final
from tests.support.frontend_in_memory import Events

TWO_TOKENS = m.TokensOut(request_ids=array("i", [0, 1]), token_ids=array("i", [40, 41]))
TWO_ENDS = m.TokensOut(
    request_ids=array("i", [0, 1]),
    token_ids=array("i", [40, 41]),
    finishes=(m.SampleFinish(0, "length"), m.SampleFinish(1, "length")),
)


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.fixture
def two_requests(memory_engine):
    events = [Events() for _ in range(2)]
    for each in events:
        each.request = memory_engine.core.submit(array("i", [5, 6]), SamplingParams(max_tokens=9), each)
    return events


@pytest.mark.parametrize(("part", "step"), [("_detokenizer.push", TWO_TOKENS), ("result", TWO_ENDS)])
def test_a_sample_costs_its_own_request(memory_engine, two_requests, monkeypatch, part, step):
    """The end of one that could not be put together came to nobody: the request was over, and its client waited."""
    broken, good = two_requests
    owner = broken.request.samples[0]
    *path, name = part.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(type(getattr(owner, path[0]) if path else owner), name, no_memory)
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
            on_loop(frontend, no_memory)
        frontend.scheduler.gate.set()
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
