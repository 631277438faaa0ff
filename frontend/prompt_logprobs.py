"""The log probabilities of a prompt's tokens, which get their texts when somebody looks at them.

For a prompt of 8,000 tokens with 20 likeliest each that takes a second and a half; so who wants all of them takes them
in turns with other work (`in_turns`). Called by `request.Request` and by whoever shows them.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from common.messages import TokenLogprobs
from frontend.detokenizer import Detokenizer
from frontend.events import TokenLogprob

TURN = 16
"""Entries that are dealt with before other work on the loop: two milliseconds for those with 20 likeliest tokens."""

T = TypeVar("T")


class PromptLogprobs:
    """One entry for each token of a prompt, the first and those that are missing None.

    Args:
        token_ids: the prompt, int32.
        detokenizer: makes one from its start, for the text that each token adds.
        describe: an entry from a token's id, that text, and what was reported.
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
        """Take what was reported; `row_index` is the position in the prompt."""
        self._entries.update((entry.row_index, entry) for entry in entries)

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        detokenizer = self._detokenizer()
        for position, token_id in enumerate(self._token_ids):
            text, entry = detokenizer.push(token_id), self._entries.get(position)
            yield None if entry is None else self._describe(token_id, text, entry)


async def in_turns(items: Iterable[T]) -> list[T]:
    """All items of an iterable that takes long, while other work on the loop gets its turn again and again."""
    gathered = []
    for item in items:
        gathered.append(item)
        if len(gathered) % TURN == 0:
            await asyncio.sleep(0)
    return gathered
