"""The slots' memory on a GPU: what every worker keeps, and how each slot samples, in the sampling kernel's layout.

What the sampling kernel does not cover stays with `special_rows`. Called by the GPU runner.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np
import torch

from common.messages import SlotInit, SlotSampling
from common.sampling_params import TEMPERATURE_FLOOR
from kernels.sampling_state import BAD_WORD_TOKENS, CHOICE_COUNT, NUMBER_COUNT, SamplingState
from worker_proc.slots import SlotMemory, StateWrites, Words, div_ceil, known_ids
from worker_proc.transfer import to_device

MAX_BIASES, MAX_BANNED, MAX_BAD_WORDS = 320, 64, 32
_WORD_WIDTH = BAD_WORD_TOKENS + 1
_WHOLE, _HALVES = Struct("=Q"), Struct("=ii")


class DeviceSlots(SlotMemory):
    """Device memory of all slots; `sampling` is what the sampling kernel reads of it.

    Args:
        vocab_size: the model's, since prompts may hold any id of it.
    """

    def __init__(
        self, slot_count: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        self.vocab_size = vocab_size
        tables = {
            "numbers": NUMBER_COUNT, "choices": CHOICE_COUNT, "bias_ids": MAX_BIASES, "bias_values": MAX_BIASES,
            "banned_ids": MAX_BANNED, "allowed": div_ceil(vocab_size, 32), "bad_words": MAX_BAD_WORDS * _WORD_WIDTH,
        }  # fmt: skip
        super().__init__(slot_count, max_model_len, block_size, device, tables)
        self.sampling = SamplingState(
            numbers=self.tables["numbers"].view(torch.float32),
            choices=self.tables["choices"],
            bias_ids=self.tables["bias_ids"],
            bias_values=self.tables["bias_values"].view(torch.float32),
            banned_ids=self.tables["banned_ids"],
            counts=torch.zeros(slot_count + 1, vocab_size, dtype=torch.int16, device=device),
            allowed=self.tables["allowed"],
            bad_words=self.tables["bad_words"].view(slot_count + 1, MAX_BAD_WORDS, _WORD_WIDTH),
        )

    def set_masks(self, slots: Sequence[int], masks: Sequence[bytes]) -> None:
        """Which token ids the slots may sample in the steps that follow, as in `StepPlan.masks`; in stream order."""
        words = np.frombuffer(b"".join(masks), "<i4").reshape(len(slots), -1)
        lines = to_device(np.column_stack((np.asarray(slots, np.int32), words)), self.device)
        self.sampling.allowed.index_copy_(0, lines[:, 0].long(), lines[:, 1:])


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


def add_sampling(writes: StateWrites, init: SlotInit, vocab_size: int) -> None:
    """How a new slot samples, as far as the kernel does it."""
    slot, sampling = init.slot, known_ids(init.sampling, vocab_size)
    rules = KernelRules.of(sampling)
    writes.add("numbers", slot, _numbers(sampling))
    writes.add("choices", slot, _choices(init, rules))
    if rules.biases:
        writes.add("bias_ids", slot, sampling.bias_token_ids)
        writes.add("bias_values", slot, sampling.bias_values)
    if rules.banned:
        writes.add("banned_ids", slot, array("i", sampling.end_token_ids))
    if rules.bad_words:
        words = np.zeros((rules.bad_words, _WORD_WIDTH), dtype=np.int32)
        for line, word in zip(words, filter(None, sampling.bad_token_ids), strict=True):
            line[: len(word) + 1] = len(word), *word
        writes.add("bad_words", slot, words.ravel())
    if sampling.allowed_token_ids:
        allowed = np.zeros(div_ceil(vocab_size, 32) * 32, dtype=bool)
        allowed[np.asarray(sampling.allowed_token_ids, dtype=np.int64)] = True
        writes.add("allowed", slot, np.packbits(allowed, bitorder="little").view("<i4"))


def is_penalised(sampling: SlotSampling) -> bool:
    """Whether the slot's logits depend on the tokens that it holds."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def _numbers(sampling: SlotSampling) -> Words:
    """The columns of `SamplingState.numbers`."""
    temperature = 0.0 if sampling.temperature < TEMPERATURE_FLOOR else sampling.temperature
    values = (
        temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty, sampling.presence_penalty,
        sampling.frequency_penalty,
    )  # fmt: skip
    return array("f", values + (0.0,) * (NUMBER_COUNT - len(values)))


def _choices(init: SlotInit, rules: KernelRules) -> Words:
    """The columns of `SamplingState.choices`. Log probabilities are -1, none: `special_rows` computes them."""
    sampling = init.sampling
    values = (
        sampling.top_k, -1, init.slot if is_penalised(sampling) else -1, rules.biases, rules.banned,
        init.prompt_count + sampling.min_output_count, *_HALVES.unpack(_WHOLE.pack(sampling.seed)),
        init.slot if sampling.allowed_token_ids or sampling.masked else -1, rules.bad_words,
    )  # fmt: skip
    return array("i", values + (0,) * (CHOICE_COUNT - len(values)))
