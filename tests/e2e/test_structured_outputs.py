"""Structured outputs and tool calls of a real engine on a random model, spoken to by the official client."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from frontend import Client, SamplingParams
from tests.support import tiny
from tests.support.patient_http import get
from tests.support.server import Server

pytestmark = pytest.mark.timeout(180)
CHAT = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "degrees": {"type": "integer", "maximum": 60}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
SEEDED = {"max_tokens": 400, "seed": 5, "temperature": 1.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny.save_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=2048)
    with Server(folder, "--served-model-name", "tiny", "--dtype", "float32", "--num-kv-blocks", "512") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.ready["http"] + "/v1", api_key="none", max_retries=0) as client:
        yield client


def assert_weather(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["city", "degrees"]
    assert isinstance(value["city"], str) and len(value["city"]) <= 8
    assert isinstance(value["degrees"], int) and value["degrees"] <= 60


def test_json_schema_whole_and_streamed(client):
    whole = client.chat.completions.create(model="tiny", messages=CHAT, response_format=FORMAT, **SEEDED)
    choice = whole.choices[0]
    assert choice.finish_reason == "stop"
    assert_weather(choice.message.content)
    stream = client.chat.completions.create(model="tiny", messages=CHAT, response_format=FORMAT, stream=True, **SEEDED)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_call_whole_and_streamed(client, choice):
    options = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, **SEEDED}
    whole = client.chat.completions.create(model="tiny", messages=CHAT, **options).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert call.function.name == "weather"
    assert_weather(call.function.arguments)
    with client.chat.completions.stream(model="tiny", messages=CHAT, **options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    answered = [
        *CHAT,
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "ok"},
    ]
    again = client.chat.completions.create(model="tiny", messages=answered, tools=[TOOL], max_tokens=4)
    assert again.choices[0].finish_reason in ("length", "stop")


def test_responses_whole_and_streamed(client):
    options = {"model": "tiny", "input": "Hi", "max_output_tokens": 400, "temperature": 0.0}
    text = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}}
    whole = client.responses.create(text=text, **options)
    assert whole.status == "completed"
    assert_weather(whole.output_text)
    with client.responses.stream(text=text, **options) as stream:
        assert stream.get_final_response().output_text == whole.output_text
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    called = client.responses.create(tools=[tool], tool_choice="required", parallel_tool_calls=False, **options)
    (call,) = called.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert_weather(call.arguments)


def test_a_wrong_schema_is_refused_whole_and_streamed(client):
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="strin"):
            client.chat.completions.create(model="tiny", messages=CHAT, response_format=wrong, stream=stream)
    assert get(f"{client.base_url.copy_with(path='/health')}").status_code == 200


def test_many_grammars_at_once_beside_free_requests(client):
    """Each grammar is compiled while the others run."""

    def one(number: int) -> None:
        if number % 3 == 0:
            choice = client.completions.create(model="tiny", prompt="The sea", max_tokens=30).choices[0]
            assert choice.finish_reason in ("length", "stop")
            return
        pattern = f"[a-f]{{{number}}}-{number}"
        text = client.completions.create(
            model="tiny", prompt="The sea", max_tokens=60, extra_body={"structured_outputs": {"regex": pattern}}
        )
        assert re.fullmatch(pattern, text.choices[0].text)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(one, range(1, 25)))


def test_the_client_socket_takes_structured_outputs(server):
    params = SamplingParams(max_tokens=20, structured_outputs={"choice": ["red", "green"]})
    with Client(server.ready["client_endpoint"]) as client:
        assert client.generate("The", params).samples[0].text in ("red", "green")


def test_nothing_was_logged_as_an_error(server):
    assert " ERROR " not in server.stderr()
    assert "scheduler leaks" not in server.stderr()
    rss = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(server.children()["scheduler"])], capture_output=True, text=True, check=True
    )
    assert int(rss.stdout) < 120 * 1024, "the scheduler holds one small vocabulary"
    assert sys.platform == "linux"
