"""Several prompts of one request: what is said while they are submitted, and their streams followed as one."""

import asyncio

import pytest

from common.errors import RequestError
from frontend.http import generation


class Scripted:
    """A stream of `count` events that then ends, or fails."""

    def __init__(self, count: int, failure: RequestError | None = None) -> None:
        self.left, self.failure, self.aborted = count, failure, False

    def __aiter__(self) -> "Scripted":
        return self

    async def __anext__(self) -> object:
        if self.left:
            self.left -= 1
            return object()
        raise self.failure or StopAsyncIteration

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def stopped(api, monkeypatch):
    """The same at any pace: word of more does not grow old."""
    monkeypatch.setattr(api.engine.core._outbox, "_clock", lambda: 1.0)
    return api


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"], [[5]] * (2 * generation.TURN + 1)], ids=len)
@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
def test_the_scheduler_hears_with_each_prompt_but_the_last_that_more_follow(stopped, path, field, prompts):
    """The first ran alone, although the body had held them all."""
    assert stopped.post(path, {field: prompts}).status_code == 200
    assert len(stopped.scheduler.added) == len(prompts)
    assert stopped.scheduler.follows == [True] * (len(prompts) - 1)


def test_word_of_prompts_that_are_refused_is_taken_back(stopped):
    assert stopped.post("/v1/completions", {"prompt": [[5], [6], [7] * 600, [8]]}).status_code == 400
    assert stopped.scheduler.follows == [True, True, False]


def indices(streams: list[Scripted]) -> list[int]:
    async def collect() -> list[int]:
        return [index async for index, _ in generation.follow(streams)]

    return asyncio.run(asyncio.wait_for(collect(), 30))


def test_merged_streams_give_all_their_events():
    streams = [Scripted(count) for count in (0, 100, 3, 70)]
    got = indices(streams)
    assert [got.count(index) for index in range(4)] == [0, 100, 3, 70]


def test_a_failed_stream_ends_the_merged_ones_though_the_queue_is_full():
    """The pumps that it cancelled waited for a place in the queue that nobody read any more."""
    streams = [Scripted(0, RequestError("deadline", status=408)), *(Scripted(10) for _ in range(150))]
    with pytest.raises(RequestError, match="deadline"):
        indices(streams)
    assert all(stream.aborted for stream in streams)
