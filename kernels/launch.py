"""Launching kernels: on a GPU or in Triton's interpreter, and on Hopper before the previous kernel has ended.

*Programmatic dependent launch* (PDL; Hopper and later) lets a kernel's programs start while the kernel before it still
runs. Four rules make that safe, and every kernel here keeps them:

1. `let_next_start` may come first: it only permits the next kernel to be placed on the card.
2. All writes come after `wait_for_inputs`. It returns when the kernel before has completed, and since a program of that
   one waited too, everything before it has completed as well.
3. Before `wait_for_inputs` a program reads what no kernel ever writes: weights, norm weights, rope tables.
4. It may also read what had been written before kernels/embedding.py was launched last: that alone waits first and only
   then lets others start. Behind a step's embedding these are its inputs, block tables, and the cached tokens of
   earlier steps, also where they came by a copy or from the host: a block that a row writes to in a step is in no other
   row's table (`StepPlan`). Where it has gathered the rows that sample, these are the step's own cached tokens too.

On another card or in the interpreter, the same code is launched in order, without PDL. While it waits, a program can
also bring into the level-2 cache what a later kernel will read first (`prefetch`): memory is then busy in the gaps
between dependent kernels, in which it would otherwise be idle.

Called by every module of `kernels`.

Sources: NVIDIA, CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import functools
import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def interpreted() -> bool:
    """Whether kernels run in Triton's CPU interpreter, which must be chosen before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def capability_major(device: torch.device) -> int:
    """The first number of an NVIDIA GPU's compute capability, 9 for Hopper; 0 for other devices and the interpreter."""
    if device.type != "cuda" or interpreted() or torch.version.hip is not None:
        return 0
    return _capability_major(device.index or 0)


def is_hopper_or_later(device: torch.device) -> bool:
    """Whether kernels run on an NVIDIA GPU with early launch, and with instructions for pairs of bfloat16 numbers."""
    return capability_major(device) >= 9


@functools.cache
def _capability_major(device_index: int) -> int:
    return torch.cuda.get_device_capability(device_index)[0]


def launch_options(tensor: torch.Tensor) -> dict[str, bool]:
    """The keyword arguments for a kernel that takes `PDL`: early launch where the tensor's card supports it."""
    return {"PDL": True, "launch_pdl": True} if is_hopper_or_later(tensor.device) else {"PDL": False}


@functools.cache
def takes_gluon(capability_major: int, triton_version: str = triton.__version__) -> bool:
    """Whether the kernels that are written in Gluon for Hopper run on a card of that compute capability."""
    return capability_major == 9 and tuple(map(int, triton_version.split(".")[:2])) >= (3, 6)


HOPPER_SHARED_BYTES = 227 * 1024


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that a program can have on a card; Hopper's where there is no card, or it does not say."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", HOPPER_SHARED_BYTES)


def multiprocessor_count(device: torch.device) -> int:
    """Of a GPU; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Permit the next kernel of the stream to be placed on the card as soon as every program has come this far."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all earlier kernels have completed and their writes can be read."""
    if PDL:
        gdc_wait()


MAX_PREFETCH_BYTES = 16 << 20  # a part of the level-2 cache that leaves room for what runs meanwhile
PREFETCH_UNIT = 1024  # bytes; shares are multiples


def prefetch_share(upcoming: torch.Tensor | None, program_count: int) -> tuple[int, int]:
    """`(bytes in all, bytes for each program)` of prefetching the beginning of `upcoming`; zeros for None."""
    if upcoming is None:
        return 0, 0
    total = min(upcoming.numel() * upcoming.element_size(), MAX_PREFETCH_BYTES) // PREFETCH_UNIT * PREFETCH_UNIT
    return total, triton.cdiv(total, program_count * PREFETCH_UNIT) * PREFETCH_UNIT


@triton.jit
def prefetch(upcoming, total, SHARE: tl.constexpr, PDL: tl.constexpr):
    """Ask for this program's SHARE of the first `total` bytes at `upcoming`; waits for nothing."""
    if PDL and SHARE > 0:
        start = (tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)) * SHARE
        size = tl.minimum(total - start, SHARE)
        if size > 0:
            tl.inline_asm_elementwise(
                """
                {
                    .reg .pred first;
                    .reg .u32 thread;
                    mov.u32 thread, %tid.x;
                    setp.eq.u32 first, thread, 0;
                    @first cp.async.bulk.prefetch.L2.global [$1], $2;
                    mov.u32 $0, 0;
                }
                """,
                "=r,l,r",
                [upcoming.to(tl.int64) + start, size],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
