"""Tokens that go straight to the connection: the stream is the same, byte for byte, whichever way each token takes."""

import asyncio
import json
import socket
from random import Random
from types import SimpleNamespace

import pytest

from frontend.http import direct
from frontend.http.direct import CYCLE_KEY, DirectWriter, StepWrites

CALL = 'Look. <tool_call>\n{"name": "f", "arguments": {"a": "sea"}}\n</tool_call>'
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 60}
TEXT = {"prompt": "Hi", "stream": True, "max_tokens": 60}
REQUESTS = {
    "chat": ("/v1/chat/completions", CHAT),
    "two chats": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "a call": (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    ),
    "tools": (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    ),
    "usage": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "completion": ("/v1/completions", TEXT),
    "echo": ("/v1/completions", {**TEXT, "echo": True, "n": 2}),
    "two prompts": ("/v1/completions", {**TEXT, "prompt": ["a", "b"]}),
    "messages": ("/v1/messages", CHAT),
    "responses": ("/v1/responses", {"input": "Hi", "stream": True}),
    "stop": ("/v1/completions", {**TEXT, "stop": "海は"}),
}
LONG_WAY = {"two prompts"}


class Connection:
    """An ASGI server's side of one response, with uvicorn's record of it.

    Attributes:
        direct_count: events that came past the application.
    """

    def __init__(self) -> None:
        self.body = b""
        self.direct_count = 0
        self.flow = SimpleNamespace(write_paused=False)
        self.disconnected = False
        self.is_closed = False
        self.chunked_encoding = None
        self.step_writes = StepWrites()
        self.transport = SimpleNamespace(
            write=self._write, close=self._close, fd=-1, step_writes=self.step_writes, on_change=lambda: None
        )

    def pause(self, paused: bool) -> None:
        self.flow.write_paused = paused
        self.transport.on_change()

    def leave(self) -> None:
        self.disconnected = True
        self.transport.on_change()

    def _close(self) -> None:
        self.is_closed = True

    def _write(self, data: bytes) -> None:
        size, _, rest = data.partition(b"\r\n")
        assert rest.endswith(b"\r\n") and len(rest) == int(size, 16) + 2, f"no chunk: {data!r}"
        self.direct_count += 1
        self.body += rest[:-2]

    async def send(self, message) -> None:
        if message["type"] == "http.response.start":
            self.chunked_encoding = True
        self.body += message.get("body", b"")


def stream(api, path: str, body: dict, connection: Connection, on_step=lambda: None) -> None:
    """Run a request to its end; `on_step` is called between the scheduler's steps."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()

    step = api.scheduler._step

    def stepped(*arguments) -> None:
        on_step()
        step(*arguments)

    api.scheduler._step = stepped
    scope = {
        "type": "http", "method": "POST", "path": path, "query_string": b"", "client": None,
        "headers": [(b"x-request-id", b"same")], CYCLE_KEY: connection,
    }  # fmt: skip
    api.engine.core.after_tokens.append(connection.step_writes.flush)
    api.loop.run_until_complete(api.app(scope, receive, connection.send))


def told(body: bytes) -> tuple[dict, list]:
    """Each choice's text and calls, and how the stream ends, without what depends on the moment."""
    assert body.endswith(b"data: [DONE]\n\n")
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    texts: dict = {}
    ends: list = []
    for event in map(json.loads, lines[:-1]):
        for choice in event.get("choices", ()):
            text = choice.get("text", choice.get("delta", {}).get("content") or "")
            for call in choice.get("delta", {}).get("tool_calls", ()):
                text += call["function"].get("name", "") + call["function"].get("arguments", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            if choice["finish_reason"]:
                ends.append((choice["index"], choice["finish_reason"], choice.get("stop_reason")))
        if event.get("usage"):
            ends.append(event["usage"])
        take_typed(event, texts, ends)
    return texts, ends


def take_typed(event: dict, texts: dict, ends: list) -> None:
    """The same of an event of `/v1/messages` or `/v1/responses`."""
    kind, delta = event.get("type", ""), event.get("delta")
    if kind in ("content_block_delta", "response.output_text.delta"):
        texts[kind] = texts.get(kind, "") + (delta if isinstance(delta, str) else delta["text"])
    elif kind:
        ends.append(kind)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_says_the_same_either_way(name, make_api):
    path, body = REQUESTS[name]
    connections = []
    for is_slow in (True, False):
        connection = Connection()
        connection.pause(is_slow)
        api = make_api().ready()
        if name == "a call":
            api.scheduler.answer, api.scheduler.stops = CALL, True
        stream(api, path, {**body, "max_tokens": 140 if name == "a call" else 60}, connection)
        connections.append(connection)
    slow, fast = connections
    assert slow.direct_count == 0
    assert (fast.direct_count > 5) == (name not in LONG_WAY), fast.body.decode()
    assert told(fast.body) == told(slow.body)


@pytest.mark.parametrize("seed", range(10))
def test_a_client_that_reads_now_and_then_gets_every_token_in_order(seed, make_api):
    choose = Random(seed)
    connection = Connection()

    def on_step() -> None:
        connection.pause(choose.random() < 0.5)

    reference = Connection()
    stream(make_api().ready(), *REQUESTS["two chats"], reference)
    stream(make_api().ready(), *REQUESTS["two chats"], connection, on_step)
    assert told(connection.body) == told(reference.body), f"seed {seed}"
    assert 0 < connection.direct_count < reference.direct_count, f"seed {seed}"


def test_without_our_protocol_and_after_the_end_everything_goes_the_long_way():
    without = DirectWriter({})
    without.open()
    assert not without.of(str.encode).take("x") and not without.of_texts(b"", b"").take("x")
    connection = Connection()
    connection.chunked_encoding = True
    writer = DirectWriter({CYCLE_KEY: connection})
    write = writer.of_texts(b"<", b">").take
    assert not write("before the head is written")
    writer.open()
    assert writer.silent and write("") and writer.silent
    assert write("a") and not writer.silent
    connection.leave()
    assert not write("the client is gone")
    connection.disconnected = False
    connection.pause(False)
    assert write("")
    writer.close()
    connection.pause(False)
    assert not write("after the end")
    connection.step_writes.flush()
    assert connection.body == b'<"a">'


def test_what_goes_the_long_way_is_not_read_by_a_parser_before():
    connection = Connection()
    connection.chunked_encoding = True
    writer = DirectWriter({CYCLE_KEY: connection})
    connection.pause(True)
    writer.open()
    seen = []
    write = writer.of(lambda text: seen.append(text) or text.encode()).take
    assert not write("a") and not seen
    connection.pause(False)
    assert write("b") and seen == ["b"]
    connection.step_writes.flush()
    assert connection.body == b"b"


@pytest.mark.parametrize("size", [1, 900, 1023, 1024, 1025, 70_000])
def test_a_text_of_any_length_is_one_chunk(size):
    connection = Connection()
    connection.chunked_encoding = True
    writer = DirectWriter({CYCLE_KEY: connection})
    writer.open()
    assert writer.of_texts(b"<", b">").take("a" * size)
    connection.step_writes.flush()
    assert connection.direct_count == 1 and connection.body == b'<"%b">' % (b"a" * size)


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_a_socket_does_not_take_goes_to_its_transport(is_gone):
    """And all that follows, until the transport says that it has nothing left."""
    connection, (ours, theirs), left = Connection(), socket.socketpair(), []

    def write(data: bytes) -> None:
        left.append(data)
        connection.pause(True)

    connection.chunked_encoding, connection.transport.write, connection.transport.fd = True, write, ours.fileno()
    ours.setblocking(False)
    writer = DirectWriter({CYCLE_KEY: connection})
    writer.open()
    take, texts, received = writer.of_texts(b"", b"").take, ["a", "b" * (4 << 20), "c"], b""
    with theirs:
        with ours:
            if is_gone:
                theirs.close()
            assert all(take(text) for text in texts)
            connection.step_writes.flush()
            assert not take("d"), "the transport holds something"
        while not is_gone and (part := theirs.recv(1 << 20)):
            received += part
    assert received + b"".join(left) == b"".join(b'%x\r\n"%b"\r\n' % (len(text) + 2, text.encode()) for text in texts)
    assert is_gone or (len(received) > 1 << 10 and len(left) == 2)
    connection.pause(False)
    assert take("d")


def test_a_connection_that_fails_is_closed_and_holds_up_no_other(caplog):
    """Its stream would go on without a token."""

    def fail(data: bytes) -> None:
        raise RuntimeError("the handler is closed")

    writes, connections, takers = StepWrites(), [Connection() for _ in range(3)], []
    connections[1].transport.write = fail
    for connection in connections:
        connection.chunked_encoding, connection.transport.step_writes = True, writes
        writer = DirectWriter({CYCLE_KEY: connection})
        writer.open()
        takers.append(writer.of_texts(b"", b"").take)
    assert all(take("a") for take in takers)
    writes.flush()
    assert [connection.body for connection in connections] == [b'"a"', b"", b'"a"']
    assert [connection.is_closed for connection in connections] == [False, True, False]
    assert [take("b") for take in takers] == [True, False, True]
    assert "a stream could not be written" in caplog.text
    writes.flush()
    assert connections[2].body == b'"a""b"', "nothing is written twice"


def test_nothing_follows_a_part_of_a_chunk_whose_rest_cannot_be_written(monkeypatch, caplog):
    """Two samples write in one step: the second one's text would stand in the middle of the first one's chunk."""

    def fail(data: bytes) -> None:
        raise RuntimeError("the handler is closed")

    written, connection = [], Connection()
    monkeypatch.setattr(direct.os, "write", lambda fd, data: written.append(data) or 1)
    connection.chunked_encoding, connection.transport.write, connection.transport.fd = True, fail, 1000
    writer = DirectWriter({CYCLE_KEY: connection})
    writer.open()
    assert all(writer.of_texts(b"", b"").take(text) for text in "ab")
    connection.step_writes.flush()
    assert written == [b'3\r\n"a"\r\n'] and connection.is_closed
    assert "a stream could not be written" in caplog.text


def test_a_connection_that_cannot_take_chunks_gets_none():
    """HTTP/1.0."""
    connection = Connection()
    connection.chunked_encoding = False
    writer = DirectWriter({CYCLE_KEY: connection})
    writer.open()
    assert not writer.of(str.encode).take("x") and not writer.of_texts(b"", b"").take("x")
