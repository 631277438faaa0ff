"""The traffic of the soak: what well-behaved clients and others do to an engine, over HTTP and the client socket.

Each kind is a coroutine that does one thing and checks the outcome: a wrong one raises `Wrong`. Called by
benchmarks/soak.py, which draws kinds at random and counts.
"""

import asyncio
import json
import random
from array import array
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx
import zmq
import zmq.asyncio

from common.errors import RequestError
from common.sampling_params import SamplingParams
from frontend import AsyncClient

WORDS = [
    "the",
    "sea",
    "blue",
    "open",
    "fresh",
    "ever",
    "free",
    "ship",
    "wave",
    "wind",
    "north",
    "star",
    "salt",
    "deep",
    "海",
    "青い",
    "naïve",
    "café",
    "🌊",
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "depth": {"type": "integer", "maximum": 99}},
    "required": ["name", "depth"],
}
TOOL = {"type": "function", "function": {"name": "sound", "parameters": SCHEMA}}
BAD_BODIES: tuple[Any, ...] = (
    b"{", b"[]", b'{"prompt": "a", "temperature": NaN}', b"\xff\xfe", b'{"prompt": "a", "max_tokens": -1}',
    {"prompt": "a", "n": 10**6}, {"prompt": [10**9]}, {"prompt": [-1]}, {"prompt": ""}, {"prompt": "a", "stop": 5},
    {"prompt": "a", "logit_bias": {"x": 1}}, {"prompt": "a", "top_p": -1}, {"prompt": "a", "model": "another"},
    {"prompt": "a", "structured_outputs": {"regex": "("}}, {"prompt": "a " * 100_000},
)  # fmt: skip


WARM_UP_ROUNDS = 20


class Wrong(Exception):
    """An outcome that must not be."""


def check(holds: bool, what: str) -> None:
    """Raise Wrong unless something holds."""
    if not holds:
        raise Wrong(what)


@dataclass
class Traffic:
    """What the kinds share.

    Attributes:
        http: a client of the HTTP API; sdk: of the client socket.
        endpoint: the client socket's.
        rng: draws prompts and parameters.
        longest: tokens that a request may hold.
        bad_count: bad inputs so far.
    """

    http: httpx.AsyncClient
    sdk: AsyncClient
    endpoint: str
    rng: random.Random
    longest: int
    bad_count: int = 0

    def text(self, word_count: int) -> str:
        """A prompt; half of them begin alike, for the prefix cache."""
        start = "the open sea " * 8 if self.rng.random() < 0.5 else ""
        return start + " ".join(self.rng.choices(WORDS, k=word_count))

    def params(self, **fixed: Any) -> dict[str, Any]:
        """Sampling parameters of any kind."""
        rng = self.rng
        values: dict[str, Any] = {
            "max_tokens": rng.choice((1, 2, 8, 24, 60)),
            "temperature": rng.choice((0.0, 0.7, 1.5)),
        }
        values |= rng.choice(({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.3}))
        values |= rng.choice(({}, {}, {"stop": ["sea", "ever"]}, {"ignore_eos": True}, {"seed": 7}, {"logprobs": 2}))
        return values | fixed

    def short_text(self) -> str:
        """A prompt of a few words."""
        return self.text(self.rng.randint(1, 20))


Kind = Callable[[Traffic], Awaitable[None]]


async def _lines(response: httpx.Response, limit: int | None = None) -> list[Any]:
    """The events of a stream, up to `limit`."""
    events: list[Any] = []
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            events.append(line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")))
            if limit is not None and len(events) >= limit:
                break
    return events


async def http_completion(traffic: Traffic) -> None:
    """A completion at once, of one or more samples, any length."""
    long = traffic.rng.random() < 0.2
    prompt = traffic.text(traffic.rng.randint(60, 100)) if long else traffic.short_text()
    body = traffic.params(prompt=prompt, n=traffic.rng.choice((1, 1, 3)))
    response = await traffic.http.post("/v1/completions", json=body)
    check(response.status_code == 200, f"{response.status_code} {response.text[:200]}")
    reply = response.json()
    check(len(reply["choices"]) == body["n"], "wrong number of choices")
    check(reply["usage"]["completion_tokens"] <= body["n"] * body["max_tokens"], "more tokens than asked for")


async def http_stream(traffic: Traffic) -> None:
    """A streamed chat, read to its end."""
    body = {"messages": [{"role": "user", "content": traffic.short_text()}], "stream": True, "max_tokens": 24}
    async with traffic.http.stream("POST", "/v1/chat/completions", json=body) as response:
        events = await _lines(response)
    check(events[-1] == "data: [DONE]", f"the stream ends with {events[-1]!r}")
    check(events[-2]["choices"][0]["finish_reason"] in ("stop", "length"), "no finish reason")


async def http_disconnect(traffic: Traffic) -> None:
    """A client that leaves in the middle of a stream."""
    body = {"prompt": traffic.short_text(), "stream": True, "max_tokens": 300, "ignore_eos": True}
    async with traffic.http.stream("POST", "/v1/completions", json=body) as response:
        await _lines(response, limit=traffic.rng.randint(1, 6))


async def http_gone_while_waiting(traffic: Traffic) -> None:
    """A client that leaves before its answer is there."""
    body = {"prompt": traffic.short_text(), "max_tokens": 300, "ignore_eos": True}
    try:
        await traffic.http.post("/v1/completions", json=body, timeout=traffic.rng.choice((0.02, 0.1, 0.3)))
    except httpx.TimeoutException:
        return


async def http_bad_input(traffic: Traffic) -> None:
    """What no engine can serve."""
    traffic.bad_count += 1
    body = BAD_BODIES[traffic.bad_count % len(BAD_BODIES)]
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = await traffic.http.post("/v1/completions", **content)
    check(400 <= response.status_code < 500, f"{response.status_code} for {str(body)[:80]}")
    check("message" in response.json()["error"], "an error without a message")


async def http_json_schema(traffic: Traffic) -> None:
    """A chat whose answer must follow a schema."""
    body = {
        "messages": [{"role": "user", "content": traffic.short_text()}], "max_tokens": 80, "temperature": 1.0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "sounding", "schema": SCHEMA}},
    }  # fmt: skip
    response = await traffic.http.post("/v1/chat/completions", json=body)
    check(response.status_code == 200, f"{response.status_code} {response.text[:200]}")
    choice = response.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        check(set(json.loads(choice["message"]["content"])) >= {"name", "depth"}, "not what the schema says")


async def http_tools(traffic: Traffic) -> None:
    """A chat that has to call a tool, streamed or not."""
    body = {
        "messages": [{"role": "user", "content": traffic.text(3)}], "max_tokens": 120, "tools": [TOOL],
        "tool_choice": "required", "stream": traffic.rng.random() < 0.5,
    }  # fmt: skip
    async with traffic.http.stream("POST", "/v1/chat/completions", json=body) as response:
        await response.aread()
    check(response.status_code == 200, f"{response.status_code} {response.text[:200]}")


async def http_slow_reader(traffic: Traffic) -> None:
    """A client that reads its stream with pauses."""
    body = {"prompt": traffic.short_text(), "stream": True, "max_tokens": 60, "ignore_eos": True}
    async with traffic.http.stream("POST", "/v1/completions", json=body) as response:
        last = ""
        async for line in response.aiter_lines():
            last = line or last
            await asyncio.sleep(0.02)
    check(last == "data: [DONE]", f"the stream ends with {last!r}")


async def http_looks(traffic: Traffic) -> None:
    """Monitoring."""
    for path in ("/health", "/metrics", "/v1/models", "/dashboard/data"):
        response = await traffic.http.get(path)
        check(response.status_code == 200, f"{path}: {response.status_code}")


async def http_flush(traffic: Traffic) -> None:
    """Somebody empties the prefix cache."""
    check((await traffic.http.post("/flush_cache")).status_code == 200, "the cache cannot be flushed")


async def sdk_generate(traffic: Traffic) -> None:
    """A request over the client socket, with a priority, streamed or not."""
    params = traffic.params()
    stream = await traffic.sdk.submit(
        traffic.short_text(), params, priority=traffic.rng.randint(-2, 2), stream=traffic.rng.random() < 0.5
    )
    texts = [delta.text async for delta in stream]
    check(stream.final is not None, "no end")
    assert stream.final is not None
    check(not texts or "".join(texts) == stream.final.text, "the deltas are not the text")


async def sdk_abort(traffic: Traffic) -> None:
    """A request that is aborted, at once or after some tokens."""
    params = SamplingParams(max_tokens=300, ignore_eos=True, n=traffic.rng.choice((1, 2)))
    stream = await traffic.sdk.submit(traffic.short_text(), params)
    wanted = traffic.rng.randint(0, 5)
    seen = 0
    if wanted == 0:
        await stream.abort()
    async for _ in stream:
        seen += 1
        if seen == wanted:
            await stream.abort()
    check(stream.final is not None and len(stream.final.samples) == params.n, "no end")


async def sdk_crowd(traffic: Traffic) -> None:
    """More at once than there are KV blocks for: some are preempted, all get every token."""
    params = {"max_tokens": 160, "ignore_eos": True}
    streams = [await traffic.sdk.submit(traffic.text(15), params, stream=False) for _ in range(14)]
    finals = await asyncio.gather(*(stream.result() for stream in streams))
    check({final.completion_tokens for final in finals} == {160}, "a preempted request lost tokens")


async def sdk_timeout(traffic: Traffic) -> None:
    """A request whose time is too short."""
    try:
        await traffic.sdk.generate(traffic.short_text(), {"max_tokens": 300, "ignore_eos": True}, timeout_s=0.05)
    except RequestError as error:
        check(error.code == "deadline_exceeded", f"{error.code}: {error}")


async def sdk_vanishes(traffic: Traffic) -> None:
    """A client that is gone with requests in flight."""
    async with AsyncClient(traffic.endpoint) as client:
        for _ in range(traffic.rng.randint(1, 4)):
            await client.submit(traffic.short_text(), {"max_tokens": 400, "ignore_eos": True})
        await asyncio.sleep(traffic.rng.random() * 0.2)


async def sdk_long_chat(traffic: Traffic) -> None:
    """A prompt about as long as the engine holds, refused or served."""
    ids = array("i", [traffic.rng.randint(5, 200) for _ in range(traffic.longest - traffic.rng.randint(-2, 40))])
    try:
        await traffic.sdk.generate(ids, {"max_tokens": 8})
    except RequestError as error:
        check(error.code == "context_length_exceeded", f"{error.code}: {error}")


async def sdk_garbage(traffic: Traffic) -> None:
    """Bytes that are no message; the next message is answered."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(traffic.endpoint)
    for _ in range(3):
        await socket.send(traffic.rng.randbytes(traffic.rng.choice((0, 1, 7, 300, 5000))))
        await asyncio.wait_for(socket.recv(), 30)
    socket.close()
    context.term()


KINDS: dict[Kind, int] = {
    http_completion: 10, http_stream: 10, http_disconnect: 5, http_gone_while_waiting: 4, http_bad_input: 6,
    http_json_schema: 4, http_tools: 3, http_slow_reader: 2, http_looks: 2, http_flush: 1,
    sdk_generate: 14, sdk_abort: 8, sdk_crowd: 1, sdk_timeout: 3, sdk_vanishes: 3, sdk_long_chat: 3, sdk_garbage: 3,
}  # fmt: skip
"""Each kind with its weight."""


def every_kind(kinds: Iterable[Kind]) -> list[Kind]:
    """Each kind once, and bad input many times over: the longest takes some until memory is as high as it gets."""
    counts = {http_bad_input: WARM_UP_ROUNDS * len(BAD_BODIES)}
    return [kind for kind in kinds for _ in range(counts.get(kind, 1))]
