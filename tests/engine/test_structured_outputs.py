"""Structured outputs through the real scheduler core and the real runner: every output follows its grammar.

A random model would produce noise; under a grammar it must produce valid text whatever the batch, the chunks, the
pressure and the run-ahead, and those beside it must get the tokens that they get alone (C12 of the fault list).
"""

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from common.sampling_params import SamplingParams
from frontend.chat.answer import AnswerForm
from frontend.chat.tool_formats import HERMES, LLAMA, MISTRAL, call_grammar
from tests.support import tiny
from tests.support.memory_engine import MemoryEngine
from worker_proc.loader import load_model
from worker_proc.models.llama import LlamaForCausalLM

END_ID = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPTS = [[5 + i, 6, 7 + i, 8, 9] for i in range(4)]
FREE = SamplingParams(max_tokens=50, seed=3)
SEEN_OUTPUTS: set[tuple[str, ...]] = set()
CONDITIONS = {
    "usual": {},
    "run-ahead-0": {"run_ahead": 0},
    "run-ahead-1": {"run_ahead": 1},
    "chunk-3": {"max_num_batched_tokens": 3},
    "pressure": {"block_count": 45},
    "swap": {"block_count": 45, "host_block_count": 60, "preemption": "swap"},
    "radix": {"prefix_cache": "radix"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(folder) -> LlamaForCausalLM:
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(folder, model):
    def make(**limits: object) -> MemoryEngine:
        return MemoryEngine(model, tokenizer_file=folder / "tokenizer.json", **limits)

    return make


@pytest.fixture(scope="module")
def tokens_alone(engine) -> list[list[int]]:
    """What each free request gets when nothing runs beside it."""
    found = []
    for prompt in PROMPTS:
        single = engine()
        request_id = single.add(prompt, FREE)
        single.run()
        found.append(single.samples[request_id, 0].token_ids)
    return found


def params(wanted: object, **changes: object) -> SamplingParams:
    values = {"max_tokens": 160, "seed": 7, "temperature": 1.0, "structured_outputs": wanted}
    return SamplingParams(**{**values, **changes})


def text_of(engine: MemoryEngine, tokenizer: Tokenizer, request_id: int, index: int = 0) -> str:
    return tokenizer.decode(engine.samples[request_id, index].token_ids, skip_special_tokens=True)


def assert_follows_schema(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"], text
    assert isinstance(value["name"], str) and len(value["name"]) <= 6, text
    assert 0 <= value["age"] <= 99, text
    assert len(value["tags"]) <= 2 and set(value["tags"]) <= {"red", "green"}, text


@pytest.mark.parametrize("limits", CONDITIONS.values(), ids=CONDITIONS.keys())
def test_grammar_rows_beside_free_rows(engine, tokenizer, tokens_alone, limits):
    mixed = engine(**limits)
    pairs = [(mixed.add(prompt, FREE), mixed.add(prompt, params({"json": SCHEMA}), (END_ID,))) for prompt in PROMPTS]
    mixed.run()
    outputs = tuple(text_of(mixed, tokenizer, grammar_id) for _, grammar_id in pairs)
    SEEN_OUTPUTS.add(outputs)
    assert len(SEEN_OUTPUTS) == 1, "the outputs depend on the conditions"
    for (free_id, grammar_id), tokens in zip(pairs, tokens_alone, strict=True):
        assert mixed.samples[free_id, 0].token_ids == tokens
        assert mixed.samples[grammar_id, 0].finish == "stop"
        assert_follows_schema(text_of(mixed, tokenizer, grammar_id))
    if "block_count" in limits:
        assert mixed.core.state.counters.preemptions > 0, "the test is to cover preemption"


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": r"[a-c]{3}-\d{2}"}, r"[a-c]{3}-\d{2}"),
        ({"choice": ["sea", "see", "open sea"]}, "sea|see|open sea"),
        ({"grammar": 'start: "a" ("b" | "c")~2 "d"'}, "a[bc]{2}d"),
        ({"grammar": 'root ::= "yes" | "no"\n'}, "yes|no"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_kinds(engine, tokenizer, wanted, pattern, temperature):
    mixed = engine()
    request_id = mixed.add([5, 6, 7], params(wanted, n=3, temperature=temperature), (END_ID,))
    mixed.run()
    for index in range(3):
        assert re.fullmatch(pattern, text_of(mixed, tokenizer, request_id, index))
        assert mixed.samples[request_id, index].finish == "stop"


def test_text_without_a_choice_is_written_in_the_tokens_that_the_model_knows(engine, tokenizer):
    """Fault: spelt out in single characters, the keys of a schema confuse the model about what follows."""
    mixed = engine()
    text = "the open sea, the ever free"
    request_id = mixed.add([5, 6, 7], params({"choice": [text]}), (END_ID,))
    mixed.run()
    assert mixed.samples[request_id, 0].token_ids == tokenizer.encode(text).ids


def test_json_object_is_valid_or_cut_by_length(engine, tokenizer):
    mixed = engine()
    ids = [mixed.add([5, 6, 7], params({"json_object": True}, seed=i, max_tokens=200), (END_ID,)) for i in range(6)]
    mixed.run()
    for request_id in ids:
        text = text_of(mixed, tokenizer, request_id)
        assert text.startswith("{")
        if mixed.samples[request_id, 0].finish == "stop":
            assert isinstance(json.loads(text), dict)


def test_an_open_grammar_ends_with_an_end_token_after_min_tokens(engine, tokenizer):
    mixed = engine()
    many = {"logit_bias": {END_ID: 100.0}, "max_tokens": 40}
    early = mixed.add([5, 6], params({"regex": "(sea )*"}, **many), (END_ID,))
    late = mixed.add([5, 6], params({"regex": "(sea )*"}, min_tokens=9, **many), (END_ID,))
    endless = mixed.add([5, 6], params({"regex": "(sea )*"}, **many), ())
    mixed.run()
    assert mixed.samples[early, 0].token_ids == [END_ID]
    assert len(mixed.samples[late, 0].token_ids) >= 10, "min_tokens come before the end token"
    assert mixed.samples[late, 0].token_ids[-1] == END_ID
    assert mixed.samples[endless, 0].finish == "length", "ignore_eos: nothing but the length ends it"
    assert re.fullmatch("(sea )*(s|se|sea)?", text_of(mixed, tokenizer, endless))


def test_a_complete_grammar_ends_the_sample_whatever_min_tokens_says(engine, tokenizer):
    mixed = engine()
    request_id = mixed.add([5, 6], params({"choice": ["sea"]}, min_tokens=30), ())
    mixed.run()
    assert text_of(mixed, tokenizer, request_id) == "sea"
    assert mixed.samples[request_id, 0].finish == "stop"


def test_allowed_ids_and_penalties_go_with_a_grammar(engine, tokenizer):
    mixed = engine()
    digits = [tokenizer.token_to_id(digit) for digit in "0123456789"]
    request_id = mixed.add(
        [5, 6], params({"regex": "[0-9a-z]{8}"}, allowed_token_ids=digits, presence_penalty=1.0), (END_ID,)
    )
    mixed.run()
    assert re.fullmatch(r"\d{8}", text_of(mixed, tokenizer, request_id))


@pytest.mark.parametrize(
    "wanted", [{"json": {"type": "strin"}}, {"regex": "(["}, {"grammar": "start: nothing"}, {"json": {"not": {}}}]
)
def test_what_cannot_be_followed_is_refused(engine, wanted):
    mixed = engine()
    request_id = mixed.add([5, 6], params(wanted), (END_ID,))
    failure = mixed.failures[request_id]
    assert (failure.status, failure.param) == (400, "structured_outputs")
    assert len(failure.message) > 50
    mixed.run()


def test_without_a_tokenizer_json_structured_outputs_are_refused(folder, model):
    bare = MemoryEngine(model, tokenizer_file=folder / "missing.json")
    request_id = bare.add([5, 6], params({"json_object": True}))
    assert "tokenizer.json" in bare.failures[request_id].message
    bare.run()


def test_abort_in_the_middle_leaves_nothing(engine):
    mixed = engine()
    ids = [mixed.add([5, 6, i], params({"regex": "[a-z]{20}"}), (END_ID,)) for i in range(4)]
    for _ in range(6):
        mixed.step()
    for request_id in ids[:2]:
        mixed.abort(request_id)
    mixed.run()
    assert all(mixed.samples[request_id, 0].finish == "stop" for request_id in ids[2:])


RICH = {
    "name": "find",
    "parameters": {
        "type": "object",
        "properties": {"where": {"$ref": "#/$defs/Place"}, "day": {"type": "string", "format": "unheard-of"}},
        "required": ["where"],
        "additionalProperties": False,
        "$defs": {"Place": {"enum": ["home", "away"]}},
    },
}
PLAIN = {"name": "now"}


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL], ids=lambda form: form.name)
@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls_are_read_back(engine, tokenizer, form, parallel):
    """The grammar of each format produces what its parser reads, with definitions and unknown keywords in schemas."""
    grammar = call_grammar(form, [RICH, PLAIN], parallel=parallel, opening_id=None)
    answer = AnswerForm(tool_format=form, tool_names=frozenset({"find", "now"}))
    mixed = engine()
    ids = [mixed.add([5, 6, i], params({"grammar": grammar}, seed=i, max_tokens=200), (END_ID,)) for i in range(6)]
    mixed.run()
    assert mixed.failures == {}
    complete = 0
    for request_id in ids:
        message = answer.message(text_of(mixed, tokenizer, request_id))
        if mixed.samples[request_id, 0].finish == "stop":
            complete += 1
            assert message.content == ""
            for call in message.calls:
                arguments = json.loads(call.arguments)
                assert call.name == "now" or arguments["where"] in ("home", "away")
            assert parallel or len(message.calls) == 1
    assert complete, "none of the outputs is complete"
