"""Finds the cached KV blocks that hold the start of a prompt: the interface, and a cache by chained hashes.

Knows tokens and block numbers, but neither requests nor steps: the caller indexes a block only after it has sent the
plan that computes it. The block pool calls back when a cached block is evicted.

A *chain* belongs to one sequence: the keys of its full blocks, each computed once, and how many of its blocks have been
indexed.
"""

import hashlib
from array import array
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import xxhash

from scheduler_proc.block_pool import BlockPool

hash_block = xxhash.xxh64_intdigest
"""(bytes, seed) -> uint64."""

_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix.

    Attributes:
        blocks: blocks that hold it, in order; not yet shared.
        token_count: tokens of it. When it ends inside the last block, that block must be copied before it is written.
    """

    blocks: list[int]
    token_count: int


NO_MATCH = Match([], 0)


class Chain:
    """A sequence's place in the prefix cache.

    Attributes:
        root: the namespace's number, negative; prefixes are found within one namespace only.
        keys: uint64, one per full block so far.
        indexed_count: blocks that have been offered to the index.
        parent: the number of the last indexed block's entry (the root before the first).
        last_block: the block of that entry; -1 before the first.
    """

    __slots__ = ("indexed_count", "keys", "last_block", "parent", "root")

    def __init__(self, root: int) -> None:
        self.root = root
        self.keys: array[int] = array("Q")
        self.indexed_count = 0
        self.parent = root
        self.last_block = -1

    def rewind(self) -> None:
        """The sequence has no blocks any more; its keys stay."""
        self.indexed_count = 0
        self.parent = self.root
        self.last_block = -1


class PrefixCache(Protocol):
    """What the planner asks of a prefix cache, whichever way it finds prefixes."""

    def chain(self, namespace: str) -> Chain:
        """The start of a new sequence's chain in the namespace (model, adapter and cache salt)."""

    def lookup(self, chain: Chain, tokens: "array[int]", limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens; the chain goes on from there."""

    def insert(self, chain: Chain, tokens: "array[int]", blocks: SequenceABC[int], token_count: int) -> None:
        """Index the sequence's full blocks among its first `token_count` tokens; the plans for them have been sent."""

    def insert_tail(self, chain: Chain, tokens: "array[int]", blocks: SequenceABC[int], token_count: int) -> None:
        """Index the partly filled last block of a sequence that ends, if this cache finds such."""

    def drop(self, blocks: SequenceABC[int]) -> None:
        """Forget those of the blocks that are indexed, and nobody finds what comes after them."""

    def flush(self) -> None:
        """Forget what no sequence holds."""

    def check(self) -> None:
        """Raise AssertionError if the index and the pool disagree."""


class NoPrefixCache:
    """Finds nothing (`--prefix-cache off`)."""

    def chain(self, namespace: str) -> Chain:
        """An empty chain."""
        return Chain(root_number(namespace))

    def lookup(self, chain: Chain, tokens: "array[int]", limit: int) -> Match:
        """Nothing."""
        return NO_MATCH

    def insert(self, chain: Chain, tokens: "array[int]", blocks: SequenceABC[int], token_count: int) -> None:
        """Nothing happens."""

    def insert_tail(self, chain: Chain, tokens: "array[int]", blocks: SequenceABC[int], token_count: int) -> None:
        """Nothing happens."""

    def drop(self, blocks: SequenceABC[int]) -> None:
        """Nothing happens."""

    def flush(self) -> None:
        """Nothing happens."""

    def check(self) -> None:
        """Nothing to disagree with."""


class HashPrefixCache:
    """Prefixes by chained xxhash64: the key of a block is the hash of its tokens, seeded with the key before it.

    A key only proposes a block. It is taken if its tokens are equal and its parent entry is the one matched before it,
    so that two prefixes with colliding keys are never mistaken for each other. Each indexing gets a new entry number;
    a child whose parent was given up and indexed again does not match, and is replaced when its tokens come again.

    The index is a hash table with chaining in flat arrays, sized once: about 100 bytes a block at 16 tokens, where a
    dict of Python integers takes over 200.

        heads      int32, per bucket: the first block of its list, -1 for none
        links      int32, per block: the next block of its list
        keys       uint64, per block
        entries    int64, per block: the number of its entry
        parents    int64, per block: the number of the entry before it, or the namespace's
        tokens     int32 [block_size], per block

    Args:
        pool: the blocks; its `on_evict` is taken over.
        block_size: tokens per block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._width = 4 * block_size
        bucket_count = 1 << pool.block_count.bit_length()
        self._mask = bucket_count - 1
        self._heads = array("i", [-1]) * bucket_count
        self._links = array("i", bytes(4 * pool.block_count))
        self._keys = array("Q", bytes(8 * pool.block_count))
        self._entries = array("q", bytes(8 * pool.block_count))
        self._parents = array("q", bytes(8 * pool.block_count))
        self._tokens = bytearray(self._width * pool.block_count)
        self._entry_count = 0
        self._indexed_count = 0
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return self._indexed_count

    def chain(self, namespace: str) -> Chain:
        """The start of a new sequence's chain in the namespace."""
        return Chain(root_number(namespace))

    def lookup(self, chain: Chain, tokens: "array[int]", limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens, in whole blocks unless the limit cuts the last."""
        data = tokens.tobytes()
        heads, links, mask, width = self._heads, self._links, self._mask, self._width
        keys, entries, parents, stored = self._keys, self._entries, self._parents, self._tokens
        blocks: list[int] = []
        parent, start = chain.root, 0
        for count in range(1, len(tokens) // self._block_size + 1):
            if count > len(chain.keys):  # no further than the match goes: the plan need not wait for the other keys
                self._extend(chain, data, 0, min(2 * count, len(tokens) // self._block_size))
            key = chain.keys[count - 1]
            block = heads[key & mask]
            while block >= 0 and keys[block] != key:
                block = links[block]
            if block < 0 or parents[block] != parent:
                break
            offset = block * width
            if stored[offset : offset + width] != data[start : start + width]:
                break
            blocks.append(block)
            parent = entries[block]
            start += width
        chain.rewind()
        if not blocks:
            return NO_MATCH
        token_count = min(len(blocks) * self._block_size, limit)
        del blocks[-(-token_count // self._block_size) :]
        chain.indexed_count = token_count // self._block_size
        if chain.indexed_count:
            chain.parent = entries[blocks[chain.indexed_count - 1]]
        return Match(blocks, token_count)

    def insert(self, chain: Chain, tokens: "array[int]", blocks: SequenceABC[int], token_count: int) -> None:
        """Index the full blocks among the first `token_count` tokens."""
        full_count = token_count // self._block_size
        first = chain.indexed_count
        if full_count <= first:
            return
        data = tokens[first * self._block_size : full_count * self._block_size].tobytes()
        self._extend(chain, data, first, full_count)
        parent, width, start = chain.parent, self._width, 0
        for key, block in zip(chain.keys[first:full_count], blocks[first:full_count], strict=True):
            parent = self._index(key, parent, data[start : start + width], block)
            start += width
        chain.parent = parent
        chain.indexed_count = full_count

    def insert_tail(self, chain: Chain, tokens: "array[int]", blocks: SequenceABC[int], token_count: int) -> None:
        """Nothing: only whole blocks have a key."""

    def drop(self, blocks: SequenceABC[int]) -> None:
        """Forget those of the blocks that are indexed; what comes after them stays, but cannot be reached."""
        for block in blocks:
            if self._pool.is_marked(block):
                self._forget(block)
                self._pool.unmark(block)

    def flush(self) -> None:
        """Forget what no sequence holds."""
        self.drop(self._pool.cached_blocks())

    def check(self) -> None:
        """Raise AssertionError if the index and the pool disagree."""
        found = 0
        for bucket, head in enumerate(self._heads):
            block = head
            while block >= 0:
                found += 1
                assert self._keys[block] & self._mask == bucket, f"block {block} stands in another key's list"
                assert self._pool.is_marked(block), f"block {block} is indexed but not marked"
                block = self._links[block]
        marked = sum(self._pool.is_marked(block) for block in range(self._pool.block_count))
        assert found == marked == self._indexed_count, f"{found} blocks are indexed, {marked} marked"

    def _extend(self, chain: Chain, data: bytes, first: int, full_count: int) -> None:
        """Compute the keys up to `full_count` blocks; `data` holds the tokens from block `first` on."""
        keys, width, digest = chain.keys, self._width, hash_block
        done = len(keys)
        key = keys[-1] if done else chain.root & _MASK64
        for start in range((done - first) * width, (full_count - first) * width, width):
            key = digest(data[start : start + width], key)
            keys.append(key)

    def _index(self, key: int, parent: int, content: bytes, block: int) -> int:
        """Make the block findable; the number of its entry, or of an equal block's that is findable already."""
        keys, bucket, width = self._keys, key & self._mask, self._width
        head = present = self._heads[bucket]
        while present >= 0 and keys[present] != key:
            present = self._links[present]
        if present >= 0:
            same_tokens = self._tokens[present * width : (present + 1) * width] == content
            if same_tokens and self._parents[present] == parent:
                return self._entries[present]
            self._forget(present)  # a colliding key, or a child whose parent is gone
            self._pool.unmark(present)
            head = self._heads[bucket]
        self._heads[bucket] = block
        self._links[block] = head
        keys[block] = key
        self._entry_count = entry = self._entry_count + 1
        self._entries[block] = entry
        self._parents[block] = parent
        self._tokens[block * width : (block + 1) * width] = content
        self._indexed_count += 1
        self._pool.mark(block)
        return entry

    def _forget(self, block: int) -> None:
        """Take the block out of its list."""
        bucket, links = self._keys[block] & self._mask, self._links
        before = self._heads[bucket]
        if before == block:
            self._heads[bucket] = links[block]
        else:
            while links[before] != block:
                before = links[before]
            links[before] = links[block]
        self._indexed_count -= 1


@lru_cache(256)
def root_number(namespace: str) -> int:
    """The namespace's number: negative, unlike every entry's; 63 bits of BLAKE2b, so that no salt can be made to meet
    another's.
    """
    digest = hashlib.blake2b(namespace.encode(), digest_size=8).digest()
    return -1 - (int.from_bytes(digest, "little") >> 1)
