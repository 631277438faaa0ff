"""The HTTP application on a real frontend engine, with a scripted scheduler in memory behind it."""

import asyncio
import json
from array import array
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from common.config import EngineConfig, ModelOptions, ServerOptions
from common.messages import (
    AbortRequests,
    AddRequest,
    EngineReady,
    MoreFollows,
    RequestFailed,
    SampleFinish,
    TokenLogprobs,
    TokensOut,
    decode_for_scheduler,
)
from frontend.engine import Engine
from frontend.http.app import build_app
from frontend.tokenizer import Tokenizer
from tests.support import tiny

ANSWER = "The sea 🌊 is blue, 海は青い. "


class Scheduler:
    """Answers every request with the tokens of ANSWER over and over, one step after another.

    Attributes:
        answer: another text to answer with.
        stops: the answer is given once, and ends with `stop`.
        embedding: of every prompt.
        aborted: ids of requests that were aborted.
        follows: what was said behind requests of more to follow.
        hold_after: tokens after which a request gets no more; None for never.
        fail_after: tokens after which a request fails; None for never.
        refuse: an error for every new request.
    """

    def __init__(self) -> None:
        self.engine: Engine
        self.added: list[AddRequest] = []
        self.aborted: list[int] = []
        self.follows: list[bool] = []
        self.answer = ANSWER
        self.stops = False
        self.embedding = [0.6, 0.0, -0.8]
        self.hold_after: int | None = None
        self.fail_after: int | None = None
        self.refuse: RequestFailed | None = None

    def send(self, data: bytes, more: bool = False) -> None:
        """Take a message from the engine."""
        message = decode_for_scheduler(data)
        if isinstance(message, AddRequest):
            self.added.append(message)
            self._later(self._step, message, 0)
        elif isinstance(message, AbortRequests):
            self.aborted += message.request_ids
        elif isinstance(message, MoreFollows):
            self.follows.append(message.follows)

    def _later(self, call: Any, *arguments: Any) -> None:
        asyncio.get_running_loop().call_soon(call, *arguments)

    def _step(self, request: AddRequest, done: int) -> None:
        handle = self.engine.core.handle
        if self.refuse is not None:
            handle(RequestFailed(request.request_id, *self._refusal()))
        elif done == self.fail_after:
            handle(RequestFailed(request.request_id, "engine_dead", "worker-0 was killed", 503))
        elif done != self.hold_after and request.request_id not in self.aborted:
            out = self._tokens(request, done)
            handle(out)
            if not out.finishes:
                self._later(self._step, request, done + 1)

    def _refusal(self) -> tuple[Any, ...]:
        refuse = self.refuse
        return refuse.error_code, refuse.message, refuse.status, refuse.param, refuse.retry_after_ms

    def _tokens(self, request: AddRequest, done: int) -> TokensOut:
        answer = self.engine.tokenizer.encode(self.answer, add_special_tokens=False)
        rows = range(request.params.n)
        stops = self.stops and done + 1 == len(answer)
        last = stops or done + 1 == request.params.max_tokens
        token_ids = array("i", [answer[done % len(answer)] for _ in rows])
        logprobs = () if request.params.logprobs is None else tuple(entry(row, t) for row, t in enumerate(token_ids))
        prompt = ()
        if request.params.prompt_logprobs is not None and done == 0:
            prompt = ((0, tuple(entry(at, t) for at, t in enumerate(request.prompt_token_ids) if at)),)
        return TokensOut(
            request_ids=array("i", [request.request_id for _ in rows]),
            sample_indices=array("B", rows),
            token_ids=token_ids,
            cached_counts=array("i", [3 for _ in rows]) if done == 0 else array("i"),
            finishes=tuple(SampleFinish(row, "stop" if stops else "length") for row in rows) if last else (),
            logprobs=logprobs,
            prompt_logprobs=prompt,
            embeddings=((0, array("f", self.embedding)),) if request.pooling else (),
        )


def entry(row: int, token_id: int) -> TokenLogprobs:
    return TokenLogprobs(row, -0.5, 1, array("i", [token_id, 5]), array("f", [-0.5, -9999.0]))


class Api:
    """A client of the application that runs its own event loop."""

    def __init__(self, folder: str, **server: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.scheduler = Scheduler()
        self.options = ServerOptions(**server)
        config = EngineConfig(model=ModelOptions(served_model_name=("tiny", "small")), server=self.options)
        self.engine = self.scheduler.engine = Engine(config, Tokenizer.load(folder), self.scheduler.send)
        self.app = build_app(self.engine, self.options)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app, raise_app_exceptions=False), base_url="http://test"
        )

    def ready(self, max_model_len: int = 512) -> "Api":
        """Bring the engine up."""
        vocab_size = self.engine.tokenizer.vocab_size
        self.engine.core.handle(
            EngineReady(
                max_model_len=max_model_len, max_num_seqs=8, block_size=16, block_count=64, vocab_size=vocab_size
            )
        )
        return self

    def get(self, path: str, **keywords: Any) -> httpx.Response:
        return self.loop.run_until_complete(self.client.get(path, **keywords))

    def post(self, path: str, body: Any = None, **keywords: Any) -> httpx.Response:
        if isinstance(body, bytes):
            return self.loop.run_until_complete(self.client.post(path, content=body, **keywords))
        return self.loop.run_until_complete(self.client.post(path, json=body, **keywords))

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, decoded; the last must be [DONE]."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]", "a stream must say that it is complete"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def close(self) -> None:
        self.loop.run_until_complete(self.client.aclose())
        self.engine.close()
        self.loop.close()


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save_tokenizer(folder)
    return str(folder)


@pytest.fixture
def api(tokenizer_dir) -> Iterator[Api]:
    api = Api(tokenizer_dir).ready()
    yield api
    api.close()


@pytest.fixture
def make_api(tokenizer_dir) -> Iterator[Any]:
    made = []

    def make(**server: Any) -> Api:
        made.append(Api(tokenizer_dir, **server))
        return made[-1]

    yield make
    for api in made:
        api.close()
