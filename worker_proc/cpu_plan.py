"""The plan of CPU attention, made once per step and shared by all layers: gather indices and masks.

On a CPU, reading a tensor's value costs nothing, so everything is worked out from the context's own tensors. Used by
`cpu_attention` only.

Decode rows of similar length form a group, small enough that its gathered K and V stay in the processor's cache. Blocks
are gathered right-aligned: every row's last block comes last. So positions that were never written are all in one known
place (the last block) and are set to zero there. Padding on the left repeats the longest row's first block, which is
full, and is masked.
"""

from dataclasses import dataclass

import torch

from worker_proc.forward_context import ForwardContext

GROUP_BYTES = 4 << 20
"""Gathered K and V of a decode group; about what two cores keep in their second-level caches and share of the third."""
TILE_TOKENS = 128
"""Most query tokens of a chunk that are attended at once: a tile skips the keys after its last token."""


@dataclass
class GatherPlan:
    """How the cached tokens of some rows become one tensor [rows, kv_head, keys, head_dim].

    indices: int64 [rows * kv_head * blocks], into a cache seen as [block * kv_head, position * head_dim].
    unwritten: int64 [n], positions of the last blocks beyond the context, into the workspace seen as
        [2 * rows * kv_head * keys, head_dim]; None if there are none.
    workspace: [2, rows * kv_head * blocks, position * head_dim], K and V of one layer after the other, as the query.
    first_keys: int64 [rows], position of each row's first gathered key; negative where it is padded on the left.
    key_count: keys per row.
    """

    row_count: int
    indices: torch.Tensor
    unwritten: torch.Tensor | None
    workspace: torch.Tensor
    first_keys: torch.Tensor
    key_count: int


@dataclass
class DecodeGroup:
    """Decode rows that are attended together; mask: float32 [rows, 1, 1, 1, keys] to add to the scores, or None."""

    tokens: torch.Tensor | slice
    gather: GatherPlan
    mask: torch.Tensor | None


@dataclass
class Tile:
    """Query tokens [start, end) of a chunk, the keys [0, key_end) they see, float32 mask [1, 1, tokens, 1, keys]."""

    start: int
    end: int
    key_end: int
    mask: torch.Tensor


@dataclass
class ChunkRow:
    """One row with several query tokens; `gather` is None if its whole context is in this step."""

    tokens: slice
    gather: GatherPlan | None
    tiles: list[Tile]


@dataclass
class AttentionPlan:
    """What the attention layers of one step read and write.

    store_indices: int64 [stored * kv_head], into a cache seen as [block * kv_head * position, head_dim].
    stored_tokens: which tokens are stored, int64; None: all, there is no padding.
    """

    store_indices: torch.Tensor
    stored_tokens: torch.Tensor | None
    decode_groups: list[DecodeGroup]
    chunk_rows: list[ChunkRow]

    @property
    def reads_fresh_tokens(self) -> bool:
        """Whether some row attends to this step's K and V without reading the cache."""
        return any(row.gather is None for row in self.chunk_rows)


@dataclass(frozen=True)
class Row:
    """One row of the step, as numbers."""

    first_token: int
    query_count: int
    context_length: int
    slot: int


class AttentionPlanner:
    """Plans a step's attention for the layers with one sliding window and cache shape; `dtype` is the query's."""

    def __init__(
        self, context: ForwardContext, cache: torch.Tensor, dtype: torch.dtype, sliding_window: int | None
    ) -> None:
        self.context, self.dtype, self.sliding_window = context, dtype, sliding_window
        _, self.kv_head_count, self.block_size, self.head_dim = cache.shape

    def plan(self) -> AttentionPlan:
        """The whole plan."""
        rows = self.rows()
        store_indices, stored_tokens = self._store()
        decode_rows = [row for row in rows if row.query_count == 1]
        return AttentionPlan(
            store_indices,
            stored_tokens,
            [self._decode_group(group) for group in self._group_by_length(decode_rows)],
            [self._chunk_row(row) for row in rows if row.query_count > 1],
        )

    def store_plan(self) -> AttentionPlan:
        """A plan that only says where the step's K and V are stored."""
        return AttentionPlan(*self._store(), [], [])

    def rows(self) -> list[Row]:
        """The rows that are not padding."""
        starts = self.context.query_starts.tolist()
        lengths = self.context.context_lengths.tolist()
        slots = self.context.row_slots.tolist()
        return [
            Row(start, end - start, length, slot)
            for start, end, length, slot in zip(starts[:-1], starts[1:], lengths, slots, strict=True)
            if slot >= 0 and end > start
        ]

    def _store(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        slots = self.context.slot_mapping
        stored_tokens = None
        if bool((slots < 0).any()):
            stored_tokens = (slots >= 0).nonzero().squeeze(1)
            slots = slots[stored_tokens]
        block_heads = (slots // self.block_size * self.kv_head_count)[:, None] + torch.arange(self.kv_head_count)
        return (block_heads * self.block_size + (slots % self.block_size)[:, None]).flatten(), stored_tokens

    def _group_by_length(self, rows: list[Row]) -> list[list[Row]]:
        """Longest first; within a group nobody is padded to more than twice its blocks, and all fit GROUP_BYTES."""
        block_bytes = 2 * self.kv_head_count * self.block_size * self.head_dim * self.dtype.itemsize
        groups: list[list[Row]] = []
        for row in sorted(rows, key=self._block_count, reverse=True):
            widest = self._block_count(groups[-1][0]) if groups else 0
            fits = groups and (len(groups[-1]) + 1) * widest * block_bytes <= GROUP_BYTES
            if fits and widest <= 2 * self._block_count(row):
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _block_count(self, row: Row) -> int:
        """Blocks of the row that its query tokens can see."""
        return -(-row.context_length // self.block_size) - self._first_block(row)

    def _first_block(self, row: Row) -> int:
        if self.sliding_window is None:
            return 0
        first_query = row.context_length - row.query_count
        return max(0, first_query + 1 - self.sliding_window) // self.block_size

    def _gather(self, rows: list[Row]) -> GatherPlan:
        longest = max(rows, key=self._block_count)
        width = self._block_count(longest)
        padding = self.context.block_tables[longest.slot, self._first_block(longest)].long()
        tables = []
        for row in rows:
            first = self._first_block(row)
            blocks = self.context.block_tables[row.slot, first : first + self._block_count(row)].long()
            tables.append(torch.cat((padding.expand(width - blocks.shape[0]), blocks)))
        indices = (torch.stack(tables) * self.kv_head_count)[:, None, :] + torch.arange(self.kv_head_count)[:, None]
        lengths = torch.tensor([row.context_length for row in rows])
        block_ends = (lengths + self.block_size - 1) // self.block_size * self.block_size
        written = lengths - block_ends + self.block_size
        workspace = torch.empty(2, indices.numel(), self.block_size * self.head_dim, dtype=self.dtype)
        key_count = width * self.block_size
        first_keys = block_ends - key_count
        unwritten = self._unwritten(written, key_count)
        return GatherPlan(len(rows), indices.flatten(), unwritten, workspace, first_keys, key_count)

    def _unwritten(self, written: torch.Tensor, key_count: int) -> torch.Tensor | None:
        """See `GatherPlan`; written: int64 [rows], positions of each row's last block that hold a token."""
        rows, positions = (torch.arange(self.block_size) >= written[:, None]).nonzero(as_tuple=True)
        if not len(rows):
            return None
        heads = rows[:, None] * self.kv_head_count + torch.arange(self.kv_head_count)
        keys = heads * key_count + (key_count - self.block_size + positions)[:, None]
        return torch.cat((keys, keys + len(written) * self.kv_head_count * key_count)).flatten()

    def _decode_group(self, rows: list[Row]) -> DecodeGroup:
        gather = self._gather(rows)
        keys = gather.first_keys[:, None] + torch.arange(gather.key_count)
        query = torch.tensor([row.context_length - 1 for row in rows])[:, None]
        seen = self._seen(keys, query)
        mask = None if bool(seen.all()) else _additive(seen)[:, None, None, None, :]
        tokens = [row.first_token for row in rows]
        if tokens == list(range(tokens[0], tokens[0] + len(tokens))):
            return DecodeGroup(slice(tokens[0], tokens[0] + len(tokens)), gather, mask)
        return DecodeGroup(torch.tensor(tokens), gather, mask)

    def _chunk_row(self, row: Row) -> ChunkRow:
        fresh = row.context_length == row.query_count
        gather = None if fresh else self._gather([row])
        first_key = 0 if gather is None else int(gather.first_keys[0])
        keys = torch.arange(first_key, row.context_length)
        queries = torch.arange(row.context_length - row.query_count, row.context_length)
        tiles = []
        for start in range(0, row.query_count, TILE_TOKENS):
            end = min(start + TILE_TOKENS, row.query_count)
            key_end = int(queries[end - 1]) + 1 - first_key
            mask = _additive(self._seen(keys[:key_end], queries[start:end, None]))
            tiles.append(Tile(start, end, key_end, mask[None, None, :, None, :]))
        return ChunkRow(slice(row.first_token, row.first_token + row.query_count), gather, tiles)

    def _seen(self, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Which key positions a query at a position may see; negative keys are padding."""
        seen = (keys >= 0) & (keys <= queries)
        return seen if self.sliding_window is None else seen & (keys > queries - self.sliding_window)


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, float("-inf"))
