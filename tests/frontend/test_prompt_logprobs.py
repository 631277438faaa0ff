"""Thousands of log probabilities: the same values as ever, and the event loop has its turns meanwhile."""

import asyncio
from array import array
from itertools import pairwise
from unittest import mock

import pytest

from common import client_messages as wire
from common import messages as m
from common.errors import RequestError
from frontend.client_records import ClientRecord, ClientSink
from frontend.prompt_logprobs import TURN, in_turns
from tests.support.frontend_in_memory import Events

PROMPT = "the open sea 海 🌊, " * 40


def entries_of(count: int):
    """One for each position from the second on."""
    return tuple(
        m.TokenLogprobs(position, -position / 8, 2, array("i", [40, 41]), array("f", [-0.5, -1.0]))
        for position in range(1, count)
    )


def test_work_in_turns_is_all_of_it_in_order_with_others_in_between():
    turns = []

    async def main():
        waiting = asyncio.create_task(in_turns(turns.append(None) or number for number in range(10 * TURN)))
        seen = []
        while not waiting.done():
            await asyncio.sleep(0)
            seen.append(len(turns))
        return await waiting, seen

    gathered, seen = asyncio.run(main())
    assert gathered == list(range(10 * TURN))
    assert max(later - sooner for sooner, later in pairwise(seen)) <= TURN


@pytest.fixture
def ended(memory_engine, byte_tokenizer):
    """A request whose prompt has log probabilities, and its end."""
    ids = byte_tokenizer.encode(PROMPT)
    params = memory_engine.engine.make_params({"max_tokens": 1, "prompt_logprobs": 2})
    events = Events()
    request = memory_engine.core.submit(ids, params, events, stream=False)
    entries = entries_of(len(ids))
    memory_engine.tokens(request.request_id, [5], prompt_logprobs=((0, entries),), finish="length")
    return request, events.end


def test_they_are_described_only_as_they_are_taken(ended, monkeypatch):
    """All were described in the turn in which they came: a second and a half for a prompt of 8,000 tokens."""
    request, final = ended
    assert len(final.prompt_logprobs) == len(request.prompt_token_ids) > 10 * TURN
    described = []
    monkeypatch.setattr(final.prompt_logprobs, "_describe", lambda *arguments: described.append(arguments[1]) or "x")
    taking = iter(final.prompt_logprobs)
    assert not described
    assert [next(taking) for _ in range(3)] == [None, "x", "x"]
    assert len(described) == 2
    assert all(entry == "x" for entry in taking)
    assert PROMPT.endswith("".join(described))


@pytest.fixture
def ending(ended):
    """A client of the socket whose request's end is being written, the request's sink, and the work that writes."""
    started = []
    client = ClientRecord({}, b"me")
    sink = client.live["a"] = ClientSink(client, "a", 1, started.append)
    sink.on_final(ended[1])
    return client, sink, started[0]


@pytest.mark.parametrize("fails_meanwhile", [False, True])
def test_a_client_of_the_socket_gets_them_in_one_end(ended, ending, fails_meanwhile):
    (_, final), (client, sink, writing) = ended, ending
    assert client.messages() == [], "all of it was written in one turn"
    assert sink.is_ending
    if fails_meanwhile:
        sink.on_failed(RequestError("this client's key was revoked", code="key_revoked", status=401))
    asyncio.run(writing)
    [end] = [wire.decode_to_client(message) for message in client.messages()]
    assert not client.live
    if fails_meanwhile:
        assert end.code == "key_revoked"
    else:
        assert end.prompt_logprobs == tuple(final.prompt_logprobs)
        assert end.samples == final.samples


def test_an_end_that_cannot_be_written_leaves_the_id_free(ended, ending, monkeypatch):
    """The client's record was kept for ever, and its id was in use."""
    client, _, writing = ending
    monkeypatch.setattr(ended[1].prompt_logprobs, "_describe", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):  # which the socket's server answers
        asyncio.run(writing)
    assert not client.live
