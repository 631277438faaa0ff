"""Steps in flight: what each needs on the host and on the device, and how its result is read once it has arrived.

A `Lane` is page-locked memory for a step's plan and its sampled ids, a line on the device for each of them, and the
events around the step. The link to the host is used beside the steps, on a stream each way, since a copy over it in the
steps' own stream keeps the device waiting for longer than a copy between two places on the device:

    | stream  | does                                                | waits for                                    |
    |---------|-----------------------------------------------------|----------------------------------------------|
    | inward  | plan: host to the lane's line                       | nothing: the lane was free                   |
    | main    | plan: line to `plan_buffer`; step; ids to the line  | the plan in its line, and all steps before   |
    | outward | ids: line to host                                   | the lane's step                              |

A lane is free once its ids have arrived on the host. So the step has ended by then, and what it read and wrote of the
lane may be overwritten, in any stream.

There are as many lanes as steps may be in flight; taking one when all are out waits for the oldest. `Lanes.read` waits
for the step and gives its lane back: the step's `PendingStep` calls it, in the reporter's thread. Called by the GPU
runner.
"""

import queue
from array import array

import torch

from kernels.step_layout import PlanLayout
from worker_proc.cuda.staging import StagedPlan, device_buffer
from worker_proc.pending import Arrived
from worker_proc.slots import StateWrites
from worker_proc.step_inputs import Numbers

LANE_COUNT = 6
LANE_TIMEOUT_S = 60.0


class SideStream:
    """A stream beside the main one, which is this thread's at the start; what is issued inside `with` runs on it.

    `torch.cuda.stream` would find out at each step which stream and device to return to.
    """

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._main, self.stream = main, torch.cuda.Stream()

    def __enter__(self) -> torch.cuda.Stream:
        torch.cuda.set_stream(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._main)


class StepStreams:
    """The stream of the steps, which is this thread's, and those of the copies beside them."""

    def __init__(self) -> None:
        self.main = torch.cuda.current_stream()
        self.inward, self.outward = SideStream(self.main), SideStream(self.main)

    @classmethod
    def of(cls, device: torch.device) -> "StepStreams | None":
        """None without a GPU."""
        return cls() if device.type == "cuda" else None


class Lane:
    """Memory and events of one step in flight, whose plan goes to `plan_buffer`.

    Args:
        streams: None without a GPU; each copy is made at once then.

    Attributes:
        plan: what the step is packed into.
        ids: int32 [max_rows], what it sampled.
    """

    def __init__(self, max_rows: int, plan_buffer: torch.Tensor, streams: StepStreams | None) -> None:
        self._streams = streams
        self.plan = StagedPlan(plan_buffer)
        self._sampled = torch.zeros(max_rows, dtype=torch.int32, device=plan_buffer.device)
        self.ids = torch.zeros(max_rows, dtype=torch.int32, pin_memory=plan_buffer.is_cuda)
        self.id_view = self.ids.numpy()
        if streams is not None:
            self._begun, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._sent, self._arrived = torch.cuda.Event(), torch.cuda.Event()

    def begin(self, plan_size: int, writes: StateWrites) -> None:
        """Bring the packed plan and the writes to `plan_buffer`; what follows on the main stream is the step.

        Its time begins once the plan is on the device and the steps before it have ended.
        """
        streams = self._streams
        if streams is None:
            self.plan.send(plan_size, writes)
        else:
            with streams.inward as inward:
                self.plan.send(plan_size, writes)
                self._sent.record(inward)
            streams.main.wait_event(self._sent)
            self._begun.record(streams.main)
        self.plan.deliver()

    def end(self, sampled: torch.Tensor) -> None:
        """The step has been issued; `sampled`, int32 [max_rows], is copied to `ids` behind it.

        The next step overwrites `sampled`, in the main stream and so behind the first copy.
        """
        self._sampled.copy_(sampled, non_blocking=True)
        streams = self._streams
        if streams is None:
            self.ids.copy_(self._sampled)
            return
        self._ended.record(streams.main)
        with streams.outward as outward:
            outward.wait_event(self._ended)
            self.ids.copy_(self._sampled, non_blocking=True)
            self._arrived.record(outward)

    def wait(self) -> int:
        """Block until the ids have arrived, and with them all that the step has copied to the host in the main stream;
        returns the microseconds that the step took there."""
        if self._streams is None:
            return 0
        self._arrived.synchronize()
        return int(1000 * self._begun.elapsed_time(self._ended))


class Lanes:
    """The lanes of one runner that no step holds. Made by the thread that will issue steps, on its stream.

    Attributes:
        plan_buffer: on the device, int32; holds the plan of the step under way.
    """

    def __init__(self, layout: PlanLayout, device: torch.device) -> None:
        self.plan_buffer = device_buffer(layout, device)
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        streams = StepStreams.of(device)
        for _ in range(LANE_COUNT):
            self._free.put(Lane(layout.rows, self.plan_buffer, streams))
        if streams is not None:
            streams.main.synchronize()  # the lines have been filled: from here on they are other streams' too

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
