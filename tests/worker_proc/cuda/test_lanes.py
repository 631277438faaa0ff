"""What a step in flight reports once it has arrived, without a GPU."""

from array import array
from functools import partial

import numpy as np
import pytest
import torch

from kernels.fetch_plan import RESULT_IDS
from worker_proc.cuda import lanes as lanes_module
from worker_proc.cuda.lanes import LANE_COUNT, Lanes
from worker_proc.pending import PendingStep


def test_a_result_has_the_rows_that_sampled_and_the_workers_four_parts(monkeypatch):
    lanes = Lanes(torch.zeros(LANE_COUNT, RESULT_IDS + 4, dtype=torch.int32), on_gpu=False, numbered=False)
    lane = lanes.take()
    lane.ids.copy_(torch.tensor([7, 8, 9, 10]))
    monkeypatch.setattr(lane, "wait", lambda: 500)
    result = PendingStep(3, partial(lanes.read, lane, np.array([0, 2]), 20)).result(report_us=6)
    assert result.token_ids == array("i", [7, 9])
    assert list(result.parts_us) == [20, 500, 0, 6], "input, forward, sampling, report"
    assert lane in [lanes.take() for _ in range(LANE_COUNT)], "the lane was not given back"


def test_lanes_are_taken_in_turn_and_a_lane_that_is_out_is_waited_for(monkeypatch):
    """Or a step would get a plan that is being written, or write where a result has not been read."""
    monkeypatch.setattr(lanes_module, "LANE_TIMEOUT_S", 0.0)
    lanes = Lanes(torch.zeros(LANE_COUNT, RESULT_IDS + 4, dtype=torch.int32), on_gpu=False, numbered=False)
    out = [lanes.take() for _ in range(LANE_COUNT)]
    assert [lane.index for lane in out] == [lane.number for lane in out] == list(range(LANE_COUNT))
    lanes.read(out[1], np.array([0]), 0)
    with pytest.raises(RuntimeError, match="no result was read"):
        lanes.take()
    lanes.read(out[0], np.array([0]), 0)
    assert [lanes.take().number, lanes.take().number] == [LANE_COUNT, LANE_COUNT + 1]
    assert [out[0].number, out[1].number] == [LANE_COUNT, LANE_COUNT + 1]
