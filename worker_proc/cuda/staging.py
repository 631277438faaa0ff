"""Brings packed plans to the GPU: pinned buffers, and the one on the device that plans come to.

One pinned buffer holds a step: the plan at fixed places (`PlanLayout` of the largest step, so that a captured graph
finds each part), then the addresses and values of the slots' writes. A step has the buffer of its lane, which lets the
host pack the next steps while earlier ones still run. What a step uses of it is copied to the device, or read by the
step's own kernels (`FETCHING`). Nothing here reads the device.
"""

import numpy as np
import torch

from kernels.fetch_plan import HostLines, plan_words
from kernels.step_layout import PlanLayout
from worker_proc.slots import IntArray, StateWrites

FETCHING = False
"""Whether a step's kernels read their plan from the host's memory and write the sampled ids there, so that a step is
nothing but its graph; otherwise a copy goes before the graph and another behind it. See docs/adr/0011."""

WRITE_ROOM = 1 << 17
"""Writes that a ring buffer has room for; a step with more brings them in a buffer of its own."""

ALIGNMENT = 4
"""Elements that the writes' parts start at a multiple of: 16 bytes."""

WRITE_WORDS = 2 * WRITE_ROOM + 2 * ALIGNMENT
"""Elements that a buffer has behind the plan."""


class StagingRing:
    """The lanes' pinned buffers that steps are packed into, and the device buffer that plans go to.

    Args:
        lines: with WRITE_WORDS behind each plan.
        fetching: a step's kernels read the buffer; nothing is copied to the device ahead of them.

    Attributes:
        device_buffer: int32; a graph reads the plan from its start.
    """

    def __init__(self, layout: PlanLayout, lines: HostLines, device: torch.device, *, fetching: bool) -> None:
        self._plan_size, self._host, self.fetching = layout.size, lines.plans, fetching
        self._views = [line.numpy() for line in lines.plans]
        size = plan_words(layout) if fetching else lines.plans.shape[1]
        self.device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        guarded = device.type == "cuda" and not fetching
        self._copied = [torch.cuda.Event() for _ in self._views] if guarded else None

    def buffer(self, lane: int) -> IntArray:
        """The plan's part of a lane's buffer, free to be written: the step before that had the lane has ended."""
        if self._copied is not None:
            self._copied[lane].synchronize()  # returns at once
        return self._views[lane][: self._plan_size]

    def send(self, lane: int, plan_size: int, writes: StateWrites) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the writes behind the plan, and copy both to the device, in stream order, unless the step fetches them.

        Returns:
            Addresses and values of the writes where kernels can read them, int32 [n] each.
        """
        addresses, values = writes.arrays()
        count = len(addresses)
        if count > WRITE_ROOM:
            self._copy(lane, plan_size)
            return self._copy_apart(addresses, values)
        start = _align(plan_size)
        middle = _align(start + count)
        view = self._views[lane]
        view[start : start + count] = addresses
        view[middle : middle + count] = values
        self._copy(lane, middle + count if count else plan_size)
        readable = self._host[lane] if self.fetching else self.device_buffer
        return readable[start : start + count], readable[middle : middle + count]

    def _copy(self, lane: int, size: int) -> None:
        if self.fetching:
            return
        self.device_buffer[:size].copy_(self._host[lane, :size], non_blocking=True)
        if self._copied is not None:
            self._copied[lane].record()

    def _copy_apart(self, addresses: IntArray, values: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of its own; the allocator keeps the pinned memory until the copy is done."""
        host = torch.from_numpy(np.stack((addresses, values)))
        if self.device_buffer.is_cuda:
            host = host.pin_memory()
        both = host.to(self.device_buffer.device, non_blocking=True)
        return both[0], both[1]


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
