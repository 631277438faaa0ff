"""`/v1/chat/completions`, streamed and not."""

import pytest

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}


def test_a_whole_reply(api):
    body = api.post("/v1/chat/completions", CHAT).json()
    choice = body["choices"][0]
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "tiny"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"].startswith("The sea")
    assert choice["finish_reason"] == "length"
    usage = body["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 8, 40])
def test_stream_deltas_join_to_the_whole_reply(api, max_tokens):
    body = {**CHAT, "max_tokens": max_tokens}
    whole = api.post("/v1/chat/completions", body).json()["choices"][0]
    events = api.events("/v1/chat/completions", body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == whole["message"]["content"]
    assert "\ufffd" not in text[:-1], "a broken character in mid-stream"
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_several_samples(api):
    body = {**CHAT, "n": 3, "max_tokens": 5}
    whole = api.post("/v1/chat/completions", body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 15
    texts = ["", "", ""]
    for event in api.events("/v1/chat/completions", body):
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]


@pytest.mark.parametrize(("options", "expected"), [({"include_usage": True}, True), ({}, False), (None, False)])
def test_usage_ends_a_stream_only_if_asked_for(api, options, expected):
    events = api.events("/v1/chat/completions", {**CHAT, "stream_options": options})
    with_usage = [event for event in events if event.get("usage")]
    assert len(with_usage) == expected
    if expected:
        assert with_usage == events[-1:]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 12


def test_continuous_usage_counts_up(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = api.events("/v1/chat/completions", {**CHAT, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events[1:]]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_logprobs(api):
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    content = api.post("/v1/chat/completions", body).json()["choices"][0]
    entries = content["logprobs"]["content"]
    assert len(entries) == 12
    assert "".join(entry["token"] for entry in entries) == content["message"]["content"]
    assert entries[0]["logprob"] == -0.5
    assert bytes(entries[0]["bytes"]).decode() == entries[0]["token"]
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.5, -9999.0]
    streamed = [
        entry
        for event in api.events("/v1/chat/completions", body)
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries


def test_stop_string_is_not_part_of_the_text(api):
    body = {**CHAT, "stop": " is", "max_tokens": 100}
    choice = api.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == "The sea 🌊"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " is")
    events = api.events("/v1/chat/completions", body)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "The sea 🌊"


def test_parameters_reach_the_engine(api):
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1, "seed": 3, "min_tokens": 2, "stop_token_ids": [5], "ignore_eos": True,
        "logit_bias": {"5": 1.5}, "bad_words": ["blue"], "allowed_token_ids": [1, 2], "skip_special_tokens": False,
        "include_stop_str_in_output": True, "n": 2,
    }  # fmt: skip
    assert api.post("/v1/chat/completions", {**CHAT, **given, "max_completion_tokens": 4}).status_code == 200
    params = api.scheduler.added[-1].params
    for name, value in given.items():
        wanted = {5: 1.5} if name == "logit_bias" else tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == wanted, name
    assert params.max_tokens == 4, "max_completion_tokens goes before max_tokens"


def test_no_limit_means_up_to_the_context(api):
    reply = api.post("/v1/chat/completions", {"messages": CHAT["messages"]}).json()
    assert reply["usage"]["total_tokens"] == 512


def test_content_parts_and_the_developer_role(api):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = {**CHAT, "messages": [{"role": "developer", "content": "Be kind"}, {"role": "user", "content": parts}]}
    assert api.post("/v1/chat/completions", body).status_code == 200
    prompt = api.engine.tokenizer.decode(api.scheduler.added[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|start|>system\nBe kind<|end|>\n<|start|>user\nHel\nlo<|end|>\n<|start|>assistant\n"


def test_a_role_that_the_chat_template_leaves_out_is_refused(api):
    """Other roles than OpenAI's are the template's to know, as with vLLM; the usual one here passes any on."""
    body = {**CHAT, "messages": [*CHAT["messages"], {"role": "critic", "content": "Oh"}]}
    assert api.post("/v1/chat/completions", body).status_code == 200
    api.engine.tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    reply = api.post("/v1/chat/completions", body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages") and "of the role 'critic'" in error["message"]


def test_token_ids_on_request(api):
    body = {**CHAT, "return_token_ids": True, "max_tokens": 3}
    whole = api.post("/v1/chat/completions", body).json()["choices"][0]["token_ids"]
    events = api.events("/v1/chat/completions", body)
    assert [t for event in events for t in event["choices"][0].get("token_ids", [])] == whole


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools"),
        ({"tools": [{"type": "search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a+"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 600}, "max_completion_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "sea " * 600}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"timeout": -1}, "timeout"),
    ],
)
def test_refusals_name_the_parameter(api, change, param):
    response = api.post("/v1/chat/completions", {**CHAT, **change})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert api.post("/v1/chat/completions", CHAT).status_code == 200, "a good request after a bad one"


def test_text_response_format_and_no_tools_are_fine(api):
    body = {**CHAT, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}
    assert api.post("/v1/chat/completions", body).status_code == 200
