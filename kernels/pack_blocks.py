"""Blocks of many cache tensors to one packed buffer and back, in one launch: what swapping copies over the link.

    pack:    packed[i, offset_t : offset_t + size_t] = tensor_t[blocks[i]]      for every tensor t, as bytes
    unpack:  tensor_t[blocks[i]] = packed[i, offset_t : offset_t + size_t]

The tensors of a paged cache (K, V and scales of every layer) hold a block in dozens of places of a few KB; packed, it
is one piece that a copy engine moves at the link's speed.

| tensor | axes                   | dtype | notes                                                             |
|--------|------------------------|-------|-------------------------------------------------------------------|
| tensors| [block_count, ...]     | any   | contiguous; the same block_count                                  |
| blocks | [n <= MAX_BLOCKS]      | int32 | numbers below block_count; to unpack, no number twice             |
| packed | [at least n, bytes]    | uint8 | contiguous rows of `BlockLayout.block_bytes`                      |

Called by the GPU worker's swapping.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import check_tensor

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
MAX_BLOCKS = 65_535
"""Of one call: programs along an axis of a grid."""

TILE = 1024
"""Words that a program moves at once."""


def pack_blocks_reference(tensors: Sequence[torch.Tensor], blocks: torch.Tensor) -> torch.Tensor:
    """The packed blocks, uint8 [n, bytes]."""
    parts = [tensor.view(torch.uint8)[blocks.long()].flatten(1) for tensor in tensors]
    return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class BlockLayout:
    """Where the tensors' blocks lie.

    Attributes:
        table: int64 [3, tensor_count] on the tensors' device: address, words a block, first word in a packed block.
        block_bytes: bytes of a packed block.
        word: the widest type that every block and every address is a multiple of.
    """

    table: torch.Tensor
    block_bytes: int
    word: torch.dtype

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "BlockLayout":
        """The layout of these tensors, which must stay where they are."""
        assert all(tensor.is_contiguous() for tensor in tensors), "a cache tensor is not contiguous"
        sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
        numbers = [*sizes, *(tensor.data_ptr() for tensor in tensors)]
        word = next(word for word in WORDS if all(number % word.itemsize == 0 for number in numbers))
        words = [size // word.itemsize for size in sizes]
        starts = [sum(words[:index]) for index in range(len(words))]
        table = torch.tensor([[tensor.data_ptr() for tensor in tensors], words, starts], device=tensors[0].device)
        return cls(table, sum(sizes), word)


def bytes_moved(block_count: int, block_bytes: int) -> int:
    """The fewest bytes that packing reads and writes."""
    return 2 * block_count * block_bytes


@triton.jit
def _move_blocks_kernel(table, tensor_count, blocks, packed, row_words, UNPACK: tl.constexpr, TILE: tl.constexpr):
    # 1. Locate: this program's tensor and block, in the tensor and in the packed buffer.
    which = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    words = tl.load(table + tensor_count + which)
    tensor = tl.load(table + which).to(tl.pointer_type(packed.dtype.element_ty))
    tensor += tl.load(blocks + item).to(tl.int64) * words
    row = packed + item * row_words + tl.load(table + 2 * tensor_count + which)
    # 2. Move.
    lane = tl.arange(0, TILE)
    for start in range(0, words, TILE):
        place = start + lane
        inside = place < words  # edge: the block's end
        if UNPACK:
            tl.store(tensor + place, tl.load(row + place, mask=inside), mask=inside)
        else:
            tl.store(row + place, tl.load(tensor + place, mask=inside), mask=inside)


def _move_blocks(layout: BlockLayout, blocks: torch.Tensor, packed: torch.Tensor, unpack: bool) -> None:
    check_tensor("blocks", blocks, (None,), torch.int32, like=layout.table)
    check_tensor("packed", packed, (None, layout.block_bytes), torch.uint8, like=blocks)
    count, tensor_count = blocks.shape[0], layout.table.shape[1]
    if packed.shape[0] < count:
        raise ValueError(f"packed: wanted at least {count} rows, got {packed.shape[0]}")
    if count > MAX_BLOCKS:
        raise ValueError(f"blocks: wanted at most {MAX_BLOCKS}, got {count}")
    if not count:
        return
    words = packed.view(layout.word)
    _move_blocks_kernel[(tensor_count, count)](
        layout.table, tensor_count, blocks, words, words.stride(0), UNPACK=unpack, TILE=TILE, num_warps=4
    )


def pack_blocks(layout: BlockLayout, blocks: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy the blocks to the first rows of `packed`, in stream order. ValueError for shapes that the table lacks."""
    _move_blocks(layout, blocks, packed, unpack=False)


def unpack_blocks(layout: BlockLayout, blocks: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy the first rows of `packed` to the blocks, in stream order. ValueError for shapes that the table lacks."""
    _move_blocks(layout, blocks, packed, unpack=True)
