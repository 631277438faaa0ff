"""A step plan under construction: collects the rows as they are placed, then turns them into a `StepPlan`.

Called by the planner and by admission. Decides nothing.
"""

from array import array

from common.messages import HEAD, NO_SLOTS, NewSlots, SlotSampling, StepPlan
from scheduler_proc.block_pool import BlockPool
from scheduler_proc.sequence import Sequence, shared_sampling, slot_seed


class ChunkRow:
    """The chunk of a prompt, or of a resumed sequence, in this step.

    Attributes:
        sequence: whose.
        first: the position of its first token.
        count: tokens.
        blocks: blocks appended for it; None for a new slot, whose whole block table travels.
        cached_count: for a new slot, tokens that were found in the cache.
    """

    __slots__ = ("blocks", "cached_count", "count", "first", "sequence")

    def __init__(self, sequence: Sequence, first: int, count: int, *, is_new: bool) -> None:
        self.sequence = sequence
        self.first = first
        self.count = count
        self.cached_count = first
        self.blocks: list[int] | None = None if is_new else []

    @property
    def is_new(self) -> bool:
        """Whether the sequence gets its slot in this step."""
        return self.blocks is None

    @property
    def samples(self) -> bool:
        """Whether it ends with the last known token, after which the next one is sampled."""
        return self.first + self.count == self.sequence.planned_len


def chunk_share(wanted: int, budget: int, others: bool) -> int:
    """Tokens for a chunk: all that are wanted if they fit, else half of the budget if others want some of it."""
    if wanted <= budget:
        return wanted
    return (budget + 1) // 2 if others else budget


class Draft:
    """The rows of a step so far.

    Attributes:
        step_id: the plan's.
        budget: tokens that the step may still compute.
        decode_rows, decode_slots: aligned.
        decode_blocks: appended blocks of the decode rows, in row order.
        decode_block_rows: for each of them, its row.
        chunks: the chunk rows.
        copies: pairs of source and destination block; each source is held until the result comes.
        swap_outs, swap_ins: pairs of device and host block, of host and device block.
        released, released_host: blocks given up with this step: they are free when its result has come.
        ending: decode rows whose last token this is.
    """

    __slots__ = (
        "_block_size",
        "budget",
        "chunks",
        "copies",
        "decode_block_rows",
        "decode_blocks",
        "decode_rows",
        "decode_slots",
        "ending",
        "released",
        "released_host",
        "step_id",
        "swap_ins",
        "swap_outs",
    )  # fmt: skip

    def __init__(self, step_id: int, budget: int, block_size: int) -> None:
        self.step_id = step_id
        self._block_size = block_size
        self.budget = budget
        self.decode_rows: list[Sequence] = []
        self.decode_slots: list[int] = []
        self.decode_blocks: list[int] = []
        self.decode_block_rows: list[int] = []
        self.chunks: list[ChunkRow] = []
        self.copies: list[tuple[int, int]] = []
        self.swap_outs: list[tuple[int, int]] = []
        self.swap_ins: list[tuple[int, int]] = []
        self.released: list[list[int]] = []
        self.released_host: list[list[int]] = []
        self.ending: list[Sequence] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do; a step may also only swap blocks, if nobody can run before."""
        return not (self.decode_rows or self.chunks or self.swap_outs)

    def place(self, row: ChunkRow) -> None:
        """Add a chunk row; from now on its sequence cannot be preempted in this step."""
        row.sequence.last_step = self.step_id
        self.chunks.append(row)

    def extend(self, row: ChunkRow, count: int, pool: BlockPool) -> None:
        """`count` more tokens for a chunk row, with the blocks for them; the caller has checked both limits."""
        sequence = row.sequence
        row.count += count
        sequence.computed_count = row.first + row.count
        needed = -(-sequence.computed_count // self._block_size) - len(sequence.blocks)
        new = pool.allocate_many(needed)
        sequence.add_blocks(new, self._block_size)
        if row.blocks is not None:
            row.blocks += new
        self.budget -= count

    def to_plan(self, cleared_slots: list[int], *, has_grammars: bool) -> StepPlan:
        """The message; `Sequence.planned_len` must not have been raised for the chunks yet."""
        masks = self._masks() if has_grammars else []
        block_ids = self.decode_blocks + [block for row in self.chunks for block in row.blocks or ()]
        return StepPlan(
            step_id=self.step_id,
            decode_slots=array("H", self.decode_slots),
            decode_block_counts=self._decode_block_counts(),
            chunk_slots=array("H", [row.sequence.slot for row in self.chunks]),
            chunk_token_counts=array("i", [row.count for row in self.chunks]),
            chunk_samples=array("B", [row.samples for row in self.chunks]),
            chunk_block_counts=array("i", [len(row.blocks or ()) for row in self.chunks]),
            block_ids=array("i", block_ids),
            new_slots=_new_slots(self.chunks),
            cleared_slots=array("H", cleared_slots),
            copy_block_ids=_flat(self.copies),
            swap_out_block_ids=_flat(self.swap_outs),
            swap_in_block_ids=_flat(self.swap_ins),
            mask_slots=array("H", [slot for slot, _ in masks]),
            masks=tuple(mask for _, mask in masks),
        )

    def _masks(self) -> list[tuple[int, bytes]]:
        """Slots and masks of the rows that sample under a grammar."""
        sampling = self.decode_rows + [row.sequence for row in self.chunks if row.samples]
        return [(s.slot, s.grammar.mask) for s in sampling if s.grammar is not None]

    def _decode_block_counts(self) -> "array[int]":
        if not self.decode_block_rows:
            return array("B")
        counts = array("B", bytes(len(self.decode_rows)))
        for row_index in self.decode_block_rows:
            counts[row_index] += 1
        return counts


def _flat(pairs: list[tuple[int, int]]) -> "array[int]":
    return array("i", [block for pair in pairs for block in pair])


def _new_slots(rows: list[ChunkRow]) -> NewSlots:
    """The slots of those chunk rows that start with this step."""
    heads, tokens, blocks = [], array("i"), array("i")
    samplings: list[SlotSampling] = []
    places: dict[int, int] = {}
    for row in rows:
        if not row.is_new:
            continue
        sequence = row.sequence
        sampling = shared_sampling(sequence)
        place = places.setdefault(id(sampling), len(samplings))
        if place == len(samplings):
            samplings.append(sampling)
        counts = len(sequence.blocks), len(sequence.tokens), row.cached_count, sequence.prompt_count
        heads.append(HEAD.pack(sequence.slot, *counts, place, slot_seed(sequence)))
        blocks.fromlist(sequence.blocks)
        tokens += sequence.tokens
    return NewSlots(b"".join(heads), blocks + tokens, tuple(samplings)) if heads else NO_SLOTS
