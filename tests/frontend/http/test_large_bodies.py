"""A body that is parsed beside the event loop is answered as it would be on the spot, and costs the loop little."""

import asyncio
import json
import tracemalloc
from array import array
from unittest import mock

import msgspec
import pytest

from common.errors import RequestError
from frontend import large_json
from frontend.http import app, bodies
from frontend.large_json import LargeBody, parse_large
from frontend.text_messages import Json, decode_from_text_process
from tests.frontend.http.test_app import GOOD, exchange, serve
from tests.frontend.http.test_wire import post

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": None}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BODIES = [
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 3, "logit_bias": {"1": 2.5}}),
    ("/v1/chat/completions", {"messages": [1, 2, 3]}),
    ("/v1/chat/completions", {"messages": "Hi"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "temperature": "warm"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2**70}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream_options": {"include_usage": 3}}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stop_token_ids": [1, 2, 3], "max_tokens": 2}),
    ("/v1/completions", {"prompt": "naïve 海 \U0001f30a", "max_tokens": 3, "echo": True}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 3, "n": 2}),
    ("/v1/completions", {"prompt": ["a", [7]], "max_tokens": 3}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [[]]}),
    ("/v1/completions", {"prompt": [[5], []]}),
    ("/v1/completions", {"prompt": [[[5]]]}),
    ("/v1/completions", {"prompt": [5, True]}),
    ("/v1/completions", {"prompt": [5, 2.0]}),
    ("/v1/completions", {"prompt": [5, -1]}),
    ("/v1/completions", {"prompt": [5, 2**31]}),
    ("/v1/completions", {"prompt": [5] * 600}),
    ("/v1/completions", {"prompt": {"a": 1}}),
    ("/v1/completions", {"stream": False}),
    ("/v1/embeddings", {"input": [5, 6, 7]}),
    ("/v1/embeddings", {"input": [[5, 6], [7]], "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": "text"}),
    ("/v1/responses", {"input": [5, 6]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
    ("/tokenize", {"prompt": "the sea", "return_token_strs": True}),
    ("/tokenize", {"prompt": [5, 6]}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/detokenize", {"tokens": [5, 10**6]}),
    ("/detokenize", {"tokens": [5, -1]}),
    ("/detokenize", {"tokens": [5, 2**40]}),
    ("/detokenize", {"tokens": [[5]]}),
    ("/detokenize", {"tokens": []}),
]
RAW = [b"{", b"[]", b"null", b"\xff", b'{"prompt": NaN}', b"[" * 5000, b'{"a":' * 5000, b'{"prompt": "\\ud800"}']


def answer(api, path, body):
    response = api.post(path, body)
    try:
        found = response.json()
    except ValueError:
        return response.status_code, response.text
    return response.status_code, {name: value for name, value in found.items() if name not in ("id", "created")}


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_large_body_is_answered_like_a_small_one(api, monkeypatch, path, body):
    headers = json.dumps(body | {"request_id": "r", "seed": 1}).encode()
    small = answer(api, path, headers)
    monkeypatch.setattr(bodies, "QUICK_BYTES", 0)
    large = answer(api, path, headers)
    if isinstance(small[1], dict) and "created_at" in small[1]:
        large[1]["created_at"] = small[1]["created_at"]
    assert large == small
    assert small[0] in (200, 400)


@pytest.mark.parametrize("body", RAW)
def test_a_large_body_that_is_none_is_refused_like_a_small_one(api, monkeypatch, body):
    small = answer(api, "/v1/completions", body)
    monkeypatch.setattr(bodies, "QUICK_BYTES", 0)
    assert answer(api, "/v1/completions", body) == small
    assert small[0] == 400


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b",".join([b"[]"] * 40) + b"]}",
        b'{"a":[' + b",".join([b'{"b":1}'] * 20) + b"]}",
        b'{"a":{' + b",".join(b'"%d":[]' % index for index in range(40)) + b"}}",
        b'{"a":[' + b",".join([b"1"] * 60) + b"]}",
        b'{"tools":[' + b"[" * 30 + b"]" * 30 + b"]}",
        b'{"stop_token_ids":[' + b",".join([b"1"] * 60) + b"]}",
    ],
)
def test_a_body_with_more_items_than_the_loop_bears_is_refused(monkeypatch, body):
    monkeypatch.setattr(large_json, "ITEM_LIMIT", 28)
    with pytest.raises(RequestError, match="more than 28 items in its lists and objects") as caught:
        parse_large(body, ("prompt",))
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize(
    "value",
    ["[{" * 100, '\\"[' * 100, '\\\\"[{' * 50, "\\", "\\\\", '"', [5] * 100, [[5] * 50, [6]], ["[[", "{{" * 50]],
)
@pytest.mark.parametrize("window", [1, 7, 1 << 16])
def test_texts_and_token_ids_are_no_items_to_be_counted(monkeypatch, value, window):
    monkeypatch.setattr(large_json, "ITEM_LIMIT", 16)
    monkeypatch.setattr(large_json, "WINDOW_BYTES", window)
    body = parse_large(json.dumps({"prompt": value}).encode(), ("prompt",))
    assert (body.values | body.token_ids)["prompt"] == (
        [array("i", entry) for entry in value] if isinstance(value[0], list)
        else array("i", value) if isinstance(value[0], int) else value
    )  # fmt: skip


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "rest",
    [b'"' + b'\\"' * 500_000, b'"' + b"a" * 1_000_000, b'""a' * 300_000, b'"\\\\' * 300_000, b'"\\""' * 250_000],
    ids=["escapes without an end", "no end", "many strings", "backslashes", "escapes"],
)
def test_no_body_takes_long_or_much_memory_to_be_counted(rest):
    """A string without an end was looked for again from each of its quotes: 72 KB took 6 s, and the text process."""
    body = b'{"a": "' + b"[" * 40_000 + b'", ' + rest
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as caught:
            parse_large(body, ())
        assert caught.value.code == "invalid_json"
        assert tracemalloc.get_traced_memory()[1] < 8 * len(body)
    finally:
        tracemalloc.stop()


def test_what_a_body_holds_survives_its_message():
    body = LargeBody(
        {"a": [None, True, -(2**63), 2**64 - 1, 0.1, "\U0001f30a\0"], "b": {"": {}}},
        {"prompt": [array("i", [1]), array("i", [2, 3])], "tokens": array("i", [4])},
    )
    assert decode_from_text_process(Json.of(1, body).to_wire()).value() == body
    with pytest.raises(RequestError, match="more than 64 bits"):
        Json.of(1, LargeBody({"a": 2**70}))


def test_a_body_that_only_the_text_process_can_nest_so_deeply_is_refused(monkeypatch):
    """The loop's stack is higher: a body of 990 levels came back, and whoever had sent it waited for ever."""
    too_high = mock.Mock(side_effect=RecursionError)
    message = Json.of(1, LargeBody({"a": [[]]}))
    monkeypatch.setattr(msgspec.msgpack, "decode", too_high)
    with pytest.raises(RequestError, match="nested too deeply"):
        message.value()
    monkeypatch.setattr(msgspec.msgpack, "encode", too_high)
    with pytest.raises(RequestError, match="nested too deeply"):
        Json.of(1, LargeBody({}))


@pytest.mark.parametrize("body", [{"pooling": 5, "input": "x"}, {"input": "x", "encoding_format": "x" * 50_000}])
def test_an_error_does_not_repeat_all_that_was_sent(api, body):
    response = api.post("/v1/embeddings", body)
    assert response.status_code == 400
    assert len(response.text) < 1000


def test_all_bodies_together_are_held_within_a_limit(make_api, monkeypatch):
    """Hundreds of connections that each sent most of a large body filled the memory."""
    monkeypatch.setattr(bodies, "HELD_LIMIT_BYTES", 100_000)
    served = bodies.Bodies()
    monkeypatch.setattr(app, "Bodies", lambda: served)
    api = make_api(port=0).ready()
    start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 190000\r\n\r\n" + b" " * 160_000

    async def talk(address):
        _, first = await asyncio.open_connection(*address)
        first.write(start)
        while served.held_bytes != 160_000 - bodies.QUICK_BYTES:
            await asyncio.sleep(0)
        refused = await exchange(address, start)
        small = await exchange(address, post("/v1/completions", b'{"prompt": "x", "max_tokens": 1}'))
        assert b"200 OK" in small, "small bodies are taken all the same"
        assert served.held_bytes == 160_000 - bodies.QUICK_BYTES
        first.transport.abort()
        while served.held_bytes:
            await asyncio.sleep(0)
        return refused, await exchange(address, GOOD)

    refused, good = serve(api, talk)
    assert b"429 Too Many Requests" in refused
    assert b"connection: close" in refused and b"retry-after: 1" in refused
    assert b'"code":"bodies_too_large"' in refused
    assert b"200 OK" in good


@pytest.mark.parametrize("body", [b"{", b'{"prompt": 5}', b'{"prompt": "x", "max_tokens": 2}', b" " * 99_999])
def test_a_body_is_let_go_whatever_came_of_it(api, body):
    api.post("/v1/completions", body)
    assert api.app.state.bodies.held_bytes == 0
