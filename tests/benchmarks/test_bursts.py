"""The figures of a burst, from the plans that the worker got."""

from array import array

import pytest

from benchmarks import bursts
from common.messages import StepPlan

MS = 1_000_000


def plan(step_id: int, prompt_tokens: int) -> StepPlan:
    chunks = (
        {"chunk_slots": array("H", [1]), "chunk_token_counts": array("i", [prompt_tokens])} if prompt_tokens else {}
    )
    return StepPlan(step_id=step_id, decode_slots=array("H", [0]), **chunks)


def test_what_the_worker_waits_for_counts_until_the_last_prompt(monkeypatch):
    monkeypatch.setattr(bursts, "TOKEN_US", 10.0)  # and half a millisecond a step
    plans = [(2 * MS, plan(1, 100)), (3 * MS, plan(2, 0)), (5 * MS, plan(3, 50)), (6 * MS, plan(4, 0))]
    figures = bursts.call_figures(MS, 9 * MS, plans)
    assert figures == pytest.approx({
        "first_plan_ms": 1.0, "last_prompt_ms": 4.0, "prompts_done_ms": 5.0, "idle_ms": 1.0 + 1.0, "whole_ms": 8.0,
        "prompt_steps": 2, "steps": 4,
    })  # fmt: skip
