"""What a step in flight reports once it has arrived, without a GPU."""

from array import array

import numpy as np
import torch

from worker_proc.cuda.lanes import Lanes, PendingStep


def test_a_result_has_the_rows_that_sampled_and_the_workers_four_parts(monkeypatch):
    lanes = Lanes(4, torch.device("cpu"))
    lane = lanes.take()
    lane.ids.copy_(torch.tensor([7, 8, 9, 10]))
    monkeypatch.setattr(lane, "wait", lambda: 500)
    result = PendingStep(3, lane, lanes, np.array([0, 2]), input_us=20).result(report_us=6)
    assert result.token_ids == array("i", [7, 9])
    assert list(result.parts_us) == [20, 500, 0, 6], "input, forward, sampling, report"
