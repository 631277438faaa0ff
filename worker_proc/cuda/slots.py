"""The slots' memory on a GPU: what every worker keeps, and how each slot samples, in the sampling kernel's layout.

What the sampling kernel does not cover stays with `special_rows`. Called by the GPU runner.
"""

from array import array
from collections.abc import Sequence
from struct import Struct

import numpy as np
import torch

from common.messages import NewSlots, SlotSampling
from common.messages.slots import REMEMBERED_BYTES
from kernels.sampling_state import BAD_WORD_TOKENS, CHOICE_COUNT, NUMBER_COUNT, SamplingState
from worker_proc.cuda.slot_records import (
    MAX_BAD_WORDS,
    MAX_BANNED,
    MAX_BIASES,
    PROMPT_PLACE,
    RECORDED,
    SEED_PLACE,
    SlotRecord,
)
from worker_proc.slots import SlotMemory, StateWrites, div_ceil
from worker_proc.transfer import to_device

KEPT_RECORDS = 64
_HEAD_WORDS = Struct("=8i")
"""A `HEAD` whose seed is in halves."""
_WORD_WIDTH = BAD_WORD_TOKENS + 1


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
        super().__init__(slot_count, max_model_len, block_size, device, tables, recorded=RECORDED)
        self._records: dict[int, tuple[SlotSampling, SlotRecord]] = {}
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

    def writes_of(self, new: NewSlots) -> StateWrites:
        """Write what new slots start with: tokens, blocks, and how they sample."""
        kinds = [self._record_of(sampling) for sampling in new.samplings]
        records = array("i")
        writes = StateWrites(self, new, records)
        for slot, _, token_count, computed_count, prompt_count, index, low, high in _HEAD_WORDS.iter_unpack(new.heads):
            kind = kinds[index]
            record = kind.words[:]
            record[0], record[1], record[2] = token_count, computed_count, prompt_count
            record[PROMPT_PLACE] += prompt_count
            record[SEED_PLACE], record[SEED_PLACE + 1] = low, high
            for place in kind.own_rows:
                record[place] = slot
            for table, row in kind.lists:
                writes.add(table, slot, row)
            records += record
        writes.count += len(records)
        return writes

    def _record_of(self, sampling: SlotSampling) -> SlotRecord:
        """Made once for each object, which is kept, so that none is taken for another; unless none can come again."""
        kept = self._records.get(id(sampling))
        if kept is not None:
            return kept[1]
        record = SlotRecord.of(sampling, self.vocab_size)
        if len(sampling.packed) <= REMEMBERED_BYTES:
            if len(self._records) >= KEPT_RECORDS:
                self._records.clear()
            self._records[id(sampling)] = sampling, record
        return record

    def set_masks(self, slots: Sequence[int], masks: Sequence[bytes]) -> None:
        """Which token ids the slots may sample in the steps that follow, as in `StepPlan.masks`; in stream order."""
        words = np.frombuffer(b"".join(masks), "<i4").reshape(len(slots), -1)
        lines = to_device(np.column_stack((np.asarray(slots, np.int32), words)), self.device)
        self.sampling.allowed.index_copy_(0, lines[:, 0].long(), lines[:, 1:])
