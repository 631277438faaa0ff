"""Plans that steps fetch themselves, against the same in plain torch; in turn, whatever their sizes."""

import random

import pytest
import torch

from kernels.fetch_plan import RESULT_IDS, HostLines, fetch_plan, fetch_plan_reference, launch_plan, plan_words
from kernels.step_layout import STEP_NUMBER, PlanLayout
from tests.kernels.closeness import DEVICE

LINES = 3


def copy_of(lines: HostLines) -> HostLines:
    return HostLines(lines.plans.clone(), lines.results.clone(), lines.turn.cpu().clone())


def junk_lines(layout: PlanLayout, count: int = LINES) -> HostLines:
    """Lines that hold anything; the first step's turn is the first line's."""
    lines = HostLines.allocate(layout, count, torch.device(DEVICE), extra_words=9)
    generator = torch.Generator().manual_seed(1)
    for tensor in (lines.plans, lines.results):
        tensor.copy_(torch.randint(-(2**31), 2**31, tensor.shape, generator=generator).int())
    return lines


def write_plan(lines: HostLines, line: int, block_count: int, number: int) -> None:
    lines.plans[line, 3], lines.plans[line, STEP_NUMBER] = block_count, number


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (4, 48), (6, 300), (40, 5)])
def test_each_step_fetches_what_the_reference_fetches(rows, blocks):
    chance, layout = random.Random(rows), PlanLayout(rows, blocks)
    lines = junk_lines(layout)
    want_lines = copy_of(lines)
    plan = torch.zeros(plan_words(layout), dtype=torch.int32, device=DEVICE)
    for step in range(2 * LINES + 1):
        count = blocks if step == 2 else chance.randint(0, blocks)
        for group in (lines, want_lines):
            write_plan(group, step % LINES, count, 1000 + step)
        want = torch.zeros(plan_words(layout), dtype=torch.int32)
        fetch_plan_reference(want_lines, layout, want)
        fetch_plan(lines, layout, plan)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        used = layout.appended_ids.start + count
        assert torch.equal(plan[:used].cpu(), want[:used]), f"step {step} with {count} blocks"
        assert torch.equal(lines.results, want_lines.results), f"step {step} reported elsewhere"
        assert int(lines.turn) == int(want_lines.turn) == step % LINES


def test_a_single_line_is_always_the_next():
    layout = PlanLayout(2, 4)
    lines, plan = junk_lines(layout, 1), torch.zeros(plan_words(layout), dtype=torch.int32, device=DEVICE)
    for number in (5, 6):
        write_plan(lines, 0, 0, number)
        fetch_plan(lines, layout, plan)
        assert int(lines.turn) == 0 and int(plan[STEP_NUMBER]) == number


def test_a_plan_with_a_block_for_each_row_is_one_tile():
    """And is read in wide words: tiles and lines are aligned."""
    assert launch_plan(PlanLayout(256, 70_000)).block == 2048
    for layout in (PlanLayout(256, 70_000), PlanLayout(1, 1), PlanLayout(1024, 10)):
        launch = launch_plan(layout)
        assert launch.block >= min(8192, layout.appended_ids.start + layout.rows)
        assert plan_words(layout) % launch.block == 0 and plan_words(layout) >= layout.size
        lines = HostLines.allocate(layout, 2, torch.device("cpu"), extra_words=3)
        assert all(tensor.stride(0) % 16 == 0 for tensor in (lines.plans, lines.results))
        assert lines.plans.shape[1] >= plan_words(layout) + 3 and lines.ids.shape[1] >= layout.rows


def test_wrong_arguments_are_named():
    layout = PlanLayout(2, 4)
    lines, plan = junk_lines(layout), torch.zeros(plan_words(layout), dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"plan: wanted shape \[32\], got \[31\]"):
        fetch_plan(lines, layout, plan[:-1])
    with pytest.raises(ValueError, match="plans: wanted at least 32 columns, got 20"):
        fetch_plan(HostLines(lines.plans[:, :20], lines.results, lines.turn), layout, plan)
    with pytest.raises(ValueError, match=f"results: wanted at least {RESULT_IDS + 2} columns, got 4"):
        fetch_plan(HostLines(lines.plans, lines.results[:, :4], lines.turn), layout, plan)
    with pytest.raises(ValueError, match="turn: wanted dtype torch.int32, got torch.int64"):
        fetch_plan(HostLines(lines.plans, lines.results, lines.turn.long()), layout, plan)


@pytest.mark.gpu
def test_only_page_locked_memory_is_within_reach():
    layout = PlanLayout(2, 4)
    lines, plan = junk_lines(layout), torch.zeros(plan_words(layout), dtype=torch.int32, device=DEVICE)
    pageable = HostLines(torch.zeros(lines.plans.shape, dtype=torch.int32), lines.results, lines.turn)
    with pytest.raises(ValueError, match="plans: wanted device cuda:0 or page-locked host memory, got cpu"):
        fetch_plan(pageable, layout, plan)


@pytest.mark.gpu
def test_one_graph_fetches_from_every_line():
    layout = PlanLayout(256, 700)
    lines = junk_lines(layout)
    plan = torch.zeros(plan_words(layout), dtype=torch.int32, device=DEVICE)
    fetch_plan(lines, layout, plan)  # compiled now
    lines.turn.fill_(LINES - 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fetch_plan(lines, layout, plan)
    assert int(lines.turn) == LINES - 1, "capturing is no step"
    for step in range(20):
        write_plan(lines, step % LINES, 700, step)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(plan[: layout.size].cpu(), lines.plans[step % LINES, : layout.size])
        assert int(lines.results[step % LINES, 0]) == step
