"""`/v1/completions`: the forms of prompts, echo, log probabilities, several prompts at once."""

import asyncio
import json
from array import array

import msgspec
import pytest

from frontend.events import SampleResult, TokenLogprob, TopLogprob
from frontend.http.replies import NO_ECHO, CompletionReply

BODY = {"model": "tiny", "prompt": "\n1. Carol has 20", "max_tokens": 6}
PATH = "/v1/completions"


def test_a_whole_reply(api):
    body = api.post(PATH, BODY).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"][0]["text"].startswith("The sea")
    assert body["choices"][0]["logprobs"] is None


def test_default_is_sixteen_tokens(api):
    assert api.post(PATH, {"prompt": "x"}).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "count"), [("Hi", 1), ([5, 6], 1), (["Hi", "Ho"], 2), ([[5, 6], [7]], 2), (["Hi", [5]], 2)]
)
def test_every_form_of_prompt(api, prompt, count):
    body = {**BODY, "prompt": prompt, "n": 2}
    whole = api.post(PATH, body).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * count))
    assert whole["usage"]["completion_tokens"] == 6 * 2 * count
    texts = [""] * (2 * count)
    for event in api.events(PATH, body):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_echo_with_logprobs_joins_to_the_text(api):
    body = {**BODY, "echo": True, "logprobs": 1}
    choice = api.post(PATH, body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(BODY["prompt"] + "The sea")
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None
    assert set(logprobs["token_logprobs"][1:]) == {-0.5}
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    merged = {name: [] for name in logprobs}
    for event in api.events(PATH, body):
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            merged[name] += values
    assert merged == logprobs


def test_echo_without_output(api):
    body = {**BODY, "echo": True, "logprobs": 1, "max_tokens": 0}
    whole = api.post(PATH, body).json()
    assert whole["choices"][0]["text"] == BODY["prompt"]
    assert "".join(whole["choices"][0]["logprobs"]["tokens"]) == BODY["prompt"]
    assert whole["usage"]["completion_tokens"] == 0
    assert "".join(event["choices"][0]["text"] for event in api.events(PATH, body)) == BODY["prompt"]


def test_usage_of_a_stream_sums_over_prompts(api):
    body = {**BODY, "prompt": ["a", "b"], "stream_options": {"include_usage": True}}
    events = api.events(PATH, body)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert sum("usage" in event for event in events) == 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[["x"]]]}, "prompt"),
        ({"prompt": [1, "x", None]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [100000]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": [5] * 600}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 10**6}, "n"),
        ({"stop": ["x"] * 20_000}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**63): 1}}, "logit_bias"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"request_id": "x" * 1000}, "request_id"),
    ],
)
def test_refusals_name_the_parameter(api, change, param):
    response = api.post(PATH, {**BODY, **change})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert api.post(PATH, BODY).status_code == 200, "a good request after a bad one"


def test_one_refused_prompt_ends_the_others(api):
    response = api.post(PATH, {**BODY, "prompt": [[5], [100000]]})
    assert response.status_code == 400
    assert api.engine.core.live_count == 0
    assert api.scheduler.aborted == [0]


def test_likeliest_tokens_of_the_same_text_are_all_shown():
    """Pieces of characters are all U+FFFD as text, and one of them stood for all."""
    pieces = [TopLogprob(7 + n, "\ufffd", bytes([0xF0 + n]), -1.0 - n, n + 1) for n in range(4)]
    chosen = TokenLogprob(8, "", b"\xf1", -2.0, 2, (*pieces, TopLogprob(5, "a", b"a", -9.0, 5)))
    sample = SampleResult(0, "", array("i", [8]), "length", None, (chosen,))
    reply = CompletionReply("id", "tiny", logprob_count=5, token_ids=False)
    logprobs = json.loads(msgspec.json.encode(asyncio.run(reply.choice(0, sample, NO_ECHO))))["logprobs"]
    assert logprobs["top_logprobs"] == [
        {"bytes:\\xf0": -1.0, "": -2.0, "bytes:\\xf2": -3.0, "bytes:\\xf3": -4.0, "a": -9.0}
    ]
    assert logprobs["tokens"] == [""]
