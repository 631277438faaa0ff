"""Parses JSON bodies that are too large for the event loop, and brings them into a form that costs the loop little.

A megabyte of JSON keeps the parser, and with it the interpreter's lock, for 0.2 ms if it is one text, 5 if it is token
ids, 50 if it is empty lists. So a text process does the parsing (`text_work`). What comes back has the token ids as
arrays and few other values; all that is left for the loop is copying long texts. Knows no endpoint: the caller decides
what a body may contain.
"""

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.errors import RequestError

ITEM_LIMIT = 1 << 15
"""Items in all lists and objects of a large body, token ids aside: some milliseconds of work on the loop."""
WINDOW_BYTES = 1 << 16
"""Bytes that are looked through at once."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LargeBody:
    """A parsed body.

    Attributes:
        values: what it holds, but for token ids.
        token_ids: fields of it that are a list of token ids, as int32; a list of them where it was a list of lists.
    """

    values: dict[str, Any]
    token_ids: "dict[str, array[int] | list[array[int]]]" = field(default_factory=dict)


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RequestError: anything else.
    """
    if not body.strip():
        raise RequestError("the request has no body: wanted a JSON object", code="invalid_json")
    try:
        values = msgspec.json.decode(body.removeprefix(_BYTE_ORDER_MARK))
    except RecursionError:
        raise too_deep() from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise RequestError(f"the body: wanted a JSON object, got {type(values).__name__}", code="invalid_json")
    return values


def parse_large(body: bytes, id_fields: Collection[str]) -> LargeBody:
    """A large body, with its token ids taken out.

    Args:
        id_fields: which of its fields may hold token ids.

    Raises:
        RequestError: not a JSON object, or more than ITEM_LIMIT items in it.
    """
    _check_containers(body)
    values = parse_json(body)
    token_ids = {name: ids for name in id_fields if (ids := _token_ids(values.get(name))) is not None}
    rest = {name: value for name, value in values.items() if name not in token_ids}
    _check_count(rest)
    return LargeBody(rest, token_ids)


def _check_containers(body: bytes) -> None:
    """Refuse what would need a hundred times its size in memory, before it does; in time and memory for any body."""
    if body.count(b"[") + body.count(b"{") <= ITEM_LIMIT:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote begins or ends a string
    count, is_string = 0, 0
    for start in range(0, len(plain), WINDOW_BYTES):
        parts = plain[start : start + WINDOW_BYTES].split(b'"')
        bare = b"".join(parts[is_string::2])
        count += bare.count(b"[") + bare.count(b"{")
        if count > ITEM_LIMIT:
            raise _too_many()
        is_string ^= (len(parts) - 1) & 1


def _token_ids(value: Any) -> "array[int] | list[array[int]] | None":
    """Token ids, or lists of them, as arrays; None for anything else, or ids that int32 cannot hold."""
    if not isinstance(value, list) or not value:
        return None
    if all(type(entry) is list and entry for entry in value):
        lists = [_id_array(entry) for entry in value]
        return [ids for ids in lists if ids is not None] if None not in lists else None
    return _id_array(value)


def _id_array(values: list[Any]) -> "array[int] | None":
    if not all(type(value) is int for value in values):
        return None
    try:
        return array("i", values)
    except OverflowError:
        return None


def _check_count(values: Mapping[str, Any]) -> None:
    left: list[Any] = [values]
    count = 0
    while left:
        value = left.pop()
        count += len(value)
        if count > ITEM_LIMIT:
            raise _too_many()
        inner = value.values() if isinstance(value, dict) else value
        left += [entry for entry in inner if isinstance(entry, dict | list)]


def too_deep() -> RequestError:
    """The refusal of a body that some process cannot read because of how deep it is nested."""
    return RequestError("the body is nested too deeply", code="invalid_json")


def _too_many() -> RequestError:
    text = f"the body holds more than {ITEM_LIMIT} items in its lists and objects, token ids aside"
    return RequestError(text, code="body_too_large", status=413)
