"""Chats with tools as templates get them: the same from every door, and whatever a client put into them."""

import json

import pytest

from common.errors import RequestError
from frontend.chat.tools import for_template
from frontend.prompt import ChatPrompt
from tests.support import hostile

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
ASKED = {"role": "user", "content": "Hi"}


def prepared(*messages, tools=(), knows_tools=True):
    return for_template(messages, tools, knows_tools=knows_tools)


def test_arguments_become_objects_and_empty_lists_of_calls_go():
    chat, tools = prepared({"role": "assistant", "tool_calls": [CALL]}, {**ASKED, "tool_calls": []}, tools=[TOOL])
    assert chat[0]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert chat[1] == ASKED
    assert tools == [TOOL]
    assert CALL["function"]["arguments"] == '{"city": "Paris"}', "the client's own was changed"


@pytest.mark.parametrize("arguments", ["", " ", "{", "[" * 5000, 5, None, {"a": 1}])
def test_arguments_that_are_no_json_stay_what_they_are(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    chat, _ = prepared({"role": "assistant", "tool_calls": [call]})
    wanted = {} if arguments in ("", " ") else arguments
    assert chat[0]["tool_calls"][0]["function"]["arguments"] == wanted


@pytest.mark.parametrize(
    ("content", "text"),
    [("a", "a"), (None, ""), ("", ""), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb")],
)
def test_a_template_without_tools_gets_them_as_text_whatever_form_the_content_has(content, text):
    system, asked, answered = {"role": "system", "content": content}, ASKED, {"role": "tool", "content": content}
    calling = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    chat, tools = prepared(system, asked, calling, answered, tools=[TOOL], knows_tools=False)
    assert tools == ()
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "user"]
    assert chat[0]["content"].startswith(f"{text}\n\nYou may call functions")
    assert json.dumps(TOOL) in chat[0]["content"]
    assert chat[2]["content"].startswith(f"{text}\n<tool_call>" if text else "<tool_call>")
    assert chat[3]["content"] == f"<tool_response>\n{text}\n</tool_response>"


@pytest.mark.parametrize("knows_tools", [True, False])
@pytest.mark.parametrize("value", hostile.VALUES, ids=lambda value: repr(value)[:20])
def test_whatever_a_client_of_the_socket_puts_there_is_taken_or_refused(value, knows_tools):
    """What was no list of calls ended as an internal error."""
    for message in (
        {"role": value, "content": "x"},
        {"role": "tool", "content": value},
        {"role": "system", "content": value},
        {"role": "assistant", "content": value, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": value},
        {"role": "assistant", "tool_calls": [value]},
        {"role": "assistant", "tool_calls": [{"function": value}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": value}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]},
    ):
        for tools in ((), [TOOL], [{"function": value}]):
            try:
                chat, _ = prepared(message, tools=tools, knows_tools=knows_tools)
            except RequestError as error:
                assert error.status == 400
            else:
                assert len(chat) in (1, 2)


def test_a_chat_from_the_client_socket_is_rendered_like_one_over_http(memory_engine):
    """There, tools went to templates that know none, and were lost."""
    tokenizer = memory_engine.engine.tokenizer
    text = tokenizer.render(ChatPrompt(messages=[ASKED, {"role": "assistant", "tool_calls": [CALL]}], tools=[TOOL]))
    assert json.dumps(TOOL) in text
    assert '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>' in text
