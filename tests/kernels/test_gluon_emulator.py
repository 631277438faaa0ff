"""The emulator's own checks: what a card would let pass by luck, or hang at, is an error with a name."""

import math

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.launch_gluon import wait_for_inputs
from tests.kernels.gluon_emulator import EmulatedKernel, KernelAhead

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def _copied(desc, output_ptr, FIRST: gl.constexpr, BYTES: gl.constexpr, WAITS: gl.constexpr, PHASE: gl.constexpr):
    line: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.bfloat16, [8, 64], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.expect(full.index(0), BYTES)
    tma.async_copy_global_to_shared(desc, [FIRST, 0], full.index(0), tile)
    if WAITS:
        mbarrier.wait(full.index(0), PHASE)
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, line))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, line))
    gl.store(output_ptr + rows[:, None] * 64 + columns[None, :], tile.load(line))


def copied(
    bytes_expected: int = 1024, waits: bool = True, phase: int = 0, row_count: int = 16, first_row: int = 8
) -> tuple:
    source = torch.randn(row_count, 64).to(torch.bfloat16)
    output = torch.zeros(8, 64, dtype=torch.bfloat16)
    descriptor = TensorDescriptor.from_tensor(source, [8, 64], SHARED.value)
    constants = {"FIRST": first_row, "BYTES": bytes_expected, "WAITS": waits, "PHASE": phase}
    EmulatedKernel(_copied)[(1,)](descriptor, output, **constants, num_warps=1)
    return output, source[8:]


def test_a_copy_arrives_with_the_wait():
    output, wanted = copied()
    assert torch.equal(output, wanted)


def test_what_is_read_before_the_wait_is_nan():
    output, _ = copied(waits=False)
    assert output.isnan().all()


def test_wrong_byte_counts_are_named():
    with pytest.raises(AssertionError, match="1024 bytes copied where 512 were expected"):
        copied(bytes_expected=512)
    with pytest.raises(RuntimeError, match="all warps wait: phase 0 of a barrier"):
        copied(bytes_expected=2048)


def test_the_wrong_phase_does_not_wait():
    """On a card a barrier's first phase is the one after phase 1: such a wait returns at once."""
    output, _ = copied(phase=1)
    assert output.isnan().all()


def test_a_copy_from_outside_the_tensor_is_an_error():
    with pytest.raises(AssertionError, match=r"a box of \[8, 64\] at \[8, 0\] of \[12, 64\]"):
        copied(row_count=12)
    with pytest.raises(AssertionError, match=r"a box of \[8, 64\] at \[-8, 0\] of \[16, 64\]"):
        copied(first_row=-8)


@gluon.jit
def _added(x_ptr, output_ptr, READS_EARLY: gl.constexpr, WAITS: gl.constexpr, WRITES: gl.constexpr):
    """One to x, behind a kernel that makes x; the first program does nothing."""
    place = gl.program_id(0)
    if place > 0:
        if READS_EARLY:
            x = gl.load(x_ptr + place)
        if WAITS:
            wait_for_inputs(True)
        if not READS_EARLY:
            x = gl.load(x_ptr + place)
        if WRITES:
            gl.store(output_ptr + place, x + 1.0)


def added(reads_early: bool = False, waits: bool = True, writes: bool = True) -> list[float]:
    x, output = torch.arange(3.0), torch.zeros(3)
    constants = {"READS_EARLY": reads_early, "WAITS": waits, "WRITES": writes}
    EmulatedKernel(_added, KernelAhead(x))[(3,)](x, output, **constants, num_warps=1)
    assert torch.equal(x, torch.arange(3.0)), "the kernel ahead has ended by then"
    return output.tolist()


def test_what_the_kernel_ahead_writes_is_there_with_the_wait():
    assert added() == [0.0, 2.0, 3.0]
    assert all(map(math.isnan, added(reads_early=True)[1:]))


def test_launches_that_do_not_wait_are_named():
    with pytest.raises(AssertionError, match="a program writes before it has waited for the kernel ahead"):
        added(waits=False)
    with pytest.raises(AssertionError, match="who waits for this kernel does not wait for the one ahead of it"):
        added(waits=False, writes=False)


@gluon.jit
def _read(x_ptr, output_ptr, ready, WAITS: gl.constexpr):
    if WAITS:
        wait_for_inputs(True)
    mbarrier.wait(ready, 0)
    gl.store(output_ptr, gl.load(x_ptr))


@gluon.jit
def _waited(ready):
    wait_for_inputs(True)
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _read_apart(x_ptr, output_ptr, WAITS: gl.constexpr, WAITS_FIRST: gl.constexpr):
    """x, by a warp that knows of another one's wait."""
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    if WAITS_FIRST:
        wait_for_inputs(True)
    gl.warp_specialize([(_read, (x_ptr, output_ptr, ready.index(0), WAITS)), (_waited, (ready.index(0),))], [1], [24])


@pytest.mark.parametrize("waits, waits_first", [(False, False), (True, False), (False, True)])
def test_each_warp_that_reads_has_to_wait(waits, waits_first):
    x, output = torch.ones(1), torch.zeros(1)
    kernel = EmulatedKernel(_read_apart, KernelAhead(x))
    kernel[(1,)](x, output, WAITS=waits, WAITS_FIRST=waits_first, num_warps=1)
    assert output.isnan().item() is not (waits or waits_first)


@gluon.jit
def _multiplied(x_ptr, output_ptr, OUTSTANDING: gl.constexpr, OVERWRITES: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    places = rows[:, None] * 64 + columns[None, :]
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    tile.store(gl.load(x_ptr + places))
    total = warpgroup_mma(tile, tile, gl.zeros([64, 64], gl.float32, layout), is_async=True)
    if OVERWRITES:
        tile.store(gl.zeros([64, 64], gl.bfloat16, layout))
    total = warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=(total,))
    gl.store(output_ptr + places, total)


@pytest.mark.parametrize("overwrites", [False, True])
def test_an_asynchronous_product_reads_until_its_wait(overwrites):
    x, output = torch.randn(64, 64).to(torch.bfloat16), torch.full((64, 64), float("nan"))
    EmulatedKernel(_multiplied)[(1,)](x, output, OUTSTANDING=0, OVERWRITES=overwrites, num_warps=4)
    assert torch.equal(output, torch.zeros(64, 64) if overwrites else x.float() @ x.float())


def test_a_product_that_is_not_waited_for_cannot_be_used():
    x, output = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64)
    with pytest.raises((RuntimeError, TypeError), match="Pending"):
        EmulatedKernel(_multiplied)[(1,)](x, output, OUTSTANDING=1, OVERWRITES=False, num_warps=4)


@gluon.jit
def _outside(x_ptr, output_ptr):
    line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    places = gl.arange(0, 64, layout=line)
    gl.store(output_ptr + places, gl.load(x_ptr + places))


def test_loads_outside_a_tensor_are_named():
    with pytest.raises(AssertionError, match="24 places outside a tensor of 40"):
        EmulatedKernel(_outside)[(1,)](torch.zeros(40), torch.zeros(64), num_warps=1)
