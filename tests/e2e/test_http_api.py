"""The HTTP API of a real engine, spoken to by the official client and by plain requests."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.patient_http import get, post
from tests.support.server import Server

pytestmark = pytest.mark.timeout(180)
PROMPT = "The sea, the sea"
CHAT = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def url(server) -> str:
    return server.ready["http"]


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client) -> str:
    return client.models.list().data[0].id


def test_chat_streamed_equals_whole(client, model):
    whole = client.chat.completions.create(model=model, messages=CHAT, **GREEDY)
    stream = client.chat.completions.create(
        model=model, messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_completions_streamed_equal_whole_and_token_ids_equal_text(client, model, url):
    whole = client.completions.create(model=model, prompt=PROMPT, **GREEDY).choices[0].text
    stream = client.completions.create(model=model, prompt=PROMPT, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole
    ids = post(url + "/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert client.completions.create(model=model, prompt=ids, **GREEDY).choices[0].text == whole
    several = client.completions.create(model=model, prompt=[PROMPT, PROMPT], **GREEDY)
    assert [choice.text for choice in several.choices] == [whole, whole]


def test_logprobs_and_echo(client, model):
    choice = client.completions.create(model=model, prompt=PROMPT, echo=True, logprobs=2, **GREEDY).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])
    again = client.completions.create(model=model, prompt=PROMPT, echo=True, logprobs=2, **GREEDY).choices[0]
    assert again.logprobs.token_logprobs == choice.logprobs.token_logprobs, "a warm prefix cache changes nothing"
    chat = client.chat.completions.create(model=model, messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY)
    entries = chat.choices[0].logprobs.content
    assert len(entries) == chat.usage.completion_tokens
    for entry in entries:  # greedy: the chosen token is the likeliest
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-5)


def test_samples_differ_and_are_reproducible(client, model):
    asked = {"model": model, "prompt": PROMPT, "n": 4, "temperature": 1.0, "seed": 1, "max_tokens": 12}
    texts = [choice.text for choice in client.completions.create(**asked).choices]
    assert len(set(texts)) > 1
    assert texts == [choice.text for choice in client.completions.create(**asked).choices]


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"1e400", b"-1", b'"x"'])
@pytest.mark.parametrize("name", [b"temperature", b"top_p", b"min_p", b"repetition_penalty", b"presence_penalty"])
def test_bad_numbers_are_refused_in_json_and_cost_nothing(url, name, value):
    if (name, value) == (b"presence_penalty", b"-1"):
        pytest.skip("a presence penalty of -1 is fine")
    body = b'{"prompt": "x", "max_tokens": 1, "' + name + b'": ' + value + b"}"
    response = post(url + "/v1/completions", content=body)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_official_client_raises_its_own_errors(client, model):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=model, prompt=PROMPT, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="max-model-len"):
        client.completions.create(model=model, prompt="sea " * 2000)


def test_health_version_and_metrics(url, client, model):
    assert get(url + "/health").json() == {"status": "serving"}
    assert get(url + "/v1/models/" + model).json()["max_model_len"] > 0
    client.completions.create(model=model, prompt=PROMPT, **GREEDY)
    text = get(url + "/metrics").text
    assert "trireme:request_success_total" in text
    assert "trireme:num_requests_running" in text


def scraped(url) -> dict[str, float]:
    """Values of `/metrics` by name without prefix and labels; what differs by label is added up."""
    values: dict[str, float] = {}
    for line in get(url + "/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.partition("{")[0].removeprefix("trireme:")
            values[name] = values.get(name, 0.0) + float(value)
    return values


def test_every_time_of_a_request_is_counted_where_it_was_spent(url):
    """Three requests of 30 and 9 tokens; the times that the scheduler tells fit into those that the frontend takes."""
    before = scraped(url)
    body = {"prompt": list(range(20, 50)), "max_tokens": 9, "ignore_eos": True, "cache_salt": "timed"}
    for _ in range(3):
        assert post(url + "/v1/completions", json=body).status_code == 200
    now = before

    def grown(name: str) -> float:
        return round(now[name] - before[name], 9)

    def is_reported() -> bool:
        """The scheduler's figures come a moment later, and so may some of earlier requests, after `before`."""
        nonlocal now
        now = scraped(url)
        return grown("generation_tokens_total") >= 27 and grown("prefix_cache_hits_total") >= 2 * 28

    wait_for(is_reported)

    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time", "request_inference_time", "request_time_per_output_token"):  # fmt: skip
        assert grown(f"{name}_seconds_count") == 3, name
        assert grown(f"{name}_seconds_sum") > 0, name
    assert grown("inter_token_latency_seconds_count") == 3 * 8
    assert grown("request_prompt_tokens_sum") == 90 and grown("request_generation_tokens_sum") == 27
    waited = grown("request_queue_time_seconds_sum") + grown("request_prefill_time_seconds_sum")
    assert waited <= grown("time_to_first_token_seconds_sum") + 1e-6
    assert grown("inter_token_latency_seconds_sum") == pytest.approx(grown("request_decode_time_seconds_sum"), rel=0.01)
    assert grown("iteration_tokens_total_count") == grown("engine_steps_total") > 0
    assert grown("iteration_tokens_total_sum") >= grown("prompt_tokens_total") - grown("prefix_cache_hits_total")
    assert grown("request_success_total") == 3
    assert grown("step_time_seconds_total") > 0


def test_a_flushed_cache_is_cold(url):
    def cached_count() -> int:
        reply = post(url + "/v1/completions", json={"prompt": list(range(20, 60)), "max_tokens": 1})
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached_count()
    assert cached_count() > 0
    assert post(url + "/flush_cache").status_code == 200
    assert cached_count() == 0
    assert cached_count() > 0


def test_more_connections_than_the_usual_limit_on_files(server, url):
    limits = Path(f"/proc/{server.children()['frontend']}/limits").read_text()
    soft, hard = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
    assert int(soft) == min(int(hard), 65_536)


def running_count(url) -> int:
    lines = get(url + "/metrics").text.splitlines()
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith("trireme:num_requests_running{"))


@pytest.fixture(scope="module")
def long_url(long_model_dir) -> Iterator[str]:
    """Of an engine whose answers may last for minutes."""
    with Server(long_model_dir, "--dtype", "float32") as running:
        yield running.ready["http"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_ends_the_request(long_url, stream):
    host, port = long_url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 60_000, "ignore_eos": True, "stream": stream, "temperature": 0})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall((head + body).encode())
        if stream:
            assert connection.recv(4096)
        else:
            wait_for(lambda: running_count(long_url) == 1)
    wait_for(lambda: running_count(long_url) == 0)


def wait_for(condition, timeout_s: float = 20.0) -> None:
    """Ask until it holds; each asking is a request to the server, so that nothing spins."""
    give_up = threading.Event()
    timer = threading.Timer(timeout_s, give_up.set)
    timer.start()
    while not condition():
        assert not give_up.is_set(), f"did not become true in {timeout_s} s"
    timer.cancel()


def test_bodies_of_a_megabyte_are_answered_like_short_ones(client, model, url):
    """They are parsed in a process of their own."""
    filler = {"metadata": {"filler": "y" * 1_000_000}}
    short = client.chat.completions.create(model=model, messages=CHAT, **GREEDY).choices[0].message.content
    long = client.chat.completions.create(model=model, messages=CHAT, extra_body=filler, **GREEDY)
    assert long.choices[0].message.content == short
    ids = post(url + "/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    many = post(url + "/detokenize", json={"tokens": ids * (200_000 // len(ids))})
    assert many.json()["prompt"] == PROMPT * (200_000 // len(ids))
    batch = client.completions.create(model=model, prompt=[ids, ids], extra_body=filler, **GREEDY)
    assert batch.choices[0].text == batch.choices[1].text
    with pytest.raises(openai.BadRequestError, match="has 400000 tokens"):
        client.completions.create(model=model, prompt=[5] * 400_000)
    refused = post(url + "/v1/chat/completions", json={"messages": CHAT, "tools": [[]] * 100_000})
    assert refused.status_code == 413
    assert "more than 32768 items" in refused.json()["error"]["message"]
