"""Malformed messages: bytes that no well-behaved peer sends, broken in every way that a fuzzer knows.

`mutated` is deterministic: a seed and the messages to start from give the same bytes, so that a failing check replays.
"""

import random
from collections.abc import Sequence
from typing import Any

import msgpack

HUGE_HEADERS = [
    b"\xdd\xff\xff\xff\xff",  # array
    b"\xdf\xff\xff\xff\xff",  # map
    b"\xdb\xff\xff\xff\xff",  # str
    b"\xc6\xff\xff\xff\xff",  # bin
    b"\xc9\xff\xff\xff\xff\x05",  # ext
    b"\xdc\xff\xff",
    b"\xc6\x04\x00\x00\x00",
]
DEEP = [b"\x91" * depth + b"\x01" for depth in (10, 500, 1000, 1023, 1024, 2000, 100_000)]
DEEP += [b"\x81\xa1a" * depth + b"\x01" for depth in (500, 1024, 100_000)]
PICKLE = b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94."
RAW = [b"", b"\x00", b"\xc1", b"\x90", b"\x91\xc0", b"\x91\xcc\xff", b"\x91\xcd\x01\x00", PICKLE, *HUGE_HEADERS, *DEEP]


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
    0.0, -0.0, 0.5, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324,
    "", "x", "\x00", "é" * 100, "x" * 10_000, b"", b"\x00", b"\xff" * 3, b"\xff" * 4096, [], [[]], {}, {"": {}},
    {"a": [1, {"b": None}]}, [None] * 300, [[1, 2]] * 50, {str(n): n for n in range(300)}, nested(200), nested(450),
    msgpack.ExtType(5, b"abc"), msgpack.Timestamp(1, 2),
]  # fmt: skip
"""What may stand where something else is wanted."""


def mutated(rng: random.Random, messages: Sequence[bytes]) -> bytes:
    """One message gone wrong in one to three ways; sometimes still a good one."""
    data = rng.choice(messages)
    for _ in range(rng.randint(1, 3)):
        data = rng.choice([_other_value, _other_value, _other_bytes, _cut, _spliced, _huge_header, _raw])(
            rng, data, messages
        )
    return data


def _other_value(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A value of another kind somewhere in the tree, a field more, less or twice."""
    try:
        tree = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return data
    if not isinstance(tree, list) or not tree:
        return data
    place, key = _somewhere(rng, tree)
    match rng.randrange(4):
        case 0 if isinstance(place, list):
            place.insert(key, rng.choice(VALUES))
        case 1:
            del place[key]
        case 2 if isinstance(place, list):
            place.insert(key, place[key])
        case _:
            place[key] = rng.choice(VALUES)
    try:
        return msgpack.packb(tree)
    except (ValueError, RecursionError):  # nested too deep to be packed again
        return data


def _somewhere(rng: random.Random, tree: Any) -> tuple[Any, Any]:
    """A container in the tree and a key of it; more often near the root."""
    while True:
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        inner = tree[key]
        if not isinstance(inner, list | dict) or not inner or rng.random() < 0.4:
            return tree, key
        tree = inner


def _other_bytes(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _cut(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start = 0 if rng.random() < 0.7 else rng.randrange(len(data) + 1)
    return data[start : rng.randint(start, len(data))]


def _spliced(rng: random.Random, data: bytes, messages: Sequence[bytes]) -> bytes:
    other = rng.choice(messages)
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def _huge_header(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(HUGE_HEADERS) + data[at:]


def _raw(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return rng.choice(RAW) if rng.random() < 0.2 else data
