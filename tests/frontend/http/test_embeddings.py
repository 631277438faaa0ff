"""`/v1/embeddings`: its forms of input and output, its errors, its end when the client goes away."""

import asyncio
import base64
import contextlib
from array import array

import pytest

from common.messages import RequestFailed

PATH = "/v1/embeddings"


def test_one_text(api):
    reply = api.post(PATH, {"input": "The sea", "model": "small"}).json()
    count = len(api.engine.tokenizer.encode("The sea"))
    assert reply == {
        "object": "list",
        "model": "small",
        "usage": {"prompt_tokens": count, "total_tokens": count},
        "data": [{"object": "embedding", "index": 0, "embedding": pytest.approx([0.6, 0.0, -0.8])}],
    }
    [request] = api.scheduler.added
    assert (request.pooling, request.params.max_tokens, request.end_token_ids) == ("last", 1, ())


@pytest.mark.parametrize(
    ("given", "prompts"), [(["a", "b", "a"], 3), ([5, 6], 1), ([[5, 6], [7]], 2), (["a", [5]], 2)]
)  # fmt: skip
def test_every_form_of_input(api, given, prompts):
    reply = api.post(PATH, {"input": given}).json()
    assert [entry["index"] for entry in reply["data"]] == list(range(prompts))
    assert reply["usage"]["prompt_tokens"] == sum(len(request.prompt_token_ids) for request in api.scheduler.added)


def test_base64_holds_the_same_numbers(api):
    [entry] = api.post(PATH, {"input": "The sea", "encoding_format": "base64"}).json()["data"]
    assert array("f", base64.b64decode(entry["embedding"])) == array("f", [0.6, 0.0, -0.8])


def test_fewer_dimensions_are_of_length_one_again(api):
    [entry] = api.post(PATH, {"input": "The sea", "dimensions": 1}).json()["data"]
    assert entry["embedding"] == [1.0]
    error = api.post(PATH, {"input": "The sea", "dimensions": 4}).json()["error"]
    assert (error["message"], error["param"]) == ("dimensions: wanted 1 to 3, got 4", "dimensions")


def test_pooling_is_the_engines_unless_a_request_names_one(api):
    assert api.post(PATH, {"input": "The sea", "pooling": "mean"}).status_code == 200
    object.__setattr__(api.engine.config.model, "pooling", "mean")
    api.post(PATH, {"input": "The sea"})
    api.post(PATH, {"input": "The sea", "pooling": "last"})
    assert [request.pooling for request in api.scheduler.added] == ["mean", "mean", "last"]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": []}, "input", "got an empty list"),
        ({"input": [["a"]]}, "input", "mixes or nests"),
        ({"input": ""}, "input", "the prompt is empty"),
        ({"input": [10**6]}, "input", "token id 1000000"),
        ({"input": [2**40]}, "input", "outside int32"),
        ({"input": [5] * 512}, "input", "has 512 tokens; this model's maximum context length is 512 tokens"),
        ({"input": ["a"] * 2049}, "input", "2049 prompts, at most 2048"),
        ({"input": "a", "dimensions": 0}, "dimensions", "wanted 1 or more"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "wanted 'float' or 'base64', got 'int8'"),
        ({"input": "a", "pooling": "max"}, "pooling", "wanted 'mean', 'last' or 'cls', got 'max'"),
        ({"input": "a", "timeout": -1}, "timeout", "above 0"),
        ({}, "input", "missing"),
    ],
)
def test_bad_requests_name_the_field(api, fields, param, text):
    response = api.post(PATH, fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert text in response.json()["error"]["message"]
    assert api.engine.core.live_count == 0


def test_errors_of_the_engine(api):
    api.scheduler.embedding = [float("nan"), 1.0]
    response = api.post(PATH, {"input": ["a", "b"]})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "sample_failed")
    api.scheduler.refuse = RequestFailed(0, "queue_full", "4096 requests wait already", 429, None, 2500)
    response = api.post(PATH, {"input": ["a", "b"]})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert api.engine.core.live_count == 0
    api.scheduler.refuse, api.scheduler.embedding = None, [1.0]
    assert api.post(PATH, {"input": "a"}).status_code == 200


def test_a_client_that_goes_away_ends_its_requests(api):
    api.scheduler.hold_after = 0
    left = asyncio.Event()

    async def receive():
        if not api.scheduler.added:
            return {"type": "http.request", "body": b'{"input": ["a", "b"]}', "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def go_away():
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b"", "client": None}
        task = asyncio.create_task(api.app(scope, receive, lambda message: asyncio.sleep(0)))
        while len(api.scheduler.added) < 2:
            await asyncio.sleep(0)
        left.set()
        with contextlib.suppress(Exception):
            await task

    api.loop.run_until_complete(go_away())
    assert sorted(api.scheduler.aborted) == [0, 1]
    assert api.engine.core.live_count == 0
