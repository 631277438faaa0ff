"""Steps in flight: what each needs on the host, and how its result is read once it has arrived.

A `Lane` is pinned memory for a step's sampled ids and the events around the step. There are as many lanes as steps may
be in flight; taking one when all are out waits for the oldest. `PendingStep.result` waits for the step and gives its
lane back: whoever calls it should not be the thread that issues steps. Called by the GPU runner and the worker's
reporter.
"""

import queue
from array import array
from dataclasses import dataclass

import torch

from common.messages import StepResult, TokenLogprobs
from worker_proc.logprobs import LogprobTable
from worker_proc.pending import PromptPiece, entries_by_slot
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
class PendingStep:
    """A step that has been issued.

    Attributes:
        sampled_rows: rows whose ids are reported.
        input_us: what preparing the step took on the host.
        logprob_rows: for each sampled row that asked: its row of `logprobs`, its index in the result, how many of the
            likeliest tokens it wants.
        logprobs: of the step's rows, if one asked.
        prompt_pieces: in the order of positions, slot by slot.
    """

    step_id: int
    lane: Lane
    lanes: Lanes
    sampled_rows: IntArray
    input_us: int
    logprob_rows: tuple[tuple[int, int, int], ...] = ()
    logprobs: LogprobTable | None = None
    prompt_pieces: tuple[PromptPiece, ...] = ()

    def result(self, report_us: int = 0) -> StepResult:
        """Wait for the step and make its result; `report_us` is how long the report before this one took."""
        forward_us = self.lane.wait()
        token_ids = array("i", self.lane.id_view[self.sampled_rows].tobytes())
        self.lanes.give_back(self.lane)
        return StepResult(
            step_id=self.step_id,
            token_ids=token_ids,
            logprobs=self._entries(),
            prompt_logprobs=entries_by_slot(self.prompt_pieces),
            # Sampling is in the forward pass's graph, and so in its time.
            parts_us=array("i", [self.input_us, forward_us, 0, report_us]),
        )

    def _entries(self) -> tuple[TokenLogprobs, ...]:
        table = self.logprobs
        if table is None:
            return ()
        return tuple(table.entry(row, index, top_count) for row, index, top_count in self.logprob_rows)
