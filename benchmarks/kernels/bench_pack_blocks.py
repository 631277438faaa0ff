"""Packing the blocks of a paged cache: bytes a second against the copy limit of the same run.

python -m benchmarks.kernels.bench_pack_blocks --output benchmarks/results/pack_blocks.jsonl
"""

from collections.abc import Iterator

import torch

from benchmarks.kernels.runner import Case, device_and_dtype, run


def cases(smoke: bool) -> Iterator[Case]:
    """Blocks of all layers into one buffer, and back."""
    from kernels.pack_blocks import BlockLayout, bytes_moved, pack_blocks, unpack_blocks

    device, dtype = device_and_dtype()
    layers, shape, counts = (2, (4, 2, 4, 8), (2,)) if smoke else (28, (128, 8, 16, 128), (16, 64))
    tensors = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * layers)]
    layout = BlockLayout.of(tensors)
    for count in counts:
        blocks = torch.randperm(shape[0])[:count].to(torch.int32).to(device)
        packed = torch.zeros(count, layout.block_bytes, dtype=torch.uint8, device=device)
        for name, move in (("pack", pack_blocks), ("unpack", unpack_blocks)):
            moved = bytes_moved(count, layout.block_bytes)
            yield Case(f"{name}_b{count}", moved, [lambda m=move, b=blocks, p=packed: m(layout, b, p)])


if __name__ == "__main__":
    run(__doc__, "pack_blocks", cases)
