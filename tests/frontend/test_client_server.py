"""The client socket under clients that send before they have read: every message has its own answer."""

import asyncio
import contextlib
from array import array
from typing import get_args

import pytest
import zmq

from common import client_messages as wire
from common.errors import RequestError
from common.messages import MoreFollows, decode_for_scheduler
from frontend import Client
from frontend.client_records import ClientRecord, ClientSink
from frontend.pieces import Piece


class Raw:
    """A DEALER that sends many messages at once."""

    def __init__(self, endpoint: str, identity: bytes | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        if identity is not None:
            self._socket.set(zmq.IDENTITY, identity)
        self._socket.connect(endpoint)

    def send(self, *messages: wire.FromClient) -> None:
        for message in messages:
            self._socket.send(message.to_wire())

    def receive(self) -> wire.ToClient:
        """The next reply; what the frontend asks when another client has left is none."""
        while True:
            assert self._socket.poll(20_000), "no reply within 20 s"
            reply = wire.decode_to_client(self._socket.recv())
            if reply != wire.Pong(""):
                return reply

    def until(self, kind: type, request_id: str) -> wire.ToClient:
        while not (isinstance(reply := self.receive(), kind) and reply.request_id == request_id):
            pass
        return reply

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def connect(shared_frontend):
    """Makes a `Raw` client of the shared frontend."""
    with contextlib.ExitStack() as stack:

        def make(identity: bytes | None = None) -> Raw:
            return stack.enter_context(contextlib.closing(Raw(shared_frontend.endpoint, identity)))

        yield make


def generate(request_id: str, params: dict, **more) -> wire.Generate:
    return wire.Generate(request_id=request_id, prompt="the sea", params=params, **more)


def known_clients(running) -> int:
    """How many records there are, counted between two turns of the frontend's loop."""

    async def count() -> int:
        return len(running.frontend._clients._clients)

    return asyncio.run_coroutine_threadsafe(count(), running.frontend._ended.get_loop()).result(20)


def test_a_token_has_the_next_flush_handle_its_client():
    touched: dict[bytes, ClientRecord] = {}
    client = ClientRecord(touched, b"me")
    sink = ClientSink(client, "a", 1, lambda work: None)
    for _ in range(2):
        sink.on_token(0, Piece(70, "sea"))
        sink.on_token(0, Piece(71, "!"))
        assert touched.pop(b"me") is client, "what the flush does"
        (message,) = client.messages()
        assert [delta.text for _, delta in wire.decode_to_client(message).entries] == ["sea", "!"]


def test_pings_at_once_are_all_answered_in_order(connect, shared_frontend):
    names = [f"p{number}" for number in range(100)]
    raw = connect()
    raw.send(*map(wire.Ping, names))
    assert [raw.receive().request_id for _ in names] == names
    assert known_clients(shared_frontend) == 0


def test_requests_that_come_at_once_reach_the_scheduler_at_once(shared_frontend):
    """The first was planned alone, and two steps of its decoding before the others' prompts."""
    running, followed = shared_frontend.frontend, []

    async def come() -> list[bool]:
        outbox, send = running._engine.core._outbox, running._send_to_scheduler
        outbox._send = lambda data, more=False: (followed.append(more), send(data, more))
        for number in range(3):
            running._clients.on_frames([b"nobody", generate(f"r{number}", {"max_tokens": 2}).to_wire()])
        before = followed.copy()
        running._clients.flush()
        running._clients.flush()  # which finds nothing any more
        outbox._send = send
        return before

    assert not asyncio.run_coroutine_threadsafe(come(), running._ended.get_loop()).result(20)
    assert followed == [True, True, False]
    shared_frontend.scheduler.wait_until(lambda: len(shared_frontend.scheduler.added) >= 3)
    assert [request.params.max_tokens for request in shared_frontend.scheduler.added[-3:]] == [2, 2, 2]


NO_REQUESTS = [
    wire.Hello(), wire.Abort("r"), wire.Tokenize("t", "abc"), wire.Detokenize("d", array("i", [1])),
    wire.GetStatus("s"), wire.Ping("p"),
]  # fmt: skip
REQUESTS = [
    generate("q", {"max_tokens": 2}),
    wire.Embed(request_id="e", prompt="abc"),
    wire.Resume(generate("q", {"max_tokens": 2}), ()),
]


def test_every_message_is_a_request_or_none():
    assert {*map(type, NO_REQUESTS), *map(type, REQUESTS)} == set(get_args(wire.FromClient))


@pytest.mark.parametrize("ending", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_word_of_more_holds_until_its_clients_next_request(shared_frontend, monkeypatch, ending):
    """It was one flag for all, and an abort between two requests of a batch took it back: a batch of which a part was
    still to come was planned without it."""
    running, sent = shared_frontend.frontend, []
    outbox, send = running._engine.core._outbox, running._send_to_scheduler
    # of this ending alone: a request that is still running keeps its client's next one of the same id from being sent
    one, other = (f"{name} {type(ending).__name__}".encode() for name in ("one", "other"))

    def also_keep(data: bytes, more: bool = False) -> None:
        message = decode_for_scheduler(data)
        sent.extend([message] if isinstance(message, MoreFollows) else [])
        send(data, more)

    async def come() -> None:
        request = generate("r", {"max_tokens": 2}).to_wire()
        others = [[one, message.to_wire()] for message in NO_REQUESTS] + [[one, b"no message"]]
        for frames in ([one, request, wire.MORE_FOLLOWS], [other, request], *others):
            running._clients.on_frames(frames)
            running._clients.flush()
        assert sent == [MoreFollows()] * 2 and outbox._more_follows(), "said behind each request"
        running._clients.on_frames([one, ending.to_wire()])
        assert not outbox._more_follows()
        running._clients.flush()

    monkeypatch.setattr(outbox, "_send", also_keep)
    monkeypatch.setattr(outbox, "_clock", lambda: 1.0)  # however long that takes, the first one's word is believed
    asyncio.run_coroutine_threadsafe(come(), running._ended.get_loop()).result(20)


def test_refusals_at_once_are_all_sent(connect):
    names = [f"g{number}" for number in range(10)]
    raw = connect()
    raw.send(*(generate(name, {"temperature": -1.0}) for name in names))
    assert [raw.receive().request_id for _ in names] == names
    raw.send(generate("bad", {"temperature": -1.0}), generate("good", {"max_tokens": 2}, stream=False))
    replies = [raw.receive(), raw.receive()]
    assert [(type(reply), reply.request_id) for reply in replies] == [(wire.ErrorReply, "bad"), (wire.Final, "good")]


def test_the_sdk_hears_of_each_of_many_refusals(shared_frontend):
    with Client(shared_frontend.endpoint) as client:
        for stream in [client.submit("x", {"temperature": -1.0}, timeout_s=5) for _ in range(8)]:
            with pytest.raises(RequestError, match="temperature"):
                stream.result()


def test_a_reply_that_was_worked_on_leaves_the_clients_live_request_alone(connect, shared_frontend):
    shared_frontend.scheduler.gate.clear()
    raw = connect()
    long = {"max_tokens": 2000, "ignore_eos": True}
    raw.send(wire.Tokenize("t", "abc"), generate("g", long), wire.Tokenize("u", "long " * 200))
    heard = {raw.receive().request_id for _ in "tu"}
    assert heard == {"t", "u"}
    assert known_clients(shared_frontend) == 1
    raw.send(generate("g", long))
    assert raw.receive().code == "duplicate_request_id"
    raw.send(wire.Abort("g"))
    assert raw.until(wire.Final, "g").samples[0].finish_reason == "abort"
    shared_frontend.scheduler.gate.set()
    raw.send(wire.Ping("last"))
    raw.until(wire.Pong, "last")
    assert known_clients(shared_frontend) == 0


def test_a_message_without_an_answer_leaves_no_record(connect, shared_frontend):
    raw = connect()
    raw.send(wire.Abort("never heard of"), wire.Ping("p"))
    assert raw.receive() == wire.Pong("p")
    assert known_clients(shared_frontend) == 0


def test_a_client_may_choose_the_longest_identity(connect):
    raw = connect(b"x" * 255)
    raw.send(generate("g", {"max_tokens": 2}, stream=False))
    assert raw.until(wire.Final, "g").completion_tokens == 2


def test_an_unknown_parameter_of_any_length_is_refused_by_name(connect):
    raw = connect()
    raw.send(generate("g", {"a" * 300: 1}))
    assert raw.receive().param == "a" * wire.PARAM_LIMIT


@pytest.mark.parametrize("tools", [["x"], [[]], [None], "x", {"a": 1}], ids=repr)
def test_tools_that_are_none_are_refused_by_name(connect, tools):
    raw = connect()
    chat = [{"role": "user", "content": "x"}]
    raw.send(wire.Generate(request_id="g", prompt=chat, params={}, chat={"tools": tools}))
    reply = raw.receive()
    assert (reply.code, reply.param) == ("invalid_parameter", "chat")
