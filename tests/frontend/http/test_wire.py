"""What bytes on the connection may look like beside the usual: versions, paths, encodings, bodies that do not come."""

import asyncio
import contextlib
import gzip
import json
import os
import re
import socket
import ssl

import pytest

from common.messages import RequestFailed
from frontend.http import bodies, protocol, server
from frontend.http.direct import StepWrites
from tests.frontend.http.test_app import GOOD, exchange, serve
from tests.support import tls

BODY = {"prompt": "The sea", "max_tokens": 3, "request_id": "r"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "request_id": "r"}


def post(path: str, body: bytes, *, version: str = "1.1", **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "host: x", "connection: close", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def replies(make_api, *requests: bytes) -> list[tuple[bytes, bytes]]:
    """Head and body of each reply."""

    return [reply.partition(b"\r\n\r\n")[::2] for reply in raw_replies(make_api, *requests)]


def raw_replies(make_api, *requests: bytes) -> list[bytes]:
    """All that comes back for each, until the connection ends."""

    async def talk(address):
        return [await exchange(address, sent) for sent in requests]

    return serve(make_api(port=0).ready(), talk)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(make_api, path, stream):
    """Streams came in chunks, which it takes for text."""
    fields = {
        "/v1/completions": BODY,
        "/v1/chat/completions": CHAT,
        "/v1/responses": {"input": "Hi", "max_output_tokens": 3, "request_id": "r"},
        "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 3},
    }
    body = json.dumps({**fields[path], "stream": stream, "temperature": 0}).encode()
    sent = [post(path, body, version=version, x_request_id="r") for version in ("1.0", "1.1")]
    (old_head, old), (new_head, new) = replies(make_api, *sent)
    assert b"200 OK" in old_head
    assert b"chunked" not in old_head
    assert (b"chunked" in new_head) == stream
    if not stream:
        assert json.loads(old).keys() == json.loads(new).keys()
        return
    lines = [line for line in old.split(b"\n") if line]
    assert all(line.startswith((b"data: ", b"event: ")) for line in lines), lines
    assert lines[-1] == b"data: [DONE]"
    assert len(lines) == new.count(b"data: ") + new.count(b"event: ")


@pytest.mark.parametrize("slashes", ["/", "//"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/models/tiny", "/v1/messages/count_tokens"])
def test_a_slash_at_the_end_of_a_path_is_passed_over(api, path, slashes):
    """It was redirected, to http behind a proxy that speaks https; and `/v1/models/` was no model."""
    bodies = {"/v1/completions": BODY, "/v1/messages/count_tokens": CHAT}
    call = (lambda at: api.post(at, bodies[path])) if path in bodies else api.get
    plain, slashed = call(path), call(path + slashes)
    assert (plain.status_code, slashed.status_code) == (200, 200)
    assert plain.json().keys() == slashed.json().keys()


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/completions/", "/metrics/", "/server_info/"])
def test_a_slash_is_no_way_around_the_key(make_api, path):
    api = make_api(api_key=("secret",)).ready()
    assert api.get(path).status_code == 401


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate", "gzip, gzip", "nonsense", "GZIP"])
def test_a_compressed_body_is_refused_by_name(api, encoding):
    """It was no JSON, said the error, from byte 0 on."""
    response = api.post(
        "/v1/completions", gzip.compress(json.dumps(BODY).encode()), headers={"content-encoding": encoding}
    )
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "content_encoding"
    assert "not compressed" in response.json()["error"]["message"]
    plain = api.post("/v1/completions", json.dumps(BODY).encode(), headers={"content-encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"\xef\xbb\xbf \n", b"\t\n "])
@pytest.mark.parametrize("content_type", ["application/json", "text/plain", None])
def test_what_editors_put_before_a_body_is_passed_over(api, start, content_type):
    """Windows writes a byte order mark; it was no JSON."""
    headers = {"content-type": content_type} if content_type else {}
    assert api.post("/v1/completions", start + json.dumps(BODY).encode(), headers=headers).status_code == 200


@pytest.mark.parametrize("body", [b"", b" ", b"\n\n"])
def test_a_body_that_is_missing_is_called_so(api, body):
    assert "has no body" in api.post("/v1/completions", body).json()["error"]["message"]


@pytest.mark.parametrize("sent", [0, 1, 40], ids=["nothing", "a byte", "most"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_does_not_come_ends_its_connection(make_api, monkeypatch, sent, chunked):
    """It was waited for, and held a connection, for ever."""
    monkeypatch.setattr(protocol, "BODY_TIMEOUT_S", 0.05)
    length = "transfer-encoding: chunked" if chunked else "content-length: 50"
    start = (b"32\r\n" if chunked else b"") + b"{" + b" " * 49
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n".encode()
    (head, body), (good, _) = replies(make_api, head + start[:sent], GOOD)
    assert b"408 Request Timeout" in head
    assert json.loads(body)["error"]["code"] == "body_timeout"
    assert b"200 OK" in good


def test_a_body_that_is_refused_and_then_does_not_come_ends_its_connection_too(make_api):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"
    [(head, body)] = replies(make_api, head)
    assert b"413 " in head
    assert b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize(
    ("headers", "size", "status", "code"),
    [
        ("authorization: Bearer secret", 40 << 20, 413, "body_too_large"),
        ("authorization: Bearer wrong", 8 << 20, 401, "invalid_api_key"),
        ("authorization: Bearer secret\r\ncontent-encoding: gzip", 8 << 20, 415, "content_encoding"),
        ("authorization: Bearer secret", 8 << 20, 429, "bodies_too_large"),
    ],
)
def test_who_sends_a_whole_body_first_gets_the_answer_that_came_before(
    make_api, monkeypatch, headers, size, status, code, connection
):
    """The connection was reset while they sent: urllib never saw the reason, and nginx made 502 of it."""
    if status == 429:
        monkeypatch.setattr(bodies, "HELD_LIMIT_BYTES", 1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\n{headers}\r\n"
    head += f"content-length: {size}\r\n\r\n"

    async def talk(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head.encode())
        for _ in range(size >> 20):
            writer.write(b" " * (1 << 20))
            await writer.drain()
        reply = await reader.readuntil(b"}}")
        writer.transport.abort()
        return reply

    reply = serve(make_api(port=0, api_key=("secret",)).ready(), talk, api_key=("secret",))
    head, _, body = reply.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert json.loads(body)["error"]["code"] == code


@pytest.mark.parametrize("key", ["secret", "wrong"])
def test_a_body_without_an_end_is_not_read_for_ever(make_api, monkeypatch, key):
    """Whoever had no key could send for ever, and nobody ended it."""
    monkeypatch.setattr(protocol, "UNWANTED_BODY_S", 0.05)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    head += "content-length: 99999999999\r\n\r\n"

    async def talk(address):
        _, writer = await asyncio.open_connection(*address)
        writer.write(head.encode())
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b" " * 65536)
                await writer.drain()
                await asyncio.sleep(0)
        return await exchange(address, GOOD)

    assert b"200 OK" in serve(make_api(port=0).ready(), talk, api_key=("secret",))


FAILED = RequestFailed(0, "queue_full", "too many wait", 429, None, 1000)


@pytest.mark.parametrize(
    ("fail", "status", "kind"),
    [
        (lambda api: setattr(api.scheduler, "refuse", FAILED), 429, "rate_limit_error"),
        (lambda api: api.engine.core.fail_all("gone"), 503, "overloaded_error"),
        (lambda api: api.engine.core.drain(), 503, "overloaded_error"),
    ],
)
def test_errors_of_anthropics_api_have_its_form(api, fail, status, kind):
    body = {"messages": CHAT["messages"], "max_tokens": 3}
    assert api.post("/v1/messages", {**body, "model": "x"}).json()["error"]["type"] == "not_found_error"
    assert api.post("/v1/messages", {**body, "messages": []}).json()["type"] == "error"
    fail(api)
    for stream in (False, True):
        response = api.post("/v1/messages", {**body, "stream": stream}, headers={"x-request-id": "me"})
        assert response.status_code == status
        assert response.json().keys() == {"type", "error", "request_id"}
        assert (response.json()["error"]["type"], response.json()["request_id"]) == (kind, "me")


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 9}, "event: error\ndata: "),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 9}, "event: error\ndata: "),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 9}, "data: "),
        ("/v1/completions", {**BODY, "max_tokens": 9}, "data: "),
    ],
)
def test_a_stream_that_fails_says_so_in_its_clients_form(api, path, body, name):
    """Anthropic's client passes over events without a name: the stream looked complete."""
    api.scheduler.fail_after = 3
    events = api.post(path, {**body, "stream": True}).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert events[-3].startswith(name)
    failed = json.loads(events[-3].removeprefix(name))
    assert failed["error"]["message"] == "worker-0 was killed"
    assert failed.get("type") == ("error" if "event" in name else None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_client_that_leaves_takes_all_its_requests_along(make_api, stream, count):
    """Of several on one connection only the last heard of it: the others were computed for nobody, one by one."""
    api = make_api(port=0).ready()
    api.scheduler.hold_after = 2
    body = json.dumps({**BODY, "max_tokens": 400, "stream": stream}).encode()

    async def talk(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(post("/v1/completions", body).replace(b"connection: close\r\n", b"") * count)
        while not api.scheduler.added:
            await asyncio.sleep(0)
        if stream:
            await reader.read(10)
        writer.transport.abort()
        while api.engine.core.live_count:
            await asyncio.sleep(0)
        return await exchange(address, GOOD)

    assert b"200 OK" in serve(api, talk)
    assert api.scheduler.aborted == [request.request_id for request in api.scheduler.added]
    assert len(api.scheduler.added) == 1, "a request was begun for a client that is gone"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_stops_reading_holds_up_no_other_and_misses_nothing(make_api, monkeypatch, loop):
    """What it has not read waits as merged text; once it reads again, its tokens go straight to it as before."""
    api, written, flush, bind = make_api(port=0).ready(max_model_len=8192), [], StepWrites.flush, server.bind_http
    api.loop.close()
    api.loop = pytest.importorskip(loop).new_event_loop()

    def request(**fields) -> bytes:
        return post("/v1/completions", json.dumps({**BODY, **fields}).encode())

    def flush_noted(writes) -> None:
        written.extend(writes.writers)
        flush(writes)

    def bind_small(options):
        listener = bind(options)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    async def talk(address):
        loop, late = asyncio.get_running_loop(), b""
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.setblocking(False)
            await loop.sock_connect(stalled, address)
            await loop.sock_sendall(stalled, request(max_tokens=3000, stream=True))
            await exchange(address, request(max_tokens=1000, stream=True))
            before = list(written)
            while part := await loop.sock_recv(stalled, 65536):
                late += part
        return before, late, await exchange(address, request(max_tokens=3000))

    monkeypatch.setattr(server, "bind_http", bind_small)
    monkeypatch.setattr(StepWrites, "flush", flush_noted)
    before, late, whole = serve(api, talk)
    slow, fast = dict.fromkeys(before)
    assert 10 < before.count(slow) < 900 < before.count(fast)
    assert written[len(before) :].count(slow) > 500
    events = [json.loads(event) for event in re.findall(rb"^data: (\{.*\})", late, re.MULTILINE)]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == json.loads(whole.partition(b"\r\n\r\n")[2])["choices"][0]["text"]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_no_token_is_written_past_tls(make_api, tmp_path, loop):
    api = make_api(port=0).ready()
    api.loop.close()
    api.loop = pytest.importorskip(loop).new_event_loop()
    certificate, key = tls.write(tmp_path, tls.KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def talk(address):
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        writer.write(post("/v1/completions", json.dumps({**BODY, "max_tokens": 60, "stream": True}).encode()))
        reply = await reader.read()
        writer.close()
        return reply

    reply = serve(api, talk, ssl_certfile=certificate, ssl_keyfile=key)
    assert reply.count(b"data: {") >= 60 and reply.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("who", ["the client", "the server", "nobody is left"])
def test_a_loop_says_that_a_connection_is_lost_before_it_closes_the_socket(make_api, monkeypatch, loop, who):
    """Tokens are written to the socket by its number until then: a number closed before could be another client's."""
    api, sockets, lost = make_api(port=0).ready(), {}, []
    api.loop.close()
    api.loop = pytest.importorskip(loop).new_event_loop()
    api.scheduler.hold_after = 3
    made, gone = protocol.Protocol.connection_made, protocol.Protocol.connection_lost

    def note_made(self, transport) -> None:
        made(self, transport)
        sockets[self] = os.fstat(self.fd).st_ino

    def note_lost(self, error) -> None:
        lost.append(os.fstat(self.fd).st_ino == sockets[self])
        gone(self, error)

    monkeypatch.setattr(protocol.Protocol, "connection_made", note_made)
    monkeypatch.setattr(protocol.Protocol, "connection_lost", note_lost)

    async def talk(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(post("/v1/completions", json.dumps({**BODY, "max_tokens": 100, "stream": True}).encode()))
        await reader.readuntil(b"data: ")
        connection = next(iter(sockets))
        match who:
            case "the client":
                writer.transport.abort()
            case "the server":
                connection.transport.close()
            case _:
                connection.transport.abort()
        while not lost:
            await asyncio.sleep(0)
        writer.close()

    serve(api, talk)
    assert lost == [True]


@pytest.mark.parametrize(
    "rest",
    [
        b"\x80\x02nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000,
        post("/v1/models", b"{", transfer_encoding="chunked"),
    ],
    ids=["no http", "a head too large", "a body of two lengths"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_read_is_refused_behind_the_answers_to_what_came_before(make_api, rest, stream):
    """The refusal was written into the stream that had begun."""
    body = json.dumps({**BODY, "max_tokens": 40, "stream": stream}).encode()
    good = post("/v1/completions", body).replace(b"connection: close\r\n", b"")

    async def talk(address):
        return await exchange(address, post("/v1/completions", body)), await exchange(address, good * 2 + rest)

    alone, reply = serve(make_api(port=0).ready(), talk)
    alone = alone.partition(b"\r\n\r\n")[2]
    first, second, refused = reply.split(b"HTTP/1.1 ")[1:]
    for answer in (first, second):
        assert answer.startswith(b"200 OK")
        assert len(answer.partition(b"\r\n\r\n")[2]) == len(alone)
    assert refused.startswith(b"400 Bad Request")
    assert b'"code":"bad_request"' in refused


GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
UPGRADE = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n"


@pytest.mark.parametrize("request_bytes", [GET, UPGRADE], ids=["plain", "upgrade"])
@pytest.mark.parametrize("more", [-1, 0, 1, 4000])
def test_a_connection_has_no_more_requests_unanswered_than_it_may(make_api, request_bytes, more):
    """Fourteen thousand in one read kept everybody waiting for 5 s; with an upgrade in each, the loop's stack ended."""
    count = protocol.PIPELINE_LIMIT + more
    [reply] = raw_replies(make_api, request_bytes * (count - 1) + GET.replace(b"host: x", b"connection: close"))
    answered, refused = min(count, protocol.PIPELINE_LIMIT), more > 0
    assert reply.count(b"HTTP/1.1 200 OK") == answered
    assert reply.count(b"HTTP/1.1 429 Too Many Requests") == reply.count(b"HTTP/1.1 4") == refused
    if refused:
        error = json.loads(reply.rpartition(b"\r\n\r\n")[2])["error"]
        assert "256 requests of this connection wait for their answers already" in error["message"]


def test_more_requests_than_that_may_follow_the_answers(make_api):
    """The limit is of those that wait, not of a connection's life."""

    async def talk(address):
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(3):
            writer.write(GET * (protocol.PIPELINE_LIMIT // 2))
            for _ in range(protocol.PIPELINE_LIMIT // 2):
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"200 OK" in head
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        writer.close()
        await writer.wait_closed()

    serve(make_api(port=0).ready(), talk)


@pytest.mark.parametrize("trusted", ["", "127.0.0.0/8", "10.0.0.1"])
@pytest.mark.parametrize("socket", ["port", "file"])
@pytest.mark.parametrize("sent", [b"", b"x-forwarded-for: 203.0.113.7\r\nx-forwarded-proto: https\r\n"])
def test_behind_a_proxy_a_client_is_who_the_proxy_says(make_api, monkeypatch, tmp_path, socket, sent, trusted):
    """Through a Unix socket all clients were one, and shared its turn of `--policy fair`."""
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if trusted:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    api = make_api().ready()
    body = json.dumps(BODY | {"stream": True}).encode()

    async def talk(address):
        if socket == "port":
            return await exchange(address, post("/v1/completions", body).replace(b"host: x\r\n", b"host: x\r\n" + sent))
        reader, writer = await asyncio.open_unix_connection(address)
        writer.write(post("/v1/completions", body).replace(b"host: x\r\n", b"host: x\r\n" + sent))
        reply = await reader.read()
        writer.close()
        await writer.wait_closed()
        return reply

    reply = serve(api, talk, **({"uds": str(tmp_path / "s")} if socket == "file" else {}))
    assert b"200 OK" in reply and b"\r\nx-accel-buffering: no\r\n" in reply
    [added] = api.scheduler.added
    believed = sent and (socket == "file" or trusted != "10.0.0.1")
    assert added.client_key == ("203.0.113.7" if believed else "127.0.0.1" if socket == "port" else "")
