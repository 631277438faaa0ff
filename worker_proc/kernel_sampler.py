"""The GPU's sampler: keeps `kernels/sampling.py`'s view of every slot, and runs it. Nothing here waits for the device.

What a slot's request asks for becomes rows of tables in the slots' memory, written with everything else that a new slot
starts with. Formulas and the order of the rules are in the kernel's docstring; the CPU's sampler follows the same.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from common.messages import SlotInit, SlotSampling
from common.sampling_params import LOGPROBS_LIMIT, TEMPERATURE_FLOOR
from kernels import sampling_state as columns
from kernels.sampling import SampledTokens, sample
from kernels.sampling_state import SamplingState, SamplingWorkspace, fill_counts
from worker_proc.slots import IntArray, SlotMemory, StateWrites, div_ceil
from worker_proc.transfer import to_device

BIAS_LIMIT, BANNED_LIMIT, BAD_WORD_LIMIT = 1024, 1088, 256
_WORD = columns.BAD_WORD_TOKENS + 1


def sampling_tables(vocabulary: int) -> dict[str, int]:
    """The slot tables that this sampler needs: name -> int32 columns."""
    return {
        "numbers": columns.NUMBER_COUNT,
        "choices": columns.CHOICE_COUNT,
        "bias_ids": BIAS_LIMIT,
        "bias_values": BIAS_LIMIT,
        "banned_ids": BANNED_LIMIT,
        "allowed": div_ceil(vocabulary, 32),
        "bad_words": BAD_WORD_LIMIT * _WORD,
    }


class KernelSampler:
    """Samples for the slots of one worker with the Triton kernels.

    Args:
        memory: made with `sampling_tables`.
        vocabulary: ids that can be sampled, the first of the logits' columns.
        model_vocabulary: ids that a prompt can hold.
    """

    def __init__(self, memory: SlotMemory, vocabulary: int, model_vocabulary: int) -> None:
        self._memory, self._vocabulary = memory, vocabulary
        device, rows, tables = memory.device, memory.slot_count + 1, memory.tables
        self._state = SamplingState(
            numbers=tables["numbers"].view(torch.float32),
            choices=tables["choices"],
            bias_ids=tables["bias_ids"],
            bias_values=tables["bias_values"].view(torch.float32),
            banned_ids=tables["banned_ids"],
            counts=torch.zeros(rows, model_vocabulary, dtype=torch.int16, device=device),
            allowed=tables["allowed"],
            bad_words=tables["bad_words"].view(rows, BAD_WORD_LIMIT, _WORD),
        )
        self._workspace = SamplingWorkspace.allocate(memory.slot_count, vocabulary, device)
        self._out = SampledTokens.allocate(memory.slot_count, LOGPROBS_LIMIT, device)
        self._long_bad_words: dict[int, list[torch.Tensor]] = {}
        self._uncounted: list[SlotInit] = []

    def start(self, init: SlotInit, writes: StateWrites) -> None:
        """A slot gets a request: write its rows of the tables."""
        slot, sampling = init.slot, init.sampling
        short = [word for word in sampling.bad_token_ids if 0 < len(word) <= columns.BAD_WORD_TOKENS]
        long = [word for word in sampling.bad_token_ids if len(word) > columns.BAD_WORD_TOKENS]
        penalised = is_penalised(sampling)
        writes.add("numbers", slot, _numbers(sampling))
        writes.add("choices", slot, _choices(init, penalised, len(short)))
        writes.add("bias_ids", slot, sampling.bias_token_ids)
        writes.add("bias_values", slot, np.asarray(sampling.bias_values, dtype=np.float32).view(np.int32))
        writes.add("banned_ids", slot, sampling.end_token_ids)
        writes.add("bad_words", slot, _padded_words(short))
        if sampling.allowed_token_ids:
            writes.add("allowed", slot, _bit_mask(sampling.allowed_token_ids, self._vocabulary))
        self._long_bad_words.pop(slot, None)
        if long:
            self._long_bad_words[slot] = [to_device(np.array(w, np.int32), self._memory.device) for w in long]
        if penalised:
            self._uncounted.append(init)

    def count_tokens(self) -> None:
        """Once the new slots' tokens are on the device: count them for those with penalties."""
        for init in self._uncounted:
            tokens = self._memory.token_ids[init.slot, : len(init.token_ids)]
            fill_counts(self._state.counts[init.slot], tokens, init.prompt_count)
        self._uncounted.clear()

    def sample(self, logits: torch.Tensor, row_slots: torch.Tensor, sample_rows: torch.Tensor) -> SampledTokens:
        """Sample for the rows int32 [S] of logits [S, vocab] and feed their slots; views of fixed buffers come back."""
        out = self._out
        count = logits.shape[0]
        out = replace(out, **{name: getattr(out, name)[:count] for name in _OUTPUTS})
        memory = self._memory
        sample(
            logits, row_slots, sample_rows, memory.known_lengths, memory.token_ids, self._state, self._workspace, out,
            self._vocabulary,
        )  # fmt: skip
        return out

    def ban_long_words(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> None:
        """Bad words longer than the kernel's tables hold, in place on logits [S, vocab]; hardly anybody has any."""
        if not self._long_bad_words:
            return
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            for word in self._long_bad_words.get(slot, ()):
                length = len(word) - 1
                if position >= length:
                    matches = (self._memory.token_ids[slot, position - length : position] == word[:-1]).all()
                    target = word[-1:].long()
                    logits[row, target] = torch.where(matches, -torch.inf, logits[row, target])


_OUTPUTS = ("ids", "logprobs", "ranks", "top_ids", "top_logprobs")


def is_penalised(sampling: SlotSampling) -> bool:
    """Whether the tokens so far change the logits."""
    changes = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1.0)
    return any(changes)


def _numbers(sampling: SlotSampling) -> IntArray:
    numbers = np.zeros(columns.NUMBER_COUNT, dtype=np.float32)
    greedy = sampling.temperature < TEMPERATURE_FLOOR
    numbers[columns.TEMPERATURE] = 0.0 if greedy else sampling.temperature
    numbers[columns.TOP_P] = sampling.top_p
    numbers[columns.MIN_P] = sampling.min_p
    numbers[columns.REPETITION] = sampling.repetition_penalty
    numbers[columns.PRESENCE] = sampling.presence_penalty
    numbers[columns.FREQUENCY] = sampling.frequency_penalty
    return numbers.view(np.int32)


def _choices(init: SlotInit, penalised: bool, bad_word_count: int) -> IntArray:
    sampling = init.sampling
    choices = np.zeros(columns.CHOICE_COUNT, dtype=np.int32)
    choices[columns.TOP_K] = sampling.top_k
    choices[columns.LOGPROB_COUNT] = sampling.logprobs
    choices[columns.COUNT_ROW] = init.slot if penalised else -1
    choices[columns.BIAS_COUNT] = len(sampling.bias_token_ids)
    choices[columns.BANNED_COUNT] = len(sampling.end_token_ids)
    choices[columns.BANNED_UNTIL] = init.prompt_count + sampling.min_output_count
    seed = np.array([sampling.seed], dtype=np.uint64).view(np.int32)
    choices[columns.SEED_LOW], choices[columns.SEED_HIGH] = seed
    choices[columns.ALLOWED_ROW] = init.slot if sampling.allowed_token_ids else -1
    choices[columns.BAD_WORD_COUNT] = bad_word_count
    return choices


def _padded_words(words: list[tuple[int, ...]]) -> IntArray:
    table = np.zeros((len(words), _WORD), dtype=np.int32)
    for index, word in enumerate(words):
        table[index, 0] = len(word)
        table[index, 1 : 1 + len(word)] = word
    return table.ravel()


def _bit_mask(token_ids: Any, vocabulary: int) -> IntArray:
    allowed = np.zeros(div_ceil(vocabulary, 32) * 32, dtype=np.uint8)
    allowed[np.asarray(token_ids)] = 1
    return np.packbits(allowed, bitorder="little").view(np.int32)
