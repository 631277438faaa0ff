"""What operators ask for: what runs here, and the end of what runs; and what a reply shows of its prompt."""

import asyncio
import json

import pytest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def test_server_info_tells_everything_but_the_keys(make_api):
    api = make_api(api_key=("secret-key",), stream_interval=3).ready()
    response = api.get("/server_info", headers={"authorization": "Bearer secret-key"})
    info = response.json()
    assert info["status"] == "serving"
    assert info["models"] == ["tiny", "small"]
    assert info["limits"]["max_model_len"] == 512
    assert info["options"]["server"]["stream_interval"] == 3
    assert "secret-key" not in response.text
    assert api.get("/server_info").status_code == 401


def test_server_info_before_the_engine_is_ready(make_api):
    info = make_api().get("/server_info").json()
    assert (info["status"], info["limits"]) == ("starting", {})


@pytest.mark.parametrize(
    ("abort", "count"),
    [
        ({"request_id": "mine"}, 1),
        ({"rid": "mine"}, 1),
        ({"request_id": "chatcmpl-mine"}, 1),
        ({"request_id": "header"}, 1),
        ({"abort_all": True}, 3),
        ({"request_id": "else"}, 0),
        ({"request_id": ""}, 0),
    ],
)
def test_an_abort_ends_a_request_with_what_it_has(api, abort, count):
    step, held = api.scheduler._step, []
    api.scheduler._step = lambda request, done: held.append(request) if done == 4 else step(request, done)

    async def run():
        waiting = [
            asyncio.create_task(api.client.post("/v1/chat/completions", json={**CHAT, "request_id": "mine"})),
            asyncio.create_task(api.client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "header"})),
            asyncio.create_task(api.client.post("/v1/completions", json={"prompt": "a"})),
        ]
        while len(held) < 3:
            await asyncio.sleep(0)
        reply = await api.client.post("/abort_request", json=abort)
        assert reply.json() == {"aborted": count}
        assert api.engine.core.live_count == 3 - count
        assert (await api.client.post("/abort_request", json={"abort_all": True})).json() == {"aborted": 3 - count}
        return [(await task).json()["choices"][0] for task in waiting]

    choices = api.loop.run_until_complete(run())
    assert [choice["finish_reason"] for choice in choices] == ["abort"] * 3
    assert choices[0]["message"]["content"]


@pytest.mark.parametrize("body", [{}, {"abort_all": False}, {"request_id": "a", "abort_all": True}])
def test_an_abort_of_nothing_in_particular_is_refused(api, body):
    assert api.post("/abort_request", body).json()["error"]["param"] == "request_id"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_prompt_is_shown_where_it_is_asked_for(api, path):
    request = {"prompt": "Hi"} if path == "/v1/completions" else CHAT
    body = api.post(path, {**request, "return_token_ids": True, "prompt_logprobs": 1, "max_tokens": 2}).json()
    shown = body["choices"][0] if path == "/v1/completions" else body
    prompt = list(api.scheduler.added[0].prompt_token_ids)
    assert shown["prompt_token_ids"] == prompt
    assert shown["prompt_logprobs"][0] is None
    assert len(shown["prompt_logprobs"]) == len(prompt)
    for token_id, entry in zip(prompt[1:], shown["prompt_logprobs"][1:], strict=True):
        assert entry[str(token_id)] == {
            "logprob": -0.5, "rank": 1, "decoded_token": api.engine.tokenizer.token_text(token_id)
        }  # fmt: skip
        assert "5" in entry
    plain = api.post(path, {**request, "max_tokens": 2}).text
    assert "prompt_" not in json.dumps({key: value for key, value in json.loads(plain).items() if key != "usage"})
    error = api.post(path, {**request, "prompt_logprobs": 1, "stream": True}).json()["error"]
    assert error["param"] == "prompt_logprobs"
