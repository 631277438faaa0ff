"""Runs Gluon kernels on the CPU, program after program, in torch, as Triton's interpreter does the other kernels.

`EmulatedKernel(kernel)` is called as the kernel is, `emulated[grid](...)`. The kernel's own functions run as Python
with another `gl`: layouts are ignored, tensors are torch tensors, pointers are places of a tensor. What a card would
let pass by luck is an error here:

- a copy arrives when somebody waits for it, and until then its target holds NaN (or, in bytes, -86); so do
  asynchronous copies of a thread's own, which come in groups;
- a wait for a copy that nobody asked for, or with the wrong phase, is named instead of hanging;
- a barrier that is told another number of bytes than are copied is named, and so is a program that ends while copies to
  its shared memory are under way;
- an asynchronous product reads shared memory when its wait comes, not before, and cannot be used until then;
- a copy from shared memory to a tensor reads it when its wait comes, and the tensor has it when the program has ended;
  to write there before the wait is an error, and so are a copy with no fence behind what was written and a program that
  ends without a wait;
- loads and stores outside their tensor are errors, and so are boxes that end outside it; but past the last row of a
  `ragged` tensor zeros are read, and nothing is stored;
- with a `KernelAhead`, what that writes is not there before a program has waited for it, nor may the program write;
  it ends as late as it can, when all warps wait; and some program has to wait.

The warps of `warp_specialize` are threads of which one runs at a time, until it waits. Who tells others that they may
go on goes on after them: what it has given up too early is then gone. Inline assembly is executed,
instruction by instruction, for the instructions listed in tests/kernels/gluon_assembly.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from kernels.decode_warp import block_barrier
from tests.kernels.gluon_assembly import inline_asm
from tests.kernels.gluon_memory import (
    DTYPES,
    Barrier,
    BarrierRow,
    Baton,
    ElementType,
    Pointer,
    Shared,
    StoredBoxes,
    torch_dtype_of,
)


def _to(tensor: torch.Tensor, dtype: ElementType | torch.dtype, bitcast: bool = False,
        plain: Callable = torch.Tensor.to) -> torch.Tensor:  # fmt: skip
    dtype = torch_dtype_of(dtype)
    return tensor.view(dtype) if bitcast else plain(tensor, dtype)


def _load(pointer, mask=True, other=0, cache_modifier="", eviction_policy=""):
    if mask is True and pointer.places.dim() == 0:
        return pointer.storage[pointer.place()].clone()
    shape = torch.broadcast_shapes(pointer.places.shape, torch.as_tensor(mask).shape)
    places, mask = pointer.masked(mask, shape)
    loaded = pointer.storage[torch.where(mask, places, 0)]
    return torch.where(mask, loaded, torch.as_tensor(other, dtype=loaded.dtype))


def _store(pointer, value, mask=True):
    value = torch.as_tensor(value).to(pointer.storage.dtype)
    shape = torch.broadcast_shapes(pointer.places.shape, value.shape, torch.as_tensor(mask).shape)
    places, mask = pointer.masked(mask, shape)
    pointer.storage[places[mask]] = value.expand(shape)[mask]


def _atomic_add(pointer, value, sem, scope):
    before = _load(pointer)
    _store(pointer, before + value)
    return before


def _both(function: Callable) -> Callable:
    def apply(left, right):
        left, right = torch.as_tensor(left), torch.as_tensor(right)
        return function(left, right.to(left.dtype) if right.dim() == 0 and left.is_floating_point() else right)

    return apply


def _fma(a, b, c):
    a, b, c = (torch.as_tensor(each, dtype=torch.float64) for each in (a, b, c))
    return (a * b + c).to(torch.float32)


def _mma(a, b, acc, **_):
    exact = torch.float32 if acc.is_floating_point() else torch.int32
    return acc + a.to(exact) @ b.to(exact)


def _where(condition, left, right):
    tensor = left if isinstance(left, torch.Tensor) else right if isinstance(right, torch.Tensor) else None
    dtype = torch.int64 if tensor is None else tensor.dtype
    return torch.where(condition, torch.as_tensor(left, dtype=dtype), torch.as_tensor(right, dtype=dtype))


def _box(descriptor, place, shape):
    """As much of a box as lies in its tensor: all of it, but in a cache, of a higher rank, and in rows of `ragged`."""
    box, tensor = descriptor.box, descriptor.tensor
    assert list(shape) == box, f"a box of {box} and {shape}"
    starts = [int(each) for each in place]
    assert min(starts) >= 0, f"a box of {box} at {starts} of {list(tensor.shape)}"
    found = tensor
    for axis, (start, size) in enumerate(zip(starts, box, strict=True)):
        first = min(start, tensor.shape[axis])
        found = found.narrow(axis, first, min(size, tensor.shape[axis] - first))
    checked = 1 if descriptor.is_ragged else 0
    is_inside = len(box) > 2 or list(found.shape)[checked:] == box[checked:]
    assert is_inside, f"a box of {box} at {starts} of {list(tensor.shape)}"
    return found


def _copy(descriptor, place, barrier, target, pred=True):
    """A box of a tensor to shared memory, zeros past the tensor's end."""
    if not pred:
        return
    target.boxes.refuse_writing(target.memory)
    found = _box(descriptor, place, target.shape)
    source = torch.zeros(descriptor.box, dtype=descriptor.dtype)
    source[tuple(slice(size) for size in found.shape)] = found
    elements = target.elements()
    elements.fill_(float("nan") if elements.is_floating_point() else -86)
    barrier.copies.append((elements, source.reshape(elements.shape)))


class Pending:
    """The result of an asynchronous product, which reads shared memory as late as its wait allows."""

    def __init__(self, a, b, acc, use_acc) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.result: torch.Tensor | None = None

    def compute(self) -> None:
        a, b = (each.load(None) if isinstance(each, Shared) else each for each in (self.a, self.b))
        acc = self.acc.result if isinstance(self.acc, Pending) else self.acc
        self.result = _mma(a, b, acc if self.use_acc else torch.zeros_like(acc))


class Products(threading.local):
    """Each warp group's asynchronous products, oldest first."""

    def __init__(self) -> None:
        self.queue: list[Pending] = []

    def start(self, a, b, acc, use_acc=True, is_async=False) -> Pending | torch.Tensor:
        self.queue.append(Pending(a, b, acc, use_acc))
        return self.queue[-1] if is_async else self.wait(0, (self.queue[-1],))

    def wait(self, num_outstanding: int, deps: tuple):
        """Finish all but the newest `num_outstanding`; those of `deps` that are finished come back as tensors."""
        while len(self.queue) > num_outstanding:
            self.queue.pop(0).compute()
        done = tuple(each.result if isinstance(each, Pending) and each.result is not None else each for each in deps)
        return done[0] if len(done) == 1 else done


class CopyGroups:
    """A program's asynchronous copies of threads, in groups, oldest first."""

    def __init__(self) -> None:
        self.open: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.groups: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def copy(self, target: Shared, pointer: Pointer, mask: torch.Tensor | bool = True) -> None:
        """To a tile of shared memory; zeros where masked."""
        source = _load(pointer, mask)
        assert list(source.shape) == target.shape, f"{list(source.shape)} elements into {target.shape}"
        target.boxes.refuse_writing(target.memory)
        elements = target.elements()
        elements.fill_(float("nan") if elements.is_floating_point() else -86)
        self.open.append((elements, source.reshape(elements.shape)))

    def commit(self) -> None:
        """What was asked for since the last commit is a group."""
        self.groups.append(self.open)
        self.open = []

    def wait(self, num_outstanding: int) -> None:
        """All groups but the newest `num_outstanding` arrive."""
        while len(self.groups) > num_outstanding:
            for target, source in self.groups.pop(0):
                target.copy_(source)


def _expect(barrier, count, pred=True):
    if pred:
        barrier.expected_bytes += int(count)
        barrier.arrive()


def _arrive(barrier, count=1, pred=True):
    if pred:
        barrier.arrive(count)
        barrier.baton.pause()


def _init(barrier, count):
    barrier.count = barrier.missing = count


def _range(*limits: torch.Tensor | int) -> list[torch.Tensor]:
    return [torch.tensor(index) for index in range(*map(int, limits))]


class KernelAhead:
    """The kernel ahead of an early launch: what it writes is undone before each program, and done when that waits, with
    all its warps.

    Args:
        written: the tensors, or views of them, that it writes; they hold what they hold afterwards.
    """

    def __init__(self, *written: torch.Tensor) -> None:
        parts = [part.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[part.itemsize]) for part in written]
        self._parts = [(part, part.clone()) for part in parts]
        self.is_done = True

    def undo(self) -> None:
        """Other numbers in place of what it writes: NaN, but in int8."""
        self.is_done = False
        for part, after in self._parts:
            part.copy_(torch.where(after == -1, 63, -1))

    def do(self) -> None:
        """It has ended."""
        self.is_done = True
        for part, after in self._parts:
            part.copy_(after)

    def run_behind(self, program: _Program) -> None:
        """From here on the program's waits are for this kernel, and what it writes has to come behind them."""
        self.undo()
        baton, language = program.baton, program.language
        baton.when_stuck = self.do

        def with_wait(text: str, *arguments, **options):
            if "griddepcontrol.wait" in text:
                baton.yield_until(lambda: self.is_done, "the kernel ahead")
            return inline_asm(text, *arguments, **options)

        language.inline_asm_elementwise = with_wait
        language.store, language.atomic_add = self.late(_store), self.late(_atomic_add)
        program.boxes.copy = self.late(program.boxes.copy)

    def late(self, write: Callable) -> Callable:
        """The same, refused before the wait."""

        def checked(*arguments, **options):
            assert self.is_done, "a program writes before it has waited for the kernel ahead"
            return write(*arguments, **options)

        return checked


class EmulatedKernel:
    """A Gluon kernel that runs on the CPU when it is launched; `ahead`: early, behind another kernel.

    ragged: names of the descriptors whose tensors may end inside a box of rows.
    """

    def __init__(self, kernel: JITFunction, ahead: KernelAhead | None = None, ragged: tuple[str, ...] = ()) -> None:
        self.kernel, self.ahead, self.ragged = kernel, ahead, ragged
        assert set(ragged) <= set(kernel.arg_names), f"{ragged} of {kernel.arg_names}"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments, num_warps, maxnreg=None, launch_pdl=None, **constants):
            names = self.kernel.arg_names[: len(arguments)]
            flat = [_argument(value, name in self.ragged) for name, value in zip(names, arguments, strict=True)]
            constants = {name: _plain(value) for name, value in constants.items()}
            has_type = patch.object(torch.Tensor, "type", SimpleNamespace(layout=None))
            with patch.object(torch.Tensor, "to", _to), has_type:
                waited = [
                    self._run(_Program(program, grid, num_warps), flat, constants)
                    for program in itertools.product(*map(range, grid))
                ]
            assert any(waited), "who waits for this kernel does not wait for the one ahead of it"
            if self.ahead is not None:
                self.ahead.do()

        return launch

    def _run(self, program: _Program, arguments: list, constants: dict) -> bool:
        """Run a program; whether it has waited for the kernel ahead, if there is one."""
        if self.ahead is not None:
            self.ahead.run_behind(program)
        program.emulated(self.kernel)(*arguments, **constants)
        program.finish()
        return self.ahead is None or self.ahead.is_done


def emulate(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, kernel: str, ahead: KernelAhead | None = None,
    ragged: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """From here on the module's kernel of that name runs on the CPU; `ahead` and `ragged` as of `EmulatedKernel`."""
    found = getattr(module, kernel)
    found = found.kernel if isinstance(found, EmulatedKernel) else found
    monkeypatch.setattr(module, kernel, EmulatedKernel(found, ahead, ragged))


def _argument(value: object, is_ragged: bool) -> object:
    if isinstance(value, tuple):
        return tuple(_argument(each, is_ragged) for each in value)
    if isinstance(value, torch.Tensor):
        span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
        value = Pointer(value.as_strided((span if value.numel() else 0,), (1,)))
    elif isinstance(value, TensorDescriptor):
        value = SimpleNamespace(dtype=value.base.dtype, box=list(value.block_shape),
                                is_ragged=is_ragged, layout=value.layout,
                                tensor=value.base.as_strided(tuple(value.shape), tuple(value.strides)))  # fmt: skip
    return value


def _plain(value: object) -> object:
    value = getattr(value, "value", value)
    return DTYPES.get(value, value) if isinstance(value, gl.dtype) else value


class _Program:
    """One program: its number, its baton, and its kernels' functions with another language in their globals."""

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...], num_warps: int) -> None:
        self.baton, self.products, self.copies, self.boxes = Baton(), Products(), CopyGroups(), StoredBoxes()
        self.functions: dict[JITFunction, FunctionType] = {}
        self.barriers: list[Barrier] = []
        plain = {each.name: torch_dtype for each, torch_dtype in DTYPES.items()}
        names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        dtypes = {name: plain[names.get(name, name)] for name in ("bfloat16", "float16", "float32", *_INTEGERS)}
        self.language = SimpleNamespace(
            **dtypes, **{name: getattr(gl, name) for name in _LAYOUTS}, constexpr=lambda value: value,
            program_id=lambda axis: torch.tensor(program[axis]), num_programs=lambda axis: torch.tensor(grid[axis]),
            arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), zeros_like=torch.zeros_like,
            load=_load, store=_store, atomic_add=_atomic_add, static_range=range,
            minimum=_both(torch.minimum), maximum=_both(torch.maximum), where=_where, abs=torch.abs,
            floor=torch.floor, fma=_fma, split=lambda x: x.unbind(-1), exp=torch.exp,
            exp2=lambda x: torch.exp2(torch.as_tensor(x, dtype=torch.float32)),
            max=torch.amax,
            sum=lambda x, axis: torch.sum(x, axis, dtype=x.dtype), expand_dims=torch.unsqueeze,
            reshape=torch.reshape, permute=torch.permute, join=lambda a, b: torch.stack((a, b), -1),
            rsqrt=torch.rsqrt, broadcast=torch.broadcast_tensors,
            associative_scan=lambda x, axis, function: torch.cumsum(x, axis, dtype=x.dtype),
            convert_layout=lambda x, layout: x, cast=lambda x, dtype: torch.as_tensor(x, dtype=dtype),
            inline_asm_elementwise=inline_asm, allocate_shared_memory=self._allocate, num_warps=lambda: num_warps,
            warp_specialize=self._specialise,
        )  # fmt: skip

    def _allocate(self, dtype: object, shape: list[int], layout: object) -> Shared | BarrierRow | Barrier:
        if isinstance(layout, mbarrier.MBarrierLayout):
            row = BarrierRow(shape[0] if len(shape) > 1 else 1, self.baton)
            self.barriers += row.barriers
            return row if len(shape) > 1 else row.index(0)
        dtype = torch_dtype_of(dtype)
        memory = torch.full((int(np.prod(shape)) * dtype.itemsize,), 0xAA, dtype=torch.uint8)
        return Shared(memory, dtype, shape, layout, self.boxes)

    def _specialise(self, functions: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
        self.baton.run([partial(function, *arguments) for function, arguments in functions])

    def finish(self) -> None:
        """The program has ended, and with it the life of its shared memory."""
        under_way = sum(len(barrier.copies) for barrier in self.barriers)
        assert under_way == 0, f"a program ends while {under_way} copies to its shared memory are under way"
        self.boxes.finish()

    def emulated(self, function: JITFunction) -> FunctionType:
        """The Python function behind a kernel's function, with this program's language in its globals."""
        if function in self.functions:
            return self.functions[function]
        python = function.fn
        scope = dict(python.__globals__, range=_range)
        emulated = FunctionType(python.__code__, scope, python.__name__, python.__defaults__, python.__closure__)
        self.functions[function] = emulated
        products, boxes = self.products, self.boxes
        replaced = {
            fence_async_shared: boxes.fence, block_barrier: lambda: None, mma_v2: _mma, warpgroup_mma: products.start,
            warpgroup_mma_wait: products.wait,
            mbarrier: SimpleNamespace(
                MBarrierLayout=mbarrier.MBarrierLayout, init=_init, expect=_expect,
                arrive=_arrive,
                wait=lambda barrier, phase: barrier.wait(int(phase)),
            ),
            tma: SimpleNamespace(
                async_copy_global_to_shared=_copy, store_wait=boxes.wait,
                async_copy_shared_to_global=lambda descriptor, place, source: boxes.copy(
                    _box(descriptor, place, source.shape), source
                ),
            ),
            async_copy: SimpleNamespace(
                async_copy_global_to_shared=self.copies.copy, commit_group=self.copies.commit,
                wait_group=self.copies.wait,
            ),
            gl: self.language,
        }  # fmt: skip
        for name, value in python.__globals__.items():
            if isinstance(value, JITFunction):
                scope[name] = self.emulated(value)
            elif isinstance(value, gl.constexpr):
                scope[name] = value.value
            else:
                for original, stand_in in replaced.items():
                    if value is original:
                        scope[name] = stand_in
        return emulated


_INTEGERS = ("int8", "int16", "int32", "int64")
_LAYOUTS = (
    "BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout",
    "SwizzledSharedLayout",
)  # fmt: skip
