"""A GPU that is not there: what would be launched on it can be compiled, and read, on any machine.

Inside `pretended_gpu` tensors made for "cuda" have shapes, strides and types but no memory, the card says what it was
told to say, and Triton compiles for it. Launches must be left out (`kernels.compile_ahead.launches_left_out`). What is
compiled so is what the card itself would be given: Triton takes it from the same folder on disk there.

Knows no kernel. Called by attention_worker, by kernel_report and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.compile_ahead import NoDevice
from kernels.launch import HOPPER_SHARED_BYTES, shared_memory_bytes

CARD = torch.device("cuda", 0)


@dataclass(frozen=True)
class Card:
    """What kernels and their plans ask of a card; `capability` as 90 for 9.0."""

    name: str = "NVIDIA H200"
    capability: int = 90
    multi_processor_count: int = 132
    shared_memory_per_block_optin: int = HOPPER_SHARED_BYTES

    @staticmethod
    def at_hand() -> Card:
        """The first card of this machine."""
        found = torch.cuda.get_device_properties(0)
        capability = 10 * found.major + found.minor
        return Card(found.name, capability, found.multi_processor_count, shared_memory_bytes(CARD))


class PretendedDriver(NoDevice):
    """Enough of Triton's driver for a launch to come as far as compiling."""

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0


def pretend_gpu(architecture: int) -> None:
    """From here on kernels of this process are for a card of that compute capability, 90 for 9.0."""
    driver.set_active(PretendedDriver(GPUTarget("cuda", architecture, 32)))


class CardTensor(torch.Tensor):
    """A tensor without memory that says it lies on the card, at an address as well aligned as torch's would be."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        """The card."""
        return CARD

    def data_ptr(self) -> int:
        """Allocations begin at multiples of 512 bytes."""
        return 512 + self.storage_offset() * self.element_size()


class _OnCard(TorchFunctionMode):
    """Makes tensors that are wanted on "cuda" without memory, and computes no more of them than their shapes."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        bare_args, bare_kwargs = tree_map(_bare, (args, kwargs or {}))
        return tree_map(_placed, func(*bare_args, **bare_kwargs))


def _bare(value: Any) -> Any:
    if isinstance(value, CardTensor):
        return value.as_subclass(torch.Tensor)
    is_card = (isinstance(value, torch.device) and value.type == "cuda") or (isinstance(value, str) and value == "cuda")
    return torch.device("meta") if is_card else value


def _placed(value: Any) -> Any:
    is_bare = isinstance(value, torch.Tensor) and value.is_meta
    return value.as_subclass(CardTensor) if is_bare else value


@contextmanager
def pretended_gpu(card: Card) -> Iterator[None]:
    """While open, `card` is at hand; Triton goes on compiling for it afterwards."""
    pretend_gpu(card.capability)
    answers = {
        "is_available": True,
        "current_device": 0,
        "get_device_name": card.name,
        "get_device_capability": divmod(card.capability, 10),
        "get_device_properties": card,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        stack.enter_context(_OnCard())
        yield
