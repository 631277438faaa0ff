"""Write the words that a plan brings to their places in the slots' memory: what the host changes there before a step.

    memory[addresses[i]] = values[i]                             0 <= i < n; addresses outside the memory are skipped

How many there are stands in the plan, so that a captured launch serves any number. It may be none, and then nothing is
written.

| tensor | axes | dtype | notes                                                                                     |
|--------|------|-------|-------------------------------------------------------------------------------------------|
| memory | [m]  | int32 | written in place                                                                          |
| plan   | [p]  | int32 | header, as in `kernels.step_inputs`; n addresses, no address twice, or the order of the   |
|        |      |       | writes is not fixed, and n values, the bits to write, directly behind the appended blocks |
"""

import torch
import triton
import triton.language as tl

from kernels.checks import check_tensor
from kernels.launch import launch_options, let_next_start, wait_for_inputs
from kernels.step_layout import BLOCK_COUNT, WRITE_COUNT, PlanLayout

BLOCK, PROGRAMS = 1024, 8
"""A prompt of a thousand tokens keeps two programs busy for one turn; more words take more turns."""


def scatter_words_reference(memory: torch.Tensor, plan: torch.Tensor, layout: PlanLayout) -> None:
    """The same in plain torch, in place."""
    count = int(plan[WRITE_COUNT])
    start = layout.appended_ids.start + int(plan[BLOCK_COUNT])
    addresses, values = plan[start : start + 2 * count].view(2, count)
    inside = (addresses >= 0) & (addresses < memory.shape[0])
    memory[addresses[inside].long()] = values[inside]


@triton.jit(do_not_specialize=["size", "APPENDED_IDS"])
def _scatter_kernel(
    memory, plan, size, APPENDED_IDS, BLOCK_COUNT: tl.constexpr, WRITE_COUNT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    lane = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    count = tl.load(plan + WRITE_COUNT)
    addresses = plan + APPENDED_IDS + tl.load(plan + BLOCK_COUNT)
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        inside = first + lane < count
        address = tl.load(addresses + first + lane, mask=inside, other=-1)
        value = tl.load(addresses + count + first + lane, mask=inside, other=0)
        tl.store(memory + address, value, mask=(address >= 0) & (address < size))


def scatter_words(memory: torch.Tensor, plan: torch.Tensor, layout: PlanLayout) -> None:
    """Write the plan's words. Shapes: the module's table; ValueError for any other."""
    check_tensor("memory", memory, (None,), torch.int32)
    check_tensor("plan", plan, (None,), torch.int32, like=memory)
    if plan.shape[0] < layout.size:
        raise ValueError(f"plan: wanted at least {layout.size} elements, got {plan.shape[0]}")
    _scatter_kernel[(PROGRAMS,)](
        memory, plan, memory.shape[0], layout.appended_ids.start, BLOCK_COUNT=BLOCK_COUNT, WRITE_COUNT=WRITE_COUNT,
        BLOCK=BLOCK, num_warps=4, **launch_options(memory),
    )  # fmt: skip
