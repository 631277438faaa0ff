"""The prefix caches: what is found, what is not, what is forgotten."""

from array import array

import pytest

from scheduler_proc import prefix_cache
from scheduler_proc.block_pool import BlockPool
from scheduler_proc.prefix_cache import HashPrefixCache, NoPrefixCache
from scheduler_proc.state import make_prefix_cache


class Books:
    """A pool and a cache, with sequences that come and go whole."""

    def __init__(self, block_count=16, block_size=4):
        self.pool = BlockPool(block_count)
        self.cache = HashPrefixCache(self.pool, block_size)
        self.block_size = block_size

    def compute(self, tokens, namespace=""):
        """A sequence computes all of its tokens, sharing nothing; its blocks stay held."""
        blocks = [self.pool.allocate() for _ in range(-(-len(tokens) // self.block_size))]
        self.cache.insert(self.cache.chain(namespace), array("i", tokens), blocks, len(tokens))
        return blocks

    def find(self, tokens, namespace="", limit=None):
        chain = self.cache.chain(namespace)
        match = self.cache.lookup(chain, array("i", tokens), len(tokens) if limit is None else limit)
        self.cache.check()
        return match.blocks, match.token_count


def test_finds_whole_blocks_and_a_cut_last_one():
    books = Books()
    blocks = books.compute(range(10))
    assert books.find(range(10)) == (blocks[:2], 8)
    assert books.find([*range(7), 99]) == (blocks[:1], 4)
    assert books.find(range(8), limit=7) == (blocks[:2], 7)
    assert books.find(range(4), limit=3) == (blocks[:1], 3)
    assert books.find([99, *range(1, 8)]) == ([], 0)
    assert books.find([1], limit=0) == ([], 0)


def test_stays_findable_after_release_until_reused():
    books = Books(block_count=3)
    books.pool.release(books.compute(range(12)))
    assert books.find(range(12)) == ([0, 1, 2], 12)
    books.pool.allocate()
    assert books.find(range(12)) == ([0, 1], 8)
    books.pool.allocate()
    books.pool.allocate()
    assert books.find(range(12)) == ([], 0)
    assert len(books.cache) == 0


def test_namespaces_are_apart():
    books = Books()
    first = books.compute(range(8), "adapter\0")
    assert books.find(range(8), "adapter\0salt") == ([], 0)
    assert books.find(range(8), "adapter") == ([], 0)
    assert books.find(range(8), "adapter\0") == (first, 8)


def test_the_second_of_two_equal_blocks_is_not_indexed():
    books = Books()
    first, second = books.compute(range(8)), books.compute(range(8))
    books.pool.release(first)
    assert books.find(range(8)) == (first, 8)
    books.pool.release(second)
    assert books.find(range(8)) == (first, 8)
    assert books.pool.cached_count == 2


def test_a_child_of_a_forgotten_parent_is_not_found_and_is_replaced():
    books = Books()
    old = books.compute(range(8))
    books.pool.release([old[0]])
    for _ in range(14):
        books.pool.allocate()
    assert books.find(range(8)) == (old, 8)
    assert books.pool.allocate() == old[0]
    assert books.find(range(8)) == ([], 0)
    for block in range(2, 10):
        books.pool.release([block])
    new = books.compute(range(8))
    assert books.find(range(8)) == (new, 8)
    assert not books.pool.is_marked(old[1])


def test_flush_forgets_what_nobody_holds():
    books = Books()
    held, released = books.compute(range(4)), books.compute(range(50, 58))
    books.pool.release(released)
    books.cache.flush()
    assert books.find(range(4)) == (held, 4)
    assert books.find(range(50, 58)) == ([], 0)
    assert books.pool.cached_count == 0


@pytest.mark.parametrize("bad_hash", [lambda content, seed: 42, lambda content, seed: content[0]])
def test_colliding_keys_are_told_apart(monkeypatch, bad_hash):
    """Fault C9: equal keys, different tokens or different parents."""
    monkeypatch.setattr(prefix_cache, "hash_block", bad_hash)
    books = Books()
    first, other, tail = [1, 2, 3, 4], [1, 7, 7, 7], [5, 6, 7, 8]
    books.compute(first + tail)
    assert books.find(other + tail) == ([], 0)
    books.compute(other + tail)
    _, count = books.find(first + tail)
    assert count in (0, 4)  # never the tail, which was computed behind `other`


def test_a_chain_goes_on_after_a_hit():
    books = Books()
    prompt = array("i", range(8))
    first = books.compute(prompt)
    chain = books.cache.chain("")
    assert books.cache.lookup(chain, prompt, 7).token_count == 7
    tokens = prompt + array("i", [50, 51, 52, 53])
    blocks = [first[0], *(books.pool.allocate() for _ in range(2))]
    books.cache.insert(chain, tokens, blocks, 12)
    assert books.find(tokens) == ([first[0], first[1], blocks[2]], 12)


def test_off_finds_nothing():
    cache = make_prefix_cache("off", BlockPool(2), 4)
    assert isinstance(cache, NoPrefixCache)
    chain = cache.chain("")
    cache.insert(chain, array("i", range(8)), [0, 1], 8)
    assert cache.lookup(chain, array("i", range(8)), 7).token_count == 0
