"""`/v1/responses`, streamed and not."""

import json
from typing import Any, get_args

import pytest

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def api(make_api) -> Any:
    """Prompts that describe tools are long in the tiny vocabulary."""
    return make_api().ready(max_model_len=4096)


def answer(api, text: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole response, and the events of the same request as a stream."""
    api.scheduler.answer, api.scheduler.stops = text, True
    whole = api.post("/v1/responses", body)
    assert whole.status_code == 200, whole.text
    stream = api.post("/v1/responses", {**body, "stream": True}).text
    *blocks, last = [block for block in stream.split("\n\n") if block]
    assert last == "data: [DONE]"
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return whole.json(), events


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]


def prompt_of(api) -> str:
    return api.engine.tokenizer.decode(api.scheduler.added[-1].prompt_token_ids, skip_special_tokens=False)


def test_text(api):
    body = {"input": "Hi", "instructions": "Be kind", "metadata": {"a": "b"}}
    response, events = answer(api, "The sea is blue.", body)
    assert prompt_of(api) == "<|start|>system\nBe kind<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert (response["object"], response["status"], response["metadata"]) == ("response", "completed", {"a": "b"})
    (item,) = response["output"]
    assert item["content"] == [
        {"type": "output_text", "text": "The sea is blue.", "annotations": [], "logprobs": []}
    ]  # fmt: skip
    assert response["usage"]["output_tokens"] > 3
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "The sea is blue." and len(deltas) > 3
    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in events))
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert without_ids(events[-1]["response"]["output"]) == without_ids(response["output"])


def test_a_call_between_texts(api):
    response, events = answer(api, f"So. {CALL} Done.", {"input": "Hi", "tools": [TOOL]})
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "message"]
    assert response["output"][1]["name"] == "f"
    assert response["output"][1]["arguments"] == '{"a": 1}'
    assert without_ids(events[-1]["response"]["output"]) == without_ids(response["output"])
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas) == '{"a": 1}'
    assert {event["output_index"] for event in deltas} == {1}


def test_reasoning_is_an_item(api):
    api.engine.tokenizer.chat_template = "{{ messages[0].content }}{# <think> #}"
    response, events = answer(api, "<think>Hm.</think>Yes.", {"input": "Hi"})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert without_ids(events[-1]["response"]["output"]) == without_ids(response["output"])


def test_a_conversation_with_calls_reaches_the_prompt(api):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Good"}]},
        {"role": "user", "content": "More"},
    ]
    answer(api, "ok", {"input": items})
    assert prompt_of(api) == (
        f"<|start|>user\nHi<|end|>\n<|start|>assistant\n{CALL}<|end|>\n<|start|>user\n<tool_response>\nok\n"
        "</tool_response><|end|>\n<|start|>assistant\nGood<|end|>\n<|start|>user\nMore<|end|>\n<|start|>assistant\n"
    )


def test_length_makes_it_incomplete(api):
    api.scheduler.stops = False
    response = api.post("/v1/responses", {"input": "Hi", "max_output_tokens": 3}).json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_formats_reach_the_engine(api):
    schema = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    answer(api, "{}", {"input": "Hi", "text": text})
    assert api.scheduler.added[-1].params.structured_outputs.key == ("json", json.dumps(schema))
    answer(api, "{}", {"input": "Hi", "tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}})
    assert '"const": "f"' in api.scheduler.added[-1].params.structured_outputs.grammar


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"text": {"format": {"type": "yaml"}}}, "text"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_refusals_name_the_parameter(api, change, param):
    for stream in (False, True):
        response = api.post("/v1/responses", {"input": "Hi", "stream": stream, **change})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("The sea is blue.", {}),
        ("The sea is blue.", {"max_output_tokens": 2}),
        (CALL, {"tools": [TOOL]}),
        ("{}", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}}),
        ("The sea.", {"instructions": "Be kind", "reasoning": {"effort": "low"}, "metadata": {"a": "b"}}),
    ],
)
def test_the_official_clients_types_hold_all_of_it(api, text, change):
    types = pytest.importorskip("openai.types.responses")
    whole, events = answer(api, text, {"input": "Hi", **change})
    types.Response.model_validate(whole)
    known = get_args(get_args(types.ResponseStreamEvent)[0])
    kinds = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in known}
    for event in events:
        kinds[event["type"]].model_validate(event)
    is_cut = "max_output_tokens" in change
    assert {item["status"] for item in whole["output"]} == {"incomplete" if is_cut else "completed"}
    assert events[-1]["type"] == ("response.incomplete" if is_cut else "response.completed")
