"""What one way of sampling writes into the GPU's tables for each slot that starts with it, in the kernel's layout.

Most requests sample in one of a few ways. So all of a record that does not depend on the slot is worked out once and
kept by the caller. Called by the slots' memory and by `special_rows`, which does what does not fit the tables.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from common.messages import SlotSampling
from kernels.sampling_state import (
    ALLOWED_ROW,
    BAD_WORD_TOKENS,
    BANNED_UNTIL,
    CHOICE_COUNT,
    COUNT_ROW,
    NUMBER_COUNT,
    SEED_LOW,
)
from worker_proc.slots import LENGTHS, Words, div_ceil, known_ids

MAX_BIASES, MAX_BANNED, MAX_BAD_WORDS = 320, 64, 32
RECORDED = ("numbers", "choices")
"""Tables of which a record holds the slot's row, behind its lengths."""
_CHOICES = len(LENGTHS) + NUMBER_COUNT
PROMPT_PLACE = _CHOICES + BANNED_UNTIL
"""Where the length of the slot's prompt is to be added."""
SEED_PLACE = _CHOICES + SEED_LOW
"""Where the low half of the slot's seed goes; the high one goes behind it."""
LONGEST = 1 << 30
"""No output has more tokens, and with those of any prompt it is still an int32."""


@dataclass(frozen=True)
class KernelRules:
    """How much of a slot's rules the kernel's tables hold; what does not fit is 0 here and left to `special_rows`."""

    biases: int
    banned: int
    bad_words: int

    @classmethod
    def of(cls, sampling: SlotSampling) -> "KernelRules":
        """Each list goes to the kernel as a whole or not at all."""
        if not has_rules(sampling):
            return _NO_RULES
        biases, words = len(sampling.bias_token_ids), [word for word in sampling.bad_token_ids if word]
        banned = len(sampling.end_token_ids) if sampling.min_output_count else 0
        words_fit = len(words) <= MAX_BAD_WORDS and all(len(word) <= BAD_WORD_TOKENS for word in words)
        return cls(
            biases if biases <= MAX_BIASES else 0, banned if banned <= MAX_BANNED else 0, len(words) if words_fit else 0
        )


_NO_RULES = KernelRules(0, 0, 0)


def has_rules(sampling: SlotSampling) -> bool:
    """Whether a slot has any rules for single tokens, be they carried out by the kernel or by `special_rows`."""
    return bool(sampling.bias_token_ids or sampling.bad_token_ids or sampling.min_output_count)


@dataclass(frozen=True)
class SlotRecord:
    """What one way of sampling writes to each slot that starts with it.

    Attributes:
        words: int32, a slot's record: its lengths and rows of RECORDED; what depends on the slot is missing.
        lists: names and rows of tables, of rules that the kernel carries out.
        own_rows: places in the record that hold the slot's own number.
    """

    words: "array[int]"
    lists: tuple[tuple[str, Words], ...]
    own_rows: tuple[int, ...]

    @classmethod
    def of(cls, sampling: SlotSampling, vocab_size: int) -> "SlotRecord":
        """As far as the kernel does it."""
        sampling = known_ids(sampling, vocab_size)
        rules = KernelRules.of(sampling)
        words = array("i", (0,) * len(LENGTHS)) + _numbers(sampling) + _choices(sampling, rules)
        own_rows = []
        if is_penalised(sampling):
            own_rows.append(_CHOICES + COUNT_ROW)
        if sampling.allowed_token_ids or sampling.masked:
            own_rows.append(_CHOICES + ALLOWED_ROW)
        return cls(words, tuple(_lists(sampling, rules, vocab_size)), tuple(own_rows))


def _lists(sampling: SlotSampling, rules: KernelRules, vocab_size: int) -> Iterator[tuple[str, Words]]:
    """Rows of the tables that hold a slot's rules."""
    if rules.biases:
        yield "bias_ids", sampling.bias_token_ids
        yield "bias_values", sampling.bias_values
    if rules.banned:
        yield "banned_ids", array("i", sampling.end_token_ids)
    if rules.bad_words:
        words = np.zeros((rules.bad_words, BAD_WORD_TOKENS + 1), dtype=np.int32)
        for line, word in zip(words, filter(None, sampling.bad_token_ids), strict=True):
            line[: len(word) + 1] = len(word), *word
        yield "bad_words", words.ravel()
    if sampling.allowed_token_ids:
        allowed = np.zeros(div_ceil(vocab_size, 32) * 32, dtype=bool)
        allowed[np.asarray(sampling.allowed_token_ids, dtype=np.int64)] = True
        yield "allowed", np.packbits(allowed, bitorder="little").view("<i4")


def is_penalised(sampling: SlotSampling) -> bool:
    """Whether the slot's logits depend on the tokens that it holds."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def _numbers(sampling: SlotSampling) -> "array[int]":
    """The columns of `SamplingState.numbers`, their bits as int32."""
    values = (
        sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty, sampling.presence_penalty,
        sampling.frequency_penalty,
    )  # fmt: skip
    return array("i", array("f", values + (0.0,) * (NUMBER_COUNT - len(values))).tobytes())


def _choices(sampling: SlotSampling, rules: KernelRules) -> "array[int]":
    """The columns of `SamplingState.choices`, without seed and slot, and as for a prompt of no tokens.

    Log probabilities are -1, none: `special_rows` computes them.
    """
    values = (
        sampling.top_k, -1, -1, rules.biases, rules.banned, min(sampling.min_output_count, LONGEST), 0, 0, -1,
        rules.bad_words,
    )  # fmt: skip
    return array("i", values + (0,) * (CHOICE_COUNT - len(values)))
