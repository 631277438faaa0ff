"""The owners of the KV blocks: a free list, reference counts, and the order in which cached blocks are evicted.

Plain integers: knows nothing of tokens, requests or steps. Called by the planner (allocate, share), by whatever ends a
sequence (release), and by the prefix cache (mark and unmark the blocks it can find again). Every operation is O(1).
"""

from array import array
from collections.abc import Callable, Sequence


class BlockPool:
    """The blocks of one KV cache.

    A block is in exactly one of three states:

        free     nobody holds it, nothing in it can be found again
        cached   nobody holds it, but the prefix cache can find it: given up least recently released first
        held     its reference count is the number of block tables (and pending copies) that name it

        allocate   free -> held, or the oldest cached -> held (the prefix cache is told to forget it)
        share      held -> held with one more reference; cached -> held
        release    held -> held with one less; the last one: -> cached if marked, else -> free
        unmark     cached -> free (held stays held)

    Invariants, which `check` recounts: free + cached + held = block_count; a block on the free list or in the cached
    order has no references; cached blocks are exactly the marked ones without references.

    Args:
        block_count: blocks 0 to block_count - 1.
    """

    __slots__ = (
        "_cached_count",
        "_free",
        "_marked",
        "_next",
        "_previous",
        "_refs",
        "block_count",
        "evictions",
        "on_evict",
    )

    def __init__(self, block_count: int) -> None:
        if block_count < 1:
            raise ValueError(f"a KV cache of {block_count} blocks can hold nothing")
        self.block_count = block_count
        self.evictions = 0
        self.on_evict: Callable[[int], None] = _ignore
        self._free = array("i", range(block_count - 1, -1, -1))
        self._refs = array("i", bytes(4 * block_count))
        self._marked = bytearray(block_count)
        self._cached_count = 0
        # the cached order as a ring through a sentinel (number block_count), whose next is the oldest
        self._next = array("i", bytes(4 * (block_count + 1)))
        self._previous = array("i", bytes(4 * (block_count + 1)))
        self._next[block_count] = self._previous[block_count] = block_count

    @property
    def available_count(self) -> int:
        """Blocks that `allocate` can still give: free or cached."""
        return len(self._free) + self._cached_count

    @property
    def free_count(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Blocks that nobody holds but the prefix cache can find."""
        return self._cached_count

    @property
    def held_count(self) -> int:
        """Blocks with at least one reference."""
        return self.block_count - len(self._free) - self._cached_count

    def refs(self, block: int) -> int:
        """How many hold the block."""
        return self._refs[block]

    def is_marked(self, block: int) -> bool:
        """Whether the prefix cache can find the block."""
        return self._marked[block] != 0

    def allocate(self) -> int:
        """A block with one reference and undefined content; the caller has checked `available_count`."""
        block = self._free.pop() if self._free else self._evict()
        self._refs[block] = 1
        return block

    def _evict(self) -> int:
        """The oldest cached block, which nothing can find any more."""
        following, end = self._next, self.block_count
        block = following[end]
        assert block != end, "no block is available"
        after = following[block]
        following[end] = after
        self._previous[after] = end
        self._cached_count -= 1
        self._marked[block] = 0
        self.evictions += 1
        self.on_evict(block)
        return block

    def allocate_many(self, count: int) -> list[int]:
        """`count` blocks as by `allocate`."""
        if count == 1:
            return [self.allocate()]
        free, refs = self._free, self._refs
        split = max(len(free) - count, 0)
        blocks = free[split:].tolist()
        blocks.reverse()
        del free[split:]
        for block in blocks:
            refs[block] = 1
        while len(blocks) < count:
            block = free.pop() if free else self._evict()  # forgetting one block can free others
            refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """One more reference to a held or cached block."""
        count = self._refs[block]
        if count == 0:
            assert self._marked[block], f"block {block} is free: nothing in it can be shared"
            self._unlink(block)
        self._refs[block] = count + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one reference from each of a sequence's blocks.

        The last block goes first, so that the end of a prefix is evicted before its start.
        """
        refs, marked, add_free = self._refs, self._marked, self._free.append
        for block in reversed(blocks):
            count = refs[block] - 1
            assert count >= 0, f"block {block} is released more often than it was taken"
            refs[block] = count
            if count == 0:
                if marked[block]:
                    self._link_newest(block)
                else:
                    add_free(block)

    def mark(self, block: int) -> None:
        """The prefix cache can find this held block from now on."""
        assert self._refs[block] > 0, f"block {block} is not held: its content may be gone"
        self._marked[block] = 1

    def unmark(self, block: int) -> None:
        """The prefix cache has forgotten this block."""
        self._marked[block] = 0
        if self._refs[block] == 0:
            self._unlink(block)
            self._free.append(block)

    def cached_blocks(self) -> list[int]:
        """The cached blocks, oldest first."""
        blocks = []
        block = self._next[self.block_count]
        while block != self.block_count:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _link_newest(self, block: int) -> None:
        end = self.block_count
        newest = self._previous[end]
        self._next[newest] = block
        self._previous[block] = newest
        self._next[block] = end
        self._previous[end] = block
        self._cached_count += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._cached_count -= 1

    def check(self, expected_refs: dict[int, int] | None = None) -> None:
        """Recount everything.

        Args:
            expected_refs: block -> how many block tables and pending copies name it; None leaves that out.

        Raises:
            AssertionError: an invariant does not hold; the message says which block and how.
        """
        free, cached = set(self._free), self.cached_blocks()
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert len(cached) == self._cached_count, f"{len(cached)} cached blocks, counted as {self._cached_count}"
        cached_set = set(cached)
        for block in range(self.block_count):
            states = (block in free) + (block in cached_set) + (self._refs[block] > 0)
            assert states == 1, f"block {block} is in {states} states (references {self._refs[block]})"
            assert (block in cached_set) <= self._marked[block], f"block {block} is cached but not marked"
            assert (block in free) + self._marked[block] < 2, f"block {block} is free but marked"
        assert len(free) + len(cached) + self.held_count == self.block_count
        if expected_refs is not None:
            found = {block: count for block, count in enumerate(self._refs) if count}
            assert found == expected_refs, f"references {_difference(found, expected_refs)}"


def _ignore(block: int) -> None:
    pass


def _difference(found: dict[int, int], expected: dict[int, int]) -> str:
    blocks = sorted(block for block in found.keys() | expected.keys() if found.get(block) != expected.get(block))
    return ", ".join(f"block {b}: {found.get(b, 0)}, held by {expected.get(b, 0)}" for b in blocks[:8])
