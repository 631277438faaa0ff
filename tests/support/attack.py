"""A malicious client of a frontend's client socket, which checks that the frontend still serves everybody."""

import dataclasses
import random
from array import array
from collections import Counter

import msgpack
import zmq

from common import client_messages as wire
from common.errors import WireError
from common.sampling_params import SamplingParams
from tests.support import hostile

PARAMS = [field.name for field in dataclasses.fields(SamplingParams)]
CODES_OF_ERRORS = {"bad_message", "protocol_version", "invalid_parameter", "context_length_exceeded",
                   "duplicate_request_id", "no_chat_template", "deadline_exceeded", "engine_restarted"}  # fmt: skip
GOOD = [
    wire.Hello(1, "me"),
    wire.Generate(request_id="a", prompt="the sea", params={"max_tokens": 3, "stop": ["x"], "temperature": 0.5}),
    wire.Generate(request_id="b", prompt=array("i", [5, 6]), params={"max_tokens": 2, "n": 2, "logprobs": 2}),
    wire.Generate(request_id="c", prompt=[{"role": "user", "content": "x"}], params={"max_tokens": 1}, chat={}),
    wire.Generate(
        request_id="d", prompt="x", params={"max_tokens": 2, "logit_bias": [[5, 1.0]], "seed": 1}, priority=1
    ),
    wire.Abort("a"),
    wire.Tokenize("t", "text", False),
    wire.Detokenize("u", array("i", [5, 6]), True),
    wire.GetStatus("v"),
    wire.Ping("w"),
    wire.Embed(request_id="e", prompt="x", pooling="mean"),
    wire.Resume(
        wire.Generate(request_id="f", prompt="x", params={"max_tokens": 4, "n": 2, "stop": ["x"]}),
        (wire.SampleSoFar(0, array("i", [5, 6]), "stop", "x"), wire.SampleSoFar(1, array("i", [7]))),
    ),
]
GOOD_BYTES = [message.to_wire() for message in GOOD]


class Attacker:
    """A DEALER that sends messages gone wrong and reads what comes back; a context manager."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def __enter__(self) -> "Attacker":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def send(self, seed: int) -> list[list]:
        """One message gone wrong (the seed says how), and all replies until the frontend has answered a Ping after it.

        Replies to what takes longer may come with those of a later message.
        """
        rng = random.Random(seed)
        frames = [hostile.mutated(rng, GOOD_BYTES) if rng.random() < 0.5 else _odd_request(rng)]
        if rng.random() < 0.1:
            frames = rng.choice([[b"", *frames], frames * 2, [*frames, b"\xc1"], [b"", b""], frames * 40])
        self._socket.send_multipart(frames)
        self._socket.send(wire.Ping(f"after {seed}").to_wire())
        replies = []
        while True:
            assert self._socket.poll(20_000), f"no answer within 20 s to hostile message {seed}: {frames!r:.300}"
            reply = msgpack.unpackb(self._socket.recv())
            wire.decode_to_client(msgpack.packb(reply))
            if reply == [wire.Pong.CODE, f"after {seed}"]:
                break
            replies.append(reply)
        errors = [reply for reply in replies if reply[0] == wire.ErrorReply.CODE and reply[2] == "bad_message"]
        if frames[1:] and frames[-1] == wire.MORE_FOLLOWS:
            frames.pop()
        bad_count = 1 if len(frames) > wire.FRAMES_LIMIT else sum(not _readable(frame) for frame in frames)
        assert len(errors) == bad_count, f"hostile message {seed}: wanted {bad_count} bad_message, got {replies!r:.500}"
        assert all(error[3] for error in errors), f"hostile message {seed}: the error says nothing"
        return replies


def attack(endpoint: str, seeds: range) -> Counter:
    """Send one message gone wrong for each seed; how often each kind of reply came.

    Raises:
        AssertionError: a message was not answered as it ought to be; names the seed.
    """
    seen: Counter = Counter()
    with Attacker(endpoint) as attacker:
        for seed in seeds:
            for reply in attacker.send(seed):
                kind = reply[2] if reply[0] == wire.ErrorReply.CODE else reply[0]
                assert reply[0] != wire.ErrorReply.CODE or kind in CODES_OF_ERRORS, f"near message {seed}: {reply}"
                seen[kind] += 1
    return seen


def _odd_request(rng: random.Random) -> bytes:
    """A request in good form whose parameters or chat options have values of all kinds."""
    message = rng.choice(GOOD[1:5])
    code, request_id, prompt, params, *rest = msgpack.unpackb(message.to_wire())
    for name in rng.choices(PARAMS, k=rng.randint(1, 2)):
        params[name] = rng.choice(hostile.VALUES)
    if rng.random() < 0.2:
        prompt = [{"role": "user", rng.choice(["content", "x", "tool_calls"]): rng.choice(hostile.VALUES)}]
        options = ("tools", "template_kwargs", "add_generation_prompt", "continue_final_message", "x")
        rest[-1] = {rng.choice(options): rng.choice(hostile.VALUES)}
        params = {"max_tokens": 1}
    return msgpack.packb([code, request_id, prompt, params, *rest])


def _readable(data: bytes) -> bool:
    try:
        wire.decode_from_client(data)
    except WireError:
        return False
    return True
