"""The slots' memory on a GPU: what every worker keeps, and how each slot samples, in the sampling kernel's layout.

What the sampling kernel does not cover stays with `special_rows`. Called by the GPU runner.
"""

from collections.abc import Sequence

import numpy as np
import torch

from common.messages import NewSlots, SlotSampling
from kernels.sampling_state import BAD_WORD_TOKENS, CHOICE_COUNT, NUMBER_COUNT, SamplingState
from worker_proc.cuda.slot_records import (
    MAX_BAD_WORDS,
    MAX_BANNED,
    MAX_BIASES,
    PROMPT_PLACE,
    RECORDED,
    SEED_PLACES,
    SlotRecord,
)
from worker_proc.slots import LENGTHS, SlotMemory, StateWrites, div_ceil, heads_of
from worker_proc.transfer import to_device

KEPT_RECORDS = 64
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
        heads, kinds = heads_of(new), [self._record_of(sampling) for sampling in new.samplings]
        records = np.array([kind.words for kind in kinds])[heads[:, 5]]
        records[:, : len(LENGTHS)] = heads[:, 2:5]
        records[:, PROMPT_PLACE] += heads[:, 4]
        records[:, SEED_PLACES] = heads[:, 6:]
        writes = StateWrites(self, new, records)
        if any(kind.lists or kind.own_rows for kind in kinds):
            for record, slot, index in zip(records, heads[:, 0].tolist(), heads[:, 5].tolist(), strict=True):
                for place in kinds[index].own_rows:
                    record[place] = slot
                for table, row in kinds[index].lists:
                    writes.add(table, slot, row)
        return writes

    def _record_of(self, sampling: SlotSampling) -> SlotRecord:
        """Made once for each object, which is kept, so that none is taken for another."""
        kept = self._records.get(id(sampling))
        if kept is None:
            if len(self._records) >= KEPT_RECORDS:
                self._records.clear()
            kept = self._records[id(sampling)] = sampling, SlotRecord.of(sampling, self.vocab_size)
        return kept[1]

    def set_masks(self, slots: Sequence[int], masks: Sequence[bytes]) -> None:
        """Which token ids the slots may sample in the steps that follow, as in `StepPlan.masks`; in stream order."""
        words = np.frombuffer(b"".join(masks), "<i4").reshape(len(slots), -1)
        lines = to_device(np.column_stack((np.asarray(slots, np.int32), words)), self.device)
        self.sampling.allowed.index_copy_(0, lines[:, 0].long(), lines[:, 1:])
