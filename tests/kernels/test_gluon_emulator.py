"""The emulator's own checks: what a card would let pass by luck, or hang at, is an error with a name."""

import math

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.launch_gluon import wait_for_inputs
from tests.kernels.gluon_assembly import inline_asm
from tests.kernels.gluon_emulator import EmulatedKernel, KernelAhead

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def _copied(
    desc, output_ptr, FIRST: gl.constexpr, BYTES: gl.constexpr, WAITS: gl.constexpr, PHASE: gl.constexpr,
    WAITS_AT_LAST: gl.constexpr,
):  # fmt: skip
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
    if WAITS_AT_LAST:
        mbarrier.wait(full.index(0), 0)


def copied(
    bytes_expected: int = 1024, waits: bool = True, phase: int = 0, row_count: int = 16, first_row: int = 8,
    ragged: tuple[str, ...] = (), waits_at_last: bool = True,
) -> tuple:  # fmt: skip
    source = torch.randn(row_count, 64).to(torch.bfloat16)
    output = torch.zeros(8, 64, dtype=torch.bfloat16)
    descriptor = TensorDescriptor.from_tensor(source, [8, 64], SHARED.value)
    constants = {"FIRST": first_row, "BYTES": bytes_expected, "WAITS": waits, "PHASE": phase}
    constants["WAITS_AT_LAST"] = waits_at_last
    EmulatedKernel(_copied, ragged=ragged)[(1,)](descriptor, output, **constants, num_warps=1)
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


def test_a_program_that_ends_while_a_copy_is_under_way_is_an_error():
    """On a card its shared memory is another program's by then."""
    with pytest.raises(AssertionError, match="a program ends while 1 copies to its shared memory are under way"):
        copied(waits=False, waits_at_last=False)


@gluon.jit
def _fill(desc, tile, full, empty):
    for turn in range(2):
        mbarrier.wait(empty.index(0), (turn & 1) ^ 1)
        mbarrier.expect(full.index(0), 1024)
        tma.async_copy_global_to_shared(desc, [8 * turn, 0], full.index(0), tile)


@gluon.jit
def _take(output_ptr, tile, full, empty, IS_EARLY: gl.constexpr):
    line: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, line))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, line))
    for turn in range(2):
        mbarrier.wait(full.index(0), turn & 1)
        mbarrier.arrive(empty.index(0), count=1, pred=IS_EARLY)
        gl.store(output_ptr + (8 * turn + rows)[:, None] * 64 + columns[None, :], tile.load(line))
        mbarrier.arrive(empty.index(0), count=1, pred=not IS_EARLY)


@gluon.jit
def _taken(desc, output_ptr, IS_EARLY: gl.constexpr, TAKES_FIRST: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.bfloat16, [8, 64], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(empty.index(0), count=1)
    take = (_take, (output_ptr, tile, full, empty, IS_EARLY))
    fill = (_fill, (desc, tile, full, empty))
    gl.warp_specialize([take, fill] if TAKES_FIRST else [fill, take], [1], [24])


@pytest.mark.parametrize("takes_first", [False, True])
def test_memory_that_is_given_back_too_early_is_filled_again(takes_first):
    """On a card only now and then: when the warp that fills it is the faster one."""
    source = torch.randn(16, 64).to(torch.bfloat16)
    descriptor = TensorDescriptor.from_tensor(source, [8, 64], SHARED.value)
    for is_early in (False, True):
        output = torch.zeros(16, 64, dtype=torch.bfloat16)
        constants = {"IS_EARLY": is_early, "TAKES_FIRST": takes_first}
        EmulatedKernel(_taken)[(1,)](descriptor, output, **constants, num_warps=1)
        assert output[:8].isnan().all() if is_early else torch.equal(output, source)


def test_a_copy_from_outside_the_tensor_is_an_error():
    with pytest.raises(AssertionError, match=r"a box of \[8, 64\] at \[8, 0\] of \[12, 64\]"):
        copied(row_count=12)
    with pytest.raises(AssertionError, match=r"a box of \[8, 64\] at \[-8, 0\] of \[16, 64\]"):
        copied(first_row=-8)


def test_rows_past_the_end_of_a_ragged_tensor_are_zeros():
    output, wanted = copied(row_count=12, ragged=("desc",))
    assert torch.equal(output[:4], wanted) and not output[4:].any()
    assert not copied(row_count=5, ragged=("desc",))[0].any(), "a box that begins past the end"


@gluon.jit
def _stored(
    desc, other_desc, seen_ptr, FIRST: gl.constexpr, FENCES: gl.constexpr, PENDING: gl.constexpr, THEN: gl.constexpr
):
    """A box of ones to a tensor, and one of twos; what rows 8-15 at `seen_ptr` hold after the wait goes to rows 0-7."""
    line: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 8, 64], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    for place in gl.static_range(2):
        tiles.index(place).store(gl.full([8, 64], 1.0 + place, gl.bfloat16, line))
        if place < FENCES:
            fence_async_shared()
        tma.async_copy_shared_to_global(desc, [FIRST * (1 - place), 0], tiles.index(place))
    if PENDING >= 0:
        tma.store_wait(pendings=PENDING)
    if THEN == "store":
        tiles.index(1).store(gl.zeros([8, 64], gl.bfloat16, line))
    if THEN == "store_first":
        tiles.index(0).store(gl.zeros([8, 64], gl.bfloat16, line))
    if THEN == "copy":
        mbarrier.expect(full, 1024)
        tma.async_copy_global_to_shared(other_desc, [0, 0], full, tiles.index(1))
        mbarrier.wait(full, 0)
    if PENDING == 1:
        tma.store_wait(pendings=0)
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, line))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, line))
    places = rows[:, None] * 64 + columns[None, :]
    gl.store(seen_ptr + places, gl.load(seen_ptr + 8 * 64 + places))


def stored(
    row_count: int = 16, fences: int = 2, pending: int = 0, then: str = "", ahead: KernelAhead | None = None
) -> torch.Tensor:
    """What comes of a tensor of NaN: 24 rows, of which the descriptor knows rows 8 to 8 + `row_count`."""
    memory = torch.full((24, 64), float("nan"), dtype=torch.bfloat16)
    descriptor = TensorDescriptor.from_tensor(memory[8 : 8 + row_count], [8, 64], SHARED.value)
    other = TensorDescriptor.from_tensor(torch.zeros(8, 64, dtype=torch.bfloat16), [8, 64], SHARED.value)
    constants = {"FIRST": 8, "FENCES": fences, "PENDING": pending, "THEN": then}
    kernel = EmulatedKernel(_stored, ahead, ragged=("desc",))
    kernel[(1,)](descriptor, other, memory, **constants, num_warps=1)
    return memory


@pytest.mark.parametrize("then", ["", "store", "store_first", "copy"])
def test_a_tensor_has_a_stored_box_when_the_program_has_ended(then):
    memory = stored(then=then)
    assert memory[:8].isnan().all(), "the wait is for what is read"
    assert (memory[8:16] == 2).all() and (memory[16:] == 1).all()


@pytest.mark.parametrize("row_count", [9, 13])
def test_rows_past_the_end_of_a_ragged_tensor_are_not_stored(row_count):
    memory = stored(row_count=row_count)
    assert (memory[16 : 8 + row_count] == 1).all() and memory[8 + row_count :].isnan().all()


@pytest.mark.parametrize(
    ("pending", "then"), [(-1, "store"), (1, "store"), (-1, "copy"), (1, "copy"), (2, "store_first")]
)
def test_writing_to_what_a_copy_may_still_read_is_an_error(pending, then):
    with pytest.raises(AssertionError, match="written before its copy to a tensor was waited for"):
        stored(pending=pending, then=then)


def test_the_older_of_two_copies_can_be_waited_for():
    assert (stored(pending=1, then="store_first")[16:] == 1).all()


@pytest.mark.parametrize("fences", [0, 1])
def test_a_copy_with_no_fence_behind_what_was_written_is_an_error(fences):
    with pytest.raises(AssertionError, match="copied to a tensor with no fence behind what was written"):
        stored(fences=fences)


def test_a_program_that_ends_before_its_copies_were_read_is_an_error():
    with pytest.raises(AssertionError, match="a program ends before its copies to a tensor were waited for"):
        stored(pending=-1)


def test_a_copy_to_a_tensor_is_a_write_behind_the_kernel_ahead():
    with pytest.raises(AssertionError, match="a program writes before it has waited for the kernel ahead"):
        stored(ahead=KernelAhead(torch.zeros(1)))


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
def _waits(x_ptr, output_ptr, done, ALL: gl.constexpr):
    wait_for_inputs(True)
    mbarrier.arrive(done, count=1)


@gluon.jit
def _reads(x_ptr, output_ptr, done, ALL: gl.constexpr):
    wait_for_inputs(ALL)
    x = gl.load(x_ptr)
    mbarrier.arrive(done, count=1, pred=False)
    mbarrier.wait(done, 0)
    gl.store(output_ptr, x)


@gluon.jit
def _specialised(x_ptr, output_ptr, ALL: gl.constexpr):
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=1)
    arguments = (x_ptr, output_ptr, done, ALL)
    gl.warp_specialize([(_waits, arguments), (_reads, arguments)], [1], [24])


@pytest.mark.parametrize("all_wait", [False, True])
def test_the_kernel_ahead_ends_when_all_warps_wait(all_wait):
    """One that does not wait reads early, also where another one has begun to wait before."""
    x, output = torch.ones(1), torch.zeros(1)
    EmulatedKernel(_specialised, KernelAhead(x))[(1,)](x, output, ALL=all_wait, num_warps=1)
    assert output.isnan().all() != all_wait


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
def _one(x_ptr, output_ptr, PLACE: gl.constexpr):
    gl.store(output_ptr, gl.load(x_ptr + PLACE))


@pytest.mark.parametrize("place", [-1, 40])
def test_a_load_of_one_place_outside_a_tensor_is_named(place):
    with pytest.raises(AssertionError, match="a place outside a tensor of 40"):
        EmulatedKernel(_one)[(1,)](torch.zeros(40), torch.zeros(1), PLACE=place, num_warps=1)


@gluon.jit
def _outside(x_ptr, output_ptr):
    line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    places = gl.arange(0, 64, layout=line)
    gl.store(output_ptr + places, gl.load(x_ptr + places))


def test_loads_outside_a_tensor_are_named():
    with pytest.raises(AssertionError, match="24 places outside a tensor of 40"):
        EmulatedKernel(_outside)[(1,)](torch.zeros(40), torch.zeros(64), num_warps=1)


def test_assembly_of_float32():
    """2^(2x - 1), of which ftz makes a zero where it has fewer digits, and its reciprocal."""
    text = "{ .reg .f32 e; mul.f32 e, $1, 0f40000000; add.f32 e, e, 0fBF800000; ex2.approx.ftz.f32 e, e; "
    x = torch.tensor([[0.5, 0.0], [1.5, -63.0], [-62.5, 65.0]])
    options = {"constraints": "=f,f", "args": [x], "dtype": gl.float32, "is_pure": True, "pack": 1}
    exact = torch.exp2(2 * x - 1)
    exact[1, 1] = 0.0
    assert torch.equal(inline_asm(text + "mov.b32 $0, e; }", **options), exact)
    found = inline_asm(text + "rcp.approx.ftz.f32 $0, e; }", **options)
    assert torch.equal(found, torch.tensor([[1.0, 2.0], [0.25, float("inf")], [2.0**126, 0.0]]))
