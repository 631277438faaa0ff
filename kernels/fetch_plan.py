"""A step's plan, read by the step itself from the host's memory: what else would be a copy in front of its graph.

    turn        = (turn + 1) % lines
    plan[i]     = plans[turn, i]                              at least for all i that the plan uses
    results[turn, 0] = plans[turn, STEP_NUMBER]

A captured graph has fixed addresses, but the host writes the next plans while earlier steps still run. So the host has
a *line* of memory for each step in flight and takes them in turn; which one a step is to read it finds on the device,
in `turn`. This kernel is the first of every step and the only one that advances it. The sampling kernel writes the
step's ids to the same line of `results`. The number that comes back beside them tells the host whether both sides agree
about whose turn it was.

| tensor  | axes              | dtype | notes                                                                         |
|---------|-------------------|-------|-------------------------------------------------------------------------------|
| plans   | [lines, n]        | int32 | page-locked host memory; each line starts with a plan, as `PlanLayout` has it |
| results | [lines, 16 + r]   | int32 | page-locked host memory; the step's number, from column 16 on its sampled ids |
| turn    | [1]               | int32 | on the device; `lines - 1` before the first step                              |
| plan    | [`plan_words`]    | int32 | on the device; beyond the plan's end it may hold anything                     |

A line may be written again once the step before that took it has ended. What the host has written before it launches a
kernel, the kernel sees; what a kernel has written to page-locked memory, the host sees once it has waited for an event
behind it (CUDA C++ Programming Guide, "Mapped Memory" and "Memory Fence Functions").

One program does it all: a plan is a few KB, all of which are asked for at once. Only if more blocks are appended than
there are rows does it go over the bus once more for each further tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import check_reachable, check_tensor
from kernels.launch import launch_options, let_next_start, wait_for_inputs
from kernels.step_layout import STEP_NUMBER, PlanLayout

RESULT_IDS = 16
"""Column of a line of results from which on it holds sampled ids."""

MAX_BLOCK = 8192
ALIGNMENT = 16
"""Elements that lines are a multiple of, for wide loads."""


@dataclass(frozen=True)
class HostLines:
    """The memory through which steps and host meet; the module's table."""

    plans: torch.Tensor
    results: torch.Tensor
    turn: torch.Tensor

    @classmethod
    def allocate(cls, layout: PlanLayout, lines: int, device: torch.device, extra_words: int = 0) -> "HostLines":
        """Memory for plans of one layout; `extra_words` are left behind each for whatever else the host sends."""
        options = {"dtype": torch.int32, "pin_memory": device.type == "cuda"}
        return cls(
            plans=torch.zeros(lines, _aligned(plan_words(layout) + extra_words), **options),
            results=torch.zeros(lines, _aligned(RESULT_IDS + layout.rows), **options),
            turn=torch.full((1,), lines - 1, dtype=torch.int32, device=device),
        )

    @property
    def ids(self) -> torch.Tensor:
        """The columns of `results` that hold sampled ids."""
        return self.results[:, RESULT_IDS:]

    def check_results(self, rows: int, like: torch.Tensor) -> None:
        """Raise ValueError unless kernels on the device of `like` can write the ids of `rows` rows."""
        _check_lines("results", self.results, self.plans.shape[0], RESULT_IDS + rows, like)
        check_tensor("turn", self.turn, (1,), torch.int32, like=like)


def fetch_plan_reference(lines: HostLines, layout: PlanLayout, plan: torch.Tensor) -> None:
    """The same in plain torch on the host."""
    lines.turn.copy_((lines.turn + 1) % lines.plans.shape[0])
    turn = int(lines.turn)
    plan.copy_(lines.plans[turn, : plan.shape[0]])
    lines.results[turn, 0] = plan[STEP_NUMBER]


@dataclass(frozen=True)
class FetchPlan:
    """The launch: elements that are copied at once, and warps."""

    block: int
    num_warps: int


def launch_plan(layout: PlanLayout) -> FetchPlan:
    """A tile that holds a plan with one appended block a row."""
    block = min(MAX_BLOCK, triton.next_power_of_2(layout.appended_ids.start + layout.rows))
    return FetchPlan(block, num_warps=min(32, max(1, block // 256)))


def plan_words(layout: PlanLayout) -> int:
    """Elements that the device's copy of a plan has room for: whole tiles."""
    block = launch_plan(layout).block
    return triton.cdiv(layout.size, block) * block


def _check_lines(name: str, tensor: torch.Tensor, lines: int, columns: int, like: torch.Tensor) -> None:
    check_tensor(name, tensor, (lines, None), torch.int32)
    if tensor.shape[1] < columns:
        raise ValueError(f"{name}: wanted at least {columns} columns, got {tensor.shape[1]}")
    check_reachable(name, tensor, like)


def _aligned(size: int) -> int:
    return triton.cdiv(size, ALIGNMENT) * ALIGNMENT


@triton.jit(do_not_specialize=["LINES", "APPENDED_IDS"])
def _fetch_plan_kernel(
    plans, results, turn, plan, plan_stride, result_stride, LINES, APPENDED_IDS, NUMBER: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    lane = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    # 1. Locate the step's line.
    line = tl.load(turn) + 1
    line = tl.where(line == LINES, 0, line)
    source = plans + line.to(tl.int64) * plan_stride
    # 2. The first tile, whose loads wait for nothing else; then the appended blocks that it does not hold.
    block_count = tl.load(source + 3, volatile=True)
    number = tl.load(source + NUMBER, volatile=True)
    tl.store(plan + lane, tl.load(source + lane, volatile=True))
    for start in range(BLOCK, APPENDED_IDS + block_count, BLOCK):
        tl.store(plan + start + lane, tl.load(source + start + lane, volatile=True))
    # 3. Whose turn it was.
    tl.store(results + line.to(tl.int64) * result_stride, number)
    tl.debug_barrier()  # every thread has read the old value
    tl.store(turn, line)


def fetch_plan(lines: HostLines, layout: PlanLayout, plan: torch.Tensor) -> None:
    """Begin a step: take the next line, and copy its plan to the device. Shapes: the module's table.

    Raises ValueError for a shape, dtype or device that differs from it.
    """
    words, count = plan_words(layout), lines.plans.shape[0]
    check_tensor("plan", plan, (words,), torch.int32)
    _check_lines("plans", lines.plans, count, words, plan)
    lines.check_results(layout.rows, like=plan)
    launch = launch_plan(layout)
    _fetch_plan_kernel[(1,)](
        lines.plans, lines.results, lines.turn, plan, lines.plans.stride(0), lines.results.stride(0), count,
        layout.appended_ids.start, NUMBER=STEP_NUMBER, BLOCK=launch.block, num_warps=launch.num_warps,
        **launch_options(plan),
    )  # fmt: skip
