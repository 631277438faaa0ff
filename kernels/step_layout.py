"""The shapes that the worker and the step-input kernel share: the packed plan, the slots' tables, the step's inputs.

Apart from the kernel, so that a CPU worker needs no Triton to import them. `kernels/step_inputs.py` says what each part
holds and what padding looks like.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

HEADER = 5
"""row_count, decode_row_count, token_count, appended block count, count of the slots' words that change."""
BLOCK_COUNT, WRITE_COUNT = 3, 4
"""Places of the last two in the header."""


@dataclass(frozen=True)
class PlanLayout:
    """Where the parts of a plan for up to `rows` rows and `blocks` appended blocks lie in the int32 buffer."""

    rows: int
    blocks: int

    @cached_property
    def row_slots(self) -> slice:
        """The slot of each row."""
        return slice(HEADER, HEADER + self.rows)

    @cached_property
    def token_counts(self) -> slice:
        """Tokens that each row computes."""
        return slice(self.row_slots.stop, self.row_slots.stop + self.rows)

    @cached_property
    def query_starts(self) -> slice:
        """Cumulative token counts, from 0; one more than there are rows."""
        return slice(self.token_counts.stop, self.token_counts.stop + self.rows + 1)

    @cached_property
    def first_blocks(self) -> slice:
        """Place in each row's block table of its first appended block."""
        return slice(self.query_starts.stop, self.query_starts.stop + self.rows)

    @cached_property
    def append_starts(self) -> slice:
        """Cumulative appended block counts, from 0; one more than there are rows."""
        return slice(self.first_blocks.stop, self.first_blocks.stop + self.rows + 1)

    @cached_property
    def appended_ids(self) -> slice:
        """The appended blocks of all rows."""
        return slice(self.append_starts.stop, self.append_starts.stop + self.blocks)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where these parts start, in this order."""
        parts = (
            self.row_slots, self.token_counts, self.query_starts, self.first_blocks, self.append_starts,
            self.appended_ids,
        )  # fmt: skip
        return tuple(part.start for part in parts)

    @cached_property
    def size(self) -> int:
        """Elements of the whole buffer."""
        return self.appended_ids.stop


@dataclass(frozen=True)
class SlotState:
    """What the device keeps of each slot and every step reads; all int32.

    slot_token_ids: [slots, max_len]; known_lengths, computed_lengths: [slots]; block_tables: [slots, max_blocks].
    """

    slot_token_ids: torch.Tensor
    known_lengths: torch.Tensor
    computed_lengths: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step, `rows` and `tokens` being the sizes of its bucket.

    token_ids, positions: int32 [tokens]; slot_mapping: int64 [tokens]; row_slots, context_lengths, sample_rows: int32
    [rows]; query_starts: int32 [rows + 1].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    row_slots: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    sample_rows: torch.Tensor

    @classmethod
    def allocate(cls, row_count: int, token_count: int, device: torch.device | str) -> "StepInputs":
        """Buffers for a bucket of `row_count` rows and `token_count` tokens, all of them padding."""
        options = {"dtype": torch.int32, "device": device}
        return cls(
            token_ids=torch.zeros(token_count, **options),
            positions=torch.zeros(token_count, **options),
            slot_mapping=torch.full((token_count,), -1, dtype=torch.int64, device=device),
            row_slots=torch.full((row_count,), -1, **options),
            query_starts=torch.zeros(row_count + 1, **options),
            context_lengths=torch.zeros(row_count, **options),
            sample_rows=torch.full((row_count,), -1, **options),
        )

    def bucket(self, row_count: int, token_count: int) -> "StepInputs":
        """The first `row_count` rows and `token_count` tokens of these buffers."""
        return StepInputs(
            self.token_ids[:token_count],
            self.positions[:token_count],
            self.slot_mapping[:token_count],
            self.row_slots[:row_count],
            self.query_starts[: row_count + 1],
            self.context_lengths[:row_count],
            self.sample_rows[:row_count],
        )
