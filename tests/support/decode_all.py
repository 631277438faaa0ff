"""Detokenizes a whole list of ids, piece by piece."""

from collections.abc import Iterable

from frontend.detokenizer import Detokenizer


def decode_all(detokenizer: Detokenizer, token_ids: Iterable[int]) -> str:
    """The text of all ids; where the table of pieces says what a token completes, it must be right."""
    texts = []
    for token_id in token_ids:
        table = detokenizer.pieces
        piece = None if table is None or detokenizer.holds_back else table[token_id]
        texts.append(detokenizer.push(token_id))
        if piece is not None:
            assert (piece.token_id, piece.text) == (token_id, texts[-1])
            assert not detokenizer.holds_back, "the table says it as long as each token has a piece"
    return "".join(texts) + detokenizer.finish()
