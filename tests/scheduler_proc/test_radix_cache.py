"""The radix tree: the longest match to the token, splits, partly filled blocks, what eviction takes along."""

from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_proc.block_pool import BlockPool
from scheduler_proc.radix_cache import RadixPrefixCache

SIZE = 4


class Books:
    """A pool and a tree, with sequences that come and go whole."""

    def __init__(self, block_count=64):
        self.pool = BlockPool(block_count)
        self.cache = RadixPrefixCache(self.pool, SIZE)

    def compute(self, tokens, namespace="", keep=True):
        """A sequence computes all of its tokens, sharing nothing, and ends; its blocks stay held if `keep`."""
        tokens = array("i", tokens)
        blocks = self.pool.allocate_many(-(-len(tokens) // SIZE))
        chain = self.cache.chain(namespace)
        for count in range(1, len(tokens) + 1):
            self.cache.insert(chain, tokens, blocks, count)
        self.cache.insert_tail(chain, tokens, blocks, len(tokens))
        self.cache.check()
        if not keep:
            self.pool.release(blocks)
        return blocks

    def find(self, tokens, limit=None, namespace=""):
        match = self.cache.lookup(
            self.cache.chain(namespace), array("i", tokens), len(tokens) if limit is None else limit
        )
        assert len(match.blocks) == -(-match.token_count // SIZE)
        return match.blocks, match.token_count


def test_finds_prefixes_to_the_token():
    books = Books()
    blocks = books.compute(range(10))
    assert books.find(range(10)) == (blocks, 10)
    assert books.find(range(20)) == (blocks, 10)
    assert books.find([*range(6), 99, 98]) == (blocks[:2], 6)
    assert books.find(range(10), limit=9) == (blocks, 9)
    assert books.find([99]) == ([], 0)
    assert books.find(range(10), namespace="other") == ([], 0)


def test_siblings_that_share_the_start_of_a_block():
    books = Books()
    first = books.compute([1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = books.compute([1, 2, 3, 4, 5, 6, 70, 80])
    assert books.find([1, 2, 3, 4, 5, 6, 7, 99]) == (first[:2], 7)
    assert books.find([1, 2, 3, 4, 5, 6, 70, 99]) == ([first[0], second[1]], 7)
    assert books.find([1, 2, 3, 4, 5, 6, 70, 80, 9])[1] == 8
    assert not books.pool.is_marked(second[0])


def test_a_partly_filled_block_gives_way_to_a_fuller_one():
    books = Books()
    short = books.compute(range(6))
    longer = books.compute(range(7))
    assert books.find(range(9)) == ([short[0], longer[1]], 7)
    full = books.compute(range(12))
    assert books.find(range(12)) == ([short[0], *full[1:]], 12)
    assert not books.pool.is_marked(short[1]) and not books.pool.is_marked(longer[1])
    again = books.compute(range(5))
    assert not books.pool.is_marked(again[1])


def test_a_partly_filled_first_block_gives_way_too():
    books = Books()
    books.compute([5, 6])
    books.compute([5, 7])
    full = books.compute([5, 6, 7, 8])
    assert books.find([5, 6, 7, 8]) == (full, 4)
    assert books.find([5, 7, 7])[1] == 2


def test_a_block_given_up_takes_along_what_follows_it():
    books = Books(block_count=8)
    head = books.compute(range(8))
    tail = books.compute(range(12))  # its third block follows blocks of the first sequence
    assert books.find(range(12)) == ([*head, tail[2]], 12)
    books.pool.release(head)
    books.pool.allocate_many(books.pool.free_count)
    assert books.pool.allocate() == head[1]
    assert books.find(range(12)) == (head[:1], 4)
    assert not books.pool.is_marked(tail[2])
    books.cache.check()


def test_ends_are_given_up_before_starts():
    books = Books(block_count=5)
    books.compute(range(20), keep=False)
    for found in (16, 12, 8, 4, 0):
        books.pool.allocate()
        assert books.find(range(20))[1] == found
        books.cache.check()


def test_a_chain_whose_place_is_gone_indexes_nothing_more():
    books = Books(block_count=8)
    tokens = array("i", range(12))
    head = books.compute(range(8))
    chain = books.cache.chain("")
    assert books.cache.lookup(chain, tokens, 8).token_count == 8
    mine = books.pool.allocate_many(3)
    books.pool.release(head)
    books.cache.flush()
    books.cache.insert(chain, tokens, mine, 12)
    assert books.find(range(12)) == ([], 0)
    books.cache.check()


def test_flush_forgets_what_nobody_holds():
    books = Books()
    held = books.compute(range(8))
    books.compute([*range(4), 50, 51], keep=False)
    books.cache.flush()
    assert books.find(range(8)) == (held, 8)
    assert books.find([0, 1, 2, 3, 50, 51])[1] == 4
    books.cache.check()


def test_a_namespace_whose_prefixes_are_gone_is_forgotten_alone():
    books = Books()
    for number in range(5):
        books.compute(range(8), namespace=str(number), keep=number == 3)
    books.cache.flush()
    assert len(books.cache._roots) == 1
    assert [books.find(range(8), namespace=str(number))[1] for number in range(5)] == [0, 0, 0, 8, 0]
    books.compute(range(12), namespace="1")
    assert books.find(range(12), namespace="1")[1] == 12


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_the_longest_match_against_brute_force(seed):
    """Without eviction, the match is the longest start that any computed sequence shares."""
    random = Random(seed)
    books = Books(block_count=400)
    computed: list[list[int]] = []
    for _ in range(30):
        base = random.choice(computed) if computed and random.random() < 0.8 else []
        tokens = base[: random.randrange(len(base) + 1)] + random.choices(range(3), k=random.randrange(1, 12))
        wanted = max((common_length(other, tokens) for other in computed), default=0)
        assert books.find(tokens)[1] == wanted, f"replay with seed {seed}"
        books.compute(tokens)
        computed.append(tokens)


def common_length(first, second):
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


@pytest.mark.parametrize("seed", range(20))
def test_random_eviction_keeps_tree_and_pool_in_step(seed):
    random = Random(seed)
    books = Books(block_count=24)
    computed: list[list[int]] = []
    for _ in range(200):
        base = random.choice(computed) if computed else []
        tokens = base[: random.randrange(len(base) + 1)][:30] + random.choices(range(3), k=random.randrange(1, 12))
        tokens = array("i", tokens)
        chain = books.cache.chain("")
        match = books.cache.lookup(chain, tokens, len(tokens) - 1)
        kept = match.blocks[: match.token_count // SIZE]
        for block in kept:
            books.pool.share(block)
        blocks = kept + books.pool.allocate_many(-(-len(tokens) // SIZE) - len(kept))
        books.cache.insert(chain, tokens, blocks, len(tokens))
        books.cache.insert_tail(chain, tokens, blocks, len(tokens))
        books.pool.release(blocks)
        books.cache.check()
        books.pool.check({})
        computed.append(tokens.tolist())
    assert books.pool.evictions > 0, "nothing was ever evicted"
    assert books.pool.held_count == 0
