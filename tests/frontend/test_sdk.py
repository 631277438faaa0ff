"""What both clients promise alike: the same surface, batches, aborts, timeouts, and an engine that comes back."""

import asyncio
import gc
import inspect
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from common.client_messages import Welcome
from common.errors import EngineDeadError, RequestError, StartupError
from common.sampling_params import SamplingParams
from frontend import AsyncClient, Client, client_requests
from frontend.async_client import AsyncStream
from frontend.client import Stream
from frontend.client_server import ClientServer
from frontend.client_state import says_hello_again

LONG = SamplingParams(max_tokens=2000)


def surface(kind: type) -> dict[str, list[str]]:
    """Public methods and their parameters."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {name: list(inspect.signature(method).parameters) for name, method in methods if name[0] != "_"}


def test_both_clients_have_the_same_surface():
    ours, theirs = surface(Client), surface(AsyncClient)
    assert theirs.pop("open") == ["self"]
    for name in ("next_reply", "submit_embedding"):
        assert ours.pop(name), "what only a client that blocks needs"
    assert ours == theirs
    assert surface(Stream) == surface(AsyncStream)
    parameters = dict(inspect.signature(Client).parameters)
    for name in ("busy_poll_ms", "busy_poll_io"):
        assert parameters.pop(name), "what only a client that blocks needs"
    assert parameters == inspect.signature(AsyncClient).parameters


def test_options_are_named_once_and_others_refused(shared_frontend):
    with Client(shared_frontend.endpoint) as client:
        with pytest.raises(TypeError, match="unknown option 'prority'; known are add_special_tokens, cache_salt"):
            client.generate("a", prority=1)
        assert client.generate("a", {"max_tokens": 1}, priority=1, cache_salt="x").completion_tokens == 1


def test_async_streams_and_batches(frontend):
    async def main() -> None:
        async with AsyncClient(frontend.endpoint) as client:
            stream = await client.generate("the sea", SamplingParams(max_tokens=9), stream=True)
            texts = [delta.text async for delta in stream]
            assert "".join(texts) == stream.final.text
            answer = await client.chat([{"role": "user", "content": "x"}], {"max_tokens": 3}, stream=True)
            assert [delta async for delta in answer]
            assert answer.final.completion_tokens == 3
            prompts = [f"a {number}" for number in range(64)]
            params = [SamplingParams(max_tokens=1 + number % 3) for number in range(64)]
            finals = await client.generate_batch(prompts, params)
            assert [final.completion_tokens for final in finals] == [1 + number % 3 for number in range(64)]
            ids = [await client.tokenize(prompt) for prompt in prompts[:3]]
            assert [list(final.prompt_token_ids) for final in finals[:3]] == ids

    asyncio.run(main())


def test_an_async_batch_keeps_within_the_queue_and_asks_again(frontend, monkeypatch):
    monkeypatch.setattr(client_requests, "BATCH_SAMPLES", 6)
    refusals = iter([False, True] * 100)

    class Sometimes(tuple):
        def __bool__(self) -> bool:
            return next(refusals)

    frontend.scheduler.refusal = Sometimes(("queue_full", "the queue is full", 429))

    async def main() -> None:
        async with AsyncClient(frontend.endpoint) as client:
            prompts = [[number] for number in range(5, 25)]
            finals = await client.generate_batch(prompts, SamplingParams(max_tokens=2, n=2))
            assert [list(final.prompt_token_ids) for final in finals] == prompts
            frontend.scheduler.refusal = ("queue_full", "the queue is full", 429)
            with pytest.raises(RequestError, match="queue is full"):
                await client.generate_batch(prompts)
            frontend.scheduler.refusal = None
            frontend.scheduler.gate.clear()
            with pytest.raises(RequestError, match="prompt"):
                await client.generate_batch(["one", "two", object()], LONG)
            frontend.scheduler.wait_until(lambda: len(frontend.scheduler.aborted) == 2)
            assert (await client.status()).live_count == 0

    asyncio.run(main())


def test_cancelling_a_wait_aborts_the_request(frontend):
    frontend.scheduler.gate.clear()

    async def main() -> None:
        async with AsyncClient(frontend.endpoint) as client:
            waiting = asyncio.ensure_future(client.generate("a", LONG))
            while not (await client.status()).live_count:
                pass
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await client.status()).live_count == 0

    asyncio.run(main())


def test_a_request_that_takes_too_long_is_given_up(frontend, monkeypatch):
    monkeypatch.setattr("frontend.client_state.TIMEOUT_SLACK_S", 0.0)
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as client:
        with pytest.raises(TimeoutError):
            client.generate("a", LONG, timeout_s=0.05)
        assert client.status().live_count == 0

    async def main() -> None:
        async with AsyncClient(frontend.endpoint) as client:
            with pytest.raises(TimeoutError):
                await client.generate("a", LONG, timeout_s=0.05)
            assert (await client.status()).live_count == 0

    asyncio.run(main())


def test_clients_outlive_an_engine_that_starts_again(run_frontend, monkeypatch):
    monkeypatch.setattr("frontend.client_state.GONE_S", 3600)  # however long it takes to come
    first = run_frontend()
    first.scheduler.gate.clear()
    endpoint = {"client_endpoint": first.endpoint}

    async def ask_until_served(client: AsyncClient) -> str:
        while True:
            try:
                return (await client.generate("abc", SamplingParams(max_tokens=3))).text
            except RequestError as error:
                assert error.code == "starting", error
            except EngineDeadError as error:
                assert str(error).endswith("is lost"), "it was sent before the loss was seen"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with Client(first.endpoint, timeout_s=30) as client:
            async with AsyncClient(first.endpoint, timeout_s=30) as client_of_loop:
                lost = await client_of_loop.submit("a", LONG)
                stream = client.submit("a", LONG)
                await client_of_loop.ping()
                await loop.run_in_executor(None, first.stop)
                with pytest.raises((RequestError, EngineDeadError)):
                    await lost.result()
                with pytest.raises((RequestError, EngineDeadError)):
                    stream.result()
                early = asyncio.ensure_future(ask_until_served(client_of_loop))  # asks while there is no engine
                await loop.run_in_executor(None, lambda: run_frontend(server=endpoint))
                assert await early == "abc"
                assert client.generate("abc", SamplingParams(max_tokens=3)).text == "abc"
                assert client.status().live_count == 0

    asyncio.run(main())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_new_client_waits_for_an_engine_that_is_starting(run_frontend, monkeypatch, kind):
    """Its first request was refused with `starting`: the client socket is there before the model is loaded."""
    is_greeted, welcome = threading.Event(), ClientServer._welcome

    def note(*arguments) -> None:
        welcome(*arguments)
        is_greeted.set()

    async def ask() -> tuple[Welcome, str]:
        async with AsyncClient(running.endpoint, timeout_s=3600) as client:
            return client.welcome, (await client.generate("abc", SamplingParams(max_tokens=3))).text

    def ask_blocking() -> tuple[Welcome, str]:
        with Client(running.endpoint, timeout_s=3600) as client:
            return client.welcome, client.generate("abc", SamplingParams(max_tokens=3)).text

    monkeypatch.setattr(ClientServer, "_welcome", note)
    running = run_frontend(is_known=False)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_blocking) if kind is Client else pool.submit(lambda: asyncio.run(ask()))
        assert is_greeted.wait(30)
        running.start_scheduler()
        greeting, text = asked.result()
    assert (greeting.state, text) == ("serving", "abc") and greeting.max_model_len > 0


@pytest.mark.parametrize(
    ("state", "now_s", "again"),
    [("starting", 9.9, True), ("starting", 10.0, False), ("serving", 0.0, False), ("dead", 0.0, False)],
)
def test_a_new_client_waits_for_no_other_state_and_not_for_ever(state, now_s, again):
    assert says_hello_again(Welcome(2, ("m",), 0, 0, state, ""), 10.0, now_s) == again


def test_sixty_four_clients_at_once(frontend):
    async def one(number: int) -> None:
        async with AsyncClient(frontend.endpoint, name=f"client {number}") as client:
            texts = [f"{number} {index}" for index in range(4)]
            same_id = await client.submit(texts[0], SamplingParams(max_tokens=50), request_id="mine")
            finals = await client.generate_batch(texts, SamplingParams(max_tokens=40))
            assert all(final.text.startswith(text) for final, text in zip(finals, texts, strict=True))
            assert (await same_id.result()).text.startswith(texts[0])

    async def crowd() -> None:
        await asyncio.gather(*(one(number) for number in range(48)))

    def blocking(number: int) -> str:
        with Client(frontend.endpoint) as client:
            return client.generate(f"{number} x", SamplingParams(max_tokens=40), request_id="mine").text

    with ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(blocking, number) for number in range(48, 64)]
        asyncio.run(crowd())
        for number, text in enumerate(waiting, 48):
            assert text.result().startswith(f"{number} x")
    with Client(frontend.endpoint) as client:
        assert client.status().live_count == 0


def test_an_end_with_an_error_can_be_asked_for_again(frontend):
    """Whoever went on with a stream that had ended with an error waited for ever."""
    frontend.scheduler.refusal = ("sample_failed", "it broke", 500)

    async def main() -> None:
        async with AsyncClient(frontend.endpoint) as client:
            stream = await client.submit("the sea")
            for _ in range(2):
                with pytest.raises(RequestError, match="it broke"):
                    await stream.result()

    with Client(frontend.endpoint) as client:
        stream = client.submit("the sea")
        for _ in range(2):
            with pytest.raises(RequestError, match="it broke"):
                next(stream)
        frontend.scheduler.refusal = None
        with client.submit("the sea", {"max_tokens": 2}) as whole:
            assert whole.result() is whole.result()
        frontend.scheduler.refusal = ("sample_failed", "it broke", 500)
    asyncio.run(main())


def test_an_embedding_that_is_given_up_keeps_its_id_until_the_engine_has_let_go(frontend, caplog):
    """The error that answers the abort was taken for that of a later request of the same name."""
    frontend.scheduler.gate.clear()

    async def give_up(client: AsyncClient) -> None:
        try:
            await client.embed("the sea", request_id="mine")
        finally:  # at once, before any answer to the abort can be read
            assert client.is_live("mine")

    async def main() -> None:
        async with AsyncClient(frontend.endpoint) as client:
            waiting = asyncio.ensure_future(give_up(client))
            while not (await client.status()).live_count:
                pass
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await client.status()).live_count == 0
            frontend.scheduler.gate.set()
            assert (await client.embed("the sea", request_id="mine")).prompt_tokens

    asyncio.run(main())
    assert "the engine reports" not in caplog.text


def test_an_endpoint_that_is_none_is_refused_and_leaves_nothing_open():
    """The context was left to the garbage collector."""

    async def main() -> None:
        with pytest.raises(StartupError, match="cannot connect to 'nonsense'"):
            await AsyncClient("nonsense").open()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(StartupError, match="cannot connect to 'nonsense'"):
            Client("nonsense")
        asyncio.run(main())
        gc.collect()
    assert not caught


@pytest.mark.timeout(30)
def test_a_second_thread_is_refused_while_the_first_one_waits(frontend, monkeypatch):
    """ZeroMQ aborted the process of whoever shared a client between threads."""
    with Client(frontend.endpoint) as client:
        waits, go_on = threading.Event(), threading.Event()
        poll = client._poller.poll

        def held_poll(wait_ms):
            waits.set()
            go_on.wait()
            return poll(wait_ms)

        monkeypatch.setattr(client, "_poller", SimpleNamespace(poll=held_poll))
        pings = []
        thread = threading.Thread(target=lambda: pings.append(client.ping()))
        thread.start()
        waits.wait()
        for call in (client.status, lambda: client.submit("the sea"), lambda: client.abort("x")):
            with pytest.raises(RuntimeError, match="another thread is using this client; give each thread a client"):
                call()
        go_on.set()
        thread.join()
        assert len(pings) == 1 and client.status().state == "serving", "one thread after the other may use it"


def test_a_request_that_no_message_may_hold_costs_itself_alone(frontend):
    """The engine would have ended the connection, and all requests of the client with it."""
    large = [{"role": "user", "content": "x" * (1 << 20)}] * 65
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as client:
        running = client.submit("a", SamplingParams(max_tokens=3))
        for submit in (client.submit, client.submit_embedding):
            with pytest.raises(RequestError, match=r"has 68,[0-9,]+ bytes; wanted at most 67,108,864") as caught:
                submit(large)
            assert (caught.value.code, caught.value.status) == ("body_too_large", 413)
        frontend.scheduler.gate.set()
        assert running.result().completion_tokens == 3
