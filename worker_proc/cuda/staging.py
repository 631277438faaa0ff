"""Brings packed plans to the GPU: page-locked memory that a step is packed into, and its way to where graphs read it.

One buffer holds a step: the plan at fixed places (`PlanLayout` of the largest step, so that a captured graph finds each
part), then the addresses and values of the slots' writes. Only what a step uses is copied, in one piece: from the host
to a line on the device, while an earlier step may run, and from there to the buffer once that has ended. Nothing here
reads the device, or waits: memory and line belong to a lane, and a lane is free once its step has come back (`lanes`).
"""

import numpy as np
import torch

from kernels.scatter_words import scatter_words
from kernels.step_layout import WRITE_COUNT, PlanLayout
from worker_proc.slots import StateWrites

WRITE_ROOM = 1 << 17
"""Writes that a buffer has room for; a step with more brings them in a buffer of its own."""

COPY_UNIT = 1024
"""Elements: copies are multiples of it, so that their views are made once."""

WRITES_ALONE = PlanLayout(0, 0)


def device_buffer(layout: PlanLayout, device: torch.device) -> torch.Tensor:
    """What holds a step on the device, int32; a graph reads the plan from its start."""
    size = layout.size + 2 * WRITE_ROOM
    return torch.zeros(-(-size // COPY_UNIT) * COPY_UNIT, dtype=torch.int32, device=device)


class StagedPlan:
    """Page-locked memory for one step, and a line on the device that its plan waits in.

    Args:
        target: on the device, from `device_buffer`; what graphs read.

    Attributes:
        words: int32, the memory; the plan is packed into its start.
    """

    def __init__(self, target: torch.Tensor) -> None:
        self._target, self._line = target, torch.zeros_like(target)
        self._host = torch.zeros(target.shape[0], dtype=torch.int32, pin_memory=target.is_cuda)
        self.words = self._host.numpy()
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._sent: tuple[torch.Tensor, torch.Tensor] | None = None

    def send(self, plan_size: int, writes: StateWrites) -> None:
        """Put the writes behind a plan of so many elements, and copy both to the line, in stream order.

        By then the line's former plan has been delivered on the device too: the step's lane was free.
        """
        count = writes.count
        assert count <= WRITE_ROOM, f"{count} writes, there is room for {WRITE_ROOM}"
        self.words[WRITE_COUNT] = count
        if count:
            writes.put(self.words[plan_size : plan_size + 2 * count])
        size = -(-(plan_size + 2 * count) // COPY_UNIT) * COPY_UNIT
        if size not in self._parts:
            self._parts[size] = self._target[:size], self._line[:size], self._host[:size]
        target, line, host = self._parts[size]
        line.copy_(host, non_blocking=True)
        self._sent = target, line

    def deliver(self) -> None:
        """Copy what was sent to the target, in stream order."""
        assert self._sent is not None, "nothing was sent"
        target, line = self._sent
        target.copy_(line, non_blocking=True)


def write_apart(memory: torch.Tensor, writes: StateWrites) -> None:
    """Carry out writes that are too many for a step's buffer; torch keeps the memory until it has been copied."""
    plan = np.zeros(WRITES_ALONE.size + 2 * writes.count, dtype=np.int32)
    plan[WRITE_COUNT] = writes.count
    writes.put(plan[WRITES_ALONE.size :])
    host = torch.from_numpy(plan)
    if memory.is_cuda:
        host = host.pin_memory()
    scatter_words(memory, host.to(memory.device, non_blocking=True), WRITES_ALONE)
