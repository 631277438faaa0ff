"""Detokenizes a whole list of ids, piece by piece."""

from collections.abc import Iterable

from frontend.detokenizer import Detokenizer


def decode_all(detokenizer: Detokenizer, token_ids: Iterable[int]) -> str:
    """The text of all ids."""
    return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.finish()
