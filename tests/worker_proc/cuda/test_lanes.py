"""What a step in flight reports once it has arrived, without a GPU."""

from array import array
from functools import partial

import numpy as np
import torch

from kernels.step_layout import PlanLayout
from worker_proc.cuda.lanes import LANE_COUNT, Lanes
from worker_proc.pending import PendingStep


def test_a_result_has_the_rows_that_sampled_and_the_workers_four_parts(monkeypatch):
    lanes = Lanes(PlanLayout(4, 8), torch.device("cpu"))
    lane = lanes.take()
    lane.ids.copy_(torch.tensor([7, 8, 9, 10]))
    monkeypatch.setattr(lane, "wait", lambda: 500)
    result = PendingStep(3, partial(lanes.read, lane, np.array([0, 2]), 20)).result(report_us=6)
    assert result.token_ids == array("i", [7, 9])
    assert list(result.parts_us) == [20, 500, 0, 6], "input, forward, sampling, report"
    assert lane in [lanes.take() for _ in range(LANE_COUNT)], "the lane was not given back"
