"""Msgpack arrays with checked fields: what every message's `to_wire` and `from_fields` are written with.

A message on the wire is one msgpack array `[type code, field, field, ...]`. Number arrays are little-endian byte
strings (`array.array` in memory, so that numpy can view them without a copy): an array of 256 numbers costs
microseconds this way and tens of microseconds as a msgpack list. Everything received is checked for type, length and
range; whatever does not fit raises `WireError`. No pickle, no msgpack extension types.
"""

import math
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import length_hint
from typing import Any, TypeVar

import msgpack

from common.errors import WireError, first_line, shown

INT32_MAX = 2**31 - 1
MESSAGE_LIMIT_BYTES = 64 << 20
LIST_LIMIT = 1 << 16
TEXT_LIMIT_BYTES = 16 << 20
ARRAY_LIMIT = 1 << 24

_LITTLE_ENDIAN = sys.byteorder == "little"

T = TypeVar("T")


def pack(fields: Sequence[Any]) -> bytes:
    """Encode one message, given as its type code followed by its fields."""
    return pack_value(fields)


def pack_value(value: Any) -> bytes:
    """Encode any value that a message may hold."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def unpack_value(data: bytes) -> Any:
    """The way back of `pack_value`, for a part of a message that came as bytes; raises WireError."""
    try:
        return msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True, ext_hook=_refuse_extension)
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a msgpack value: {first_line(error)}") from None


def array_header(length: int) -> bytes:
    """What stands before the items of an array, for arrays whose items were encoded one by one."""
    return bytes(msgpack.Packer().pack_array_header(length))


def unpack(
    data: bytes | memoryview, limit_bytes: int = MESSAGE_LIMIT_BYTES, item_limit: int | None = None
) -> tuple[int, list[Any]]:
    """Decode one message into its type code and its raw fields.

    Args:
        data: the message.
        limit_bytes: its greatest length.
        item_limit: for messages from outside: the most items in all its arrays and maps together. An item can take one
            byte on the wire and a hundred in memory.

    Raises:
        WireError: the bytes or items are too many, not msgpack, or not an array that starts with a small integer.
    """
    if len(data) > limit_bytes:
        raise WireError(f"message of {len(data)} bytes exceeds the limit of {limit_bytes}")
    try:
        fields = msgpack.unpackb(
            data, raw=False, use_list=True, strict_map_key=True, ext_hook=_refuse_extension, **_bounds(item_limit)
        )
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a msgpack message: {first_line(error)}") from None
    if not isinstance(fields, list) or not fields or type(fields[0]) is not int or not 0 <= fields[0] < 256:
        raise WireError("a message is a msgpack array that starts with a type code from 0 to 255")
    return fields[0], fields[1:]


def kinds_of(union: Any) -> dict[int, Any]:
    """The message classes of a union (`A | B | C`, or a single class) by their type codes."""
    return {kind.CODE: kind for kind in getattr(union, "__args__", (union,))}


def decode(
    data: bytes,
    kinds: Mapping[int, Any],
    link: str,
    *,
    limit_bytes: int = MESSAGE_LIMIT_BYTES,
    item_limit: int | None = None,
    further_fields: Sequence[bytes] = (),
) -> Any:
    """Decode one message of a link.

    Args:
        data: the message.
        kinds: the classes that the link carries, as `kinds_of` gives them.
        link: what errors call it, such as `frontend -> scheduler`.
        limit_bytes, item_limit: as for `unpack`.
        further_fields: fields that came in frames of their own.

    Raises:
        WireError: not a message, or not one that the link carries.
    """
    code, fields = unpack(data, limit_bytes, item_limit)
    kind = kinds.get(code)
    if kind is None:
        raise WireError(f"type code {code} is not carried by the link {link}")
    return kind.from_fields([*fields, *further_fields] if further_fields else fields)


def _bounds(item_limit: int | None) -> dict[str, Any]:
    """msgpack's options that hold a message to so many items: each array and map is counted as it closes."""
    if item_limit is None:
        return {}
    left = item_limit

    def count(container: Any) -> Any:
        nonlocal left
        left -= len(container) + 1
        if left < 0:
            raise WireError(f"a message holds at most {item_limit} items")
        return container

    return {"max_array_len": item_limit, "max_map_len": item_limit, "list_hook": count, "object_hook": count}


def _refuse_extension(code: int, data: bytes) -> Any:
    raise WireError(f"msgpack extension type {code} is not part of the protocol")


def array_bytes(numbers: array) -> bytes:  # type: ignore[type-arg]
    """The little-endian bytes of an array (`'B'`, `'H'`, `'i'` or `'f'`)."""
    if _LITTLE_ENDIAN:
        return numbers.tobytes()
    swapped = array(numbers.typecode, numbers)
    swapped.byteswap()
    return swapped.tobytes()


_END: Any = object()
"""What is read behind the last field; it fits no check."""

_ITEM_BYTES = {"B": 1, "H": 2, "i": 4, "f": 4}


class FieldReader:
    """Reads a message's fields in order, each with its check; the end of a `with` refuses what is left.

    Args:
        name: the message's name, for error texts.
        fields: the raw fields, as `unpack` gives them.
    """

    __slots__ = ("_fields", "_left", "_name")

    def __init__(self, name: str, fields: Any) -> None:
        if not isinstance(fields, list):
            raise WireError(f"{name}: wanted an array of fields, got {type(fields).__name__}")
        self._name = name
        self._fields = fields
        self._left = iter(fields)

    def __enter__(self) -> "FieldReader":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and (left_count := length_hint(self._left)):
            count = len(self._fields)
            raise WireError(f"{self._name}: {count} fields, wanted {count - left_count}")

    def _skips_nil(self) -> bool:
        """Whether the next field is nil; it is passed over then."""
        left_count = length_hint(self._left)
        return left_count > 0 and self._fields[-left_count] is None and next(self._left) is None

    def _fail(self, what: str, wanted: str, got: Any) -> WireError:
        if got is _END:
            count = len(self._fields)
            return WireError(f"{self._name}.{what}: the message ends before this field ({count} fields)")
        return WireError(f"{self._name}.{what}: wanted {wanted}, got {shown(got)}")

    def integer(self, what: str, low: int = 0, high: int = INT32_MAX) -> int:
        """An integer in [low, high]."""
        value = next(self._left, _END)
        if type(value) is not int or not low <= value <= high:
            raise self._fail(what, f"an integer in [{low}, {high}]", value)
        return value

    def optional_integer(self, what: str, low: int = 0) -> int | None:
        """An integer from `low` to INT32_MAX, or nil."""
        return None if self._skips_nil() else self.integer(what, low)

    def number(self, what: str) -> float:
        """A finite float (an integer is taken too)."""
        value = next(self._left, _END)
        if type(value) not in (float, int) or not math.isfinite(value):
            raise self._fail(what, "a finite number", value)
        return float(value)

    def optional_number(self, what: str) -> float | None:
        """A finite float, or nil."""
        return None if self._skips_nil() else self.number(what)

    def flag(self, what: str) -> bool:
        """True or False."""
        value = next(self._left, _END)
        if type(value) is not bool:
            raise self._fail(what, "a boolean", value)
        return value

    def text(self, what: str, limit: int = TEXT_LIMIT_BYTES) -> str:
        """A string of at most `limit` characters."""
        value = next(self._left, _END)
        if type(value) is not str or len(value) > limit:
            raise self._fail(what, f"a string of at most {limit} characters", value)
        return value

    def optional_text(self, what: str, limit: int = TEXT_LIMIT_BYTES) -> "str | None":
        """A string of at most `limit` characters, or nil."""
        return None if self._skips_nil() else self.text(what, limit)

    def blob(self, what: str, limit: int = TEXT_LIMIT_BYTES) -> bytes:
        """A byte string of at most `limit` bytes."""
        value = next(self._left, _END)
        if type(value) is not bytes or len(value) > limit:
            raise self._fail(what, f"a byte string of at most {limit} bytes", value)
        return value

    def numbers(self, what: str, typecode: str, limit: int = ARRAY_LIMIT) -> "array[Any]":
        """A number array of at most `limit` items: `'B'` uint8, `'H'` uint16, `'i'` int32, `'f'` float32."""
        value = next(self._left, _END)
        if value == b"":  # most are
            return array(typecode)
        size = _ITEM_BYTES[typecode]
        if type(value) is not bytes or len(value) % size or len(value) > limit * size:
            raise self._fail(what, f"bytes of at most {limit} items of {size} bytes", value)
        items = array(typecode, value)
        if not _LITTLE_ENDIAN:
            items.byteswap()
        return items

    def entries(self, what: str, item: Callable[[Any], T], limit: int = LIST_LIMIT) -> tuple[T, ...]:
        """An array of at most `limit` items, each decoded by `item`."""
        value = next(self._left, _END)
        if type(value) is not list or len(value) > limit:
            raise self._fail(what, f"an array of at most {limit} items", value)
        return tuple(map(item, value)) if value else ()

    def mapping(self, what: str, limit: int = 256) -> dict[str, Any]:
        """A map of at most `limit` entries with string keys; the values are the caller's to check."""
        value = next(self._left, _END)
        if type(value) is not dict or len(value) > limit or any(type(key) is not str for key in value):
            raise self._fail(what, f"a map of at most {limit} string keys", value)
        return value

    def anything(self, what: str) -> Any:
        """Whatever stands there: plain msgpack values that the caller has to check."""
        value = next(self._left, _END)
        if value is _END:
            raise self._fail(what, "anything", value)
        return value

    def nested(self, what: str, item: Callable[[Any], T]) -> T:
        """One nested array, decoded by `item`."""
        return item(self.anything(what))
