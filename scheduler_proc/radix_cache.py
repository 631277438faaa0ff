"""The prefix cache as a radix tree, which finds prefixes token by token.

A node holds a run of blocks and their tokens; its children continue at the end of its last block. Siblings may share
the start of their first block, and the last block of a run may be only partly filled, so the longest match can end
inside a block; whoever matched it then gets a copy of that block. Siblings are sorted by their first block's tokens, so
the one that shares the longest start with a prompt is always next to the place where the prompt itself would be
inserted.

Eviction goes from the leaves up, because sequences release their last blocks first. A block can still be evicted before
those that follow it (when the sequences that computed those held a copy of their own); then all that follows is
forgotten with it. Every block is forgotten once for each time it is indexed, so the cost is O(1) amortised.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence as SequenceABC

from scheduler_proc.block_pool import BlockPool
from scheduler_proc.prefix_cache import NO_MATCH, Chain, Match, root_number


class Node:
    """A run of blocks.

    Attributes:
        parent: None for a namespace's root, which holds no blocks; namespace: then its number.
        depth: blocks before it.
        key: the run's tokens, four bytes each, the high byte first, so that bytes sort as tokens do.
        blocks: one per started block of tokens.
        child_keys: for each child, its key's first block; sorted.
        children: aligned with `child_keys`.
    """

    __slots__ = ("blocks", "child_keys", "children", "depth", "key", "namespace", "parent")

    def __init__(
        self, parent: "Node | None", depth: int, key: bytes | bytearray = b"", blocks: SequenceABC[int] = ()
    ) -> None:
        self.parent = parent
        self.namespace = 0
        self.depth = depth
        self.key = bytearray(key)
        self.blocks = array("i", blocks)
        self.child_keys: list[bytes] = []
        self.children: list[Node] = []


class RadixPrefixCache:
    """Prefixes by a radix tree with token granularity.

    Args:
        pool: the blocks; its `on_evict` is taken over.
        block_size: tokens per block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._width = 4 * block_size
        self._roots: dict[int, Node] = {}
        self._nodes: list[Node | None] = [None] * pool.block_count
        self._entries = array("q", bytes(8 * pool.block_count))
        self._entry_count = 0
        pool.on_evict = self._forget

    def chain(self, namespace: str) -> Chain:
        """The start of a new sequence's chain in the namespace."""
        return Chain(root_number(namespace))

    # ---- finding

    def lookup(self, chain: Chain, tokens: "array[int]", limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens."""
        chain.rewind()
        node = self._roots.get(chain.root)
        if node is None:
            return NO_MATCH
        data = _sortable(tokens)
        blocks: list[int] = []
        start, common = 0, 0
        while True:
            child = _nearest_child(node, data[start : start + self._width])
            if child is None:
                break
            common = _common_bytes(child.key, data, start)
            blocks += child.blocks[: -(-common // self._width)]
            start += common
            if common < len(child.key):
                break
            node = child
        token_count = min(start // 4, limit)
        del blocks[-(-token_count // self._block_size) :]
        chain.indexed_count = full_count = token_count // self._block_size
        if full_count:
            self._move(chain, blocks[full_count - 1])
        return Match(blocks, token_count)

    # ---- indexing

    def insert(self, chain: Chain, tokens: "array[int]", blocks: SequenceABC[int], token_count: int) -> None:
        """Index the full blocks among the first `token_count` tokens."""
        size, width, first = self._block_size, self._width, chain.indexed_count
        full_count = token_count // size
        if full_count <= first:
            return
        place = self._place(chain)
        if place is None:
            return  # what came before has been given up: nothing after it could be found
        node, index = place
        data = _sortable(tokens[first * size : full_count * size])
        block = -1
        for number in range(first, full_count):
            start = (number - first) * width
            node, index, block = self._put(node, index, data[start : start + width], blocks[number])
        chain.indexed_count = full_count
        self._move(chain, block)

    def insert_tail(self, chain: Chain, tokens: "array[int]", blocks: SequenceABC[int], token_count: int) -> None:
        """Index the partly filled last block of a sequence that ends; `insert` has indexed the others."""
        size = self._block_size
        full_count = token_count // size
        place = self._place(chain) if token_count % size and chain.indexed_count == full_count else None
        if place is not None:
            self._put(*place, _sortable(tokens[full_count * size : token_count]), blocks[full_count])

    def drop(self, blocks: SequenceABC[int]) -> None:
        """Forget those of the blocks that are indexed, with all that comes after them."""
        for block in blocks:
            if self._nodes[block] is not None:
                self._forget(block)
                self._pool.unmark(block)

    def flush(self) -> None:
        """Forget what no sequence holds."""
        self.drop(self._pool.cached_blocks())

    # ---- the tree

    def _move(self, chain: Chain, block: int) -> None:
        chain.last_block = block
        chain.parent = self._entries[block]

    def _place(self, chain: Chain) -> tuple[Node, int] | None:
        """The node and the number of its blocks that the chain has behind it; None if they are gone."""
        if chain.indexed_count == 0:
            root = self._roots.get(chain.root)
            if root is None:
                root = self._roots[chain.root] = Node(None, 0)
                root.namespace = chain.root
            return root, 0
        node = self._nodes[chain.last_block]
        if node is None or self._entries[chain.last_block] != chain.parent:
            return None
        return node, chain.indexed_count - node.depth

    def _put(self, node: Node, index: int, content: bytes, block: int) -> tuple[Node, int, int]:
        """Put a block after the node's first `index` ones.

        Returns:
            The node and the number of its blocks up to and including it, and the block that stands there: the given
            one, or one with the same tokens that stood there before.
        """
        if index < len(node.blocks):
            present = bytes(node.key[index * self._width : (index + 1) * self._width])
            if present.startswith(content):
                return node, index + 1, node.blocks[index]
            if content.startswith(present):
                return self._replace(node, index, content, block)
            self._split(node, index)
        place = bisect_left(node.child_keys, content)
        if place < len(node.children) and node.child_keys[place].startswith(content):
            return node.children[place], 1, node.children[place].blocks[0]
        if place > 0 and content.startswith(node.child_keys[place - 1]):
            return self._replace(node.children[place - 1], 0, content, block)
        if node.children or node.parent is None:
            child = Node(node, node.depth + len(node.blocks))
            node.child_keys.insert(place, content)
            node.children.insert(place, child)
            node = child
        node.key += content
        node.blocks.append(block)
        self._note(node, block)
        return node, len(node.blocks), block

    def _replace(self, node: Node, index: int, content: bytes, block: int) -> tuple[Node, int, int]:
        """A partly filled last block gives way to one that holds more."""
        old = node.blocks[index]
        self._nodes[old] = None
        self._pool.unmark(old)
        if index == 0:
            self._rename(node, content)
        node.key[index * self._width :] = content
        node.blocks[index] = block
        self._note(node, block)
        return node, index + 1, block

    def _rename(self, node: Node, first_key: bytes) -> None:
        assert node.parent is not None
        place = bisect_left(node.parent.child_keys, bytes(node.key[: self._width]))
        node.parent.child_keys[place] = first_key  # an extension of the old key, which no sibling lies between

    def _note(self, node: Node, block: int) -> None:
        self._entry_count += 1
        self._entries[block] = self._entry_count
        self._nodes[block] = node
        self._pool.mark(block)

    def _split(self, node: Node, index: int) -> None:
        """The blocks from `index` on become the node's only child."""
        cut = index * self._width
        rest = Node(node, node.depth + index, node.key[cut:], node.blocks[index:])
        rest.child_keys, rest.children = node.child_keys, node.children
        for child in rest.children:
            child.parent = rest
        for block in rest.blocks:
            self._nodes[block] = rest
        del node.key[cut:], node.blocks[index:]
        node.child_keys, node.children = [bytes(rest.key[: self._width])], [rest]

    def _forget(self, block: int) -> None:
        """Take a block out, and all that follows it."""
        node = self._nodes[block]
        assert node is not None, f"block {block} is not in the tree"
        self._nodes[block] = None
        index = len(node.blocks) - 1
        if node.blocks[index] != block:
            index = node.blocks.index(block)
        following = list(node.blocks[index + 1 :])
        stack, node.children, node.child_keys = node.children, [], []
        while stack:
            child = stack.pop()
            following += child.blocks
            stack += child.children
        for other in following:
            self._nodes[other] = None
            self._pool.unmark(other)
        if index == 0:
            self._remove(node)
        del node.key[index * self._width :], node.blocks[index:]

    def _remove(self, node: Node) -> None:
        """Take an empty node out of its parent, and a namespace's root that leads nowhere out of the list."""
        parent = node.parent
        assert parent is not None
        place = bisect_left(parent.child_keys, bytes(node.key[: self._width]))
        del parent.child_keys[place], parent.children[place]
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]

    # ---- checks

    def check(self) -> None:
        """Raise AssertionError if the tree and the pool disagree."""
        found = 0
        stack = list(self._roots.values())
        for number, root in self._roots.items():
            assert root.namespace == number, f"namespace {number}'s root says {root.namespace}"
        while stack:
            node = stack.pop()
            found += len(node.blocks)
            self._check_node(node)
            stack += node.children
        marked = sum(self._pool.is_marked(block) for block in range(self._pool.block_count))
        assert found == marked, f"{found} blocks are in the tree, {marked} marked"

    def _check_node(self, node: Node) -> None:
        assert len(node.blocks) == -(-len(node.key) // self._width), "a node's key and blocks differ in length"
        assert bool(node.blocks) == (node.parent is not None), "only a root is empty"
        assert node.child_keys == sorted(node.child_keys), "children are out of order"
        assert not node.children or len(node.key) % self._width == 0, "a partly filled block has children"
        for block in node.blocks:
            assert self._nodes[block] is node and self._pool.is_marked(block), f"block {block} is misfiled"
        for key, child in zip(node.child_keys, node.children, strict=True):
            assert child.parent is node and child.depth == node.depth + len(node.blocks)
            assert bytes(child.key[: self._width]) == key, "a child stands under another key"


def _sortable(tokens: "array[int]") -> bytes:
    """The tokens with their high bytes first."""
    swapped = tokens[:]
    swapped.byteswap()
    return swapped.tobytes()


def _nearest_child(node: Node, content: bytes) -> Node | None:
    """The child whose first block shares the longest start of at least a token with `content`."""
    place = bisect_left(node.child_keys, content)
    best, best_common = None, 0
    for index in (place - 1, place):
        if 0 <= index < len(node.children):
            common = _common_bytes(node.child_keys[index], content, 0)
            if common > best_common:
                best, best_common = node.children[index], common
    return best


def _common_bytes(key: bytes | bytearray, data: bytes, start: int) -> int:
    """How many bytes `key` and `data[start:]` have in common, in whole tokens."""
    most = min(len(key), len(data) - start)
    if key[:most] == data[start : start + most]:
        return most
    low, high = 0, most // 4  # tokens in common: at least low, less than high
    while high - low > 1:
        middle = (low + high) // 2
        if key[4 * low : 4 * middle] == data[start + 4 * low : start + 4 * middle]:
            low = middle
        else:
            high = middle
    return 4 * low
