"""The log probabilities of a prompt's tokens. Their texts are decoded only when an answer is written.

For a prompt of 8,000 tokens with the 20 likeliest at each position, decoding takes a second and a half. So that other
requests do not wait for it, an answer goes through them with `in_turns`. Created by `request.Request`; iterated over by
the code that writes an answer.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from common.messages import TokenLogprobs
from frontend.detokenizer import Detokenizer
from frontend.events import TokenLogprob

TURN = 16
"""Entries handled before the event loop may do other work; with 20 likeliest tokens each they take two milliseconds."""

T = TypeVar("T")


class PromptLogprobs:
    """One entry for each token of a prompt; None for the first token, and for those that nothing was reported for.

    Args:
        token_ids: the prompt, int32.
        detokenizer: makes a new detokenizer, which gives the text that each token adds.
        describe: makes an entry of a token's id, that text, and what the scheduler reported.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        detokenizer: Callable[[], Detokenizer],
        describe: Callable[[int, str, TokenLogprobs], TokenLogprob],
    ) -> None:
        self._token_ids = token_ids
        self._detokenizer = detokenizer
        self._describe = describe
        self._entries: dict[int, TokenLogprobs] = {}

    def add(self, entries: Iterable[TokenLogprobs]) -> None:
        """Keep what the scheduler reported; an entry's `row_index` is its position in the prompt."""
        self._entries.update((entry.row_index, entry) for entry in entries)

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        detokenizer = self._detokenizer()
        for position, token_id in enumerate(self._token_ids):
            text, entry = detokenizer.push(token_id), self._entries.get(position)
            yield None if entry is None else self._describe(token_id, text, entry)


async def in_turns(items: Iterable[T]) -> list[T]:
    """List the items of a slow iterable, letting other tasks run after every `TURN` items."""
    gathered = []
    for item in items:
        gathered.append(item)
        if len(gathered) % TURN == 0:
            await asyncio.sleep(0)
    return gathered
