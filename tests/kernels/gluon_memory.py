"""What an emulated Gluon kernel works on: pointers, shared memory, barriers, and warps that take turns.

Called by tests/kernels/gluon_emulator.py, whose docstring says what is an error here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from triton.experimental.gluon import language as gl

DTYPES = {
    gl.bfloat16: torch.bfloat16, gl.float16: torch.float16, gl.float32: torch.float32, gl.int8: torch.int8,
    gl.int16: torch.int16, gl.int32: torch.int32, gl.int64: torch.int64,
}  # fmt: skip


def torch_dtype_of(dtype: object) -> torch.dtype:
    """Torch's name of a dtype of the language, of one of torch, or of an `ElementType`."""
    dtype = getattr(dtype, "value", dtype)
    dtype = getattr(dtype, "torch_dtype", dtype)
    return dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype]


@dataclass(frozen=True)
class ElementType:
    """What a kernel asks of an element's type in shared memory; `Tensor.to` takes it while a kernel is emulated."""

    torch_dtype: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.torch_dtype.itemsize


class Pointer:
    """Places in a flat tensor, as elements from its beginning."""

    def __init__(self, storage: torch.Tensor, places: torch.Tensor | int = 0) -> None:
        self.storage = storage
        self.places = torch.as_tensor(places, dtype=torch.int64)
        self.dtype = SimpleNamespace(element_ty=storage.dtype)

    def __add__(self, places: torch.Tensor | int) -> Pointer:
        return Pointer(self.storage, self.places + torch.as_tensor(places).to(torch.int64))

    def to(self, dtype: torch.dtype) -> Pointer:
        """As a number it is still the same place."""
        return self

    def place(self) -> int:
        """The only place, which most loads have; it lies inside the tensor."""
        place = int(self.places)
        assert 0 <= place < self.storage.numel(), f"a place outside a tensor of {self.storage.numel()}"
        return place

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
        self.paused_count = 0
        self.when_stuck: Callable[[], None] | None = None
        """Called once, when all threads wait for what has not come: for what comes from outside the program."""

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
                if not is_over():
                    self.condition.wait()
            del self.waits[me]
            self.condition.notify_all()

    def pause(self) -> None:
        """Let the other threads go as far as they can: this one is slow."""
        with self.condition:
            self.paused_count += 1
            self.condition.notify_all()
            while not self._others_are_stuck():
                self._refuse_errors()
                self.condition.wait()
            self.paused_count -= 1

    def _others_are_stuck(self) -> bool:
        is_any_over = any(is_over() for is_over, _ in self.waits.values())
        return len(self.waits) + self.paused_count == self.running and not is_any_over

    def _refuse_errors(self) -> None:
        if self.errors:
            raise RuntimeError("another warp failed")

    def _check_progress(self) -> None:
        self._refuse_errors()
        if self._is_stuck() and self.when_stuck is not None:
            when_stuck, self.when_stuck = self.when_stuck, None
            when_stuck()
            self.condition.notify_all()
        if self._is_stuck():
            raise RuntimeError(f"all warps wait: {', '.join(what for _, what in self.waits.values())}")

    def _is_stuck(self) -> bool:
        return len(self.waits) == self.running and not any(is_over() for is_over, _ in self.waits.values())

    def run(self, functions: list[Callable[[], None]]) -> None:
        """Run all to their end, taking turns only where they wait, or pause."""
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


@dataclass(frozen=True)
class StoredBox:
    """A copy that `thread` asked for, of shared memory into `part` of a tensor: as much of the box as lies in it."""

    thread: int
    source: Shared
    part: torch.Tensor

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`part`, and what it will hold."""
        return self.part, self.source.load(None)[tuple(map(slice, self.part.shape))]


class StoredBoxes:
    """A program's copies from shared memory to tensors, oldest first.

    A copy reads shared memory when its thread waits for it, and the tensor has it when the program has ended: the wait
    is for what is read. It does not see what a thread wrote to shared memory and put no fence behind.
    """

    def __init__(self) -> None:
        self.asked: list[StoredBox] = []
        self.read: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.unfenced: dict[int, list[range]] = {}

    def refuse_writing(self, memory: torch.Tensor) -> None:
        """Nothing is written to what a copy may still read."""
        is_read = any(_overlap(_addresses(memory), _addresses(box.source.memory)) for box in self.asked)
        assert not is_read, "shared memory is written before its copy to a tensor was waited for"

    def write(self, memory: torch.Tensor) -> None:
        """A thread writes there by itself."""
        self.refuse_writing(memory)
        self.unfenced.setdefault(threading.get_ident(), []).append(_addresses(memory))

    def fence(self) -> None:
        """What this thread wrote is there for copies."""
        self.unfenced.pop(threading.get_ident(), None)

    def copy(self, part: torch.Tensor, source: Shared) -> None:
        """Ask for a copy to `part` of a tensor."""
        addresses = _addresses(source.memory)
        is_unfenced = any(_overlap(addresses, each) for written in self.unfenced.values() for each in written)
        assert not is_unfenced, "shared memory is copied to a tensor with no fence behind what was written"
        self.asked.append(StoredBox(threading.get_ident(), source, part))

    def wait(self, pendings: int) -> None:
        """All but the newest `pendings` of this thread's copies have been read."""
        own = [box for box in self.asked if box.thread == threading.get_ident()]
        for box in own[: max(len(own) - pendings, 0)]:
            self.read.append(box.read())
            self.asked.remove(box)

    def finish(self) -> None:
        """The program has ended, and what it copied is there."""
        assert not self.asked, "a program ends before its copies to a tensor were waited for"
        for part, content in self.read:
            part.copy_(content)


def _addresses(memory: torch.Tensor) -> range:
    return range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)


def _overlap(left: range, right: range) -> bool:
    return left.start < right.stop and right.start < left.stop


class Shared:
    """A view of shared memory: `tiles` tensors of [rows, columns] one behind another.

    A tile wider than the swizzled width lies as its halves, one behind the other; the swizzle itself is left out, since
    it depends on addresses alone and views of one memory must agree on it.
    """

    def __init__(
        self, memory: torch.Tensor, dtype: torch.dtype, shape: list[int], layout: object, boxes: StoredBoxes
    ) -> None:
        self.memory, self.torch_dtype, self.shape, self.layout = memory, dtype, list(shape), layout
        self.dtype = ElementType(dtype)
        self.boxes = boxes
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
        before = len(self.shape) - self.layout.rank  # several tiles
        halves = typed.view(*outer[:before], columns // self.width, *outer[before:], self.width)
        return halves.movedim(before, -2)

    def index(self, index: torch.Tensor | int) -> Shared:
        size = self.memory.numel() // self.shape[0]
        assert 0 <= int(index) < self.shape[0], f"index {int(index)} of {self.shape[0]}"
        part = self.memory[int(index) * size : (int(index) + 1) * size]
        return Shared(part, self.torch_dtype, self.shape[1:], self.layout, self.boxes)

    def slice(self, start: int, length: int, dim: int = 0) -> Slice:
        assert dim == 0 and start >= 0 and start + length <= self.shape[0]
        return Slice(self, self.elements()[start : start + length], [length, *self.shape[1:]])

    def permute(self, order: tuple[int, ...]) -> Shared:
        assert tuple(order) in ((1, 0), (0, 2, 1))
        view = Shared(self.memory, self.torch_dtype, self.shape, self.layout, self.boxes)
        view.turned = not self.turned
        return view

    def load(self, layout: object) -> torch.Tensor:
        loaded = self.elements().clone().reshape(self.shape)
        return loaded.mT if self.turned else loaded

    def store(self, value: torch.Tensor) -> None:
        self.boxes.write(self.memory)
        elements = self.elements()
        elements.copy_(value.to(self.torch_dtype).reshape(elements.shape))

    def _reinterpret(self, dtype: object, shape: list[int], layout: object) -> Shared:
        swizzles = [getattr(each, "swizzle_byte_width", None) for each in (self.layout, layout)]
        if swizzles[0] != swizzles[1]:
            self.memory.fill_(0xAA)  # what it holds cannot be read through another swizzle
        view = Shared(self.memory, torch_dtype_of(dtype), shape, layout, self.boxes)
        assert np.prod(shape) * view.torch_dtype.itemsize == self.memory.numel()
        return view


class Slice:
    """Some of the rows of a tile in shared memory."""

    def __init__(self, tile: Shared, elements: torch.Tensor, shape: list[int]) -> None:
        self.tile, self.elements, self.shape = tile, elements, shape

    def load(self, layout: object) -> torch.Tensor:
        return self.elements.clone().reshape(self.shape)

    def store(self, value: torch.Tensor) -> None:
        self.tile.boxes.write(self.tile.memory)
        self.elements.copy_(value.to(self.elements.dtype).reshape(self.elements.shape))


class BarrierRow:
    """Barriers in shared memory."""

    def __init__(self, count: int, baton: Baton) -> None:
        self.barriers = [Barrier(baton) for _ in range(count)]

    def index(self, index: torch.Tensor | int) -> Barrier:
        return self.barriers[int(index)]
