"""Steps in flight: what each reports once it has arrived, and that its memory is its own until then."""

from array import array
from collections import deque
from functools import partial
from itertools import count
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.messages import StepPlan
from kernels.step_layout import PlanLayout
from tests.kernels.closeness import DEVICE
from tests.support.pretended_streams import PretendedGpu
from worker_proc.cuda import lanes as lanes_module
from worker_proc.cuda.lanes import LANE_COUNT, Lanes, StepStreams
from worker_proc.cuda.staging import WRITE_ROOM
from worker_proc.pending import PendingStep
from worker_proc.slots import SlotMemory, StateWrites

LAYOUT = PlanLayout(4, 8)


def test_a_result_has_the_rows_that_sampled_and_the_workers_four_parts(monkeypatch):
    lanes = Lanes(LAYOUT, torch.device("cpu"))
    lane = lanes.take()
    lane.ids.copy_(torch.tensor([7, 8, 9, 10]))
    monkeypatch.setattr(lane, "wait", lambda: 500)
    result = PendingStep(3, partial(lanes.read, lane, np.array([0, 2]), 20)).result(report_us=6)
    assert result.token_ids == array("i", [7, 9])
    assert list(result.parts_us) == [20, 500, 0, 6], "input, forward, sampling, report"
    assert lane in [lanes.take() for _ in range(LANE_COUNT)], "the lane was not given back"


def test_a_steps_memory_is_nobody_elses_until_its_result_has_been_read(
    tiny_model, make_gpu_driver, fused_sizes, monkeypatch
):
    """Its plan may still have to be copied, and its ids to arrive."""
    monkeypatch.setattr(lanes_module, "LANE_TIMEOUT_S", 0.01)
    _, folder = tiny_model("Llama", **fused_sizes)
    runner = make_gpu_driver(folder, DEVICE).runner
    plans = (StepPlan(step_id=step_id) for step_id in count(1))
    steps = [runner.execute(next(plans)) for _ in range(LANE_COUNT)]
    with pytest.raises(RuntimeError, match=f"no result was read for 0.01 s with {LANE_COUNT} steps in flight"):
        runner.execute(next(plans))
    assert steps[0].result().step_id == 1
    runner.execute(next(plans))
    with pytest.raises(RuntimeError, match="no result was read"):
        runner.execute(next(plans))


def pretended_lanes(seed: int, monkeypatch) -> tuple[PretendedGpu, Lanes]:
    """Lanes with streams, over the host's memory."""
    gpu = PretendedGpu(seed, monkeypatch)
    monkeypatch.setattr(StepStreams, "of", lambda _: StepStreams())
    return gpu, Lanes(LAYOUT, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(6))
def test_however_copies_overlap_steps_each_reads_its_plan_and_reports_its_ids(seed, monkeypatch):
    """Plans are packed and ids read while other steps are under way, in every order that events allow."""
    gpu, lanes = pretended_lanes(seed, monkeypatch)
    rng, sampled, ids = Random(seed), torch.zeros(4, dtype=torch.int32), LAYOUT.row_slots
    nothing, in_flight = StateWrites(SlotMemory(2, 8, 4, torch.device("cpu"), {})), deque()

    def step() -> None:
        sampled[:] = lanes.plan_buffer[ids] + 1

    def read() -> None:
        lane, first = in_flight.popleft()
        assert lanes.read(lane, np.arange(4), 0).token_ids == array("i", range(first + 1, first + 5))

    for first in range(0, 400, 10):
        if len(in_flight) == LANE_COUNT:
            read()
        lane = lanes.take()
        lane.plan.words[ids] = range(first, first + 4)
        lane.begin(LAYOUT.size, nothing)
        gpu.issue(step)
        lane.end(sampled)
        in_flight.append((lane, first))
        while in_flight and rng.random() < 0.3:
            read()
    while in_flight:
        read()
    assert gpu.current is gpu.streams[0], "steps are issued on another stream"


@pytest.mark.parametrize("seed", range(6))
def test_a_steps_time_is_that_of_its_stream_and_not_of_the_link(seed, monkeypatch):
    gpu, lanes = pretended_lanes(seed, monkeypatch)
    gpu.copy_ticks = dict(zip(gpu.streams, (1, 1000, 1000), strict=True))
    lane = lanes.take()
    lane.begin(LAYOUT.size, StateWrites(SlotMemory(2, 8, 4, torch.device("cpu"), {})))
    lane.end(torch.zeros(4, dtype=torch.int32))
    assert lanes.read(lane, np.arange(4), 0).forward_us == 2 * 1000, "two copies on the device, in milliseconds"
    assert gpu.clock == 2 * 1000 + 2, "and one each way over the link"


def test_an_error_while_a_plan_is_sent_leaves_the_steps_stream_in_place(monkeypatch):
    gpu, lanes = pretended_lanes(0, monkeypatch)
    lane, too_many = lanes.take(), SimpleNamespace(count=WRITE_ROOM + 1)
    with pytest.raises(AssertionError, match="there is room for"):
        lane.begin(LAYOUT.size, too_many)
    assert gpu.current is gpu.streams[0]
