"""Faults that engines of this kind have had, tried on the real processes; each test names the row it stands for.

One server takes all of it: after every test it must be idle with no block lost, and answer a good request.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest
import zmq

from common.errors import RequestError, TriremeError
from common.sampling_params import SamplingParams
from frontend import Client
from tests.support.idle import assert_becomes_idle
from tests.support.patient_http import post

pytestmark = pytest.mark.timeout(180)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = "The sea, the sea, the open sea"
BLOCK_SIZE, BLOCK_COUNT = 4, 256


@pytest.fixture
def client(server):
    with Client(server.ready["client_endpoint"], timeout_s=30) as client:
        yield client


@pytest.fixture
def url(server):
    return server.ready["http"]


@pytest.fixture(autouse=True)
def unharmed(server):
    """Checks 1 and 5: after the test the engine is idle, every block is accounted for, and a good request succeeds."""
    with Client(server.ready["client_endpoint"], timeout_s=30) as client:
        before = client.generate(PROMPT, GREEDY).text
        yield
        assert client.generate(PROMPT, GREEDY).text == before
        assert_becomes_idle(client)


def text_of(client, params, prompt=PROMPT):
    """The whole text, and the streamed deltas; they must agree (check 2)."""
    whole = client.generate(prompt, params)
    deltas = list(client.generate(prompt, params, stream=True))
    assert "".join(delta.text for delta in deltas) == whole.text
    return whole, deltas


def test_a1_nothing_of_a_stop_string_is_ever_streamed(client):
    plain = client.generate(PROMPT, GREEDY).text
    for start in range(1, len(plain) - 4, 3):
        stop = plain[start : start + 4]
        whole, _ = text_of(client, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=stop))
        assert whole.text == plain[: plain.index(stop)]
        assert whole.samples[0].finish_reason == "stop"
        assert whole.samples[0].stop_reason == stop


def test_a1_what_was_held_back_for_a_stop_string_is_flushed_at_the_end(client):
    plain = client.generate(PROMPT, GREEDY).text
    whole, _ = text_of(client, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=plain[-3:] + "\0"))
    assert whole.text == plain
    assert whole.samples[0].finish_reason == "length"


@pytest.mark.parametrize("seed", range(4))
def test_a5_a_character_cut_by_max_tokens_shows_as_one_replacement_at_most(client, url, seed):
    pieces = client.tokenize("ü🌋鯨🦑")
    assert len(pieces) > 8, "wanted characters that take several tokens"
    for max_tokens in range(1, 7):
        params = SamplingParams(
            temperature=3.0, seed=seed, max_tokens=4 * max_tokens, ignore_eos=True, allowed_token_ids=pieces
        )
        whole, deltas = text_of(client, params, "海は青い 🌊")
        at_once = client.detokenize(whole.samples[0].token_ids, skip_special_tokens=True)
        assert whole.text == at_once, f"seed {seed}, max_tokens {4 * max_tokens}: {list(whole.samples[0].token_ids)}"
        end = 0
        for delta in deltas[:-1]:
            end += len(delta.text)
            assert not delta.text.endswith("\ufffd") or at_once[end - 1] == "\ufffd", f"{delta} before {at_once!r}"
        body = {"model": "x", "prompt": "🌊", "max_tokens": max_tokens, "temperature": 3.0, "seed": seed}
        reply = post(url + "/v1/completions", json={key: body[key] for key in body if key != "model"})
        assert reply.status_code == 200
        json.loads(reply.content.decode("utf-8"))


def test_b1_penalties_stay_with_their_row(client):
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=2.0, max_tokens=16, ignore_eos=True),
        SamplingParams(seed=99, top_k=1, max_tokens=16, ignore_eos=True),
        SamplingParams(seed=5, temperature=1.5, frequency_penalty=1.0, presence_penalty=0.5, max_tokens=16),
    ]
    prompts = ["The sea", "The blue, the fresh, the ever free, the open sea", "naïve café"]
    alone = [client.generate(prompt, each).text for prompt, each in zip(prompts, params, strict=True)]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        together = client.generate_batch([prompts[i] for i in order], [params[i] for i in order])
        assert [final.text for final in together] == [alone[i] for i in order]


def test_b3_min_tokens_holds_through_the_real_processes(client):
    eos = client.tokenize("<|end|>")[-1]
    params = SamplingParams(temperature=0.0, logit_bias={eos: 100.0}, min_tokens=4, max_tokens=20)
    final = client.generate(PROMPT, params)
    ids = list(final.samples[0].token_ids)
    assert ids[4] == eos
    assert eos not in ids[:4]
    assert len(ids) == 5
    assert final.samples[0].finish_reason == "stop"


def test_b8_samples_of_one_request_differ_and_come_again(client):
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    first, second = client.generate(PROMPT, params), client.generate(PROMPT, params)
    texts = [sample.text for sample in first.samples]
    assert len(set(texts)) == 4
    assert texts == [sample.text for sample in second.samples]


def test_c1_a_request_that_can_never_fit_is_refused_and_the_next_is_served(client):
    too_long = [5] * 600  # the model's limit is 512
    with pytest.raises(RequestError, match="600") as caught:
        client.generate(too_long, GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert client.generate("Hi", GREEDY).text


@pytest.mark.parametrize("length", [2 * BLOCK_SIZE - 1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_c2_a_prompt_that_ends_at_a_block_boundary_gives_the_same_twice(client, length):
    prompt = [(7 * index + length) % 200 + 10 for index in range(length)]
    cold = client.generate(prompt, GREEDY)
    warm = client.generate(prompt, GREEDY)
    assert list(warm.samples[0].token_ids) == list(cold.samples[0].token_ids)
    assert cold.cached_tokens == 0
    assert length - BLOCK_SIZE <= warm.cached_tokens <= length - 1


def test_c5_random_aborts_lose_no_block(client):
    rng = random.Random(7)
    streams = []
    for index in range(150):
        params = SamplingParams(n=rng.choice([1, 1, 2]), max_tokens=rng.randint(1, 60), seed=index, ignore_eos=True)
        prompt = [rng.randrange(10, 300) for _ in range(rng.randint(1, 90))]
        streams.append(client.submit(prompt, params, stream=True))
        if rng.random() < 0.7:
            victim = streams.pop(rng.randrange(len(streams)))
            if rng.random() < 0.5:
                next(victim, None)
            victim.abort()
    for stream in streams:
        assert stream.result().samples


def test_c7_aborts_of_what_is_not_there_are_ignored(client):
    final = client.generate(PROMPT, GREEDY)
    for request_id in (final.request_id, final.request_id, "never heard of"):
        client.abort(request_id)
    assert client.generate(PROMPT, GREEDY).samples == final.samples


def test_c12_prompt_logprobs_are_the_same_with_a_warm_cache(client):
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)
    prompt = list(range(20, 53))
    first, second = client.generate(prompt, params), client.generate(prompt, params)
    assert first.prompt_logprobs == second.prompt_logprobs
    assert len(first.prompt_logprobs) == len(prompt)
    assert first.prompt_logprobs[0] is None


def test_d8_an_id_in_use_is_refused_for_its_client_and_free_for_others(client, server):
    long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    first = client.submit(PROMPT, long, stream=True, request_id="mine")  # of whose end nobody looks before the next
    with pytest.raises(TriremeError, match="mine"):
        client.submit(PROMPT, GREEDY, request_id="mine").result()
    with Client(server.ready["client_endpoint"], timeout_s=30) as other:
        assert other.submit(PROMPT, GREEDY, request_id="mine").result().text
    first.abort()


FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400", "-5", '"x"', "[1]", "true"])
def test_e1_numbers_that_are_none_are_refused_over_http(url, name, text):
    body = f'{{"prompt": "a", "{name}": {text}}}'
    reply = post(url + "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert json.loads(reply.text)["error"]["message"]


RAW_VALUES = [float("nan"), float("inf"), -5.0, "x", [1], True, None]


def test_e1_numbers_that_are_none_are_refused_over_the_client_socket(server):
    with RawClient(server.ready["client_endpoint"]) as raw:
        for name in FLOATS:
            for value in RAW_VALUES:
                reply = raw.generate({name: value})
                assert reply[0] == 83, f"{name}={value!r} was taken"


@pytest.mark.parametrize("token_id", [100_000, -1, 2**31, 2**63])
def test_e2_ids_that_the_model_lacks_are_refused_in_every_field(url, token_id):
    for fields in (
        {"prompt": [token_id]},
        {"prompt": [[5, token_id]]},
        {"prompt": "a", "stop_token_ids": [token_id]},
        {"prompt": "a", "logit_bias": {str(token_id): 1.0}},
        {"prompt": "a", "allowed_token_ids": [token_id]},
    ):
        reply = post(url + "/v1/completions", json=fields)
        assert reply.status_code == 400, f"{fields}: {reply.text}"
        assert json.loads(reply.text)["error"]["message"]


class RawClient:
    """A DEALER that sends what it is told to; type codes as docs/protocol.md gives them."""

    def __init__(self, endpoint):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close(0)
        self._context.term()

    def send(self, data):
        self._socket.send(data)

    def receive(self):
        assert self._socket.poll(20_000), "no reply within 20 s"
        return msgpack.unpackb(self._socket.recv())

    def generate(self, params):
        self.send(generate_message(params))
        return self.receive()


def generate_message(params):
    """A Generate with raw sampling parameters, made from a good one."""
    from common.client_messages import Generate

    code, *fields = msgpack.unpackb(Generate(request_id="r", prompt="a", params={}, stream=False).to_wire())
    index = next(i for i, field in enumerate(fields) if field == {})
    fields[index] = params
    return msgpack.packb([code, *fields])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xc1",
        b"\x91" * 100_000 + b"\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\x40\x00\x00\x00",
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
        msgpack.packb([1, 2, 3]),
        msgpack.packb([255]),
        msgpack.packb({"a": 1}),
    ],
    ids=["empty", "zero", "reserved", "deep", "huge-array", "huge-bytes", "pickle", "other-link", "unknown", "map"],
)
def test_e11_bad_bytes_cost_one_message(server, data):
    with RawClient(server.ready["client_endpoint"]) as raw:
        raw.send(data)
        raw.send(generate_message({"max_tokens": 2}))
        codes = [raw.receive()[0]]
        while codes[-1] != 82:
            codes.append(raw.receive()[0])
        assert [code for code in codes if code != 87] == [83, 82]  # a Pong may come unasked


def test_e11_random_mutations_of_a_good_message_never_silence_the_engine(server):
    rng = random.Random(3)
    good = generate_message({"max_tokens": 1})
    with RawClient(server.ready["client_endpoint"]) as raw:
        for _ in range(300):
            data = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            raw.send(bytes(data[: rng.randint(1, len(data))]))
        raw.send(generate_message({"max_tokens": 3, "ignore_eos": True}))
        replies = []
        while not (replies and replies[-1][0] == 82 and len(replies[-1][2][0][2]) == 12):
            replies.append(raw.receive())  # the last one's three token ids end it; `receive` does not wait for ever
        assert sum(reply[0] == 83 for reply in replies) > 1, "no mutation was refused"


def test_e7_huge_numbers_are_refused(url):
    for fields in ({"n": 10**6}, {"logprobs": 10**6}, {"stop": ["x"] * 10**5}, {"max_tokens": -1}, {"best_of": 10**6}):
        reply = post(url + "/v1/completions", json={"prompt": "a", **fields})
        assert 400 <= reply.status_code < 500, f"{list(fields)}: {reply.status_code}"


def test_many_clients_at_once_get_their_own_answers(server):
    def ask(number):
        with Client(server.ready["client_endpoint"], timeout_s=60) as client:
            return client.generate([10 + number, 20, 30], GREEDY).samples[0].token_ids

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(48)))
    for number in (0, 17, 47):
        assert list(ask(number)) == list(together[number])
