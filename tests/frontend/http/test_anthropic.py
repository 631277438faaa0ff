"""`/v1/messages`, streamed and not, and `count_tokens`."""

import json
from typing import Any

import pytest

TOOL = {"name": "f", "description": "does it", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
BODY = {"max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def api(make_api) -> Any:
    """Prompts that describe tools are long in the tiny vocabulary."""
    return make_api().ready(max_model_len=4096)


def answer(api, text: str, body: dict[str, Any], stops: bool = True) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole message, and the events of the same request as a stream."""
    api.scheduler.answer, api.scheduler.stops = text, stops
    whole = api.post("/v1/messages", body)
    assert whole.status_code == 200, whole.text
    stream = api.post("/v1/messages", {**body, "stream": True}).text
    events = []
    for block in stream.split("\n\n"):
        if block.startswith("event: "):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return whole.json(), events


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content put together from a stream, as a client does it."""
    content: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], content[event["index"]]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif event["type"] == "content_block_stop" and event["index"] in inputs:
            content[event["index"]]["input"] = json.loads(inputs[event["index"]])
    return content


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.items() if key != "id"} for block in content]


def prompt_of(api) -> str:
    return api.engine.tokenizer.decode(api.scheduler.added[-1].prompt_token_ids, skip_special_tokens=False)


def test_text(api):
    message, events = answer(api, "The sea is blue.", {**BODY, "system": "Be kind"})
    assert prompt_of(api) == "<|start|>system\nBe kind<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert message["content"] == [{"type": "text", "text": "The sea is blue."}]
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "end_turn")
    assert message["usage"]["output_tokens"] > 3
    assert joined(events) == message["content"]
    assert list(dict.fromkeys(event["type"] for event in events)) == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == {"output_tokens": message["usage"]["output_tokens"]}


def test_text_then_a_call(api):
    message, events = answer(api, f"So.\n{CALL}", {**BODY, "tools": [TOOL]})
    assert without_ids(message["content"]) == [
        {"type": "text", "text": "So.\n"}, {"type": "tool_use", "name": "f", "input": {"a": 1}}
    ]  # fmt: skip
    assert message["stop_reason"] == "tool_use"
    assert without_ids(joined(events)) == without_ids(message["content"])
    assert "does it" in prompt_of(api)


def test_thinking_is_a_block(api):
    api.engine.tokenizer.chat_template = "{{ messages[0].content }}{{ enable_thinking }}{# <think> #}"
    message, events = answer(api, "<think>Hm.</think>Yes.", BODY)
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert joined(events) == message["content"]
    answer(api, "Yes.", {**BODY, "thinking": {"type": "disabled"}})
    assert prompt_of(api) == "HiFalse"


def test_a_conversation_with_tools_reaches_the_prompt(api):
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok"}]},
                {"type": "text", "text": "More"},
            ],
        },
    ]
    answer(api, "ok", {**BODY, "messages": chat})
    assert prompt_of(api) == (
        f"<|start|>user\nHi<|end|>\n<|start|>assistant\n{CALL}<|end|>\n<|start|>user\n<tool_response>\nok\n"
        "</tool_response><|end|>\n<|start|>user\nMore<|end|>\n<|start|>assistant\n"
    )


def test_other_ends(api):
    message, events = answer(api, "The sea is blue.", {**BODY, "stop_sequences": [" is"]})
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " is")
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " is"}
    cut, _ = answer(api, CALL, {**BODY, "max_tokens": 50, "tools": [TOOL]}, stops=False)
    assert cut["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(("kind", "name"), [("any", None), ("tool", "f")])
def test_a_call_that_is_insisted_on_becomes_a_grammar(api, kind, name):
    choice = {"type": kind, "disable_parallel_tool_use": True} | ({"name": name} if name else {})
    answer(api, CALL, {**BODY, "tools": [TOOL], "tool_choice": choice})
    assert '"const": "f"' in api.scheduler.added[-1].params.structured_outputs.grammar


def test_count_tokens(api):
    count = api.post("/v1/messages/count_tokens", {"messages": BODY["messages"]}).json()
    answer(api, "ok", BODY)
    assert count == {"input_tokens": len(api.scheduler.added[-1].prompt_token_ids)}
    more = api.post("/v1/messages/count_tokens", {"messages": BODY["messages"], "tools": [TOOL]}).json()
    assert more["input_tokens"] > count["input_tokens"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
    ],
)
def test_refusals_name_the_parameter(api, change, param):
    response = api.post("/v1/messages", {**BODY, **change})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_key_may_come_in_anthropic_s_header(make_api):
    api = make_api(api_key=("sesame",)).ready()
    assert api.post("/v1/messages", {**BODY, "max_tokens": 1}).status_code == 401
    for headers in ({"x-api-key": "sesame"}, {"authorization": "Bearer sesame"}):
        assert api.post("/v1/messages", {**BODY, "max_tokens": 1}, headers=headers).status_code == 200
    assert api.post("/v1/messages", BODY, headers={"x-api-key": "wrong"}).status_code == 401
