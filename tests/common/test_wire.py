"""Field checks refuse what does not fit, naming message and field."""

from array import array

import pytest

from common.errors import WireError
from common.wire import FieldReader, array_bytes, pack, unpack


@pytest.mark.parametrize(
    ("method", "good", "bad"),
    [
        ("integer", 5, [-1, 2**31, 1.0, True, "5", None]),
        ("optional_integer", None, [-1, 1.5, "x"]),
        ("number", 1.5, ["1", None, True, float("nan"), float("inf")]),
        ("optional_number", None, ["1", float("nan")]),
        ("flag", True, [0, 1, None, "true"]),
        ("text", "x", [b"x", 5, None]),
        ("optional_text", None, [b"x", 5]),
        ("blob", b"x", ["x", 5, None]),
        ("mapping", {"a": 1}, [[], None, {1: 2}]),
    ],
)
def test_each_reader_takes_its_type_only(method, good, bad):
    assert getattr(FieldReader("M", [good]), method)("field") == good
    for value in bad:
        with pytest.raises(WireError, match=r"M\.field: wanted"):
            getattr(FieldReader("M", [value]), method)("field")


@pytest.mark.parametrize(
    "method", ["integer", "optional_integer", "optional_number", "optional_text", "flag", "blob", "mapping", "anything"]
)
@pytest.mark.parametrize("before", [[], [None], [5, None]])
def test_a_field_behind_the_end_is_missing_and_not_nil(method, before):
    """Also where the message's first field is nil, which index -0 would find."""
    read = FieldReader("M", before)
    for _ in before:
        read.anything("earlier")
    with pytest.raises(WireError, match=rf"M\.field: the message ends before this field \({len(before)} fields\)"):
        getattr(read, method)("field")


@pytest.mark.parametrize("method", ["optional_integer", "optional_number", "optional_text", "anything"])
def test_a_nil_is_passed_over_once(method):
    with FieldReader("M", [None, None, 5]) as read:
        assert getattr(read, method)("first") is None
        assert getattr(read, method)("second") is None
        assert read.integer("third") == 5


def test_bounds_hold_for_lists_texts_and_arrays():
    with pytest.raises(WireError, match="at most 2 items"):
        FieldReader("M", [[1, 2, 3]]).entries("field", int, 2)
    with pytest.raises(WireError, match="at most 2 characters"):
        FieldReader("M", ["abc"]).text("field", 2)
    with pytest.raises(WireError, match="at most 1 items of 4 bytes"):
        FieldReader("M", [b"12345678"]).numbers("field", "i", 1)
    with pytest.raises(WireError, match="items of 4 bytes"):
        FieldReader("M", [b"12345"]).numbers("field", "i")


def test_arrays_are_little_endian_on_the_wire():
    assert array_bytes(array("i", [1, -2])) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    assert FieldReader("M", [b"\x01\x00\x00\x00"]).numbers("field", "i") == array("i", [1])


def test_a_message_over_the_limit_is_refused_before_it_is_parsed():
    with pytest.raises(WireError, match="exceeds the limit of 10"):
        unpack(pack([1, b"x" * 100]), limit_bytes=10)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01", b"\x91\x01\x01", b"\x91" * 5000, b"\x92\x01\xa1\xff"])
def test_bytes_that_are_no_msgpack_are_refused_with_a_whole_sentence(data):
    with pytest.raises(WireError, match=r"^not a msgpack message: \w.*[^: ]$"):
        unpack(data)
