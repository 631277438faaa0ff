"""What holds for the whole application: errors, keys, ids, limits, disconnects and health."""

import asyncio
import contextlib
import json
import logging

import httpx
import pytest

from common.config import ServerOptions
from common.messages import RequestFailed
from frontend.http import protocol, server, streams
from frontend.http import requests as bodies
from frontend.http.bodies import QUICK_BYTES
from frontend.http.middleware import BODY_LIMIT_BYTES
from frontend.http.replies import ChatReply

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}
GOOD = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


def body_for(path):
    return {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "Hi"}}[path]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff", b'{"temperature": NaN}', b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}', b'{"temperature": 1e400}', b'{"prompt": "\\ud800"}', b"[" * 100_000,
        b'{"a":' * 100_000, b"1" * 10_000,
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused_in_json(api, path, body):
    response = api.post(path, body)
    assert response.status_code == (413 if len(body) > QUICK_BYTES else 400)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_missing_field_is_named(api):
    error = api.post("/v1/chat/completions", {}).json()["error"]
    assert error["param"] == "messages"
    assert error["message"] == "Object missing required field `messages`"


def test_a_wrong_type_is_named_with_its_place(api):
    error = api.post("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": 3}}).json()["error"]
    assert error["param"] == "stream_options"
    assert error["message"] == "stream_options.include_usage: Expected `bool | null`, got `int`"


def test_unknown_fields_are_taken_and_logged_once(api, caplog, monkeypatch):
    monkeypatch.setattr(bodies, "_reported", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert api.post("/v1/chat/completions", {**CHAT, "frobnicate": 1}).status_code == 200
    assert [record.getMessage() for record in caplog.records] == [
        "ignoring the unknown field 'frobnicate' of ChatRequest (said once)"
    ]


def test_unknown_paths_and_methods(api):
    missing = api.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = api.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (405, "/v1/completions does not take GET")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/", "; /docs describes the API, and /dashboard shows the engine"),
        ("/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/v1/embeddings", "; did you mean /v1/embeddings?"),
        ("/v1", "; did you mean /v1/models?"),
        ("/v1/model", "; did you mean /v1/models?"),
        ("/generate", "; /docs describes what there is"),
        ("/" + "a" * 5000, ""),
    ],
)
def test_a_path_that_does_not_exist_is_answered_with_one_that_does(api, path, hint):
    assert api.get(path).json()["error"]["message"] == f"there is no {path}{hint}"


@pytest.mark.parametrize(
    ("path", "hint"),
    [("/", "; /llm/docs describes"), ("/v1/model", "; did you mean /llm/v1/models?"), ("/metric", "/llm/metrics?"),
     ("/llm/v1/models", "/llm/v1/models? (if that is what was asked for: a proxy has to take /llm off"),
     ("/generate", "; /llm/docs")],
)  # fmt: skip
def test_what_is_proposed_instead_is_behind_the_proxys_prefix_too(make_api, path, hint):
    """It named paths that the proxy does not serve, and found few: the prefix made all of them unlike."""
    api = make_api(root_path="/llm").ready()
    reply = serve(api, lambda address: exchange(address, GOOD.replace(b"/health", path.encode())), root_path="/llm")
    assert hint.encode() in reply


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_unknown_model_is_not_found(api, path):
    response = api.post(path, {**body_for(path), "model": "gpt-7"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "this engine serves tiny, small" in response.json()["error"]["message"]


def test_models(api):
    listed = api.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["tiny", "small"]
    assert listed[0]["max_model_len"] == 512
    assert api.get("/v1/models/small").json() == listed[1]
    assert api.get("/v1/models/org/other").status_code == 404


def test_request_id_is_echoed_or_made(api):
    assert api.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = api.get("/version").headers["x-request-id"]
    assert len(made) == 32
    assert api.get("/version", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"
    reply = api.post("/v1/chat/completions", CHAT, headers={"x-request-id": "abc-2"})
    assert reply.json()["id"] == "chatcmpl-abc-2"
    assert api.get("/nothing", headers={"x-request-id": "abc-3"}).headers["x-request-id"] == "abc-3"


def test_behind_a_proxys_prefix_the_same_paths_are_open(make_api):
    """The server puts `--root-path` before every path: /health was asked for a key then."""
    api = make_api(api_key=("secret",), root_path="/llm").ready()
    transport = httpx.ASGITransport(app=api.app, root_path="/llm")

    async def statuses(*paths):
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [(await client.get(path)).status_code for path in paths]

    paths = ("/llm/health", "/llm/ready", "/llm/dashboard", "/llm/v1/models", "/llm/dashboard/data", "/llm/llm/health")
    assert api.loop.run_until_complete(statuses(*paths)) == [200, 200, 200, 401, 401, 401]


def test_api_key_protects_all_but_what_orchestrators_ask(make_api):
    api = make_api(api_key=("secret", "other")).ready()
    for path in ("/v1/models", "/metrics", "/version", "/nothing"):
        response = api.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key"), path
        assert api.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert api.get(path, headers={"authorization": "Basic secret"}).status_code == 401
        assert api.get(path, headers={"authorization": "Bearer other"}).status_code != 401
    for path in ("/health", "/ready", "/ping"):
        assert api.get(path).status_code == 200
    assert api.post("/v1/chat/completions", CHAT).status_code == 401
    assert api.post("/v1/chat/completions", CHAT, headers={"authorization": "bearer secret"}).status_code == 200


def test_large_bodies_are_refused_by_length_and_by_count(api):
    response = api.post("/v1/completions", b"x" * (BODY_LIMIT_BYTES + 1))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")

    async def chunks():
        for _ in range(33):
            yield b"x" * (1 << 20)

    response = api.loop.run_until_complete(api.client.post("/v1/completions", content=chunks()))
    assert response.status_code == 413


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "TEXT/PLAIN; charset=utf-8", "application/x-www-form-urlencoded", "multipart/form-data; x=y"],
)
@pytest.mark.parametrize("path", ["/abort_request", "/flush_cache", "/v1/completions", "/v1/chat/completions", "/ping"])
def test_pages_of_other_origins_have_no_browser_send_what_it_sends_unasked(api, make_api, path, kind):
    """A page that somebody here looked at could end all requests: browsers ask before they send JSON only."""
    headers = {"origin": "https://evil.example"} | ({"content-type": kind} if kind else {})
    body = b'{"abort_all": true, "prompt": "x", "messages": [], "max_tokens": 1}'
    refused = api.post(path, body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert not api.scheduler.added
    for allowed in ("https://evil.example", "*"):
        assert make_api(allowed_origins=(allowed,)).ready().post(path, body, headers=headers).status_code in (200, 400)
    asked = api.post(path, body, headers=headers | {"content-type": "application/json; charset=utf-8"})
    without = api.post(path, body, headers={"content-type": kind} if kind else {})
    assert asked.status_code == without.status_code != 403


def test_cors_only_where_asked_for(api, make_api):
    headers = {"origin": "https://app.example"}
    assert "access-control-allow-origin" not in api.get("/version", headers=headers).headers
    other = make_api(allowed_origins=("https://app.example",), api_key=("secret",)).ready()
    assert other.get("/health", headers=headers).headers["access-control-allow-origin"] == "https://app.example"
    preflight = headers | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    response = other.loop.run_until_complete(other.client.options("/v1/completions", headers=preflight))
    assert response.status_code == 200
    assert other.get("/version", headers=headers).headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_full_queue_is_429_with_a_hint_also_for_streams(api, path, stream):
    api.scheduler.refuse = RequestFailed(0, "queue_full", "4096 requests wait already", 429, None, 2500)
    response = api.post(path, {**body_for(path), "stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"] == {
        "message": "4096 requests wait already", "type": "rate_limit_error", "param": None, "code": "queue_full",
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_failure_in_mid_stream_is_an_event(api, path):
    api.scheduler.fail_after = 3
    *before, last = api.events(path, body_for(path))
    assert len(before) >= 3
    assert last["error"]["message"] == "worker-0 was killed"
    assert last["error"]["type"] == "service_unavailable_error"
    assert api.post(path, body_for(path)).status_code == 503


def test_a_failure_of_one_prompt_ends_all(api):
    api.scheduler.fail_after = 3
    assert api.post("/v1/completions", {"prompt": ["a", "b"]}).status_code == 503
    *_, last = api.events("/v1/completions", {"prompt": ["a", "b"]})
    assert last["error"]["code"] == "engine_dead"
    assert api.engine.core.live_count == 0


class Connection:
    """One request at the ASGI level, so that the test decides when the client goes away."""

    def __init__(self, path, body):
        self.sent = []
        self.gone = asyncio.Event()
        self._body = json.dumps(body).encode()
        self.scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [], "client": ("127.0.0.1", 1), "server": ("test", 80), "scheme": "http", "root_path": "",
            "http_version": "1.1", "asgi": {"version": "3.0", "spec_version": "2.3"},
        }  # fmt: skip

    async def receive(self):
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"prompt": "Hi"}, {"prompt": ["a", "b"]}], ids=["one", "two"])
def test_a_disconnect_aborts_the_requests(api, stream, body):
    api.scheduler.hold_after = 2

    async def go_away():
        connection = Connection("/v1/completions", {**body, "stream": stream})
        running = asyncio.create_task(api.app(connection.scope, connection.receive, connection.send))
        count = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
        while len(api.scheduler.added) < count:
            await asyncio.sleep(0)
        connection.gone.set()
        await running

    api.loop.run_until_complete(asyncio.wait_for(go_away(), 30))
    assert sorted(api.scheduler.aborted) == [request.request_id for request in api.scheduler.added]
    assert api.engine.core.live_count == 0


def test_silence_is_filled_with_comments(api):
    api.scheduler.hold_after = 0

    async def wait():
        connection = Connection("/v1/chat/completions", {**CHAT, "stream": True})

        async def send(message):
            connection.sent.append(message)
            if len(connection.sent) == 3:
                connection.gone.set()

        await api.app(connection.scope, connection.receive, send)
        return connection.sent

    original = streams.EventStream.__init__.__defaults__
    streams.EventStream.__init__.__defaults__ = (0.001,)
    try:
        sent = api.loop.run_until_complete(asyncio.wait_for(wait(), 30))
    finally:
        streams.EventStream.__init__.__defaults__ = original
    assert sent[0]["status"] == 200
    assert [message["body"] for message in sent[1:3]] == [b": keep-alive\n\n"] * 2


def test_health_is_true(make_api):
    api = make_api()
    for path in ("/health", "/ready", "/ping"):
        assert (api.get(path).status_code, api.get(path).json()) == (503, {"status": "starting"})
    refused = api.post("/v1/chat/completions", CHAT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    api.ready()
    assert (api.get("/health").status_code, api.get("/health").json()) == (200, {"status": "serving"})
    api.engine.core.drain()
    assert (api.get("/health").status_code, api.get("/health").json()) == (503, {"status": "draining"})
    api.engine.core.fail_all("worker-0 was killed by signal 9")
    dead = api.get("/health")
    assert (dead.status_code, dead.json()) == (503, {"status": "dead", "detail": "worker-0 was killed by signal 9"})


def test_tokenize_and_back(api):
    text = "naïve 海 café"
    reply = api.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 512
    assert api.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": text}
    chat = api.post("/tokenize", {"messages": CHAT["messages"]}).json()["tokens"]
    rendered = "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert api.post("/detokenize", {"tokens": chat}).json() == {"prompt": rendered}
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [10**6]}), ("/detokenize", {"tokens": [-1]})):
        assert api.post(path, body).status_code == 400


class Panic(BaseException):
    """As what the tokenizer's library raises, which is no Exception."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, MemoryError, Panic])
def test_an_unexpected_failure_is_500_in_json(api, monkeypatch, kind):
    def fail(*_, **__) -> None:
        raise kind("ZeroDivisionError")

    monkeypatch.setattr(api.engine, "make_params", fail)
    response = api.post("/v1/chat/completions", CHAT)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_error"
    assert "ZeroDivisionError" not in response.text
    assert response.headers["x-request-id"], "the one who reports it needs the id"


def test_an_unexpected_failure_in_mid_stream_is_an_event(api, monkeypatch):
    monkeypatch.setattr(ChatReply, "chunk", lambda *_: 1 / 0)
    *_, last = api.events("/v1/chat/completions", CHAT)
    assert last["error"]["type"] == "internal_error"
    assert api.engine.core.live_count == 0


async def exchange(address, data, when_sent=lambda: None):
    """Everything that the server says to these bytes until it closes."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    when_sent()
    reply = b""
    with contextlib.suppress(ConnectionError):  # closed while we were still writing
        while part := await reader.read(65536):
            reply += part
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return reply


def serve(api, talk, **options):
    """Serve on a real socket, with further options, while `talk(address)` runs; its result."""

    async def run():
        listener = server.bind_http(ServerOptions(port=0, **options))
        running = server.HttpServer(api.engine, ServerOptions(port=0, **options), listener)
        await running.start()
        result = await talk(listener.getsockname())
        await running.stop(1.0)
        return result

    return api.loop.run_until_complete(asyncio.wait_for(run(), 30))


def applications(loop=None) -> list[asyncio.Task]:
    """The requests that a server is busy with."""
    return [task for task in asyncio.all_tasks(loop) if "run_asgi" in repr(task.get_coro())]


def test_a_request_that_is_still_being_sent_ends_with_the_server(api):
    """It was left to the end of the loop, where each had a traceback in the log."""

    async def talk(address):
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        while not applications():
            await asyncio.sleep(0)
        return writer

    writer = serve(api, talk)
    assert applications(api.loop) == []
    writer.close()
    with contextlib.suppress(ConnectionError):
        api.loop.run_until_complete(writer.wait_closed())


@pytest.mark.parametrize(
    ("sent", "status", "found"),
    [
        (GOOD, b"200", b'{"status":"serving"}'),
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * (1 << 20), b"400", b"head is larger than 65536 bytes"),
        (b"GET /health HTTP/1.1\r\n" + b"x: a\r\n" * 100_000, b"400", b"head is larger than 65536 bytes"),
        (b"\x80\x02nonsense\r\n\r\n", b"400", b'"code":"bad_request"'),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", b"400", b"CONNECT is not served"),
    ],
    ids=["good", "one header", "many headers", "no http", "connect"],
)
def test_served_by_uvicorn_on_a_real_socket(make_api, sent, status, found):
    async def talk(address):
        return [await exchange(address, sent), await exchange(address, GOOD)]

    first, second = serve(make_api(port=0).ready(), talk)
    assert first.startswith(b"HTTP/1.1 " + status)
    assert found in first
    assert second.startswith(b"HTTP/1.1 200"), "a good request after it"


def test_idle_connections_leave_file_descriptors(make_api):
    """Without any, ZeroMQ aborts the process."""
    api = make_api(port=0).ready()
    api.engine.connections.limit = 5
    api.engine.connections.client_count = 2

    async def talk(address):
        idle = [await asyncio.open_connection(*address) for _ in range(3)]
        refused = await exchange(address, b"")
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()
        while not (served := await exchange(address, GOOD)).startswith(b"HTTP/1.1 200"):
            pass  # the server has not seen yet that they are gone
        return refused, served

    refused, _ = serve(api, talk)
    assert refused.startswith(b"HTTP/1.1 503 Service Unavailable")
    assert b"too_many_connections" in refused


@pytest.mark.parametrize("sent", [b"", b"GET /hea", GOOD.replace(b"connection: close\r\n", b"") + b"GET /hea"])
def test_a_connection_that_sends_no_head_is_ended(make_api, monkeypatch, sent):
    def limit() -> None:
        monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)

    if not sent:
        limit()  # which counts from the connection on; else from the head's first byte

    async def talk(address):
        return await exchange(address, sent, limit)

    reply = serve(make_api(port=0).ready(), talk)
    assert b"HTTP/1.1 408 Request Timeout" in reply
    assert reply.count(b"HTTP/1.1 200") == (1 if len(sent) > 10 else 0)


@pytest.mark.parametrize("cut", [0, 30, 150, 260])
@pytest.mark.parametrize("length", [b"content-length: 30", b"transfer-encoding: chunked"], ids=["counted", "chunked"])
def test_a_wish_for_another_protocol_is_passed_over(make_api, cut, length):
    """The parser took the body for that protocol's, and the application saw none (curl --http2 asks so)."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    length = length.replace(b"30", b"%d" % len(body))
    framed = body if b"content" in length else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    sent = head + b"http2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n" + length + b"\r\n\r\n" + framed + GOOD

    async def talk(address):
        reader, writer = await asyncio.open_connection(*address)
        for part in (sent[:cut], sent[cut:]):
            writer.write(part)
            await writer.drain()
        reply = await reader.read()
        writer.close()
        await writer.wait_closed()
        return reply

    reply = serve(make_api(port=0).ready(), talk)
    assert reply.count(b"HTTP/1.1 200") == 2, reply
    assert b'"text_completion"' in reply


def test_a_client_that_leaves_while_it_sends_its_body_is_no_error(make_api, caplog):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"

    async def talk(address):
        _, writer = await asyncio.open_connection(*address)
        writer.write(head + b"{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        while "left while it sent" not in caplog.text:
            await exchange(address, GOOD)

    with caplog.at_level(logging.DEBUG, logger="frontend.http.middleware"):
        serve(make_api(port=0).ready(), talk)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
