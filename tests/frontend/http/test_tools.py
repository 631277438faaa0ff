"""Tools, reasoning and structured outputs of `/v1/chat/completions`, streamed and not."""

import json
from typing import Any

import pytest

from frontend.chat.tool_formats import HERMES, call_grammar

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think> #}"


@pytest.fixture
def api(make_api) -> Any:
    """Prompts that describe tools are long in the tiny vocabulary."""
    return make_api().ready(max_model_len=4096)


def prompt_of(api) -> str:
    return api.engine.tokenizer.decode(api.scheduler.added[-1].prompt_token_ids, skip_special_tokens=False)


def answer(api, text: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole choice and the chunks' choices for one scripted answer."""
    api.scheduler.answer, api.scheduler.stops = text, True
    response = api.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    events = api.events("/v1/chat/completions", body)
    return response.json()["choices"][0], [choice for event in events for choice in event["choices"]]


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """A message put together from a stream's chunks, as the official client does it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["calls"]):
                assert call["id"] and call["type"] == "function", "a call starts with its id and name"
                message["calls"].append([call["function"]["name"], call["function"]["arguments"]])
            else:
                message["calls"][call["index"]][1] += call["function"]["arguments"]
    return message


def test_a_call_whole_and_streamed(api):
    choice, chunks = answer(api, f"I look.\n{CALL}", CHAT)
    message = choice["message"]
    assert message["content"] == "I look.\n"
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert choice["finish_reason"] == "tool_calls"
    assert joined(chunks) == {
        "content": "I look.\n", "reasoning_content": "", "calls": [["get_weather", ARGUMENTS]]
    }  # fmt: skip
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    assert sum("tool_calls" in chunk["delta"] for chunk in chunks) > 3, "arguments come in fragments"


def test_a_lone_call_has_no_content(api):
    choice, chunks = answer(api, CALL, CHAT)
    assert choice["message"]["content"] is None
    assert joined(chunks)["content"] == ""


def test_malformed_calls_are_content(api):
    text = "<tool_call>nothing</tool_call>"
    choice, chunks = answer(api, text, CHAT)
    assert choice["message"] == {"role": "assistant", "content": text}
    assert joined(chunks)["content"] == text
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("extra", [{"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True}])
def test_logprobs_and_token_ids_are_complete_beside_calls(api, extra):
    choice, chunks = answer(api, f"So {CALL}", {**CHAT, **extra})
    if "logprobs" in extra:
        streamed = [entry for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]]
        assert streamed == choice["logprobs"]["content"]
    else:
        assert [t for chunk in chunks for t in chunk.get("token_ids", [])] == choice["token_ids"]
    assert joined(chunks)["calls"] == [["get_weather", ARGUMENTS]]


def test_several_samples_are_read_apart(api):
    _, chunks = answer(api, f"x {CALL}", {**CHAT, "n": 2})
    for index in range(2):
        assert joined([chunk for chunk in chunks if chunk["index"] == index])["calls"] == [["get_weather", ARGUMENTS]]


def test_without_parallel_calls_there_is_one(api):
    choice, chunks = answer(api, f"{CALL}\n{CALL}", {**CHAT, "parallel_tool_calls": False})
    assert len(choice["message"]["tool_calls"]) == len(joined(chunks)["calls"]) == 1


def test_tool_choice_none_reads_no_calls_and_tells_the_model_of_none(api):
    choice, _ = answer(api, CALL, {**CHAT, "tool_choice": "none"})
    assert choice["message"] == {"role": "assistant", "content": CALL}
    assert "get_weather" not in prompt_of(api)


def test_a_template_without_tools_gets_them_in_the_system_message(api):
    answer(api, "ok", {**CHAT, "messages": [{"role": "system", "content": "Be kind"}, *CHAT["messages"]]})
    prompt = prompt_of(api)
    assert prompt.count("system\n") == 1
    assert "Be kind\n\n" in prompt and json.dumps(WEATHER) in prompt


def test_earlier_calls_and_results_reach_the_prompt(api):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer(api, "ok", {**CHAT, "messages": messages})
    assert f"assistant\n{CALL}<|end|>\n" in prompt_of(api)
    assert "user\n<tool_response>\nsunny\n</tool_response><|end|>" in prompt_of(api)


def test_a_template_with_tools_gets_tools_and_decoded_arguments(api):
    api.engine.tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.city }}{% endfor %};{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    answer(api, "ok", {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]})
    assert prompt_of(api).endswith("user:Hi;assistant:Paris;")
    assert json.loads(prompt_of(api).removesuffix("user:Hi;assistant:Paris;")) == [WEATHER]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_insisted_on_becomes_a_grammar(api, choice):
    whole, _ = answer(api, CALL, {**CHAT, "tool_choice": choice})
    assert whole["finish_reason"] == "tool_calls"
    wanted = api.scheduler.added[-1].params.structured_outputs
    parallel = choice == "required"
    assert wanted.grammar == call_grammar(HERMES, [WEATHER["function"]], parallel=parallel, opening_id=None)


def test_reasoning_is_split_off(api):
    api.engine.tokenizer.chat_template = THINKING
    choice, chunks = answer(api, "<think>\nHm.\n</think>\n\nYes.", {"messages": CHAT["messages"]})
    assert choice["message"]["content"] == "Yes."
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "Hm."
    assert joined(chunks) == {"content": "Yes.", "reasoning_content": "Hm.", "calls": []}
    hidden, chunks = answer(
        api, "<think>Hm.</think>Yes.", {"messages": CHAT["messages"], "include_reasoning": False}
    )  # fmt: skip
    assert hidden["message"]["reasoning_content"] is None
    assert joined(chunks)["reasoning_content"] == ""


def test_reasoning_that_the_prompt_opens(api):
    api.engine.tokenizer.chat_template = THINKING + "{% if add_generation_prompt %}<think>\n{% endif %}"
    choice, chunks = answer(api, "Hm.</think>Yes.", {"messages": CHAT["messages"]})
    assert choice["message"]["content"] == "Yes."
    assert choice["message"]["reasoning_content"] == "Hm."
    assert joined(chunks)["reasoning_content"] == "Hm."


def test_reasoning_effort_reaches_the_template(api):
    api.engine.tokenizer.chat_template = "{{ reasoning_effort }} {{ enable_thinking }} {{ messages[0].content }}"
    answer(api, "ok", {"messages": CHAT["messages"], "reasoning_effort": "none"})
    assert prompt_of(api) == "none False Hi"
    kwargs = {"reasoning_effort": "high", "enable_thinking": True}
    answer(api, "ok", {"messages": CHAT["messages"], "reasoning_effort": "none", "chat_template_kwargs": kwargs})
    assert prompt_of(api) == "high True Hi"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"response_format": {"type": "json_object"}}, ("json", '{"type":"object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}},
            ("json", '{"type": "string"}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, ("choice", '["a", "b"]')),
        ({"guided_json": {"type": "object"}}, ("json", '{"type": "object"}')),
        ({"guided_grammar": "start: 'a'"}, ("grammar", "start: 'a'")),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
def test_structured_outputs_reach_the_engine(api, given, key, endpoint):
    prompt = {"messages": CHAT["messages"]} if endpoint.startswith("chat") else {"prompt": "Hi"}
    assert api.post(f"/v1/{endpoint}", {**prompt, **given, "max_tokens": 2}).status_code == 200
    assert api.scheduler.added[-1].params.structured_outputs.key == key
