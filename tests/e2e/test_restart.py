"""`--restart` with real processes: a lost process is started again, and every request goes on (FAULTS D2, D3)."""

import contextlib
import json
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from common.errors import TriremeError
from frontend import Client, SamplingParams
from tests.support.server import Server

pytestmark = pytest.mark.timeout(180)

TOKENS = 200
TOKENS_BEFORE = 20
"""How many at most have come when a process is lost: the worker waits then."""
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 1},
]
PROMPTS = ["The sea", "A ship", "Three rows of oars", "Salamis"]


@pytest.fixture(scope="module")
def server(tiny_model_dir):
    """One engine for all losses but the last."""
    options = ["--restart", "--restart-limit", "99", "--dtype", "float32", "--block-size", "4"]
    options += ["--num-kv-blocks", "2000", "--shutdown-timeout", "60"]
    with Server(tiny_model_dir, *options, faulty=True) as running:
        yield running


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.ready["http"], timeout=60) as client:
        yield client


def hold_until_live(server: Server, client: Client, count: int) -> None:
    """Let the worker begin, of a `server.hold(0)`, when all requests are there, so that none ends before another has
    begun, or before it is released."""
    while client.status().live_count < count:
        pass
    server.hold(TOKENS_BEFORE)


class Streams:
    """Eight streamed requests, four over each way in, of which each has given something and none has ended: the worker
    is held."""

    def __init__(self, server: Server, client: Client) -> None:
        server.hold(0)
        self._pool = ThreadPoolExecutor(len(PARAMS))
        self._first = [threading.Event() for _ in PARAMS]
        self._http: list[Future[str]] = [
            self._pool.submit(self._read_http, server.ready["http"], number) for number in range(len(PARAMS))
        ]
        self._zmq = [
            client.generate(prompt, {"max_tokens": TOKENS, "ignore_eos": True, **params}, stream=True)
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
        hold_until_live(server, client, 2 * len(PARAMS))
        self._deltas = [next(stream) for stream in self._zmq]
        for event in self._first:
            assert event.wait(60)

    def _read_http(self, base_url: str, number: int) -> str:
        body = {"prompt": PROMPTS[number], "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        text = ""
        url = f"{base_url}/v1/completions"
        with httpx.stream("POST", url, json=body | PARAMS[number], timeout=60) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    self._first[number].set()
        return text

    def finish(self) -> list:
        """Text over HTTP; text, token ids and number of log probabilities over ZeroMQ."""
        results: list = [future.result() for future in self._http]
        self._pool.shutdown()
        for stream, first in zip(self._zmq, self._deltas, strict=True):
            deltas = [first, *stream]
            final = stream.final
            assert "".join(delta.text for delta in deltas) == final.text
            token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
            assert token_ids == list(final.samples[0].token_ids)
            results.append((final.text, token_ids, len(final.samples[0].logprobs or ())))
        return results


@pytest.fixture(scope="module")
def undisturbed(server):
    with Client(server.ready["client_endpoint"]) as client:
        streams = Streams(server, client)
        server.go_on()
        results = streams.finish()
    assert len({str(result) for result in results}) == len(results)
    assert {len(ids) for _, ids, _ in results[4:]} == {TOKENS}
    return results


def wait_for_health(http: httpx.Client, status: int) -> dict:
    while (response := http.get("/health")).status_code != status:
        pass
    return response.json()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("worker-0", signal.SIGKILL),
        ("scheduler", signal.SIGKILL),
        ("worker-0", signal.SIGSTOP),
        ("worker-0", signal.SIGUSR1),  # a broken device
        ("scheduler", signal.SIGUSR1),  # no memory
    ],
)
def test_streams_go_on_with_the_same_tokens(server, http, undisturbed, name, number):
    with Client(server.ready["client_endpoint"], timeout_s=60) as client:
        before = client.status().figures["restarts"]
        streams = Streams(server, client)
        pid = server.children()[name]
        os.kill(pid, number)
        server.hold(TOKENS_BEFORE + 5)  # in one of these steps it fails if the signal says so; the next worker waits
        health = wait_for_health(http, 503)
        server.go_on()
        assert health["status"] == "restarting"
        assert name in health["detail"] and "started again" in health["detail"]
        meanwhile = client.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
        assert meanwhile.text == undisturbed[0], "submitted while the engine was down"
        assert streams.finish() == undisturbed
        assert wait_for_health(http, 200) == {"status": "serving", "restarts": before + 1}
        assert f'engine_restarts_total{{model_name="{client.welcome.model_names[0]}"}} {before + 1:.1f}' in (
            http.get("/metrics").text
        )
        assert server.children()[name] != pid
        while client.status().figures["running_count"]:  # the last figures come a tenth of a second later
            pass


def read(server: Server, number: int, started: threading.Event) -> tuple:
    """A client of its own that streams one of the requests; what it got."""
    with Client(server.ready["client_endpoint"], timeout_s=60) as client:
        stream = client.submit(PROMPTS[number], {"max_tokens": TOKENS, "ignore_eos": True, **PARAMS[number]})
        deltas = []
        for delta in stream:
            deltas.append(delta)
            started.set()
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        logprobs = [entry.token_id for delta in deltas for entry in delta.logprobs]
        final = stream.final
        assert "".join(delta.text for delta in deltas) == final.text
        assert [entry.token_id for entry in final.samples[0].logprobs or ()] == logprobs
        assert (token_ids, final.completion_tokens) == (list(final.samples[0].token_ids), TOKENS)
        return final.text, token_ids, len(logprobs)


@pytest.mark.parametrize("names", [["frontend"], ["frontend", "worker-0"]], ids=" and ".join)
def test_clients_of_a_lost_frontend_go_on_with_the_same_tokens(server, http, undisturbed, names):
    pids, started = server.children(), [threading.Event() for _ in PARAMS]
    server.hold(0)
    with ThreadPoolExecutor(len(PARAMS) + 1) as pool, Client(server.ready["client_endpoint"], timeout_s=60) as client:
        streams = [pool.submit(read, server, number, event) for number, event in enumerate(started)]
        whole = client.submit(PROMPTS[0], {**PARAMS[0], "max_tokens": TOKENS, "ignore_eos": True}, stream=False)
        body = {"prompt": "The sea", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        over_http = pool.submit(http.send, http.build_request("POST", "/v1/completions", json=body), stream=True)
        hold_until_live(server, client, len(PARAMS) + 2)
        with contextlib.closing(over_http.result()) as response:
            lines = response.iter_lines()
            assert next(lines) and all(event.wait(60) for event in started)
            for name in names:
                os.kill(pids[name], signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)
            assert not any(stream.done() for stream in streams)
            server.go_on()
        again = client.generate(PROMPTS[0], {**PARAMS[0], "max_tokens": TOKENS, "ignore_eos": True})
        assert [stream.result() for stream in streams] == undisturbed[4:]
        assert whole.result().text == again.text == undisturbed[0]
        assert wait_for_health(http, 200)["status"] == "serving"
        status = client.status()
        while client.status().figures["running_count"]:
            pass
        assert status.live_count == 0
    lost = set(pids) - {"frontend"} if len(names) > 1 else set()
    now = server.children()
    assert {name for name in pids if now[name] != pids[name]} == {"frontend", *lost}


def test_one_loss_too_many_ends_the_run(long_model_dir):
    options = ["--restart", "--restart-limit", "1", "--dtype", "float32"]
    with Server(long_model_dir, *options) as server, Client(server.ready["client_endpoint"], timeout_s=60) as client:
        stream = client.generate("The sea", {"max_tokens": 60_000, "ignore_eos": True}, stream=True)
        next(stream)
        pids = server.children()
        os.kill(pids["worker-0"], signal.SIGKILL)
        while server.children().get("worker-0") in (None, pids["worker-0"]):
            pass
        os.kill(server.children()["worker-0"], signal.SIGKILL)  # while it loads the model
        with pytest.raises(TriremeError, match="worker-0 was killed"):
            list(stream)
        assert server.process.wait(30) == 1
        server.assert_nothing_is_left(pids)
    assert "it is not started again: --restart-limit is 1 within 5 minutes" in server.stderr().splitlines()[-1]


@pytest.fixture
def held(tiny_model_dir):
    """An engine whose worker is held in the middle of a long answer: the server, its client and the answer's stream."""
    options = ["--restart", "--shutdown-timeout", "600"]
    with (
        Server(tiny_model_dir, *options, faulty=True) as server,
        Client(server.ready["client_endpoint"], timeout_s=60) as client,
    ):
        server.hold(TOKENS_BEFORE)
        stream = client.generate("The sea", {"max_tokens": 300, "ignore_eos": True}, stream=True)
        next(stream)
        yield server, client, stream


def test_a_worker_that_is_lost_after_the_stop_is_started_again_too(held):
    server, client, stream = held
    server.process.send_signal(signal.SIGTERM)
    while client.status().state != "draining":
        pass
    os.kill(server.children()["worker-0"], signal.SIGKILL)
    server.go_on()
    assert len(stream.result().samples[0].token_ids) == 300
    assert server.process.wait(30) == 0


def test_a_stop_during_a_restart_lets_requests_finish(held):
    server, client, stream = held
    os.kill(server.children()["worker-0"], signal.SIGKILL)
    while client.status().state != "restarting":
        pass
    server.process.send_signal(signal.SIGTERM)
    server.go_on()
    assert len(stream.result().samples[0].token_ids) == 300
    assert server.process.wait(30) == 0
