"""The block pool: life cycle, order of eviction, reference counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_proc.block_pool import BlockPool


def test_blocks_go_round():
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    assert blocks == [0, 1, 2] and pool.available_count == 0 and pool.held_count == 3
    pool.share(1)
    pool.release([1])
    assert pool.refs(1) == 1
    pool.release(blocks)
    assert pool.free_count == 3
    pool.check({})


def test_cached_blocks_are_given_up_oldest_first_and_free_ones_before_them():
    pool, evicted = BlockPool(4), []
    pool.on_evict = evicted.append
    blocks = [pool.allocate() for _ in range(4)]
    for block in blocks[:3]:
        pool.mark(block)
    pool.release(blocks)  # the last first: 3 is free, then 2, 1, 0 are cached
    assert (pool.free_count, pool.cached_blocks()) == (1, [2, 1, 0])
    pool.share(2)
    pool.release([2])  # used again: now the newest
    assert [pool.allocate() for _ in range(4)] == [3, 1, 0, 2]
    assert evicted == [1, 0, 2] and pool.evictions == 3


def test_unmarked_blocks_are_free():
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.mark(first)
    pool.mark(second)
    pool.release([first])
    pool.unmark(first)
    pool.unmark(second)
    assert (pool.free_count, pool.cached_count) == (1, 0)
    pool.release([second])
    assert pool.free_count == 2
    pool.check({})


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.release([0]), "released more often"),
        (lambda pool: pool.share(0), "block 0 is free"),
        (lambda pool: pool.mark(0), "not held"),
        (lambda pool: [pool.allocate() for _ in range(3)], "no block is available"),
    ],
)
def test_misuse_is_refused(misuse, message):
    with pytest.raises(AssertionError, match=message):
        misuse(BlockPool(2))


def test_no_blocks_is_refused():
    with pytest.raises(ValueError, match="0 blocks"):
        BlockPool(0)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release", "mark", "unmark"]), st.integers(0, 5))))
def test_random_operations_against_a_plain_model(operations):
    pool, refs, marked, order = BlockPool(6), dict.fromkeys(range(6), 0), set(), []
    pool.on_evict = lambda block: (order.remove(block), marked.remove(block))
    for name, block in operations:
        if name == "allocate" and pool.available_count:
            oldest = order[0] if order else None
            taken = pool.allocate()
            assert taken == oldest or refs[taken] == 0
            refs[taken] = 1
        elif name == "share" and (refs[block] or block in order):
            pool.share(block)
            refs[block] += 1
            order = [other for other in order if other != block]
        elif name == "release" and refs[block]:
            pool.release([block])
            refs[block] -= 1
            if refs[block] == 0 and block in marked:
                order.append(block)
        elif name == "mark" and refs[block]:
            pool.mark(block)
            marked.add(block)
        elif name == "unmark" and block in marked:
            pool.unmark(block)
            marked.discard(block)
            order = [other for other in order if other != block]
        assert pool.cached_blocks() == order
        pool.check({block: count for block, count in refs.items() if count})
