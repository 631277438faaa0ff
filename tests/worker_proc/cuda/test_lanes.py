"""Steps in flight: what each reports once it has arrived, and that its memory is its own until then."""

from array import array
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch

from common.messages import StepPlan
from kernels.step_layout import PlanLayout
from tests.kernels.closeness import DEVICE
from worker_proc.cuda import lanes as lanes_module
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
