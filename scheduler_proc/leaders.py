"""Finds the prompt that is about to compute what a sequence needs next: that sequence waits for it.

Prompts of one step may be hundreds, and each would have to be compared with all before it. So those that the step
holds are found by the tokens of the block in question, in a table for each place that is asked about. No clock, no
sockets. Called by admission.
"""

from array import array
from collections.abc import Iterable
from itertools import chain

from scheduler_proc.draft import Draft
from scheduler_proc.sequence import Leader, Sequence

_Table = dict[tuple[int, bytes], list[Sequence]]


class Leaders:
    """The prompts under way while one step is planned.

    Args:
        draft: the step; rows that it gets later count too.
        prefilling: the running prompts.
        block_size: tokens per block.
    """

    def __init__(self, draft: Draft, prefilling: Iterable[Sequence], block_size: int) -> None:
        self._draft, self._block_size = draft, block_size
        self._skipped = [sequence for sequence in prefilling if sequence.last_step != draft.step_id]
        self._tables: dict[int, tuple[_Table, int]] = {}

    def find(self, sequence: Sequence, matched: int) -> Leader | None:
        """The first prompt that computes the block after the sequence's `matched` tokens in this step or later."""
        start = matched - matched % self._block_size
        end = start + self._block_size
        tokens, root = sequence.tokens, sequence.chain.root
        placed = self._placed(start, end).get((root, tokens[start:end].tobytes()), ())
        skipped = (
            other
            for other in self._skipped
            if other.computed_count < end <= len(other.tokens) and other.chain.root == root
        )
        for other in chain(placed, skipped):
            shared = _common_length(other.tokens, tokens, start, end)
            if shared >= end:
                return Leader(other, shared)
        return None

    def _placed(self, start: int, end: int) -> _Table:
        """The prompts of the step that compute the tokens from `start` to `end`, by their namespace and these."""
        chunks = self._draft.chunks
        table, seen_count = self._tables.get(start) or ({}, 0)
        for row in chunks[seen_count:]:
            sequence = row.sequence
            if row.first < end <= len(sequence.tokens):
                key = sequence.chain.root, sequence.tokens[start:end].tobytes()
                table.setdefault(key, []).append(sequence)
        self._tables[start] = table, len(chunks)
        return table


def _common_length(first: "array[int]", second: "array[int]", start: int, end: int) -> int:
    """How many tokens the two have in common from the beginning; 0 if they differ before `end` (`start` is a hint)."""
    if first[start:end] != second[start:end] or first[:start] != second[:start]:
        return 0
    low, high = end, min(len(first), len(second)) + 1  # in common: at least low, less than high
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
