"""Joined pieces equal the decoding of the whole, for every family of tokenizers, cut anywhere."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from frontend.detokenizer import REPLACEMENT, ByteDetokenizer, WindowDetokenizer
from frontend.tokenizer import Tokenizer
from tests.support.decode_all import decode_all


def byte_ids(data: bytes) -> list[int]:
    """The byte tokens of the byte-fallback tokenizer, where 3 stands for byte 0."""
    return [3 + value for value in data]


@given(text=st.text(), data=st.data())
def test_byte_level_pieces_join_to_the_text(byte_tokenizer, text, data):
    ids = list(byte_tokenizer.encode(text))
    assert decode_all(byte_tokenizer.detokenizer(skip_special_tokens=False), ids) == text
    cut = ids[: data.draw(st.integers(0, len(ids)))]
    assert decode_all(byte_tokenizer.detokenizer(), cut) == byte_tokenizer.decode(cut)


@given(ids=st.lists(st.integers(0, 340)))
@example(ids=[171, 256])  # the bytes ED A0: the start of a surrogate, which no text holds
def test_byte_level_equals_the_tokenizers_own_decode_for_any_ids(byte_tokenizer, ids):
    for skip in (True, False):
        pieces = decode_all(byte_tokenizer.detokenizer(skip_special_tokens=skip), ids)
        assert pieces == byte_tokenizer.decode(ids, skip_special_tokens=skip)


@given(
    words=st.lists(st.one_of(st.integers(259, 276).map(lambda token: [token]), st.text().map(str.encode).map(byte_ids)))
)
def test_byte_fallback_equals_the_tokenizers_own_decode(fallback_tokenizer, words):
    ids = [token_id for word in words for token_id in word]
    assert decode_all(fallback_tokenizer.detokenizer(), ids) == fallback_tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 280)))
def test_pieces_do_not_depend_on_how_the_ids_arrive(fallback_tokenizer, ids):
    detokenizer = fallback_tokenizer.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in ids]
    whole = "".join(pieces) + detokenizer.finish()
    valid = b"".join(fallback_tokenizer.token_bytes(token_id) for token_id in ids if token_id not in (0, 1, 2))
    runs = re.compile(REPLACEMENT + "+")  # how many stand for an invalid run is another test's business
    assert runs.sub(REPLACEMENT, whole) == runs.sub(REPLACEMENT, valid.decode("utf-8", "replace").removeprefix(" "))


@given(ids=st.lists(st.integers(0, 280)), at_start=st.booleans())
@example(ids=[1, 260], at_start=True)  # a token without text, then the space that is stripped
def test_a_piece_says_what_the_next_token_completes_while_nothing_is_held_back(fallback_tokenizer, ids, at_start):
    detokenizer = fallback_tokenizer.detokenizer(at_start=at_start)
    for token_id in ids:
        piece = None if detokenizer.holds_back else detokenizer.pieces[token_id]
        text = detokenizer.push(token_id)
        assert piece is None or piece.text == text


@pytest.mark.parametrize("character", ["é", "海", "🌊"])
def test_a_cut_character_is_one_replacement_at_the_end_and_never_before(byte_tokenizer, fallback_tokenizer, character):
    raw_ids = [byte_tokenizer.id_of(piece) for piece in _byte_level_pieces(character)]
    for tokenizer, ids in ((byte_tokenizer, raw_ids), (fallback_tokenizer, byte_ids(character.encode()))):
        for count in range(1, len(ids)):
            detokenizer = tokenizer.detokenizer()
            assert [detokenizer.push(token_id) for token_id in ids[:count]] == [""] * count
            assert detokenizer.finish() == REPLACEMENT
        assert decode_all(tokenizer.detokenizer(), ids) == character


def test_invalid_bytes_are_replaced_where_they_stand(fallback_tokenizer):
    detokenizer = fallback_tokenizer.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in [*byte_ids(b"\xe2\x82"), 265, *byte_ids(b"\xff")]]
    assert pieces == ["", "", REPLACEMENT * 2 + "l", REPLACEMENT]


def test_spaces_survive_sentencepiece_token_by_token(fallback_tokenizer):
    ids = fallback_tokenizer.encode("I love you")
    assert decode_all(fallback_tokenizer.detokenizer(), ids) == fallback_tokenizer.decode(ids) == "I love you"
    continued = fallback_tokenizer.detokenizer(at_start=False)
    assert decode_all(continued, [260, 261]) == " I love"


def test_special_tokens_are_left_out_unless_wanted(byte_tokenizer):
    ids = byte_tokenizer.encode("a<|end|>b")
    assert decode_all(byte_tokenizer.detokenizer(), ids) == "ab"
    assert decode_all(byte_tokenizer.detokenizer(skip_special_tokens=False), ids) == "a<|end|>b"


def test_ids_outside_the_vocabulary_are_no_text(byte_tokenizer):
    assert decode_all(byte_tokenizer.detokenizer(), [10**6, -1, 2**31 - 1]) == ""


def test_a_decoder_of_another_kind_goes_through_the_tokenizer():
    words = {"[UNK]": 0, "play": 1, "##ing": 2, "chess": 3}
    raw = RawTokenizer(models.WordPiece(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(raw)
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    ids = tokenizer.encode("playing chess playing")
    assert decode_all(detokenizer, ids) == tokenizer.decode(ids) == "playing chess playing"


@given(text=st.text(alphabet="aé海🌊 \n", max_size=40))
def test_the_window_gives_the_same_as_the_table(byte_tokenizer, text):
    ids = byte_tokenizer.encode(text)
    assert decode_all(WindowDetokenizer(byte_tokenizer.decode), ids) == text


def test_both_families_use_the_table(byte_tokenizer, fallback_tokenizer):
    for tokenizer in (byte_tokenizer, fallback_tokenizer):
        assert isinstance(tokenizer.detokenizer(), ByteDetokenizer)


def _byte_level_pieces(text: str) -> list[str]:
    encoded = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return list(encoded[0][0])
