"""Reasoning and tool calls apart from content: known texts, and any text in any pieces."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.chat.answer import AnswerForm, opens_reasoning
from frontend.chat.parts import CallArguments, CallStart, Content, Message, Part, Reasoning
from frontend.chat.tool_formats import HERMES, LLAMA, MISTRAL, ToolFormat, format_of

FORMATS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
NAMES = frozenset({"get_weather", "f"})


def form_of(tool_format: ToolFormat | None, **options: object) -> AnswerForm:
    return AnswerForm(tool_format=tool_format, tool_names=NAMES, **options)


def read(form: AnswerForm, pieces: list[str]) -> list[Part]:
    parser = form.parser()
    parts = [part for piece in pieces for part in parser.feed(piece)]
    parts += parser.finish()
    assert parser.has_calls == any(isinstance(part, CallStart) for part in parts)
    return parts


def plain(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]


def whole(tool_format: ToolFormat | None, text: str, **options: object) -> tuple[str, str, list[tuple[str, str]]]:
    return plain(form_of(tool_format, **options).message(text))


WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris {\\"x\\": [1]}"}}'
ARGUMENTS = '{"city": "Paris {\\"x\\": [1]}"}'
PARAMETERS = WEATHER.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("get_weather", ARGUMENTS)]),
        ("hermes", f"<tool_call>{WEATHER}</tool_call>", "", [("get_weather", ARGUMENTS)]),
        ("hermes", f"\n\n<tool_call>{WEATHER}</tool_call>\n", "", [("get_weather", ARGUMENTS)]),
        (
            "hermes",
            f"I look.\n<tool_call>{WEATHER}</tool_call>\n Done.",
            "I look.\nDone.",
            [("get_weather", ARGUMENTS)],
        ),
        (
            "hermes",
            f'<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>',
            "",
            [("get_weather", ARGUMENTS), ("f", "{}")],
        ),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        ("hermes", f"<tool_call>{WEATHER}", "", [("get_weather", ARGUMENTS)]),
        ("hermes", f"<tool_call>{WEATHER}</tool", "", [("get_weather", ARGUMENTS)]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
        ("hermes", "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
        ("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
        ("hermes", f"<tool_call><tool_call>{WEATHER}", "<tool_call>", [("get_weather", ARGUMENTS)]),
        ("hermes", "a < b <tool", "a < b <tool", []),
        ("hermes", "  plain {}", "  plain {}", []),
        ("hermes", " \n", " \n", []),
        ("llama", PARAMETERS, "", [("get_weather", ARGUMENTS)]),
        ("llama", f"\n {PARAMETERS}", "", [("get_weather", ARGUMENTS)]),
        ("llama", f"<|python_tag|>{PARAMETERS}", "", [("get_weather", ARGUMENTS)]),
        ("llama", f"Wait <|python_tag|>{PARAMETERS}", "Wait ", [("get_weather", ARGUMENTS)]),
        ("llama", f'{PARAMETERS}; {{"name": "f", "parameters": {{}}}}', "", [("get_weather", ARGUMENTS), ("f", "{}")]),
        ("llama", ' {"name": "Bob", "parameters": {}}', ' {"name": "Bob", "parameters": {}}', []),
        ("llama", '{"answer": 5}', '{"answer": 5}', []),
        ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("llama", f"So: {PARAMETERS}", f"So: {PARAMETERS}", []),
        ("mistral", f"[TOOL_CALLS][{WEATHER}]", "", [("get_weather", ARGUMENTS)]),
        ("mistral", f"[TOOL_CALLS] {WEATHER}", "", [("get_weather", ARGUMENTS)]),
        (
            "mistral",
            f'[TOOL_CALLS] [{WEATHER}, {{"name": "f", "arguments": {{}}}}]',
            "",
            [("get_weather", ARGUMENTS), ("f", "{}")],
        ),
        ("mistral", "[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]", []),
        ("mistral", "[TOOL] x", "[TOOL] x", []),
    ],
)
def test_known_texts(name, text, content, calls):
    assert whole(FORMATS[name], text) == (content, "", calls)


@pytest.mark.parametrize("name", FORMATS)
def test_every_cut_of_a_text_reads_the_same(name):
    call = WEATHER if name != "llama" else PARAMETERS
    texts = {
        "hermes": f"Hm <b> <tool_call>\n{call}\n</tool_call> x <tool_call>no</tool_call>",
        "llama": f" {call} ; <|python_tag|>{call} tail",
        "mistral": f"a [TOOL_CALLS] [{call}, {call}] b",
    }
    form, text = form_of(FORMATS[name]), texts[name]
    expected = plain(form.message(text))
    assert expected[2], "the text holds a call"
    for first, second in itertools.combinations(range(0, len(text) + 1, 1 + len(text) // 60), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert plain(Message.of(read(form, pieces))) == expected, pieces
    assert plain(Message.of(read(form, list(text)))) == expected


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>",
     '{"name": "f", ', '"arguments": ', '"parameters": {', "}", "]", "[", ",", ";", "\n", " ", '"', "\\", "<", "a",
     WEATHER, PARAMETERS, "null", '"name"', ":"]
)  # fmt: skip


@given(
    fragments=st.lists(FRAGMENTS, max_size=14),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    name=st.sampled_from([*FORMATS, ""]),
    reasons=st.booleans(),
    opened=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_streamed_pieces_join_to_the_whole(fragments, cuts, name, reasons, opened):
    text = "".join(fragments)
    pieces, place = [], 0
    for length in itertools.chain(cuts, itertools.repeat(5)):
        if place >= len(text):
            break
        pieces.append(text[place : place + length])
        place += length
    form = form_of(FORMATS.get(name), reasons=reasons, opened=opened and reasons)
    parts = read(form, pieces)
    message = Message.of(parts)
    assert plain(message) == plain(form.message(text))
    started: set[int] = set()
    for part in parts:
        if isinstance(part, CallStart):
            assert part.index == len(started), "calls are numbered from 0"
            started.add(part.index)
        elif isinstance(part, CallArguments):
            assert part.index in started, "a call's name comes before its arguments"
        assert not isinstance(part, Content | Reasoning | CallArguments) or part.text, "no empty pieces"
    if form.is_plain:
        assert message.content == text
    elif not message.calls and not reasons:
        assert message.content == text, "what is no call is content, unchanged"


@given(st.text(alphabet='ab{}[]",:\\ 1', max_size=40), st.text(alphabet="f<>", max_size=8))
@settings(max_examples=200, deadline=None)
def test_any_valid_arguments_come_through(key, value):
    arguments = json.dumps({key: [value, {"deep": None}]})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert whole(HERMES, text) == ("", "", [("f", arguments)])


@pytest.mark.parametrize(
    ("text", "opened", "content", "reasoning"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Yes.", "Hm."),
        ("\n<think>Hm.</think>Yes.", False, "Yes.", "Hm."),
        ("Hm.\n</think>\n\nYes.", True, "Yes.", "Hm."),
        ("Hm. </thin", True, "", "Hm. </thin"),
        ("<think>\n\n</think>\n\nYes.", False, "Yes.", ""),
        ("Yes. <think>no</think>", False, "Yes. <think>no</think>", ""),
        ("<thin", False, "<thin", ""),
        (" Yes", False, " Yes", ""),
        ("a b \n c</think> d ", True, "d ", "a b \n c"),
        ("", True, "", ""),
    ],
)
def test_reasoning(text, opened, content, reasoning):
    form = AnswerForm(reasons=True, opened=opened)
    assert plain(form.message(text)) == (content, reasoning, [])
    assert plain(Message.of(read(form, list(text)))) == (content, reasoning, [])


def test_calls_in_the_reasoning_are_no_calls():
    text = f"<think><tool_call>{WEATHER}</tool_call></think>\n<tool_call>{WEATHER}</tool_call>"
    content, reasoning, calls = whole(HERMES, text, reasons=True)
    assert (content, calls) == ("", [("get_weather", ARGUMENTS)])
    assert reasoning.startswith("<tool_call>")


def test_without_parallel_calls_the_first_counts():
    text = f"<tool_call>{WEATHER}</tool_call><tool_call>{WEATHER}</tool_call>"
    assert whole(HERMES, text, parallel=False) == ("", "", [("get_weather", ARGUMENTS)])


def test_mistral_ids_have_nine_characters():
    (call,) = form_of(MISTRAL).message(f"[TOOL_CALLS][{WEATHER}]").calls
    assert len(call.call_id) == 9 and call.call_id.isalnum()


def test_arguments_are_streamed_before_the_call_ends():
    parser = form_of(HERMES).parser()
    assert parser.feed('<tool_call>\n{"name": "f"') == []
    start, *rest = parser.feed(', "arguments": {"a')
    assert isinstance(start, CallStart) and start.name == "f"
    assert rest == [CallArguments(0, '{"a')]
    assert parser.feed('": 1') == [CallArguments(0, '": 1')]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for tool in tools %}...<tool_call>", HERMES),
        ('{% if tools %}{"name": function name, "parameters": dictionary}', LLAMA),
        ("{% if tools %}<|python_tag|>", LLAMA),
        ("{% if tools %}[AVAILABLE_TOOLS]...[TOOL_CALLS]", MISTRAL),
        ("{{ messages }}", HERMES),
    ],
)
def test_the_format_is_detected_from_the_template(template, expected):
    assert format_of(template) is expected


def test_the_prompt_s_end_says_whether_reasoning_is_open():
    assert opens_reasoning("<|assistant|><think>\n")
    assert not opens_reasoning("<think>\n\n</think>\n\n")
