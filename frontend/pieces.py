"""Pieces of text, one per token, each made once for all streams that say the token.

What nearly every token adds to a text, and what is sent to clients for it, depends on nothing but the token: a table of
pieces takes the place of decoding and packing it again. Knows nothing of requests. A sample says when the table holds
(`Sample.pieces`), the core looks tokens up, and sinks take pieces.
"""

import re
from collections.abc import Callable, Iterable

from common.client_messages import Deltas

PIECES_LIMIT = 1 << 15
"""Pieces that a table keeps, some 250 bytes each. Most texts need a tenth of that; a table that is full starts anew."""


class Piece:
    """A token with the text that it completes.

    Attributes:
        token_id: the token.
        text: may be empty.
        row_end: `pack_row_end`'s result, once it has been asked for; b"" before.
    """

    __slots__ = ("row_end", "text", "token_id")

    def __init__(self, token_id: int, text: str) -> None:
        self.token_id = token_id
        self.text = text
        self.row_end = b""

    def pack_row_end(self) -> bytes:
        """The end of its row in a message to a client, kept for the next one."""
        self.row_end = Deltas.row_end(self.text, self.token_id)
        return self.row_end


class PieceTable(dict[int, "Piece | None"]):
    """Token id -> its piece where a text goes on with it, filled on first use; None for a token that is no whole text.

    Args:
        token_bytes: gives an id's bytes.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> Piece | None:
        if len(self) >= PIECES_LIMIT:
            self.clear()
        try:
            piece = Piece(token_id, self._token_bytes(token_id).decode())
        except UnicodeDecodeError:
            piece = None
        self[token_id] = piece
        return piece

    def texts(self, token_ids: Iterable[int]) -> list[str]:
        """The texts of tokens that are whole texts."""
        return [piece.text for token_id in token_ids if (piece := self[token_id]) is not None]


class PiecesWithout(dict[int, "Piece | None"]):
    """The pieces of a table in whose text a pattern is not found; None for all other tokens.

    Args:
        table: of all pieces.
        pattern: what is looked for.
    """

    def __init__(self, table: PieceTable, pattern: re.Pattern[str]) -> None:
        super().__init__()
        self._table = table
        self._pattern = pattern

    def __missing__(self, token_id: int) -> Piece | None:
        if len(self) >= PIECES_LIMIT:
            self.clear()
        piece = self._table[token_id]
        if piece is not None and self._pattern.search(piece.text):
            piece = None
        self[token_id] = piece
        return piece


WITHOUT_TEXT = PieceTable(lambda token_id: b"")
"""For requests that want token ids alone."""
