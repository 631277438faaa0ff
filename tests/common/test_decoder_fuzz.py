"""Every decoder under bytes that went wrong: a message or a WireError comes out, in bounded memory.

A failing check names the seed that replays it.
"""

import random
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import client_messages as wire
from common.errors import WireError, shown
from common.wire import unpack
from frontend import text_messages as texts
from frontend.large_json import LargeBody
from tests.common.test_client_messages import FROM_CLIENT, TO_CLIENT
from tests.common.test_messages import EXAMPLES
from tests.support import hostile

TEXT_JOBS = [
    texts.EncodeText(1, "a text", True),
    texts.EncodeChat(2, texts.ChatPrompt(messages=[{"role": "user", "content": "x"}], tools=[{"a": 1}]), False),
    texts.DecodeIds(3, wire.Detokenize("", FROM_CLIENT[6].token_ids).token_ids, True),
    texts.ParseJson(4, b'{"prompt": [1, 2]}', ("prompt",)),
]
TEXT_RESULTS = [
    texts.TextReady(0),
    texts.TokenIds(1, TEXT_JOBS[2].token_ids),
    texts.Text(2, "a text"),
    texts.TextRefused(3, "why", "invalid_parameter", "messages", 400),
    texts.Json.of(4, LargeBody({"a": None}, {"prompt": [TEXT_JOBS[2].token_ids]})),
]
LINKS = {
    **EXAMPLES,
    wire.decode_from_client: FROM_CLIENT,
    wire.decode_to_client: TO_CLIENT,
    texts.decode_for_text_process: TEXT_JOBS,
    texts.decode_from_text_process: TEXT_RESULTS,
}
EVERY_LINK = pytest.mark.parametrize("decode", LINKS, ids=lambda decode: decode.__name__)
ROUNDS = 600

VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=20),
        st.binary(max_size=20), st.sampled_from(hostile.VALUES),
    ),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def as_bytes(message) -> bytes:
    """A message in one piece, whichever way it is sent."""
    if not hasattr(message, "to_frames"):
        return message.to_wire()
    first, *long = message.to_frames()
    return msgpack.packb([*msgpack.unpackb(first), *long])


def outcome(decode, data: bytes, replay: str) -> str:
    """What a decoder makes of bytes; anything but a message or a WireError fails the test."""
    try:
        return type(decode(data)).__name__
    except WireError as error:
        assert len(str(error)) < 1000, f"{replay}: an error of {len(str(error))} characters"
        return "WireError"
    except BaseException as error:
        raise AssertionError(f"{replay}: {decode.__name__} raised {error!r} for {data[:200]!r}") from error


@EVERY_LINK
def test_messages_gone_wrong(decode):
    good = [as_bytes(message) for message in LINKS[decode]]
    seen = set()
    for seed in range(ROUNDS):
        data = hostile.mutated(random.Random(seed), good)
        seen.add(outcome(decode, data, f"hostile.mutated(Random({seed}))"))
    assert "WireError" in seen
    assert len(seen) > 1, "nothing came through: the fuzzer does not reach the fields"


@EVERY_LINK
@settings(max_examples=30)
@given(data=st.binary(max_size=300) | VALUES.map(msgpack.packb))
def test_anything_at_all(decode, data):
    known = {type(message).__name__ for message in LINKS[decode]}
    assert outcome(decode, data, "hypothesis") in {"WireError", *known}


@EVERY_LINK
@settings(max_examples=40)
@given(data=st.data())
def test_any_fields_behind_each_type_code(decode, data):
    code = data.draw(st.sampled_from([type(message).CODE for message in LINKS[decode]]))
    fields = data.draw(st.lists(VALUES, max_size=12))
    wanted = {type(message).__name__ for message in LINKS[decode] if code == type(message).CODE}
    assert outcome(decode, msgpack.packb([code, *fields]), "hypothesis") in {"WireError", *wanted}


@EVERY_LINK
def test_the_worst_bytes_by_hand(decode):
    for data in hostile.RAW:
        assert outcome(decode, data, "hostile.RAW") == "WireError", data[:40]
    code = type(LINKS[decode][0]).CODE
    for data in hostile.DEEP + hostile.HUGE_HEADERS:
        assert outcome(decode, b"\x92" + msgpack.packb(code) + data, "deep or huge field") == "WireError"


def test_the_id_of_whatever_was_wrong_never_raises():
    good = [message.to_wire() for message in FROM_CLIENT]
    for seed in range(ROUNDS):
        found = wire.request_id_of(hostile.mutated(random.Random(seed), good))
        assert isinstance(found, str), f"seed {seed}"
        assert len(found) <= wire.ID_LIMIT, f"seed {seed}"


@pytest.mark.parametrize(
    "data",
    [
        b"\x92\x3d\xdd\x00\x20\x00\x00" + b"\x90" * (1 << 21),
        b"\x92\x3d\xdd\x00\x20\x00\x00" + b"\x80" * (1 << 21),
        b"\x92\x3d\xdd\x00\x20\x00\x00" + b"\xc0" * (1 << 21),
        b"\x92\x3d\xdc\x00\x80" + (b"\xdd\x00\x00\x40\x00" + b"\x90" * (1 << 14)) * 128,
    ],
    ids=["arrays", "maps", "nils", "arrays of arrays"],
)
def test_what_a_stranger_sends_takes_little_more_memory_than_its_bytes(data):
    """2 MiB of empty arrays took 136 MB, and a message may have 64 MiB."""
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            wire.decode_from_client(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 90e6, f"{len(data)} bytes took {peak / 1e6:.0f} MB"


def test_a_message_may_hold_so_many_items_and_no_more():
    assert unpack(msgpack.packb([1, [0] * 90, {"a": 1}]), item_limit=100) == (1, [[0] * 90, {"a": 1}])
    with pytest.raises(WireError, match="a message holds at most 100 items"):
        unpack(msgpack.packb([1, [0] * 90, [0] * 10]), item_limit=100)
    with pytest.raises(WireError):
        unpack(msgpack.packb([1, [0] * 200]), item_limit=100)


@pytest.mark.parametrize("value", [hostile.nested(5000), b"x" * 10**7, "x" * 10**7, list(range(10**6)), 2**60, None])
def test_a_value_is_shown_short(value):
    assert len(shown(value)) <= 80
