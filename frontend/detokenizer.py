"""Incremental detokenization: token ids to text, piece by piece, never half a character.

Knows nothing of requests. `tokenizer.Tokenizer` makes the table, `request.Sample` feeds one decoder per sample.

Each token id stands for some bytes; the text is the UTF-8 decoding of all bytes so far. A character that is not
complete yet is held back; bytes that can never become one turn into U+FFFD where they are. At the end, an incomplete
character becomes a single U+FFFD. The joined pieces equal the tokenizer's own decoding of all ids, with two intended
differences: byte-fallback tokenizers replace also the good characters of a run of byte tokens when another part of that
run is invalid, and they end an incomplete character with one U+FFFD per byte.
"""

import codecs
from collections.abc import Callable
from typing import Protocol

from frontend.pieces import PieceTable

REPLACEMENT = "�"
_PER_BYTE = "trireme_replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_PER_BYTE, _replace_each_byte)


class ByteTable(dict[int, bytes]):
    """Token id -> its bytes, filled on first use (a whole vocabulary of 150,000 would cost start-up time).

    Args:
        look_up: gives an id's bytes; b"" for ids that do not exist or are left out of the text.
        byte_fallback: replace invalid bytes one by one, as SentencePiece models do, instead of once per character.
        stripped_spaces: how many leading spaces the decoder strips from a text.

    Attributes:
        pieces: the same tokens as text.
    """

    def __init__(
        self, look_up: Callable[[int], bytes], *, byte_fallback: bool = False, stripped_spaces: int = 0
    ) -> None:
        super().__init__()
        self._look_up = look_up
        self.errors = _PER_BYTE if byte_fallback else "replace"
        self.stripped_spaces = stripped_spaces
        self.pieces = PieceTable(self.__getitem__)

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._look_up(token_id)
        return data


class Detokenizer(Protocol):
    """The incremental decoder of one sample.

    Attributes:
        pieces: says what a token completes, without `push`, while nothing is held back, if it has a piece there; None
            if that always depends on the tokens before it.
    """

    pieces: PieceTable | None

    def push(self, token_id: int) -> str:
        """The text that one more token completes."""

    def finish(self) -> str:
        """The rest of the text, at the end."""

    @property
    def holds_back(self) -> bool:
        """Whether what the next token completes depends on those before it."""


class ByteDetokenizer:
    """Decodes with a table of the bytes of each token.

    Args:
        table: the tokenizer's.
        at_start: a text starts here (a chat's answer), so leading spaces are stripped as the tokenizer's decoder does;
            False if it continues a prompt.
    """

    __slots__ = ("_pending", "_strip_count", "_table", "pieces")

    def __init__(self, table: ByteTable, *, at_start: bool = True) -> None:
        self.pieces: PieceTable | None = table.pieces
        self._table = table
        self._pending = b""
        self._strip_count = table.stripped_spaces if at_start else 0

    def push(self, token_id: int) -> str:
        """The text that one more token completes."""
        data = self._table[token_id]
        if self._pending:
            data = self._pending + data
        try:
            text = data.decode()
            self._pending = b""
        except UnicodeDecodeError:
            text, used_count = codecs.utf_8_decode(data, self._table.errors, False)
            self._pending = data[used_count:]
        return self._strip(text) if self._strip_count else text

    def finish(self) -> str:
        """U+FFFD if the last character is incomplete, else nothing.

        The first two bytes of a surrogate are held back too, but are not an incomplete character: they become two
        U+FFFD, as they would anywhere else.
        """
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")

    @property
    def holds_back(self) -> bool:
        """Whether a character is incomplete, or the spaces at the start are being stripped."""
        return bool(self._pending or self._strip_count)

    def _strip(self, text: str) -> str:
        if not text:
            return text
        kept = text.lstrip(" ")
        space_count = len(text) - len(kept)
        stripped_count = min(space_count, self._strip_count)
        self._strip_count = self._strip_count - stripped_count if not kept else 0
        return text[stripped_count:]


class WindowDetokenizer:
    """Decodes with the tokenizer itself, where a table of bytes is not enough (WordPiece and the like).

    The ids since the last complete text are decoded together with a few before them, for rules that depend on the
    previous token.

    Args:
        decode: the tokenizer's decoding of a list of ids.
    """

    __slots__ = ("_context_index", "_decode", "_done_index", "_ids", "pieces")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.pieces: PieceTable | None = None
        self._decode = decode
        self._ids: list[int] = []
        self._context_index = 0
        self._done_index = 0

    def push(self, token_id: int) -> str:
        """The text that one more token completes."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context_index : self._done_index])
        after = self._decode(self._ids[self._context_index :])
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        return self._advance(before, after)

    def finish(self) -> str:
        """The rest of the text, with at most one U+FFFD at its end."""
        before = self._decode(self._ids[self._context_index : self._done_index])
        rest = self._advance(before, self._decode(self._ids[self._context_index :]))
        kept = rest.rstrip(REPLACEMENT)
        return rest if kept == rest else kept + REPLACEMENT

    @property
    def holds_back(self) -> bool:
        """Always: any token may depend on those before it."""
        return True

    def _advance(self, before: str, after: str) -> str:
        self._context_index, self._done_index = self._done_index, len(self._ids)
        return after[len(before) :]
