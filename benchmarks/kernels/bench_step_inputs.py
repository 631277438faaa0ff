"""A step's inputs from plan and slots: microseconds for decode buckets and a mixed one.

python -m benchmarks.kernels.bench_step_inputs --output benchmarks/results/step_inputs.jsonl
"""

from collections.abc import Iterator

import torch

from benchmarks.kernels.runner import Case, device_and_dtype, run
from kernels.step_layout import HEADER, PlanLayout, SlotState, StepInputs

BLOCK_SIZE = 16


def make_plan(layout: PlanLayout, counts: list[int], device: str) -> torch.Tensor:
    """Rows that each append one block, for slots in order."""
    rows = len(counts)
    plan = torch.zeros(layout.size, dtype=torch.int32)
    plan[:HEADER] = torch.tensor([rows, sum(count == 1 for count in counts), sum(counts), rows, 0])
    plan[layout.row_slots] = torch.arange(rows)
    plan[layout.token_counts] = torch.tensor(counts)
    plan[layout.query_starts] = torch.tensor([0, *counts]).cumsum(0)
    plan[layout.append_starts] = torch.arange(rows + 1)
    plan[layout.appended_ids] = torch.arange(rows)
    return plan.to(device)


def cases(smoke: bool) -> Iterator[Case]:
    """Decode steps of several sizes, and a step with a long chunk."""
    from kernels.step_inputs import step_inputs

    device, _ = device_and_dtype()
    buckets = {"decode1": [1], "decode64": [1] * 64, "decode256": [1] * 256, "mixed": [1] * 255 + [1793]}
    for name, counts in {"decode2": [1, 1]}.items() if smoke else buckets.items():
        rows, tokens = len(counts), sum(counts)
        inner = 10 if max(counts) == 1 else 1
        max_length = max(counts) * inner * 64  # every call of the run advances the slots
        state = SlotState(
            slot_token_ids=torch.zeros(rows, max_length, dtype=torch.int32, device=device),
            known_lengths=torch.ones(rows, dtype=torch.int32, device=device),
            computed_lengths=torch.zeros(rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros(rows, max_length // BLOCK_SIZE, dtype=torch.int32, device=device),
        )
        layout, inputs = PlanLayout(rows, rows), StepInputs.allocate(rows, tokens, device)
        plan = make_plan(layout, counts, device)

        def call(plan=plan, layout=layout, state=state, inputs=inputs) -> None:
            step_inputs(plan, layout, state, inputs, BLOCK_SIZE)

        yield Case(f"{name}_t{tokens}", tokens * 24 + rows * 40, [call], inner=inner)


if __name__ == "__main__":
    run(__doc__, "step_inputs", cases)
