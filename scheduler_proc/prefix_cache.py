"""Which cached KV blocks hold the start of a prompt: one interface, and its implementation by chained hashes.

Knows tokens and block numbers, but neither requests nor steps: the caller indexes a block only once the plan that
computes it has been sent. The pool tells when a cached block is given up.

A *chain* is what one sequence carries along: the keys of its full blocks, computed once, and how many of its blocks
have been indexed.
"""

import hashlib
from array import array
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
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
    """

    __slots__ = ("indexed_count", "keys", "parent", "root")

    def __init__(self, root: int) -> None:
        self.root = root
        self.keys: array[int] = array("Q")
        self.indexed_count = 0
        self.parent = root

    def rewind(self) -> None:
        """The sequence has no blocks any more; its keys stay."""
        self.indexed_count = 0
        self.parent = self.root


class PrefixCache(Protocol):
    """What the planner asks of a prefix cache, whichever way it finds prefixes."""

    def chain(self, namespace: str) -> Chain:
        """The start of a new sequence's chain in the namespace (model, adapter and cache salt)."""

    def lookup(self, chain: Chain, tokens: "array[int]", limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens; the chain goes on from there."""

    def insert(self, chain: Chain, tokens: "array[int]", blocks: SequenceABC[int], token_count: int) -> None:
        """Index the sequence's full blocks among its first `token_count` tokens; the plans for them have been sent."""

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

    def flush(self) -> None:
        """Nothing happens."""

    def check(self) -> None:
        """Nothing to disagree with."""


class HashPrefixCache:
    """Prefixes by chained xxhash64: the key of a block is the hash of its tokens, seeded with the key before it.

    A key only proposes a block. It is taken if its tokens are equal and its parent entry is the one matched before it,
    so that two prefixes with colliding keys are never mistaken for each other. Each indexing gets a new entry number;
    a child whose parent was given up and indexed again does not match, and is replaced when its tokens come again.

    Per block, in flat arrays: its key, its entry's number, the parent's number, its tokens.

    Args:
        pool: the blocks; its `on_evict` is taken over.
        block_size: tokens per block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._width = 4 * block_size
        self._block_of: dict[int, int] = {}
        self._key_of = array("Q", bytes(8 * pool.block_count))
        self._entry_of = array("q", bytes(8 * pool.block_count))
        self._parent_of = array("q", bytes(8 * pool.block_count))
        self._tokens_of = bytearray(self._width * pool.block_count)
        self._entries = 0
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._block_of)

    def chain(self, namespace: str) -> Chain:
        """The start of a new sequence's chain in the namespace."""
        return Chain(root_number(namespace))

    def lookup(self, chain: Chain, tokens: "array[int]", limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens, in whole blocks unless the limit cuts the last."""
        chain.rewind()
        data = tokens.tobytes()
        self._extend(chain, data, 0, len(tokens) // self._block_size)
        width, block_of, entry_of, parent_of = self._width, self._block_of, self._entry_of, self._parent_of
        stored = self._tokens_of
        blocks: list[int] = []
        parent, start = chain.root, 0
        for key in chain.keys:
            block = block_of.get(key)
            if block is None or parent_of[block] != parent:
                break
            offset = block * width
            if stored[offset : offset + width] != data[start : start + width]:
                break
            blocks.append(block)
            parent = entry_of[block]
            start += width
        token_count = min(len(blocks) * self._block_size, limit)
        del blocks[-(-token_count // self._block_size) :]
        chain.indexed_count = token_count // self._block_size
        if chain.indexed_count:
            chain.parent = entry_of[blocks[chain.indexed_count - 1]]
        return Match(blocks, token_count)

    def insert(self, chain: Chain, tokens: "array[int]", blocks: SequenceABC[int], token_count: int) -> None:
        """Index the full blocks among the first `token_count` tokens."""
        full_count = token_count // self._block_size
        if full_count <= chain.indexed_count:
            return
        first = chain.indexed_count
        data = tokens[first * self._block_size : full_count * self._block_size].tobytes()
        self._extend(chain, data, first, full_count)
        for index in range(first, full_count):
            start = (index - first) * self._width
            content = data[start : start + self._width]
            chain.parent = self._index(chain.keys[index], chain.parent, content, blocks[index])
        chain.indexed_count = full_count

    def flush(self) -> None:
        """Forget what no sequence holds."""
        for block in self._pool.cached_blocks():
            self._forget(block)
            self._pool.unmark(block)

    def check(self) -> None:
        """Raise AssertionError if the index and the pool disagree."""
        marked = sum(self._pool.is_marked(block) for block in range(self._pool.block_count))
        assert marked == len(self._block_of), f"{marked} blocks are marked, {len(self._block_of)} are indexed"
        for key, block in self._block_of.items():
            assert self._key_of[block] == key, f"block {block} is indexed under another block's key"
            assert self._pool.is_marked(block), f"block {block} is indexed but not marked"

    def _extend(self, chain: Chain, data: bytes, first: int, full_count: int) -> None:
        """Compute the keys up to `full_count` blocks; `data` holds the tokens from block `first` on."""
        keys, width, digest = chain.keys, self._width, hash_block
        done = len(keys)
        key = keys[-1] if done else chain.root & _MASK64
        for start in range((done - first) * width, (full_count - first) * width, width):
            key = digest(data[start : start + width], key)
            keys.append(key)

    def _index(self, key: int, parent: int, content: bytes, block: int) -> int:
        present = self._block_of.get(key)
        if present is not None:
            if self._parent_of[present] == parent and self._content(present) == content:
                return self._entry_of[present]
            self._forget(present)  # a colliding key, or a child whose parent is gone
            self._pool.unmark(present)
        self._block_of[key] = block
        self._key_of[block] = key
        self._entry_of[block] = entry = self._new_entry()
        self._parent_of[block] = parent
        offset = block * self._width
        self._tokens_of[offset : offset + self._width] = content
        self._pool.mark(block)
        return entry

    def _content(self, block: int) -> bytearray:
        return self._tokens_of[block * self._width : (block + 1) * self._width]

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of[block]]

    def _new_entry(self) -> int:
        self._entries += 1
        return self._entries


def root_number(namespace: str) -> int:
    """The namespace's number: negative, unlike every entry's; 63 bits of BLAKE2b, so that no salt can be made to meet
    another's.
    """
    digest = hashlib.blake2b(namespace.encode(), digest_size=8).digest()
    return -1 - (int.from_bytes(digest, "little") >> 1)


def make_prefix_cache(kind: str, pool: BlockPool, block_size: int) -> PrefixCache:
    """The implementation that `--prefix-cache` names: `hash` or `off`."""
    if kind == "hash":
        return HashPrefixCache(pool, block_size)
    assert kind == "off", f"unknown prefix cache {kind!r}"
    return NoPrefixCache()
