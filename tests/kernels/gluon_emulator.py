"""Runs Gluon kernels on the CPU, program after program, in torch: what Triton's interpreter does for the other kernels.

`EmulatedKernel(kernel)` is called as the kernel is, `emulated[grid](...)`. The kernel's own functions run as Python with
another `gl`: layouts are ignored, tensors are torch tensors, pointers are places of a tensor. What a card would let pass
by luck is an error here:

- a copy arrives when somebody waits for it, and until then its target holds NaN (or, in bytes, -86);
- a wait for a copy that nobody asked for, or with the wrong phase, is named instead of hanging;
- a barrier that is told another number of bytes than are copied is named;
- loads and stores outside their tensor are errors.

The warps of `warp_specialize` are threads of which one runs at a time, until it waits. Inline assembly is executed,
instruction by instruction, for the instructions listed in `_INSTRUCTIONS`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.jit import JITFunction

DTYPES = {
    gl.bfloat16: torch.bfloat16, gl.float16: torch.float16, gl.float32: torch.float32, gl.int8: torch.int8,
    gl.int16: torch.int16, gl.int32: torch.int32, gl.int64: torch.int64,
}  # fmt: skip


@dataclass(frozen=True)
class ElementType:
    """What a kernel asks of an element's type in shared memory; `Tensor.to` takes it while a kernel is emulated."""

    torch_dtype: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.torch_dtype.itemsize


def _to(tensor: torch.Tensor, dtype: ElementType | torch.dtype, bitcast: bool = False,
        plain: Callable = torch.Tensor.to) -> torch.Tensor:  # fmt: skip
    dtype = _torch_dtype(dtype)
    return tensor.view(dtype) if bitcast else plain(tensor, dtype)


class Pointer:
    """Places in a flat tensor, as elements from its beginning."""

    def __init__(self, storage: torch.Tensor, places: torch.Tensor | int = 0) -> None:
        self.storage = storage
        self.places = torch.as_tensor(places, dtype=torch.int64)
        self.dtype = SimpleNamespace(element_ty=storage.dtype)

    def __add__(self, places: torch.Tensor | int) -> Pointer:
        return Pointer(self.storage, self.places + torch.as_tensor(places).to(torch.int64))

    def masked(self, mask: torch.Tensor | bool, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Places and which of them count, both of `shape`; those that count lie inside the tensor."""
        places = self.places.expand(shape)
        mask = torch.as_tensor(mask, dtype=torch.bool).expand(shape)
        outside = mask & ((places < 0) | (places >= self.storage.numel()))
        assert not outside.any(), f"{int(outside.sum())} places outside a tensor of {self.storage.numel()}"
        return places, mask


class Barrier:
    """A phase that completes with its last arrival and the last byte that is expected."""

    def __init__(self, baton: Baton) -> None:
        self.baton = baton
        self.count = self.missing = 1
        self.phase = 0
        self.expected_bytes = 0
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def arrive(self, count: int = 1) -> None:
        assert 0 < count <= self.missing, f"{count} arrivals at a barrier that wants {self.missing} more"
        self.missing -= count
        self._complete_without_copies()

    def _complete_without_copies(self) -> None:
        if self.missing == 0 and not self.copies and self.expected_bytes == 0:
            self.phase += 1
            self.missing = self.count

    def wait(self, parity: int) -> None:
        self.baton.yield_until(lambda: self._is_over(parity), f"phase {parity} of a barrier")

    def _is_over(self, parity: int) -> bool:
        if self.phase % 2 == parity and self.missing == 0 and self.copies:
            copied = sum(source.numel() * source.element_size() for _, source in self.copies)
            assert copied <= self.expected_bytes, f"{copied} bytes copied where {self.expected_bytes} were expected"
            if copied == self.expected_bytes:
                for target, source in self.copies:
                    target.copy_(source)
                self.copies, self.expected_bytes = [], 0
                self._complete_without_copies()
        return self.phase % 2 != parity


class Baton:
    """Lets one thread of a program run at a time; a program in which all wait is an error."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.errors: list[BaseException] = []
        self.running = 1
        self.waits: dict[int, tuple[Callable[[], bool], str]] = {}

    def yield_until(self, is_over: Callable[[], bool], what: str) -> None:
        with self.condition:
            if is_over():
                self.condition.notify_all()
                return
            me = threading.get_ident()
            self.waits[me] = is_over, what
            self.condition.notify_all()
            while not is_over():
                self._check_progress()
                self.condition.wait()
            del self.waits[me]
            self.condition.notify_all()

    def _check_progress(self) -> None:
        if self.errors:
            raise RuntimeError("another warp failed")
        if len(self.waits) == self.running and not any(is_over() for is_over, _ in self.waits.values()):
            raise RuntimeError(f"all warps wait: {', '.join(what for _, what in self.waits.values())}")

    def run(self, functions: list[Callable[[], None]]) -> None:
        """Run all to their end, taking turns only where they wait."""
        self.running = len(functions)
        threads = [threading.Thread(target=self._guarded, args=(function,)) for function in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.running = 1
        if self.errors:
            raise self.errors[0]

    def _guarded(self, function: Callable[[], None]) -> None:
        with self.condition:
            try:
                function()
            except BaseException as error:
                self.errors.append(error)
            self.running -= 1
            self.condition.notify_all()


class Shared:
    """A view of shared memory: `tiles` tensors of [rows, columns] one behind another.

    A tile wider than the swizzled width lies as its halves, one behind the other; the swizzle itself is left out, since
    it depends on addresses alone and views of one memory must agree on it.
    """

    def __init__(self, memory: torch.Tensor, dtype: torch.dtype, shape: list[int], layout: object) -> None:
        self.memory, self.torch_dtype, self.shape, self.layout = memory, dtype, list(shape), layout
        self.dtype = ElementType(dtype)
        self.turned = False

    @property
    def width(self) -> int:
        swizzled = getattr(self.layout, "swizzle_byte_width", 0) // self.torch_dtype.itemsize
        return min(swizzled or self.shape[-1], self.shape[-1])

    def elements(self) -> torch.Tensor:
        """A view of the memory as a tensor of the shape's first dimensions."""
        typed = self.memory.view(self.torch_dtype)
        *outer, columns = self.shape
        if len(self.shape) == 1 or columns == self.width:
            return typed.view(self.shape)
        rows = outer.pop()
        halves = typed.view(*outer, columns // self.width, rows, self.width)
        return halves.movedim(-3, -2)

    def index(self, index: torch.Tensor | int) -> Shared:
        size = self.memory.numel() // self.shape[0]
        assert 0 <= int(index) < self.shape[0], f"index {int(index)} of {self.shape[0]}"
        return Shared(self.memory[int(index) * size : (int(index) + 1) * size], self.torch_dtype, self.shape[1:],
                      self.layout)  # fmt: skip

    def slice(self, start: int, length: int) -> Slice:
        assert 0 <= start and start + length <= self.shape[0]
        return Slice(self.elements()[start : start + length], [length, *self.shape[1:]])

    def permute(self, order: tuple[int, ...]) -> Shared:
        assert tuple(order) == (1, 0)
        view = Shared(self.memory, self.torch_dtype, self.shape, self.layout)
        view.turned = not self.turned
        return view

    def load(self, layout: object) -> torch.Tensor:
        loaded = self.elements().clone().reshape(self.shape)
        return loaded.t() if self.turned else loaded

    def store(self, value: torch.Tensor) -> None:
        elements = self.elements()
        elements.copy_(value.to(self.torch_dtype).reshape(elements.shape))

    def _reinterpret(self, dtype: object, shape: list[int], layout: object) -> Shared:
        swizzles = [getattr(each, "swizzle_byte_width", None) for each in (self.layout, layout)]
        assert swizzles[0] == swizzles[1], f"two swizzles of one memory: {swizzles}"
        view = Shared(self.memory, _torch_dtype(dtype), shape, layout)
        assert np.prod(shape) * view.torch_dtype.itemsize == self.memory.numel()
        return view


class Slice:
    """Some of the rows of a tile in shared memory."""

    def __init__(self, elements: torch.Tensor, shape: list[int]) -> None:
        self.elements, self.shape = elements, shape

    def load(self, layout: object) -> torch.Tensor:
        return self.elements.clone().reshape(self.shape)

    def store(self, value: torch.Tensor) -> None:
        self.elements.copy_(value.to(self.elements.dtype).reshape(self.elements.shape))


class BarrierRow:
    """Barriers in shared memory."""

    def __init__(self, count: int, baton: Baton) -> None:
        self.barriers = [Barrier(baton) for _ in range(count)]

    def index(self, index: torch.Tensor | int) -> Barrier:
        return self.barriers[int(index)]


def _torch_dtype(dtype: object) -> torch.dtype:
    dtype = getattr(dtype, "value", dtype)
    dtype = getattr(dtype, "torch_dtype", dtype)
    return dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype]


# ---- inline assembly: 32-bit words as int64


def _halves(words: torch.Tensor) -> torch.Tensor:
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.bfloat16).float()


def _words(halves: torch.Tensor) -> torch.Tensor:
    return halves.to(torch.bfloat16).view(torch.uint32).to(torch.int64)


def _permuted(low: torch.Tensor, high: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    both = low | (high << 32)
    result = torch.zeros_like(both)
    for place in range(4):
        picked = (selector >> (4 * place)) & 0xF
        byte = (both >> (8 * (picked & 7))) & 0xFF
        result |= torch.where(picked & 8 > 0, (byte >> 7) * 0xFF, byte) << (8 * place)
    return result


def _looked_up(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(a)
    for case in range(8):
        if (int(table.flatten()[0]) >> case) & 1:
            chosen = [value if case & bit else ~value for value, bit in ((a, 4), (b, 2), (c, 1))]
            result |= chosen[0] & chosen[1] & chosen[2]
    return result & 0xFFFFFFFF


_INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _permuted,
    "lop3.b32": _looked_up,
    "sub.rn.bf16x2": lambda a, b: _words(_halves(a) - _halves(b)),
    "mul.rn.bf16x2": lambda a, b: _words(_halves(a) * _halves(b)),
    "fma.rn.bf16x2": lambda a, b, c: _words((_halves(a).double() * _halves(b).double() + _halves(c).double()).float()),
}


def _executed(text: str, outputs: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The `outputs` words that an assembly text makes of its input words, all of one shape."""
    registers = {f"${outputs + index}": words for index, words in enumerate(inputs)}
    for statement in re.sub(r"//.*|[{}]", "", text).replace("\n", " ").split(";"):
        words = statement.split(None, 1)
        if not words or words[0] == ".reg":
            continue
        target, *names = [name.strip() for name in words[1].split(",")]
        operands = [registers[n] if n in registers else torch.full_like(inputs[0], int(n, 0)) for n in names]
        registers[target] = _INSTRUCTIONS[words[0]](*operands)
    return [registers[f"${index}"] for index in range(outputs)]


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Neighbouring elements along the last dimension as 32-bit words."""
    if values.element_size() == 4:
        return values.contiguous().view(torch.uint32).to(torch.int64)
    return values.contiguous().flatten().view(torch.uint32).to(torch.int64)


def _inline_asm(text, constraints, args, dtype, is_pure, pack):  # noqa: ANN001, ANN202
    text = getattr(text, "value", text)
    if "griddepcontrol" in text:
        return None
    if "pmevent" in text:
        return args[0]
    if "cvt.rn.bf16x2.f32" in text or "cvt.rn.f16x2.f32" in text:
        return args[0].to(_torch_dtype(dtype))
    args = torch.broadcast_tensors(*args)
    shape, count = args[0].shape, constraints.count("=")
    if isinstance(dtype, tuple):  # a word in, a word out for each result
        results = _executed(text, count, [_packed(each) for each in args])
        return tuple(
            words.to(torch.uint32).view(_torch_dtype(each)).reshape(shape)
            for words, each in zip(results, dtype, strict=True)
        )
    # Four bytes make two words; what goes with them is the same for the four.
    stored, *others = args
    words = [_packed(stored)]
    for other in others:
        words += list(_packed(other).reshape(-1, 4).t())
    low, high = _executed(text, count, words)
    return torch.stack([low, high], -1).to(torch.uint32).view(_torch_dtype(dtype)).reshape(shape)


# ---- the language


def _load(pointer, mask=True, other=0, cache_modifier=""):  # noqa: ANN001, ANN202
    shape = torch.broadcast_shapes(pointer.places.shape, torch.as_tensor(mask).shape)
    places, mask = pointer.masked(mask, shape)
    loaded = pointer.storage[torch.where(mask, places, 0)]
    return torch.where(mask, loaded, torch.as_tensor(other, dtype=loaded.dtype))


def _store(pointer, value, mask=True):  # noqa: ANN001, ANN202
    value = torch.as_tensor(value).to(pointer.storage.dtype)
    shape = torch.broadcast_shapes(pointer.places.shape, value.shape, torch.as_tensor(mask).shape)
    places, mask = pointer.masked(mask, shape)
    pointer.storage[places[mask]] = value.expand(shape)[mask]


def _atomic_add(pointer, value, sem, scope):  # noqa: ANN001, ANN202
    before = _load(pointer)
    _store(pointer, before + value)
    return before


def _both(function: Callable) -> Callable:
    def apply(left, right):  # noqa: ANN001, ANN202
        left, right = torch.as_tensor(left), torch.as_tensor(right)
        return function(left, right.to(left.dtype) if right.dim() == 0 and left.is_floating_point() else right)

    return apply


def _mma(a, b, acc, **_):  # noqa: ANN001, ANN003, ANN202
    exact = torch.float32 if acc.is_floating_point() else torch.int32
    return acc + a.to(exact) @ b.to(exact)


def _where(condition, left, right):  # noqa: ANN001, ANN202
    tensor = left if isinstance(left, torch.Tensor) else right if isinstance(right, torch.Tensor) else None
    dtype = torch.int64 if tensor is None else tensor.dtype
    return torch.where(condition, torch.as_tensor(left, dtype=dtype), torch.as_tensor(right, dtype=dtype))


def _copy(descriptor, place, barrier, target):  # noqa: ANN001, ANN202
    """A box of a tensor to shared memory; queries past the last token are zeros, blocks past the cache an error."""
    box = list(descriptor.block_shape)
    assert list(target.shape) == box, f"a box of {box} into {target.shape}"
    place = [int(each) for each in place]
    inside = [
        slice(start, max(start, min(start + size, limit)))
        for start, size, limit in zip(place, box, descriptor.shape, strict=True)
    ]
    source = torch.zeros(box, dtype=descriptor.base.dtype)
    found = descriptor.base[tuple(inside)]
    assert len(box) > 2 or list(found.shape) == box, f"a box of {box} at {place} of {list(descriptor.shape)}"
    source[tuple(slice(size) for size in found.shape)] = found
    elements = target.elements()
    elements.fill_(float("nan") if elements.is_floating_point() else -86)
    barrier.copies.append((elements, source))


def _warpgroup_mma(a, b, acc, use_acc=True, is_async=False):  # noqa: ANN001, ANN202
    a, b = (each.load(None) if isinstance(each, Shared) else each for each in (a, b))
    return _mma(a, b, acc if use_acc else torch.zeros_like(acc))


def _warpgroup_wait(num_outstanding, deps):  # noqa: ANN001, ANN202
    return deps[0] if len(deps) == 1 else deps


def _expect(barrier, count):  # noqa: ANN001, ANN202
    barrier.expected_bytes += int(count)
    barrier.arrive()


def _init(barrier, count):  # noqa: ANN001, ANN202
    barrier.count = barrier.missing = count


def _range(*limits: torch.Tensor | int) -> list[torch.Tensor]:
    return [torch.tensor(index) for index in range(*map(int, limits))]


class EmulatedKernel:
    """A Gluon kernel that runs on the CPU when it is launched."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments, num_warps, maxnreg=None, launch_pdl=None, **constants):  # noqa: ANN001, ANN002, ANN003, ANN202
            flat = [Pointer(x.view(-1)) if isinstance(x, torch.Tensor) else x for x in arguments]
            constants = {name: _plain(value) for name, value in constants.items()}
            with patch.object(torch.Tensor, "to", _to):
                for program in range(grid[0]):
                    _Program(program, grid[0]).emulated(self.kernel)(*flat, **constants)

        return launch


def _plain(value: object) -> object:
    value = getattr(value, "value", value)
    return DTYPES.get(value, value) if isinstance(value, gl.dtype) else value


class _Program:
    """One program: its number, its baton, and its kernels' functions with another language in their globals."""

    def __init__(self, program: int, programs: int) -> None:
        self.baton = Baton()
        self.functions: dict[JITFunction, FunctionType] = {}
        plain = {each.name: torch_dtype for each, torch_dtype in DTYPES.items()}
        names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        dtypes = {name: plain[names.get(name, name)] for name in ("bfloat16", "float16", "float32", *_INTEGERS)}
        self.language = SimpleNamespace(
            **dtypes, **{name: getattr(gl, name) for name in _LAYOUTS}, constexpr=lambda value: value,
            program_id=lambda axis: torch.tensor(program), num_programs=lambda axis: torch.tensor(programs),
            arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), zeros_like=torch.zeros_like,
            load=_load, store=_store, atomic_add=_atomic_add, thread_barrier=lambda: None, static_range=range,
            minimum=_both(torch.minimum), maximum=_both(torch.maximum), where=_where, abs=torch.abs,
            floor=torch.floor, exp2=lambda x: torch.exp2(torch.as_tensor(x, dtype=torch.float32)),
            max=lambda x, axis: torch.amax(x, axis),
            sum=lambda x, axis: torch.sum(x, axis, dtype=x.dtype), expand_dims=torch.unsqueeze,
            associative_scan=lambda x, axis, function: torch.cumsum(x, axis, dtype=x.dtype),
            convert_layout=lambda x, layout: x, cast=lambda x, dtype: torch.as_tensor(x, dtype=dtype),
            inline_asm_elementwise=_inline_asm, allocate_shared_memory=self._allocate, num_warps=lambda: 4,
            warp_specialize=self._specialise,
        )  # fmt: skip

    def _allocate(self, dtype: object, shape: list[int], layout: object) -> Shared | BarrierRow:
        if isinstance(layout, mbarrier.MBarrierLayout):
            return BarrierRow(shape[0], self.baton)
        dtype = _torch_dtype(dtype)
        memory = torch.full((int(np.prod(shape)) * dtype.itemsize,), 0xAA, dtype=torch.uint8)
        return Shared(memory, dtype, shape, layout)

    def _specialise(self, functions: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
        self.baton.run([partial(function, *arguments) for function, arguments in functions])

    def emulated(self, function: JITFunction) -> FunctionType:
        """The Python function behind a kernel's function, with this program's language in its globals."""
        if function in self.functions:
            return self.functions[function]
        python = function.fn
        scope = dict(python.__globals__, range=_range)
        emulated = FunctionType(python.__code__, scope, python.__name__, python.__defaults__, python.__closure__)
        self.functions[function] = emulated
        replaced = {
            fence_async_shared: lambda: None, mma_v2: _mma, warpgroup_mma: _warpgroup_mma,
            warpgroup_mma_wait: _warpgroup_wait,
            mbarrier: SimpleNamespace(
                MBarrierLayout=mbarrier.MBarrierLayout, init=_init, expect=_expect,
                arrive=lambda barrier, count: barrier.arrive(count),
                wait=lambda barrier, phase: barrier.wait(int(phase)),
            ),
            tma: SimpleNamespace(async_copy_global_to_shared=_copy),
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
