"""Brings packed plans to the GPU: a ring of pinned buffers, and the one on the device that they are copied to.

One pinned buffer holds a step: the plan at fixed places (`PlanLayout` of the largest step, so that a captured graph
finds each part), then the addresses and values of the slots' writes. Only what a step uses is copied. A ring of such
buffers, each guarded by an event, lets the host pack the next steps while earlier ones still run. Nothing here reads
the device.
"""

import numpy as np
import torch

from kernels.step_layout import PlanLayout
from worker_proc.slots import IntArray, StateWrites

WRITE_ROOM = 1 << 17
"""Writes that a ring buffer has room for; a step with more brings them in a buffer of its own."""

ALIGNMENT = 4
"""Elements that the writes' parts start at a multiple of: 16 bytes."""


class StagingRing:
    """Pinned buffers that steps are packed into in turn, and the device buffer that they are copied to.

    Attributes:
        device_buffer: int32; a graph reads the plan from its start.
    """

    def __init__(self, layout: PlanLayout, depth: int, device: torch.device) -> None:
        self._plan_size, size = layout.size, layout.size + ALIGNMENT + 2 * WRITE_ROOM
        pinned = device.type == "cuda"
        self.device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(depth)]
        self._views = [buffer.numpy() for buffer in self._host]
        self._copied = [torch.cuda.Event() for _ in range(depth)] if pinned else None
        self._turn = depth - 1

    def next_buffer(self) -> IntArray:
        """The plan's part of the next buffer, free to be written."""
        self._turn = (self._turn + 1) % len(self._host)
        if self._copied is not None:
            self._copied[self._turn].synchronize()  # returns at once unless the ring has been overtaken
        return self._views[self._turn][: self._plan_size]

    def copy(self, plan_size: int, writes: StateWrites) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the current buffer, with the writes behind the plan, to the device, in stream order.

        Returns:
            Addresses and values of the writes on the device, int32 [n] each.
        """
        addresses, values = writes.arrays()
        count = len(addresses)
        if count > WRITE_ROOM:
            self._send(plan_size)
            return self._copy_apart(addresses, values)
        start = _align(plan_size)
        middle = _align(start + count)
        view = self._views[self._turn]
        view[start : start + count] = addresses
        view[middle : middle + count] = values
        self._send(middle + count if count else plan_size)
        return self.device_buffer[start : start + count], self.device_buffer[middle : middle + count]

    def _send(self, size: int) -> None:
        self.device_buffer[:size].copy_(self._host[self._turn][:size], non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record()

    def _copy_apart(self, addresses: IntArray, values: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of its own; the allocator keeps the pinned memory until the copy is done."""
        host = torch.from_numpy(np.stack((addresses, values)))
        if self._copied is not None:
            host = host.pin_memory()
        both = host.to(self.device_buffer.device, non_blocking=True)
        return both[0], both[1]


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
