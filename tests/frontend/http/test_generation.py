"""Several streams followed as one."""

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
