"""Steps in flight: what each needs on the host, and how its result is read once it has arrived.

A `Lane` is a line of page-locked memory for a step's sampled ids and the events around the step. There are as many
lanes as steps may be in flight, and steps take them in turn, since a step's kernels count along to find its line
(`kernels/fetch_plan.py`). Taking one that is still out waits for it. `Lanes.read` waits for the step and gives its lane
back: the step's `PendingStep` calls it, in the reporter's thread. Called by the GPU runner.
"""

import threading
from array import array

import torch

from kernels.fetch_plan import RESULT_IDS
from worker_proc.pending import Arrived
from worker_proc.slots import IntArray

LANE_COUNT = 6
LANE_TIMEOUT_S = 60.0


class Lane:
    """Host memory and events of one step in flight.

    Attributes:
        index: of the lane's line of memory, here and among the plans.
        number: of the step, as the device is to report it.
        ids: int32 [max_rows], its sampled ids.
    """

    def __init__(self, index: int, line: torch.Tensor, *, on_gpu: bool) -> None:
        self.index, self.number = index, -1
        self._on_gpu = on_gpu
        self.ids, self._view = line[RESULT_IDS:], line.numpy()
        self.in_use = threading.Lock()
        if on_gpu:
            self._begun, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def begin(self) -> None:
        """What follows on the stream is the step."""
        if self._on_gpu:
            self._begun.record()

    def end(self) -> None:
        """All of the step has been issued."""
        if self._on_gpu:
            self._ended.record()

    def wait(self) -> int:
        """Block until the results have arrived; returns the microseconds that the step took on the device."""
        if not self._on_gpu:
            return 0
        self._ended.synchronize()
        return int(1000 * self._begun.elapsed_time(self._ended))

    def id_bytes(self, rows: IntArray) -> bytes:
        """The ids of some rows."""
        return self._view[RESULT_IDS:][rows].tobytes()

    @property
    def reported_number(self) -> int:
        """Of the step that has written its number here last."""
        return int(self._view[0])


class Lanes:
    """The lanes of one runner.

    Args:
        results: int32 [LANE_COUNT, n], as in `HostLines`.
        numbered: whether steps report their numbers.
    """

    def __init__(self, results: torch.Tensor, *, on_gpu: bool, numbered: bool) -> None:
        self._lanes = [Lane(index, line, on_gpu=on_gpu) for index, line in enumerate(results)]
        self._numbered, self._taken = numbered, 0

    def take(self) -> Lane:
        """The next lane; waits until it is free, and fails if it stays out, since then nobody reads results."""
        lane = self._lanes[self._taken % LANE_COUNT]
        if not lane.in_use.acquire(timeout=LANE_TIMEOUT_S):
            raise RuntimeError(f"no result was read for {LANE_TIMEOUT_S} s with {LANE_COUNT} steps in flight")
        lane.number = self._taken & 0x7FFFFFFF
        self._taken += 1
        return lane

    def read(self, lane: Lane, rows: IntArray, input_us: int) -> Arrived:
        """Wait for the lane's step, which sampled in `rows`, and give the lane back.

        `input_us` is what preparing it took on the host. Sampling is in the forward pass's graph, and so in its time.

        Raises:
            RuntimeError: the device took another lane for this step, which is a fault of ours.
        """
        forward_us = lane.wait()
        if self._numbered and lane.reported_number != lane.number:
            raise RuntimeError(
                f"lane {lane.index}: the host's step is {lane.number}, the device's {lane.reported_number}; "
                "each step must fetch its plan exactly once"
            )
        token_ids = array("i", lane.id_bytes(rows))
        lane.in_use.release()
        return Arrived(token_ids, input_us, forward_us, 0)
