"""Write a list of 32-bit words to a list of places: what the host changes in the slots' memory, in one launch.

    memory[addresses[i]] = values[i]                             0 <= i < n; addresses outside the memory are skipped

| tensor    | axes | dtype | notes                                                      |
|-----------|------|-------|------------------------------------------------------------|
| memory    | [m]  | int32 | written in place                                           |
| addresses | [n]  | int32 | no address twice, or the order of the writes is not fixed  |
| values    | [n]  | int32 | the bits to write                                          |
"""

import torch
import triton
import triton.language as tl

from kernels.checks import check_tensor
from kernels.launch import launch_options, let_next_start, wait_for_inputs

BLOCK = 1024


def scatter_words_reference(memory: torch.Tensor, addresses: torch.Tensor, values: torch.Tensor) -> None:
    """The same in plain torch, in place."""
    inside = (addresses >= 0) & (addresses < memory.shape[0])
    memory[addresses[inside].long()] = values[inside]


@triton.jit(do_not_specialize=["size", "count"])
def _scatter_kernel(memory, addresses, values, size, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    address = tl.load(addresses + index, mask=index < count, other=-1)
    value = tl.load(values + index, mask=index < count, other=0)
    tl.store(memory + address, value, mask=(address >= 0) & (address < size))


def scatter_words(memory: torch.Tensor, addresses: torch.Tensor, values: torch.Tensor) -> None:
    """Write the words. Shapes: the module's table; ValueError for any other."""
    check_tensor("memory", memory, (None,), torch.int32)
    check_tensor("addresses", addresses, (None,), torch.int32, like=memory)
    check_tensor("values", values, (addresses.shape[0],), torch.int32, like=memory)
    if addresses.shape[0] == 0:
        return
    grid = (triton.cdiv(addresses.shape[0], BLOCK),)
    _scatter_kernel[grid](
        memory, addresses, values, memory.shape[0], addresses.shape[0], BLOCK=BLOCK, num_warps=4,
        **launch_options(memory),
    )  # fmt: skip
