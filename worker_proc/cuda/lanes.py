"""Steps in flight: what each needs on the host, and how its result is read once it has arrived.

A `Lane` is page-locked memory for a step's plan and its sampled ids, and the events around the step. There are as many
lanes as steps may be in flight; taking one when all are out waits for the oldest. `Lanes.read` waits for the step and
gives its lane back: the step's `PendingStep` calls it, in the reporter's thread. Called by the GPU runner.
"""

import queue
from array import array

import torch

from kernels.step_layout import PlanLayout
from worker_proc.cuda.staging import StagedPlan, device_buffer
from worker_proc.pending import Arrived
from worker_proc.step_inputs import Numbers

LANE_COUNT = 6
LANE_TIMEOUT_S = 60.0


class Lane:
    """Host memory and events of one step in flight, whose plan goes to `plan_buffer`.

    Attributes:
        plan: what the step is packed into.
        ids: int32 [max_rows], what it sampled.
    """

    def __init__(self, max_rows: int, plan_buffer: torch.Tensor) -> None:
        self._on_gpu = plan_buffer.is_cuda
        self.plan = StagedPlan(plan_buffer)
        self.ids = torch.zeros(max_rows, dtype=torch.int32, pin_memory=self._on_gpu)
        self.id_view = self.ids.numpy()
        if self._on_gpu:
            self._stream = torch.cuda.current_stream()
            self._begun, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def begin(self) -> None:
        """What follows on the stream is the step."""
        if self._on_gpu:
            self._begun.record(self._stream)

    def end(self, sampled: torch.Tensor) -> None:
        """The step has been issued; `sampled`, int32 [max_rows], is copied to `ids` behind it."""
        self.ids.copy_(sampled, non_blocking=True)
        if self._on_gpu:
            self._ended.record(self._stream)

    def wait(self) -> int:
        """Block until the results have arrived; returns the microseconds that the step took on the device."""
        if not self._on_gpu:
            return 0
        self._ended.synchronize()
        return int(1000 * self._begun.elapsed_time(self._ended))


class Lanes:
    """The lanes of one runner that no step holds. Made by the thread that will issue steps, on its stream.

    Attributes:
        plan_buffer: on the device, int32; holds the plan of the step under way.
    """

    def __init__(self, layout: PlanLayout, device: torch.device) -> None:
        self.plan_buffer = device_buffer(layout, device)
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for _ in range(LANE_COUNT):
            self._free.put(Lane(layout.rows, self.plan_buffer))

    def take(self) -> Lane:
        """A free lane; waits for one, and fails if none comes, since then nobody reads results."""
        try:
            return self._free.get(timeout=LANE_TIMEOUT_S)
        except queue.Empty:
            raise RuntimeError(f"no result was read for {LANE_TIMEOUT_S} s with {LANE_COUNT} steps in flight") from None

    def read(self, lane: Lane, rows: Numbers, input_us: int) -> Arrived:
        """Wait for the lane's step, which sampled in `rows`, and give the lane back.

        `input_us` is what preparing it took on the host. Sampling is in the forward pass's graph, and so in its time.
        """
        forward_us = lane.wait()
        token_ids = array("i", lane.id_view[rows].tobytes())
        self._free.put(lane)
        return Arrived(token_ids, input_us, forward_us, 0)
