"""More faults that engines of this kind have had, on real processes under strain; each test names its row.

The engine here has a pool of 256 tokens for 8 sequences, steps of 16 tokens, two ends of text and an API key. What it
answers is held against the calm engine of the other tests, which has the same weights.
"""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from common.errors import RequestError
from common.sampling_params import SamplingParams
from frontend import Client
from tests.support import tiny
from tests.support.idle import assert_becomes_idle, assert_figure_exceeds
from tests.support.ports import reserved_port
from tests.support.server import ROOT, Server

pytestmark = pytest.mark.timeout(180)
PROMPT = "The sea, the sea, the open sea"
KEY = {"authorization": "Bearer secret"}
POOL_TOKENS = 256
OTHER_END = 7
STRAIN = ("--block-size", "4", "--num-kv-blocks", "64", "--max-num-seqs", "8", "--max-num-batched-tokens", "16")


def greedy(max_tokens: int = 24, **more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **more})


@pytest.fixture(scope="module")
def strained(tmp_path_factory):
    folder = tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, OTHER_END]}))
    with Server(folder, "--dtype", "float32", *STRAIN, "--api-key", "secret") as running:
        yield running


@pytest.fixture
def client(strained):
    with Client(strained.ready["client_endpoint"], timeout_s=60) as client:
        yield client


@pytest.fixture
def calm(server):
    with Client(server.ready["client_endpoint"], timeout_s=60) as client:
        yield client


@pytest.fixture
def http(strained):
    with httpx.Client(base_url=strained.ready["http"], headers=KEY, timeout=60) as http:
        yield http


@pytest.fixture(autouse=True)
def unharmed(strained):
    """After each test nothing runs, every block is accounted for, and a good request is answered as ever."""
    with Client(strained.ready["client_endpoint"], timeout_s=60) as client:
        yield
        assert_becomes_idle(client)
        assert client.generate("Hi", greedy(4)).completion_tokens == 4


def streamed(http, body: dict) -> list[dict]:
    """The chunks of a completion."""
    chunks = []
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunks.append(json.loads(line[6:]))
    return chunks


# -- A: text -----------------------------------------------------------------------------------------------------------


def test_a2_a_stop_string_inside_a_token_is_found_and_cut_before(client):
    plain = client.generate(PROMPT, greedy())
    tokens = [client.detokenize([token_id]) for token_id in plain.samples[0].token_ids]
    [long, *_] = [text for text in tokens if len(text) > 2 and text.isascii()]
    for stop in (long[1:-1] or long[1], long[1], long[:2], long[-1]):
        final = client.generate(PROMPT, greedy(stop=stop))
        assert final.text == plain.text[: plain.text.index(stop)], f"stop {stop!r}"
        stream = client.generate(PROMPT, greedy(stop=stop), stream=True)
        assert "".join(delta.text for delta in stream) == final.text


@pytest.mark.parametrize("prompt", ["\n1. Carol has 20", PROMPT, "海は青い 🌊"])
def test_a6_tokens_and_offsets_of_an_echo_join_to_its_text(http, prompt):
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 8, "temperature": 0}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    pieces = [chunk["choices"][0] for chunk in streamed(http, body) if chunk["choices"]]
    logprobs = [piece["logprobs"] for piece in pieces if piece.get("logprobs")]
    tokens = [token for piece in logprobs for token in piece["tokens"]]
    offsets = [offset for piece in logprobs for offset in piece["text_offset"]]
    assert whole["text"].startswith(prompt)
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert "".join(whole["logprobs"]["tokens"]) == "".join(tokens) == whole["text"]
    wanted = [sum(map(len, tokens[:index])) for index in range(len(tokens))]
    assert whole["logprobs"]["text_offset"] == offsets == wanted


def test_a7_usage_is_the_same_whole_and_streamed_and_comes_only_when_asked_for(http):
    body = {"prompt": "test " * 30, "max_tokens": 3, "n": 2, "temperature": 0, "ignore_eos": True}
    whole = http.post("/v1/completions", json=body).json()["usage"]
    assert whole["completion_tokens"] == 6
    for options in (None, {}, {"include_usage": False}):
        chunks = streamed(http, {**body, "stream_options": options})
        assert not any(chunk.get("usage") for chunk in chunks), options
        assert all(chunk["choices"] for chunk in chunks), options
    *chunks, last = streamed(http, {**body, "stream_options": {"include_usage": True}})
    assert last["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][name] for name in counts] == [whole[name] for name in counts]
    assert all(chunk["choices"] and not chunk.get("usage") for chunk in chunks)
    *chunks, last = streamed(http, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    totals = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert totals == sorted(totals)
    assert last["usage"]["completion_tokens"] == 6


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """An engine whose tokenizer is of Llama 2's kind: a word begins with a mark for its space."""
    folder = tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")
    pieces = ["▁", "▁I", "▁love", "▁you", "▁the", "▁sea", *"loveyuthsa,.éI"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{value:02X}>": 3 + value for value in range(256)}}
    vocabulary |= {piece: 259 + number for number, piece in enumerate(pieces)}
    raw = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    raw.save(str(folder / "tokenizer.json"))
    with Server(folder, "--dtype", "float32", "--block-size", "4", "--num-kv-blocks", "64") as running:
        yield running, raw


def test_a9_no_space_is_lost_token_by_token(sentencepiece):
    server, raw = sentencepiece
    words = [raw.token_to_id(piece) for piece in ("▁I", "▁love", "▁you", "▁sea", "▁", "é", ".")]
    with Client(server.ready["client_endpoint"], timeout_s=60) as client:
        for seed in range(8):
            params = SamplingParams(temperature=2.0, seed=seed, max_tokens=24, allowed_token_ids=words, ignore_eos=True)
            for ask, at_start in ((client.generate, False), (client.chat, True)):
                stream = ask("I love" if not at_start else [{"role": "user", "content": "I"}], params, stream=True)
                text = "".join(delta.text for delta in stream)
                ids = list(stream.final.samples[0].token_ids)
                whole = raw.decode([raw.token_to_id("▁I"), *ids])[1:] if not at_start else raw.decode(ids)
                assert text == stream.final.text, f"seed {seed}"
                assert text == whole, f"seed {seed}: {ids}"


# -- B: sampling -------------------------------------------------------------------------------------------------------


def test_b6_a_greedy_row_with_a_ban_beside_a_hot_one_is_right(client):
    first = client.generate(PROMPT, greedy(1)).samples[0].token_ids[0]
    banned = greedy(12, logit_bias={first: -100.0})
    alone = client.generate(PROMPT, banned)
    hot = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, logprobs=3)
    hot_alone = client.generate("naïve", hot)
    for order in ([0, 1], [1, 0]):
        finals = client.generate_batch(
            [[PROMPT, "naïve"][index] for index in order], [[banned, hot][index] for index in order]
        )
        texts = [finals[order.index(index)].text for index in (0, 1)]
        assert texts == [alone.text, hot_alone.text]
    assert first not in alone.samples[0].token_ids


@pytest.mark.parametrize("echo", [False, True])
def test_b7_logprobs_of_what_cannot_be_are_numbers_or_null(http, echo):
    body = {"prompt": PROMPT, "logprobs": 5, "top_k": 1, "temperature": 0.7, "max_tokens": 4, "echo": echo}
    body |= {"logit_bias": {"9": -100}, "allowed_token_ids": [5, 6, 7, 8]}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    logprobs = json.loads(reply.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    values = logprobs["choices"][0]["logprobs"]["token_logprobs"]
    assert all(value is None or -10_000 < value <= 0 for value in values)


def test_b14_no_end_of_the_generation_config_ends_a_request_that_ignores_ends(client):
    for end in (1, OTHER_END):
        bias = {end: 100.0}
        stopped = client.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8, logit_bias=bias))
        assert (stopped.completion_tokens, stopped.samples[0].finish_reason) == (1, "stop")
        late = client.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8, logit_bias=bias, min_tokens=4))
        ids = list(late.samples[0].token_ids)
        assert (len(ids), ids[-1]) == (5, end), "min_tokens holds for every end"
        assert not {1, OTHER_END} & {*ids[:4]}
        on = client.generate(PROMPT, greedy(8, logit_bias=bias))
        assert list(on.samples[0].token_ids) == [end] * 8


def test_b10_penalties_and_bad_words_do_not_depend_on_running_ahead(client, strained, calm):
    ids = list(calm.generate(PROMPT, greedy()).samples[0].token_ids)
    two_tokens = calm.detokenize(ids[3:5])
    params = [
        greedy(40, frequency_penalty=1.0, presence_penalty=0.5),
        greedy(40, repetition_penalty=1.7),
        greedy(40, bad_words=[two_tokens]) if two_tokens.strip().isascii() else greedy(40),
    ]
    prompts = [PROMPT, "The blue", PROMPT]
    ahead = client.generate_batch(prompts, params)
    with (
        Server(strained.model_dir, "--dtype", "float32", "--run-ahead", "0") as server,
        Client(server.ready["client_endpoint"], timeout_s=60) as plain,
    ):
        for final, prompt, each in zip(ahead, prompts, params, strict=True):
            assert list(plain.generate(prompt, each).samples[0].token_ids) == list(final.samples[0].token_ids)


# -- C: scheduler and cache --------------------------------------------------------------------------------------------


def test_c1_a_request_that_outgrows_the_pool_alone_ends_and_blocks_nobody(client):
    limit = client.welcome.max_model_len
    assert limit <= POOL_TOKENS
    final = client.generate([5] * (limit - 20), greedy(400))
    assert (final.completion_tokens, final.samples[0].finish_reason) == (20, "length")
    with pytest.raises(RequestError, match=str(limit)):
        client.generate([5] * (limit + 1), greedy())
    assert client.generate("Hi", greedy(2)).completion_tokens == 2


def test_c3_and_c8_a_hundred_requests_in_a_tiny_pool_equal_those_with_room(client, calm):
    before = client.status().figures["preemptions"]
    prompts = [[10 + (7 * n + index) % 250 for index in range(5 + n % 60)] for n in range(96)]
    params = [greedy(10 + n % 40) for n in range(96)]
    crowded = client.generate_batch(prompts, params)
    assert_figure_exceeds(client, "preemptions", before)  # else the pool was not short
    for n in range(0, 96, 4):
        roomy = calm.generate(prompts[n], params[n])
        assert list(roomy.samples[0].token_ids) == list(crowded[n].samples[0].token_ids), f"request {n}"
        assert crowded[n].completion_tokens == params[n].max_tokens


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_c4_equal_prompts_in_one_step_equal_a_cold_one(client, http, first_to_end):
    prompt = [20 + (3 * index + first_to_end) % 200 for index in range(60)]
    assert http.post("/flush_cache").status_code == 200
    cold = list(client.generate(prompt, greedy(30)).samples[0].token_ids)
    assert http.post("/flush_cache").status_code == 200
    lengths = [30, 30]
    lengths[first_to_end] = 5
    both = client.generate_batch([prompt, prompt], [greedy(length) for length in lengths])
    for final, length in zip(both, lengths, strict=True):
        assert list(final.samples[0].token_ids) == cold[:length]
    assert list(client.generate(prompt, greedy(30)).samples[0].token_ids) == cold


def test_c9_a_prefix_under_one_salt_is_not_that_of_another(client):
    prompt = [30 + index for index in range(40)]
    counts = [client.generate(prompt, greedy(2), cache_salt=salt).cached_tokens for salt in ("a", "a", "b", "", "a")]
    assert counts[0] == counts[2] == counts[3] == 0
    assert counts[1] > 0
    assert counts[4] > 0


# -- D: processes ------------------------------------------------------------------------------------------------------


def test_d4_messages_of_a_hundred_kilobytes_arrive_whole(calm, server):
    params = greedy(300, logprobs=20)
    expected = calm.generate(PROMPT, params)
    size = len(expected.to_wire())
    assert size > 60_000, f"a message of {size} bytes is too small to tell"

    def ask(number: int) -> None:
        with Client(server.ready["client_endpoint"], timeout_s=60) as client:
            stream = client.generate(PROMPT, params, stream=True)
            text = "".join(delta.text for delta in stream)
            assert text == stream.final.text == expected.text
            pairs = zip(stream.final.samples[0].logprobs, expected.samples[0].logprobs, strict=True)
            assert all(ours.logprob == pytest.approx(theirs.logprob, abs=1e-3) for ours, theirs in pairs)
            assert len(client.tokenize("sea " * 40_000)) >= 40_000

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert "cannot be read" not in server.stderr()


def test_d5_three_thousand_requests_at_once_all_end(calm):
    finals = [calm.submit([10 + n % 200, 20], greedy(2), stream=False) for n in range(3000)]
    for stream in finals:
        assert stream.result().completion_tokens == 2


STOPPED_CLIENT = """
import sys, time
from frontend import Client
with Client(sys.argv[1]) as client:
    streams = [client.submit([10 + n], {"max_tokens": 200, "ignore_eos": True, "n": 4}) for n in range(5)]
    next(streams[0])
    print("streaming", flush=True)
    sys.stdin.read()
"""


def test_d5_a_client_that_is_stopped_harms_nobody(calm, server):
    endpoint = server.ready["client_endpoint"]
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED_CLIENT, endpoint], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"streaming\n"
        process.send_signal(signal.SIGSTOP)
        expected = calm.generate(PROMPT, greedy(100)).text
        assert calm.generate(PROMPT, greedy(100)).text == expected
        deadline_s = time.monotonic() + 60
        while calm.status().live_count:  # its requests run to their ends, or are aborted
            assert time.monotonic() < deadline_s, calm.status()
    finally:
        process.kill()
        process.communicate()


def test_d6_a_client_that_leaves_takes_its_queued_requests_along(client, strained):
    running = [client.submit([10 + n], greedy(200)) for n in range(8)]
    next(running[0])
    with Client(strained.ready["client_endpoint"], timeout_s=60) as other:
        for n in range(20):
            other.submit([50 + n], greedy(200))
        other.ping()
    deadline_s = time.monotonic() + 60
    while client.status().live_count > len(running):
        assert time.monotonic() < deadline_s, client.status()
    for stream in running:
        stream.abort()


def test_d1_a_frontend_that_is_killed_while_the_model_loads_ends_the_start(strained):
    server = Server(strained.model_dir)
    try:
        while len(pids := server.children()) < 3:
            assert server.process.poll() is None, server.stderr()
        os.kill(pids["frontend"], signal.SIGKILL)
        assert server.process.wait(30) not in (0, None)
        server.assert_nothing_is_left(pids)
        assert "frontend was killed by signal 9" in server.stderr()
    finally:
        server.close()


@pytest.fixture
def port():
    with reserved_port() as number:
        yield number


def test_d3_nobody_is_told_ready_before_the_model_is(strained, port):
    server = Server(strained.model_dir, "--port", str(port))  # of two that are given, the last counts
    try:
        codes = []
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            while not codes or codes[-1] != 200:
                assert server.process.poll() is None, server.stderr()
                with contextlib.suppress(httpx.ConnectError):  # the address is not bound yet
                    early = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code
                    codes.append(http.get("/ready").status_code)
                    assert early in (200, 503)
                    assert early == 503 or codes[-1] == 200
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert {*codes} <= {200, 503}, codes
    finally:
        server.close()


# -- E: bad input ------------------------------------------------------------------------------------------------------


def test_e4_and_e5_nobody_else_reaches_a_socket(strained):
    pids = {"supervisor": strained.process.pid, **strained.children()}
    listening = {address for pid in pids.values() for address in listening_at(pid)}
    assert listening == {strained.ready["http"].removeprefix("http://")}
    [run_dir] = strained.run_dirs.iterdir()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    sockets = [path for path in run_dir.rglob("*") if path.is_socket()]
    assert len(sockets) >= 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in sockets} == {0o600}


def listening_at(pid: int) -> set[str]:
    """Addresses of the TCP sockets that a process listens at, IPv6 ones as they stand in /proc."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                address, port = local.split(":")
                if table == "tcp":
                    address = ".".join(str(byte) for byte in bytes.fromhex(address)[::-1])
                found.add(f"{address}:{int(port, 16)}")
    return found


def test_e7_a_body_or_header_of_a_hundred_megabytes_is_refused_before_it_is_read(strained):
    host, port = strained.ready["http"].removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
    for rest, codes in (
        ("content-length: 104857600\r\n\r\n", (400, 413)),
        ("x: " + "y" * (1 << 20) + "\r\n\r\n", (400, 431)),
    ):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall((head + rest).encode())
            reply = connection.recv(4096).decode()
        assert int(reply.split()[1]) in codes, reply


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest/meta-data", "http://127.0.0.1:1/", "file:///etc/passwd"]
)
def test_e9_images_are_refused_and_never_fetched(http, url):
    content = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    reply = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert reply.status_code == 400
    assert "text only" in reply.json()["error"]["message"]


OPEN = {"/health", "/ready", "/ping", "/dashboard"}  # the page is the same for everybody; its figures need the key


@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer secre", "Bearer secret2", "secret", "Basic secret"])
def test_e10_no_route_but_those_of_health_opens_without_the_key(strained, http, key):
    document = http.get("/openapi.json").json()
    headers = {"authorization": key} if key else {}
    with httpx.Client(base_url=strained.ready["http"], headers=headers, timeout=60) as stranger:
        for path, methods in document["paths"].items():
            for method in methods:
                reply = stranger.request(method, path.replace("{", "").replace("}", ""))
                assert (reply.status_code == 401) == (path not in OPEN), f"{method} {path}: {reply.status_code}"
