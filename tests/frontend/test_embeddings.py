"""Embeddings over the client socket: both clients, batches, aborts, errors."""

import asyncio
from array import array

import pytest

from benchmarks.fake_scheduler import EMBEDDING, LIMITS
from common import messages as m
from common.errors import RequestError
from frontend import AsyncClient, Client
from frontend.request_checks import EMBEDDING_PARAMS
from tests.support.frontend_in_memory import Events

VECTOR = pytest.approx(list(EMBEDDING))
LONG = "the sea " * 200  # encoded in a thread


@pytest.mark.parametrize("prompt", ["the sea", LONG, [5, 6], {"prompt": "the sea"}, [{"role": "user", "content": "x"}]])
def test_any_prompt_can_be_embedded(shared_frontend, prompt):
    with Client(shared_frontend.endpoint) as client:
        reply = client.embed(prompt)
        assert list(reply.embedding) == VECTOR
        request = shared_frontend.scheduler.added[-1]
        assert reply.prompt_tokens == len(request.prompt_token_ids)
        assert (request.pooling, request.params.max_tokens, request.params.temperature) == ("last", 1, 0.0)
        assert client.embed(prompt, pooling="mean", priority=3).embedding == reply.embedding
        request = shared_frontend.scheduler.added[-1]
        assert (request.pooling, request.priority) == ("mean", 3)


def test_batches_keep_the_order(shared_frontend):
    with Client(shared_frontend.endpoint) as client:
        prompts = [[7] * (1 + number % 5) for number in range(40)]
        replies = client.embed_batch(prompts)
        assert [reply.prompt_tokens for reply in replies] == [len(prompt) for prompt in prompts]


def test_a_batch_ends_with_the_first_error(shared_frontend):
    with Client(shared_frontend.endpoint) as client:
        with pytest.raises(RequestError, match="has 2048 tokens"):
            client.embed_batch(["a", [5] * 2048, "b"])
        with pytest.raises(RequestError, match="pooling: wanted 'mean', 'last' or 'cls'"):
            client.embed("a", pooling="max")
        assert list(client.embed("a").embedding) == VECTOR
        assert client.status().live_count == 0


@pytest.mark.parametrize("prompt", ["the sea", LONG])
def test_an_abort_is_the_end(frontend, prompt):
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as client:
        running = client.submit_embedding(prompt, request_id="mine")
        client.abort("mine")
        with pytest.raises(RequestError, match="was aborted") as caught:
            running.result()
        assert (caught.value.code, caught.value.status) == ("aborted", 499)
        assert client.status().live_count == 0


def test_the_same_for_asyncio(frontend):
    async def main():
        async with AsyncClient(frontend.endpoint) as client:
            replies = await asyncio.gather(*(client.embed(f"number {number}") for number in range(20)))
            assert all(list(reply.embedding) == VECTOR for reply in replies)
            with pytest.raises(RequestError, match="the prompt is empty"):
                await client.embed("")
            frontend.scheduler.gate.clear()
            task = asyncio.create_task(client.embed("the sea"))
            while (await client.status()).live_count == 0:
                pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while (await client.status()).live_count:
                pass

    asyncio.run(main())


def test_the_core_gives_each_request_one_end(memory_engine):
    core = memory_engine.core

    def submit():
        events = Events()
        events.request = core.submit(array("i", [5, 6]), EMBEDDING_PARAMS, events, stream=False, pooling="mean")
        return events, events.request.request_id

    good, good_id = submit()
    assert memory_engine.sent[-1].pooling == "mean"
    memory_engine.tokens(good_id, [9], finish="length", embeddings=((0, EMBEDDING),))
    assert (good.end.embedding, good.end.samples[0].token_ids, good.end.usage.completion_tokens) == (
        EMBEDDING, array("i"), 0
    )  # fmt: skip
    for vector in ([float("nan"), 1.0], [float("inf"), 1.0]):
        bad, bad_id = submit()
        memory_engine.tokens(bad_id, [9], finish="length", embeddings=((0, array("f", vector)),))
        assert bad.end.code == "sample_failed"
    without, without_id = submit()
    memory_engine.tokens(without_id, [9], finish="length")
    assert without.end.code == "sample_failed"
    broken, broken_id = submit()
    finish = m.SampleFinish(0, "error", "the model's output for this sample was not a number")
    core.handle(
        m.TokensOut(
            request_ids=array("i", [broken_id]), token_ids=array("i"), token_counts=array("B", [0]), finishes=(finish,)
        )
    )
    assert broken.end.code == "sample_failed"
    resent, resent_id = submit()
    core.suspend("worker-0 was killed", 1)
    core.handle(LIMITS)
    assert memory_engine.sent[-1].pooling == "mean"
    assert [list(output) for output in memory_engine.sent[-1].outputs] == [[]]
    memory_engine.tokens(resent_id, [9], finish="length", embeddings=((0, EMBEDDING),))
    assert resent.end.embedding == EMBEDDING
    aborted, aborted_id = submit()
    core.abort(aborted_id)
    assert aborted.end.embedding is None
    assert core.live_count == core.token_count == 0
