"""A frontend is lost and started again (`--restart`), as its clients see it: with real sockets, and both clients."""

import asyncio
import contextlib
import errno
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import zmq

from benchmarks.fake_scheduler import EMBEDDING
from common import client_messages as wire
from common.client_messages import SampleSoFar
from common.errors import EngineDeadError, RequestError, StartupError
from common.messages import AddRequest, NewSession
from common.sampling_params import SamplingParams
from frontend import AsyncClient, Client
from frontend.request import Request
from tests.frontend.test_client_server import Raw

LONG = SamplingParams(max_tokens=200, seed=3)
SHORT = SamplingParams(max_tokens=20, seed=3)
PROMPTS = ["the sea", "a ship", "x"]


def hashed(request: AddRequest, sample_index: int) -> Iterator[int]:
    """Tokens that depend on their place, as a model's do: repeated or left out ones would show."""
    place = 0
    while True:
        yield 5 + (place * 7919 + sample_index * 104729 + len(request.prompt_token_ids)) % 250
        place += 1


@pytest.fixture
def start(run_frontend):
    """Starts an engine that starts its frontend again, or the next frontend of one (`after`)."""
    return partial(run_frontend, server={"restart": True}, script=hashed)


@pytest.fixture
def again(run_frontend):
    """Loses a frontend; gives a function that starts the next one."""

    def lose(running):
        running.lose()
        return lambda **options: run_frontend(after=running, **options)

    return lose


def test_one_that_cannot_reach_the_next_scheduler_ends(start):
    """It was deaf from then on, while the engine said that it served again."""
    running = start()
    client = Client(running.endpoint)
    (running.folder / "outputs.1.sock").mkdir()
    running.link.order(NewSession("worker-0", "worker-0 was killed", 1))
    running.join(30)
    assert running.exit_code == 1
    assert "cannot bind ipc://" in running.link.detail
    client.close()


def joined(deltas) -> tuple[str, list[int]]:
    return "".join(delta.text for delta in deltas), [token_id for delta in deltas for token_id in delta.token_ids]


def of_final(final: wire.Final) -> tuple[str, list[int]]:
    return final.text, list(final.samples[0].token_ids)


def come(client, stream) -> int:
    """Tokens of a stream that its client has heard of."""
    return client._state._live[stream.request_id].kept._token_count


def test_streams_of_both_clients_go_on_again_and_again(start, again):
    frontend, count = start(is_held=True), 2 * len(PROMPTS) + 1

    async def read(stream) -> list:
        return [delta async for delta in stream]

    async def main(client: AsyncClient, mine: list) -> list[wire.Final]:
        running, loop = frontend, asyncio.get_running_loop()
        streams = [await client.submit(prompt, LONG) for prompt in PROMPTS]
        whole = asyncio.ensure_future(client.generate("whole", LONG))
        readers = [asyncio.ensure_future(read(stream)) for stream in streams]
        with ThreadPoolExecutor(1) as pool:
            reading = loop.run_in_executor(pool, lambda: [list(stream) for stream in mine])
            for token_count in (10, 20, 30):
                await loop.run_in_executor(None, running.scheduler.advance, count, token_count)
                while come(client, streams[0]) < token_count:
                    await asyncio.sleep(0)
                starting = await loop.run_in_executor(None, again, running)
                running = await loop.run_in_executor(None, starting)
            running.scheduler.gate.set()
            deltas = [await reader for reader in readers] + await reading
        finals = [stream.final for stream in (*streams, *mine)]
        assert [joined(each) for each in deltas] == list(map(of_final, finals))
        return [*finals, await whole]

    async def connected(mine: list) -> list[wire.Final]:
        async with AsyncClient(frontend.endpoint) as client:
            return await main(client, mine)

    with Client(frontend.endpoint) as client:
        finals = asyncio.run(connected([client.submit(prompt, LONG) for prompt in PROMPTS]))
        wanted = client.generate_batch([*PROMPTS, *PROMPTS, "whole"], LONG)
        assert [(final.samples, final.completion_tokens, final.prompt_tokens) for final in finals] == [
            (final.samples, final.completion_tokens, final.prompt_tokens) for final in wanted
        ]
        assert client.status().live_count == 0


def test_an_abort_in_the_pause_is_not_forgotten(start, again):
    first = start(is_held=True)

    async def main(client: AsyncClient, blocking: Client) -> None:
        loop = asyncio.get_running_loop()
        stream, mine = await client.submit("the sea", LONG), blocking.submit("the sea", LONG)
        first.scheduler.advance(2, 100)
        known, ours = [await anext(stream)], [next(mine)]
        starting = await loop.run_in_executor(None, again, first)
        while not client._state.is_resuming:
            await asyncio.sleep(0)
        await stream.abort()
        while not blocking._state.is_resuming:
            blocking._pump(None)
        mine.abort()
        await loop.run_in_executor(None, starting)
        known += [delta async for delta in stream]
        ours += list(mine)
        for deltas, final in ((known, stream.final), (ours, mine.final)):
            assert final.samples[0].finish_reason == "abort" and joined(deltas)[1] == of_final(final)[1]
            assert final.completion_tokens >= 1

    async def connected() -> None:
        async with AsyncClient(first.endpoint) as client:
            await main(client, blocking)

    with Client(first.endpoint) as blocking:
        asyncio.run(connected())


def test_everything_waits_for_a_frontend_that_waits_for_the_engine(start, again):
    """Frontend and scheduler were lost together: the client socket is there long before the engine."""
    first = start()
    with Client(first.endpoint, timeout_s=20) as client:
        expected = client.generate("the sea", SHORT).samples
        first.scheduler.close_at = 100
        cut = client.submit("the sea", LONG)
        known = [next(cut), next(cut)]
        first.scheduler.gate.clear()
        running = [client.submit("the sea", SHORT), client.submit("the sea", SHORT, timeout_s=0.01)]
        embedding = client.submit_embedding("the sea")
        first.scheduler.wait_until(lambda: first.scheduler.live_count == 4)
        second = again(first)(is_known=False)
        new, aborted = client.submit("the sea", SHORT), client.submit("the sea", SHORT, request_id="mine")
        client.abort("mine")
        cut.abort()
        assert aborted.result().samples[0].finish_reason == "abort"
        assert client.tokenize("the sea") and client.status().state == "starting"
        with pytest.raises(RequestError, match="deadline") as caught:
            running[1].result()
        assert caught.value.code == "deadline_exceeded"
        waited_until_s = time.time()
        second.start_scheduler()
        assert running[0].result().samples == new.result().samples == expected
        assert embedding.result().embedding == EMBEDDING
        assert all(added.arrived_at_s < waited_until_s for added in second.scheduler.added), "deadlines count from then"
        known += cut
        assert cut.final.samples[0].finish_reason == "abort" and joined(known) == of_final(cut.final)
        assert cut.final.completion_tokens >= 2, "what had come is not lost with the abort"
        assert client.status().live_count == 0


def test_new_requests_beyond_a_full_queue_do_not_wait(start, again):
    first = start()
    first.scheduler.gate.clear()
    with Client(first.endpoint, timeout_s=20) as client:
        old = [client.submit("the sea", {"max_tokens": 2}) for _ in range(3)]
        embedding = client.submit_embedding("the sea")
        first.scheduler.wait_until(lambda: first.scheduler.live_count == 4)
        second = again(first)(is_known=False, queue_limit=2)
        with pytest.raises(RequestError, match="still starting") as caught:
            client.generate("the sea", {"max_tokens": 2})
        assert (caught.value.code, caught.value.retry_after_ms) == ("starting", 1000)
        second.start_scheduler()
        assert [stream.result().completion_tokens for stream in old] == [2] * 3
        assert embedding.result().embedding == EMBEDDING


def test_aborted_requests_that_wait_leave_no_room_for_more_and_more(start, again):
    """Each goes on waiting for the engine, though nobody wants it any more."""
    first = start()
    second = again(first)(is_known=False, queue_limit=2, max_num_seqs=3)
    with contextlib.closing(Raw(first.endpoint)) as raw:
        raw.send(wire.Hello(2, "raw"))
        assert raw.receive().state == "starting"
        for number in range(7):
            generate = wire.Generate(request_id=str(number), prompt="the sea")
            raw.send(wire.Resume(generate), wire.Abort(generate.request_id))
        replies = {}
        while len(replies) < 7:
            reply = raw.receive()
            replies[reply.request_id] = reply
        assert [isinstance(replies[str(number)], wire.Final) for number in range(7)] == [True] * 5 + [False] * 2
        assert {replies[refused].code for refused in "56"} == {"starting"}
        second.start_scheduler()


def test_the_loop_has_a_turn_between_requests_whose_output_is_taken_up(start, monkeypatch):
    """Many come at once, and each may take its time."""
    frontend, turns = start(), []
    loop, take_up = frontend.frontend._ended.get_loop(), Request.take_up

    def noted(request, samples):
        turns.append("output")
        loop.call_soon(turns.append, "turn")
        take_up(request, samples)

    monkeypatch.setattr(Request, "take_up", noted)
    with contextlib.closing(Raw(frontend.endpoint)) as raw:
        params, known = {"max_tokens": 30}, (SampleSoFar(0, array("i", [5])),)
        raw.send(*(wire.Resume(wire.Generate(request_id=name, prompt="x", params=params), known) for name in "abc"))
        ended = []
        while len(ended) < 3:
            if isinstance(reply := raw.receive(), wire.Final):
                ended.append((reply.request_id, reply.completion_tokens))
    assert sorted(ended) == [("a", 30), ("b", 30), ("c", 30)]
    assert turns == ["output", "turn"] * 3


@pytest.mark.parametrize("restart", [True, False])
def test_an_engine_that_does_not_come_back(run_frontend, restart):
    """With `--restart` its clients wait for as long as for any connection, else not at all."""
    frontend = run_frontend(server={"restart": restart})
    frontend.scheduler.gate.clear()

    async def main() -> None:
        async with AsyncClient(frontend.endpoint) as client:
            with Client(frontend.endpoint) as blocking:
                client.timeout_s = blocking.timeout_s = 0.1 if restart else 3600
                lost, mine = await client.submit("a", LONG), blocking.submit("a", LONG)
                frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == 2)
                await asyncio.get_running_loop().run_in_executor(None, frontend.lose)
                with pytest.raises(EngineDeadError, match="is lost"):
                    await lost.result()
                with pytest.raises(EngineDeadError, match="is lost"):
                    mine.result()

    asyncio.run(main())


@pytest.fixture
def no_room(monkeypatch):
    """Gives the flag that has clients find no room for sockets while it is set."""
    flag = threading.Event()
    real = zmq.Socket.get_monitor_socket

    def get_monitor_socket(socket, *options):
        if flag.is_set() and socket.type == zmq.DEALER:
            raise zmq.ZMQError(errno.EMFILE)
        return real(socket, *options)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", get_monitor_socket)
    return flag


def test_a_client_without_room_for_a_new_socket_tries_again(start, again, no_room):
    """What waited has ended; the next call finds no room either, and the one after it does."""
    first = start()
    first.scheduler.close_at = 100
    with Client(first.endpoint) as client:
        streams = [client.submit("the sea", LONG), client.submit("a ship", LONG)]
        next(streams[0])
        no_room.set()
        again(first)()
        for wait in (*(stream.result for stream in streams), client.ping):
            with pytest.raises(EngineDeadError, match="is lost, and no new socket can be made: .*Too many open files"):
                wait()
        no_room.clear()
        assert len(client.generate("the sea", LONG).samples[0].token_ids) == 200


def test_an_asyncio_client_without_room_for_a_new_socket_tries_again(start, again, no_room):
    first = start()
    first.scheduler.close_at = 100

    async def main() -> None:
        async with AsyncClient(first.endpoint) as client:
            streams = [await client.submit("the sea", LONG), await client.submit("a ship", LONG)]
            await anext(streams[0])
            no_room.set()
            await asyncio.to_thread(again(first))
            for wait in (*(stream.result for stream in streams), client.ping):
                with pytest.raises(EngineDeadError, match="is lost, and no new socket can be made: .*Too many open"):
                    await wait()
            no_room.clear()
            assert len((await client.generate("the sea", LONG)).samples[0].token_ids) == 200

    asyncio.run(main())


def test_who_waits_for_a_connection_hears_that_there_is_no_room_for_one(start, no_room):
    """It came between the loss and the attempt at a new socket, and is told at once."""
    frontend = start()

    async def main() -> None:
        async with AsyncClient(frontend.endpoint, timeout_s=3600) as client:
            lose, late = client._state.lose, []

            def lose_and_ask(error: EngineDeadError) -> None:
                lose(error)
                late.append(asyncio.ensure_future(client.ping()))

            client._state.lose = lose_and_ask
            no_room.set()
            await asyncio.to_thread(frontend.lose)
            while not late:
                await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="no new socket can be made"):
                await late[0]

    asyncio.run(main())


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_client_that_found_no_room_closes_as_any_other(start, no_room, client):
    frontend = start()

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            if client is Client:
                opened = stack.enter_context(Client(frontend.endpoint))
                ping = partial(asyncio.to_thread, opened.ping)
            else:
                ping = (await stack.enter_async_context(AsyncClient(frontend.endpoint))).ping
            no_room.set()
            await asyncio.to_thread(frontend.lose)
            with pytest.raises(EngineDeadError, match="Too many open files"):
                await ping()
            with pytest.raises(StartupError, match="Too many open files"):
                Client(frontend.endpoint)

    asyncio.run(main())


def test_nothing_goes_on_in_an_engine_that_starts_nothing_again(run_frontend):
    with contextlib.closing(Raw(run_frontend().endpoint)) as raw:
        raw.send(wire.Hello(2, "new"), wire.Resume(wire.Generate(request_id="g", prompt="x")))
        assert raw.receive().engine == ""
        assert raw.receive().code == "invalid_parameter"


def test_a_connection_that_is_cut_costs_a_pause(start):
    """The frontend is the same: what it has of the old connection is aborted."""
    frontend = start()
    scheduler = frontend.scheduler
    scheduler.close_at = 100
    with Client(frontend.endpoint) as client:
        stream = client.submit("the sea", LONG)
        deltas = [next(stream)]
        frontend.frontend._ended.get_loop().call_soon_threadsafe(frontend.frontend._clients._monitor._cut)
        scheduler.wait_until(lambda: scheduler.aborted)
        scheduler.close_at = None
        scheduler.gate.set()
        deltas += stream
        assert joined(deltas) == of_final(stream.final) == of_final(client.generate("the sea", LONG))
        assert len(scheduler.added) == 3
        scheduler.wait_until(lambda: scheduler.live_count == 0)


def test_what_waits_in_the_socket_of_a_lost_connection_runs_for_nobody(start, again):
    """The next engine had it, and went on with it."""
    first, ghost = start(), wire.Generate(request_id="ghost", prompt="the sea", params={"max_tokens": 2000})

    async def main() -> None:
        async with AsyncClient(first.endpoint) as client:
            with Client(first.endpoint) as blocking:
                starting = again(first)  # in this loop's thread: neither notices the loss
                for socket in (client._socket, blocking._socket):
                    socket.send(ghost.to_wire())
                second = starting(step_interval_s=0.02)
                assert (await client.generate("a", SHORT)).samples == blocking.generate("a", SHORT).samples
                second.scheduler.wait_until(lambda: second.scheduler.live_count == 0)

    asyncio.run(main())


@pytest.mark.parametrize("is_idle", [True, False])
def test_nothing_is_sent_through_a_socket_that_was_lost(start, again, is_idle):
    """While the client's loop is busy, it may connect to the next frontend by itself. It is closed all the same."""
    first, connected = start(), [struct.pack("=Hi", zmq.EVENT_HANDSHAKE_SUCCEEDED, 0), b""]

    first.scheduler.close_at = 15

    async def main() -> None:
        async with AsyncClient(first.endpoint) as client:
            stream = None if is_idle else await client.submit("the sea", SHORT)
            deltas = [] if stream is None else [await anext(stream)]
            again(first)()  # in this loop's thread
            old = client._socket
            while client._connection.is_up:
                assert client._monitor.poll(20_000)
                client._monitor_reader.drain()
            client._on_connection(connected)
            assert not client._settled.is_set() and not client._connection.is_up
            expected = of_final(await client.generate("the sea", SHORT))
            assert client._socket is not old
            if stream is not None:
                deltas += [delta async for delta in stream]
                assert joined(deltas) == of_final(stream.final) == expected

    asyncio.run(main())


def test_another_engine_in_its_place_is_not_asked(start, run_frontend):
    frontend = start()
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as client:
        lost = client.submit("a", LONG)
        frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == 1)
        frontend.lose()
        other = run_frontend(server={"restart": True, "client_endpoint": frontend.endpoint})
        with pytest.raises(EngineDeadError, match="is lost"):
            lost.result()
        assert client.generate("abc", SamplingParams(max_tokens=3)).text == "abc"
        assert len(other.scheduler.added) == 1


def test_a_frontend_that_fails_leaves_the_last_word_to_the_next(start, again):
    first = start()
    first.scheduler.close_at = 15
    with Client(first.endpoint) as client:
        stream = client.submit("the sea", SHORT)
        deltas = [next(stream)]
        first.scheduler.garbage = b"\xc1"
        first.scheduler.gate.set()
        first.join(30)
        assert (first.exit_code, "cannot be read" in first.link.detail) == (1, True)
        again(first)()
        deltas += stream
        assert joined(deltas) == of_final(stream.final) == of_final(client.generate("the sea", SHORT))


def test_a_client_without_the_sdk_goes_on_as_the_document_says(start, again):
    """And one that speaks the first version of the protocol is understood."""
    first = start()
    with contextlib.closing(Raw(first.endpoint)) as old:
        old.send(wire.Hello(1, "old"))
        assert old.receive() == wire.Welcome(1, ("smollm2-135m-instruct",), 2048, 400, "serving")
    with contextlib.closing(Raw(first.endpoint)) as raw:
        generate = wire.Generate(request_id="g", prompt="the sea", params={"max_tokens": 30, "n": 2})
        raw.send(wire.Hello(2, "new"), generate)
        name = raw.receive().engine
        final = raw.until(wire.Final, "g")
    again(first)()
    with contextlib.closing(Raw(first.endpoint)) as raw:
        raw.send(wire.Hello(2, "new"))
        assert raw.receive().engine == name
        known = SampleSoFar(1, final.samples[1].token_ids[:20])
        raw.send(wire.Resume(generate, (SampleSoFar(0, final.samples[0].token_ids, "length"), known)))
        deltas = []
        while isinstance(reply := raw.receive(), wire.Deltas):
            deltas += [delta for _, delta in reply.entries]
        assert {delta.sample_index for delta in deltas} == {1}
        assert final.samples[1].token_ids[20:] == array("i", joined(deltas)[1])
        assert reply.samples == final.samples
        raw.send(wire.Resume(generate, (known, known)))
        reply = raw.receive()
        assert (reply.code, reply.param) == ("invalid_parameter", "samples")
