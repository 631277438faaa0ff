"""Requests of one batch: sent several at once, answered in their order, and gone if the batch fails."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import zmq

from common import client_messages as wire
from common.client_messages import FRAMES_LIMIT, MORE_FOLLOWS
from common.errors import EngineDeadError, RequestError
from common.sampling_params import SamplingParams
from frontend import AsyncClient, Client, client_requests
from frontend.client_server import ClientServer

FIRST, SECOND = FRAMES_LIMIT // 4, FRAMES_LIMIT // 2
"""How many requests of a batch are sent first, and after them."""
SENT_COUNT = FIRST + SECOND + FRAMES_LIMIT


def test_batch_keeps_the_order(frontend):
    prompts = [f"a {number}" for number in range(64)]
    with Client(frontend.endpoint) as client:
        results = client.generate_batch(prompts, [SamplingParams(max_tokens=1 + n % 3) for n in range(64)])
        for number, result in enumerate(results):
            assert list(result.prompt_token_ids) == client.tokenize(prompts[number])
            assert result.completion_tokens == 1 + number % 3


@pytest.mark.parametrize("left", [2, 0], ids=["", "with none left to send"])
def test_a_batch_that_cannot_be_submitted_whole_leaves_nothing_running(frontend, left):
    """Those that were sent are aborted, and of those that still waited for others to be sent with nothing remains."""
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as client:
        with pytest.raises(RequestError):
            client.generate_batch(["a"] * (SENT_COUNT + left) + [object()], SamplingParams(max_tokens=2000))
        frontend.scheduler.wait_until(lambda: len(frontend.scheduler.aborted) == SENT_COUNT)
        client.ping()
        assert client._state.live_count == 0
        frontend.scheduler.gate.set()
        assert client.generate("a", SamplingParams(max_tokens=1)).completion_tokens == 1
        assert len(frontend.scheduler.added) == SENT_COUNT + 1


@pytest.fixture
def message_counts(monkeypatch) -> list[int]:
    """How many messages have come at once, each time; below 0 if it was said that more follow."""
    counts: list[int] = []
    handle = ClientServer.on_frames

    def counted(server: ClientServer, frames: list[bytes]) -> None:
        count = len(frames) - 1
        counts.append(1 - count if frames[-1] == MORE_FOLLOWS else count)
        handle(server, frames)

    monkeypatch.setattr(ClientServer, "on_frames", counted)
    return counts


def test_a_batch_is_sent_several_requests_at_once_and_in_order(message_counts, frontend):
    """So that they share the engine's first step; one after the other they came in two. Fewer go first: until then the
    engine has nothing to do."""
    with Client(frontend.endpoint) as client:
        message_counts.clear()
        for count in (8, 2 * FRAMES_LIMIT + 3, 1):
            client.generate_batch([[number] for number in range(count)], SamplingParams(max_tokens=1))
        client.embed_batch([[1], [2]])
        assert message_counts == [-FIRST, 8 - FIRST, -FIRST, -SECOND, -FRAMES_LIMIT, 7, 1, 2]
    sent = [request.prompt_token_ids[0] for request in frontend.scheduler.added]
    assert sent == [*range(8), *range(2 * FRAMES_LIMIT + 3), 0, 1, 2]


def test_an_asynchronous_batch_says_with_each_but_its_last_request_that_more_follow(
    message_counts, frontend, monkeypatch
):
    """Its first requests ran alone. Those for which there is no room yet follow when there is, and nobody waits."""

    async def run() -> None:
        async with AsyncClient(frontend.endpoint) as client:
            message_counts.clear()
            await client.generate_batch([[number] for number in range(5)], SamplingParams(max_tokens=1))
            await client.embed_batch([[1], [2]])
            monkeypatch.setattr(client_requests, "BATCH_SAMPLES", 2)
            await client.generate_batch([[number] for number in range(3)], SamplingParams(max_tokens=1))

    asyncio.run(run())
    assert message_counts == [-1, -1, -1, -1, 1, -1, 1, -1, 1, 1]


def test_long_prompts_do_not_wait_for_one_another(message_counts, frontend):
    """The engine has enough to do with the first of them."""
    with Client(frontend.endpoint) as client:
        message_counts.clear()
        client.generate_batch([[number] * 2000 for number in range(8)], SamplingParams(max_tokens=1))
    assert message_counts == [-1, -2, -3, 2]


@pytest.mark.parametrize("size", [1, FIRST])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [2, -1], ids=["a frame in the middle", "the last frame"])
def test_a_batch_that_is_interrupted_while_it_is_sent_leaves_nothing_running(frontend, monkeypatch, at, is_after, size):
    """The next message was taken for more frames of the same one, and refused with all of them; what was sent whole
    ran on for nobody."""
    at = min(at % size, size - 1)
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as client:
        send, sent = client._socket.send, []

        def send_some(data: bytes, flags: int) -> None:
            sent.append(data)
            if len(sent) - 1 != at or is_after:
                send(data, flags)
            if len(sent) - 1 == at:
                raise KeyboardInterrupt

        socket = SimpleNamespace(send=send_some, closed=False)
        with monkeypatch.context() as patched:
            patched.setattr(client, "_socket", socket)
            with pytest.raises(KeyboardInterrupt):
                client.generate_batch(["a"] * size, SamplingParams(max_tokens=2000))
        assert client._state.live_count == 0
        frontend.scheduler.wait_until(lambda: len(frontend.scheduler.aborted) == at + is_after)
        frontend.scheduler.gate.set()
        assert len(client.generate_batch(["a"] * FRAMES_LIMIT, SamplingParams(max_tokens=1))) == FRAMES_LIMIT


def test_another_thread_is_refused_while_a_batch_is_gathered(frontend):
    """What it sent was gathered too: left behind, or sent in the other thread's name."""
    with Client(frontend.endpoint) as client, ThreadPoolExecutor() as other, client._together():
        stream = client.submit("a", SamplingParams(max_tokens=1))
        for call in (client.ping, lambda: client.submit("a"), lambda: client.abort("x")):
            with pytest.raises(RuntimeError, match="another thread is using this client"):
                other.submit(call).result()
        assert len(client._gathered) == client._state.live_count == 1
        assert stream.result().completion_tokens == 1


def test_a_batch_that_finds_no_engine_leaves_its_ids_free(run_frontend):
    frontend = run_frontend()
    with Client(frontend.endpoint) as client:
        assert frontend.stop() == 0
        client.timeout_s = 0.2
        with pytest.raises(EngineDeadError):
            client.generate_batch(["one", "two", "three"])
        assert client._state.live_count == 0


def test_messages_that_come_at_once_are_answered_one_by_one(frontend):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(frontend.endpoint)
        good = [wire.Ping(f"{number}").to_wire() for number in range(FRAMES_LIMIT)]
        for frames, wanted in (
            ([good[0], b"\xc1", good[1]], ["0", "", "1"]),
            (good, [str(number) for number in range(FRAMES_LIMIT)]),
            ([*good, MORE_FOLLOWS], [str(number) for number in range(FRAMES_LIMIT)]),
            ([*good, good[0]], [""]),
            ([MORE_FOLLOWS], [""]),
        ):
            socket.send_multipart(frames)
            replies = []
            for _ in wanted:
                assert socket.poll(10_000), "no answer"
                replies.append(wire.decode_to_client(socket.recv()))
            assert [reply.request_id for reply in replies] == wanted
            assert {reply.code for reply in replies if isinstance(reply, wire.ErrorReply)} <= {"bad_message"}
