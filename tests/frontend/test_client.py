"""The client protocol over real sockets: both clients, against the real frontend with a scripted scheduler."""

import asyncio
import subprocess
import sys
import threading
from itertools import islice

import numpy as np
import pytest
import zmq

from common import client_messages as wire
from common import messages as m
from common.errors import EngineDeadError, RequestError
from common.sampling_params import SamplingParams
from common.wire import pack
from frontend import AsyncClient, Client, client_requests
from frontend.client_state import ClientState, raise_error


def test_generate_returns_text_tokens_and_usage(frontend):
    with Client(frontend.endpoint) as client:
        ids = client.tokenize("the sea")
        final = client.generate("the sea", SamplingParams(max_tokens=2 * len(ids)))
        assert final.text == "the seathe sea"
        assert list(final.prompt_token_ids) == ids
        assert final.samples[0].finish_reason == "length"
        assert (final.prompt_tokens, final.completion_tokens) == (len(ids), 2 * len(ids))
        assert client.detokenize(ids) == "the sea"


def test_joined_deltas_are_the_final_text(frontend):
    text = "naïve café 海は青い 🌊🙂"
    with Client(frontend.endpoint) as client:
        stream = client.generate(text, SamplingParams(max_tokens=64), stream=True)
        deltas = list(stream)
        assert "".join(delta.text for delta in deltas) == stream.final.text
        assert "\ufffd" not in "".join(delta.text for delta in deltas[:-1])
        assert [token_id for delta in deltas for token_id in delta.token_ids] == list(stream.final.samples[0].token_ids)


def test_chat_renders_the_template(frontend):
    with Client(frontend.endpoint) as client:
        final = client.chat([{"role": "user", "content": "hello"}], {"max_tokens": 3})
        assert client.detokenize(final.prompt_token_ids) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"


def test_chat_may_fill_the_context(run_frontend):
    frontend = run_frontend(script=lambda request, _: iter([request.params.max_tokens % 256]))
    with Client(frontend.endpoint) as client:
        final = client.chat([{"role": "user", "content": "hello"}])
        request = frontend.scheduler.added[-1]
        assert request.params.max_tokens == 2048 - final.prompt_tokens


class EverySecond(tuple):
    """A refusal that holds for every second request."""

    count = 0

    def __bool__(self) -> bool:
        self.count += 1
        return self.count % 2 == 0


def test_a_batch_keeps_within_the_queue_and_sends_again_what_found_it_full(frontend, monkeypatch):
    """`LLM.generate` with more prompts than the queue takes failed as a whole."""
    monkeypatch.setattr(client_requests, "BATCH_SAMPLES", 6)
    frontend.scheduler.refusal = EverySecond(("queue_full", "the queue is full", 429))
    with Client(frontend.endpoint) as client:
        submit, live_counts = client.submit, []

        def counted(*arguments, **options):
            live_counts.append(client._state.live_count)
            return submit(*arguments, **options)

        monkeypatch.setattr(client, "submit", counted)
        prompts = [[number] for number in range(5, 25)]
        finals = client.generate_batch(prompts, SamplingParams(max_tokens=2, n=2))
        assert [list(final.prompt_token_ids) for final in finals] == prompts
        assert max(live_counts) == 2
        assert len(live_counts) > len(prompts)
        frontend.scheduler.refusal = ("queue_full", "the queue is full", 429)
        with pytest.raises(RequestError, match="queue is full"):
            client.generate_batch(prompts)


def test_the_id_of_a_request_that_could_not_be_sent_is_free_again(shared_frontend):
    with Client(shared_frontend.endpoint) as client:
        with pytest.raises(RequestError):
            client.submit(object(), request_id="mine")
        assert client.submit("a", SamplingParams(max_tokens=1), request_id="mine").result().completion_tokens == 1


def test_automatic_ids_leave_the_usual_ones_to_the_caller(frontend):
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as client:
        streams = [client.submit("a", SamplingParams(max_tokens=1)) for _ in range(3)]
        streams += [client.submit("a", SamplingParams(max_tokens=1), request_id=name) for name in ("r1", "1", "r2")]
        frontend.scheduler.gate.set()
        assert [stream.result().completion_tokens for stream in streams] == [1] * 6


def test_samples_of_one_request(frontend):
    with Client(frontend.endpoint) as client:
        final = client.generate("abc", SamplingParams(n=3, max_tokens=4))
        assert [sample.index for sample in final.samples] == [0, 1, 2]
        assert final.completion_tokens == 12


def test_abort_ends_a_stream_with_what_there_is(frontend):
    with Client(frontend.endpoint) as client:
        stream = client.submit("the sea", SamplingParams(max_tokens=2000))
        assert len(list(islice(stream, 3))) == 3
        stream.abort()
        final = stream.result()
        assert final.samples[0].finish_reason in ("abort", "length")
        frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == 0)


def test_leaving_a_stream_aborts_it(run_frontend):
    frontend = run_frontend()
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as client:
        with client.submit("the sea", SamplingParams(max_tokens=2000)):
            pass
        frontend.scheduler.wait_until(lambda: frontend.scheduler.aborted == [0])
        assert client.status().live_count == 0


def test_abort_while_the_prompt_is_being_encoded(frontend):
    with Client(frontend.endpoint) as client:
        stream = client.submit("long text " * 20_000, SamplingParams(max_tokens=4))
        stream.abort()
        try:
            assert stream.result().samples[0].finish_reason == "abort"
        except RequestError as error:  # it was encoded before the abort came
            assert error.code == "context_length_exceeded"
        assert client.generate("a", SamplingParams(max_tokens=1)).completion_tokens == 1


def test_a_client_that_goes_away_loses_its_requests(frontend):
    frontend.scheduler.gate.clear()
    client = Client(frontend.endpoint)
    client.submit("the sea", SamplingParams(max_tokens=2000), stream=False)
    frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == 1)
    client.close()
    frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == 0)
    assert frontend.scheduler.added and not frontend.scheduler.live_count


def test_integer_keys_of_logit_bias_are_taken_in_a_map(frontend):
    """Msgpack maps have string keys on our wire: such a request was unreadable, and its caller waited for ever."""
    with Client(frontend.endpoint) as client:
        assert client.generate("a", {"logit_bias": {5: 1.0}, "max_tokens": 1}, timeout_s=20).samples
    assert dict(frontend.scheduler.added[0].params.logit_bias) == {5: 1.0}


def test_a_request_id_that_the_wire_does_not_take_is_refused_here(shared_frontend):
    with Client(shared_frontend.endpoint) as client:
        for request_id in ("x" * 257, 7):
            with pytest.raises(RequestError, match="at most 256 characters"):
                client.submit("a", request_id=request_id)


def test_an_error_about_an_unreadable_message_ends_the_only_request():
    state = ClientState()
    only = state.open("a")
    state.take(wire.ErrorReply("", "bad_message", "what is this?").to_wire())
    with pytest.raises(RequestError, match="what is this"):
        raise_error(only.replies.popleft())
    first, second = state.open("b"), state.open("c")
    state.take(wire.ErrorReply("", "bad_message", "what is this?").to_wire())
    assert not first.replies and not second.replies  # it might be either's


def test_one_id_may_not_be_live_twice_but_clients_do_not_collide(frontend):
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as one, Client(frontend.endpoint) as two:
        first = one.submit("a", SamplingParams(max_tokens=2), request_id="same")
        other = two.submit("b", SamplingParams(max_tokens=2), request_id="same")
        with pytest.raises(RequestError, match="in use"):
            one.submit("c", request_id="same")
        raw = _raw_socket(one, frontend.endpoint)
        for _ in range(2):
            raw.send(wire.Generate(request_id="twice", prompt="a", params={"max_tokens": 2}).to_wire())
        reply = wire.decode_to_client(raw.recv())
        assert (reply.code, reply.request_id) == ("duplicate_request_id", "twice")
        frontend.scheduler.gate.set()
        assert first.result().completion_tokens == other.result().completion_tokens == 2
        while not isinstance(reply, wire.Final):
            reply = wire.decode_to_client(raw.recv())
        assert reply.request_id == "twice"
        raw.close()


BAD_BYTES = [
    b"",
    b"\xc1",
    b"not msgpack",
    b"\x93\x01",
    b"\x91" * 5000,
    b"\xdd\xff\xff\xff\xff",
    b"\x80\x04\x95\x10\x00.",
    pack([61]),
    pack([61, "x", 5, {}, True, True, 0, "", None, None, {}]),
    pack([61, "x", "p", {}, True, True, 0, "", None, None, {}, "one too many"]),
    pack([61, "x", [], {}, True, True, 0, "", None, None, {}]),
    pack([61, "x", [{"content": "no role"}], {}, True, True, 0, "", None, None, {}]),
    pack([61, "x", "p", {}, True, True, 0, "", -1, None, {}]),
    pack([61, "x", b"123", {}, True, True, 0, "", None, None, {}]),
    pack([81, []]),
    pack([200]),
    pack([60, 99, ""]),
    pack(["61"]),
    pack({"a": 1}),
]


@pytest.mark.parametrize("data", BAD_BYTES, ids=lambda data: repr(data[:12]))
def test_bad_bytes_cost_one_message(shared_frontend, data):
    with Client(shared_frontend.endpoint) as client:
        raw = _raw_socket(client, shared_frontend.endpoint)
        raw.send(data)
        reply = wire.decode_to_client(raw.recv())
        assert isinstance(reply, wire.ErrorReply)
        raw.close()
        assert client.generate("a", SamplingParams(max_tokens=1)).completion_tokens == 1


BAD_PARAMS = [
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": float("inf")}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"n": 10**6}, "n"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop_token_ids": [400]}, "stop_token_ids"),
    ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
    ({"no_such_parameter": 1}, "no_such_parameter"),
]


@pytest.mark.parametrize(("params", "name"), BAD_PARAMS, ids=lambda value: str(value)[:40])
def test_bad_parameters_are_refused_by_name(shared_frontend, params, name):
    with Client(shared_frontend.endpoint) as client:
        with pytest.raises(RequestError) as caught:
            client.generate("a", params)
        assert caught.value.param == name
        assert client.generate("a", SamplingParams(max_tokens=1)).completion_tokens == 1


@pytest.mark.parametrize(
    "prompt", ["", [], [400], [-1], [2**31 - 1], "sea " * 3000, [5] * 2048], ids=lambda p: str(p)[:12]
)
def test_bad_prompts_are_refused(shared_frontend, prompt):
    with Client(shared_frontend.endpoint) as client:
        with pytest.raises(RequestError, match="prompt"):
            client.generate(prompt, SamplingParams(max_tokens=1))
        assert client.generate([5] * 2047, SamplingParams(max_tokens=9)).completion_tokens == 1


@pytest.mark.parametrize(
    "prompt",
    [[5, "a", 7], [5, 1.5], [5.0], [True, 5], [2**31], b"abc", {5, 6}, 7, None, {"text": "a"}, [{"role": "user"}, 5],
     "\ud800"],
    ids=repr,
)  # fmt: skip
def test_what_is_no_prompt_is_refused_whole(shared_frontend, prompt):
    """Entries that were not `int` were dropped, and the rest was answered as if it were the prompt."""
    with Client(shared_frontend.endpoint) as client, pytest.raises(RequestError):
        client.generate(prompt, SamplingParams(max_tokens=1), timeout_s=20)


@pytest.mark.parametrize("prompt", [[np.int64(5), 6], np.array([5, 6]), (5, 6), {"prompt_token_ids": [5, 6]}], ids=repr)
def test_whatever_stands_for_token_ids_is_taken(shared_frontend, prompt):
    with Client(shared_frontend.endpoint) as client:
        final = client.generate(prompt, SamplingParams(max_tokens=1), timeout_s=20)
        assert list(final.prompt_token_ids) == [5, 6]


@pytest.mark.parametrize("params", [{"stop": {"a"}}, {"seed": 2**70}, {"stop": "\ud800"}, ["stop"]], ids=repr)
def test_parameters_that_the_wire_cannot_carry_are_refused(shared_frontend, params):
    with Client(shared_frontend.endpoint) as client, pytest.raises(RequestError):
        client.generate("a", params, timeout_s=20)


def test_an_id_is_free_again_after_a_submit_that_raised(shared_frontend):
    with Client(shared_frontend.endpoint) as client:
        with pytest.raises(RequestError):
            client.submit([2**31], request_id="mine")
        assert client.submit([5], SamplingParams(max_tokens=1), request_id="mine").result().samples

    async def main() -> None:
        async with AsyncClient(shared_frontend.endpoint) as client:
            with pytest.raises(RequestError):
                await client.submit("a", {"stop": {"a"}}, request_id="mine")
            assert (await client.generate([5], {"max_tokens": 1}, request_id="mine")).samples

    asyncio.run(main())


def test_a_refusal_of_the_scheduler_reaches_the_client(frontend):
    frontend.scheduler.refusal = ("queue_full", "4096 requests wait, the most there may be", 429)
    with Client(frontend.endpoint) as client, pytest.raises(RequestError, match="4096") as caught:
        client.generate("a")
    assert (caught.value.code, caught.value.status) == ("queue_full", 429)


def test_a_failed_peer_ends_every_request(frontend):
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as client:
        streams = [client.submit("a", SamplingParams(max_tokens=9)) for _ in range(5)]
        frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == 5)
        frontend.link.order(m.PeerFailed("worker-0", "worker-0 was killed by signal 9"))
        for stream in streams:
            with pytest.raises(EngineDeadError, match="worker-0 was killed by signal 9"):
                stream.result()
    frontend.join(30)
    assert frontend.exit_code == 1


def test_an_engine_that_says_it_is_dead_raises_what_one_that_is_gone_raises():
    """It was a RequestError, as if the request were at fault, and an EngineDeadError a moment later."""
    for code, kind in [("engine_dead", EngineDeadError), ("shutting_down", RequestError), ("queue_full", RequestError)]:
        with pytest.raises(kind, match="why"):
            raise_error(wire.ErrorReply("a", code, "why", None, None, 503))


def test_bytes_of_the_schedulers_that_are_no_message_end_every_request(frontend):
    frontend.scheduler.garbage = b"\xc1"
    wanted = pytest.raises(EngineDeadError, match="a message of the scheduler cannot be read")
    with Client(frontend.endpoint) as client, wanted:
        client.generate("a", SamplingParams(max_tokens=9))
    frontend.join(30)
    assert frontend.exit_code == 1
    assert "cannot be read" in frontend.link.detail


def test_no_engine_at_the_endpoint(tmp_path):
    with pytest.raises(EngineDeadError, match="no engine can be reached"):
        Client(f"ipc://{tmp_path}/nothing.sock", timeout_s=0.05)


def test_status_ping_and_welcome(frontend):
    with Client(frontend.endpoint, name="test") as client:
        assert client.welcome.max_model_len == 2048
        assert client.welcome.state == "serving"
        status = client.status()
        assert (status.state, status.live_count, status.limits["block_size"]) == ("serving", 0, 16)
        assert status.figures["running_count"] == 0
        assert client.ping() < 30


def test_a_client_that_does_not_read_costs_only_itself(run_frontend, monkeypatch):
    monkeypatch.setattr("common.sockets.CLIENT_QUEUE_LIMIT", 20)
    frontend = run_frontend()
    with Client(frontend.endpoint) as good:
        context = zmq.Context()
        stalled = context.socket(zmq.DEALER)
        stalled.set(zmq.RCVHWM, 1)
        stalled.set(zmq.LINGER, 0)
        stalled.connect(frontend.endpoint)
        many = wire.Generate(request_id="many", prompt="x" * 400, params={"max_tokens": None, "n": 64, "stop": "no"})
        for number in range(20):
            stalled.send(wire.Generate(**{**vars(many), "request_id": f"many{number}"}).to_wire())
        frontend.scheduler.wait_until(lambda: len(frontend.scheduler.aborted) == 20, 60)
        assert good.generate("abc", SamplingParams(max_tokens=3)).text == "abc"
        assert good.status().live_count == 0
        stalled.close()
        context.term()


def test_async_client(frontend):
    async def main() -> None:
        async with AsyncClient(frontend.endpoint) as client:
            ids = await client.tokenize("the sea")
            one = client.generate("the sea", SamplingParams(max_tokens=len(ids)))
            many = [client.generate(f"a {n}", SamplingParams(max_tokens=4)) for n in range(32)]
            results = await asyncio.gather(one, *many)
            assert results[0].text == "the sea"
            assert all(result.completion_tokens == 4 for result in results[1:])
            stream = await client.submit("the sea", SamplingParams(max_tokens=9))
            texts = [delta.text async for delta in stream]
            assert "".join(texts) == stream.final.text
            chat = await client.chat([{"role": "user", "content": "x"}], {"max_tokens": 1})
            assert chat.completion_tokens == 1
            assert await client.detokenize(ids) == "the sea"
            assert (await client.status()).state == "serving"
            assert await client.ping() < 30
            with pytest.raises(RequestError, match="temperature"):
                await client.generate("a", {"temperature": -1})

    asyncio.run(main())


def test_async_client_notices_a_lost_engine(frontend):
    frontend.scheduler.gate.clear()

    async def main() -> None:
        async with AsyncClient(frontend.endpoint) as client:
            stream = await client.submit("a", SamplingParams(max_tokens=9))
            await client.ping()
            await asyncio.get_running_loop().run_in_executor(None, frontend.stop)
            with pytest.raises(RequestError, match="shut down"):
                await stream.result()
            client.timeout_s = 0.1  # nobody comes any more
            with pytest.raises(EngineDeadError):
                await client.generate("a")

    asyncio.run(main())


def test_several_clients_in_threads(shared_frontend):
    failures = []

    def work(number: int) -> None:
        try:
            with Client(shared_frontend.endpoint) as client:
                for _ in range(5):
                    final = client.generate(f"{number}", SamplingParams(max_tokens=1), request_id="r")
                    assert final.text == f"{number}"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_importing_the_sdk_loads_neither_torch_nor_transformers():
    code = (
        "import sys, frontend\n"
        "frontend.Client, frontend.AsyncClient, frontend.SamplingParams, frontend.LLM\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'numpy', 'starlette') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _raw_socket(client: Client, endpoint: str) -> zmq.Socket:
    socket = client._context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVTIMEO, 20_000)
    socket.connect(endpoint)
    return socket
