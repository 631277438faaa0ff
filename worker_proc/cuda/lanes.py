"""Steps in flight: what each needs on the host, and how its result is read once it has arrived.

A `Lane` is pinned memory for a step's sampled ids and the events around the step. There are as many lanes as steps may
be in flight; taking one when all are out waits for the oldest. `PendingStep.result` waits for the step and gives its
lane back: whoever calls it should not be the thread that issues steps. Called by the GPU runner and the worker's
reporter.
"""

import queue
from array import array
from dataclasses import dataclass, field

import torch

from common.messages import StepResult
from worker_proc.cuda.special_rows import HostLogprobs
from worker_proc.slots import IntArray

LANE_COUNT = 6
LANE_TIMEOUT_S = 60.0


class Lane:
    """Host memory and events of one step in flight; `ids` is int32 [max_rows]."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.ids = torch.zeros(max_rows, dtype=torch.int32, pin_memory=self._on_gpu)
        self.id_view = self.ids.numpy()
        if self._on_gpu:
            self._begun, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def begin(self) -> None:
        """What follows on the stream is the step."""
        if self._on_gpu:
            self._begun.record()

    def end(self) -> None:
        """The step's last copy has been issued."""
        if self._on_gpu:
            self._ended.record()

    def wait(self) -> int:
        """Block until the results have arrived; returns the microseconds that the step took on the device."""
        if not self._on_gpu:
            return 0
        self._ended.synchronize()
        return int(1000 * self._begun.elapsed_time(self._ended))


class Lanes:
    """The lanes of one runner that no step holds."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for _ in range(LANE_COUNT):
            self._free.put(Lane(max_rows, device))

    def take(self) -> Lane:
        """A free lane; waits for one, and fails if none comes, since then nobody reads results."""
        try:
            return self._free.get(timeout=LANE_TIMEOUT_S)
        except queue.Empty:
            raise RuntimeError(f"no result was read for {LANE_TIMEOUT_S} s with {LANE_COUNT} steps in flight") from None

    def give_back(self, lane: Lane) -> None:
        """The lane's step is done."""
        self._free.put(lane)


@dataclass(frozen=True)
class LogprobRequest:
    """Which entry of the step's log probabilities goes to which index of the result, with how many likeliest tokens."""

    index: int
    row_index: int
    top_count: int


@dataclass(frozen=True)
class PendingStep:
    """A step that has been issued.

    Attributes:
        sampled_rows: rows whose ids are reported.
        logprobs: of the sampled rows that asked.
        prompt_logprobs: (slot, log probabilities, requests) of chunks that asked.
        input_us: what preparing the step took on the host.
    """

    step_id: int
    lane: Lane
    lanes: "Lanes"
    sampled_rows: IntArray
    input_us: int
    logprobs: HostLogprobs | None = None
    logprob_requests: tuple[LogprobRequest, ...] = ()
    prompt_logprobs: tuple[tuple[int, HostLogprobs, tuple[LogprobRequest, ...]], ...] = field(default=())

    def result(self, report_us: int = 0) -> StepResult:
        """Wait for the step and make its result; `report_us` is how long the report before this one took."""
        forward_us = self.lane.wait()
        token_ids = array("i", self.lane.id_view[self.sampled_rows].tobytes())
        self.lanes.give_back(self.lane)
        return StepResult(
            step_id=self.step_id,
            token_ids=token_ids,
            logprobs=_entries(self.logprobs, self.logprob_requests),
            prompt_logprobs=tuple((slot, _entries(found, wanted)) for slot, found, wanted in self.prompt_logprobs),
            parts_us=array("i", [0, 0, self.input_us, forward_us, 0, report_us]),
        )


def _entries(found: HostLogprobs | None, wanted: tuple[LogprobRequest, ...]) -> tuple:
    if found is None:
        return ()
    return tuple(found.entry(request.index, request.row_index, request.top_count) for request in wanted)
