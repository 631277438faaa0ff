"""Every message between clients and the frontend survives the wire, and nothing else gets in."""

import contextlib
from array import array

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import client_messages as wire
from common.errors import WireError
from common.wire import pack, unpack

TOP = wire.TopLogprob(5, "é", b"\xc3\xa9", -0.25, 1)
LOGPROB = wire.TokenLogprob(7, "", b"\xc3", -0.5, 2, (TOP, TOP))
IDS = array("i", [1, 2, 2**31 - 1])
FROM_CLIENT = [
    wire.Hello(1, "me"),
    wire.Generate(request_id="a", prompt="text", params={"max_tokens": 5, "stop": ["x"]}, timeout_ms=5, priority=-3),
    wire.Generate(request_id="", prompt=IDS, model_defaults=False, stream=False, add_special_tokens=True),
    wire.Generate(request_id="c", prompt=[{"role": "user", "content": [{"type": "text"}]}], chat={"tools": [{}]}),
    wire.Abort("a"),
    wire.Tokenize("a", "text", False),
    wire.Detokenize("a", IDS, True),
    wire.GetStatus("a"),
    wire.Ping("a"),
    wire.Embed(request_id="a", prompt="text", pooling="mean"),
    wire.Resume(
        wire.Generate(request_id="a", prompt="text", timeout_ms=5),
        (wire.SampleSoFar(0, IDS), wire.SampleSoFar(2, IDS, "stop", "x")),
    ),
    wire.Resume(wire.Embed(request_id="a", prompt=IDS)),
]
TO_CLIENT = [
    wire.Welcome(1, ("model", "other"), 2048, 400, "serving"),
    wire.Welcome(2, ("model",), 2048, 400, "restarting", "an engine"),
    wire.Deltas((("a", wire.Delta(1, "text", IDS, [LOGPROB], "stop", "x")), ("b", wire.Delta(0, "", array("i"))))),
    wire.Final(
        request_id="a",
        samples=(
            wire.SampleResult(0, "text", IDS, "stop", 7, (LOGPROB,)),
            wire.SampleResult(1, "", array("i"), "abort"),
        ),
        prompt_token_ids=IDS,
        prompt_logprobs=(None, LOGPROB),
        prompt_tokens=3,
    ),
    wire.ErrorReply("a", "queue_full", "too many", None, 500, 429),
    wire.TokenizeReply("a", IDS),
    wire.DetokenizeReply("a", "text"),
    wire.StatusReply("a", "serving", "", ("model",), 3, {"block_size": 16}, {"steps": 2**40}),
    wire.Pong("a"),
]
ALL = [(wire.decode_from_client, example) for example in FROM_CLIENT]
ALL += [(wire.decode_to_client, example) for example in TO_CLIENT]
BOTH = pytest.mark.parametrize(("decode", "message"), ALL, ids=lambda value: type(value).__name__)


@BOTH
def test_round_trip(decode, message):
    assert decode(message.to_wire()) == message


@BOTH
def test_each_field_is_needed_and_none_may_follow(decode, message):
    code, fields = unpack(message.to_wire())
    for count in range(len(fields)):
        with pytest.raises(WireError):
            decode(pack([code, *fields[:count]]))
    with pytest.raises(WireError):
        decode(pack([code, *fields, None]))


@BOTH
@given(position=st.integers(0, 30), value=st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6,
))  # fmt: skip
def test_any_value_anywhere_is_a_message_or_a_wire_error(decode, message, position, value):
    code, fields = unpack(message.to_wire())
    fields[position % len(fields)] = value
    with contextlib.suppress(WireError):
        assert type(decode(pack([code, *fields]))) is type(message)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_message_or_a_wire_error(data):
    for decode in (wire.decode_from_client, wire.decode_to_client):
        with contextlib.suppress(WireError):
            assert unpack(data)[0] == decode(data).CODE


def test_the_request_id_of_a_message_that_cannot_be_read():
    assert wire.request_id_of(pack([61, "mine", 5])) == "mine"
    assert (
        wire.request_id_of(msgpack.packb([61, "é" * 256, {5: 1}, "x" * 10_000, msgpack.ExtType(1, b"")])) == "é" * 256
    )
    assert wire.request_id_of(pack([61, "x" * 257])) == wire.request_id_of(b"\x91" * 100_000) == ""
    assert wire.request_id_of(pack([68, [61, "mine", 5], 7])) == wire.request_id_of(pack([68, [67, "mine"]])) == "mine"
    assert wire.request_id_of(pack([68, [61], []])) == wire.request_id_of(pack([68, "x", []])) == ""
    assert wire.request_id_of(pack([61, 5])) == wire.request_id_of(b"\xc1") == wire.request_id_of(pack([61])) == ""


def test_codes_of_the_other_direction_are_refused():
    with pytest.raises(WireError, match="not carried"):
        wire.decode_from_client(wire.Pong("a").to_wire())
    with pytest.raises(WireError, match="not carried"):
        wire.decode_to_client(wire.Ping("a").to_wire())


def test_only_a_request_can_be_resumed():
    for request in (wire.Ping("a").to_wire(), wire.Resume(wire.Embed(request_id="a", prompt="x")).to_wire()):
        with pytest.raises(WireError, match="wanted a Generate or an Embed"):
            wire.decode_from_client(pack([wire.Resume.CODE, list(msgpack.unpackb(request)), []]))


def test_codes_are_unique():
    codes = [type(message).CODE for _, message in ALL]
    assert len({*codes}) == len({type(message) for _, message in ALL})


@given(rows=st.lists(st.tuples(st.text(), st.integers(0, 255), st.text(), st.integers(0, 2**31 - 1)), max_size=20))
def test_rows_put_together_from_their_parts_are_the_same_message(rows):
    ids = [array("i", [token_id]) for _, _, _, token_id in rows]
    entries = [(name, wire.Delta(index, text, one)) for (name, index, text, _), one in zip(rows, ids, strict=True)]
    parts = [wire.Deltas.row_start(name, index) + wire.Deltas.row_end(text, token) for name, index, text, token in rows]
    message = wire.Deltas(tuple(entries))
    assert wire.Deltas.wire_of(parts) == message.to_wire()
    assert message.to_wire() == pack([wire.Deltas.CODE, [[name, *delta.to_list()] for name, delta in entries]])


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_a_message_of_any_length_is_put_together(count):
    assert unpack(wire.Deltas.wire_of([b"\x00"] * count)) == (wire.Deltas.CODE, [[0] * count])
