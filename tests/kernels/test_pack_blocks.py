"""Blocks come out of many tensors as one piece, and go back to where they are told."""

import pytest
import torch

from kernels.pack_blocks import BlockLayout, bytes_moved, pack_blocks, pack_blocks_reference, unpack_blocks
from tests.kernels.closeness import DEVICE


def cache_tensors(block_size: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """K, V and their scales of two layers, 7 blocks, random bytes."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for shape, kind in [((kv_heads, block_size, 10), dtype), ((kv_heads, block_size), torch.float16)] * 4:
        byte_shape = (7, *shape[:-1], shape[-1] * kind.itemsize)
        made.append(torch.randint(256, byte_shape, generator=generator, dtype=torch.uint8).to(DEVICE).view(kind))
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("block_size", "kv_heads"), [(4, 2), (1, 1), (16, 3)])
def test_blocks_are_packed_and_put_back_elsewhere(block_size, kv_heads, dtype):
    tensors = cache_tensors(block_size, kv_heads, dtype)
    before = [tensor.clone() for tensor in tensors]
    layout = BlockLayout.of(tensors)
    blocks = torch.tensor([5, 0, 3], dtype=torch.int32, device=DEVICE)
    packed = torch.full((4, layout.block_bytes), 7, dtype=torch.uint8, device=DEVICE)
    pack_blocks(layout, blocks, packed)
    assert torch.equal(packed[:3], pack_blocks_reference(tensors, blocks))
    assert (packed[3] == 7).all(), "a row without a block was written"
    places = torch.tensor([1, 5, 6], dtype=torch.int32, device=DEVICE)
    unpack_blocks(layout, places, packed)
    for tensor, old in zip(tensors, before, strict=True):
        now, was = tensor.view(torch.uint8), old.view(torch.uint8)
        assert torch.equal(now[[1, 5, 6]], was[[5, 0, 3]])
        assert torch.equal(now[[0, 2, 3, 4]], was[[0, 2, 3, 4]]), "another block was written"


def test_the_widest_word_that_fits_is_moved():
    aligned, odd = torch.zeros(2, 16, dtype=torch.int8), torch.zeros(2, 6, dtype=torch.int8)
    assert BlockLayout.of([aligned]).word == torch.int64
    layout = BlockLayout.of([aligned, odd])
    assert layout.word == torch.int16
    assert (layout.table[1].tolist(), layout.table[2].tolist(), layout.block_bytes) == ([8, 3], [0, 8], 22)
    assert bytes_moved(3, 22) == 132


def test_no_blocks_and_wrong_arguments():
    layout = BlockLayout.of([torch.zeros(2, 16, device=DEVICE)])
    packed = torch.zeros(2, 64, dtype=torch.uint8, device=DEVICE)
    pack_blocks(layout, torch.zeros(0, dtype=torch.int32, device=DEVICE), packed)
    with pytest.raises(ValueError, match="packed: wanted at least 3 rows, got 2"):
        pack_blocks(layout, torch.zeros(3, dtype=torch.int32, device=DEVICE), packed)
    with pytest.raises(ValueError, match=r"packed: wanted shape \[any, 64\]"):
        unpack_blocks(layout, torch.zeros(1, dtype=torch.int32, device=DEVICE), packed[:, :32])
    with pytest.raises(ValueError, match="blocks: wanted at most 65535, got 65536"):
        many = torch.zeros(65_536, 64, dtype=torch.uint8, device=DEVICE)
        pack_blocks(layout, torch.zeros(65_536, dtype=torch.int32, device=DEVICE), many)
