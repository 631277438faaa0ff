"""A step's plan from page-locked host memory, by its kernel: microseconds, beside the copy that it replaces.

python -m benchmarks.kernels.bench_fetch_plan --output benchmarks/results/fetch_plan.jsonl
"""

from collections.abc import Iterator

import torch

from benchmarks.kernels.runner import Case, device_and_dtype, run


def cases(smoke: bool) -> Iterator[Case]:
    """Plans of 256 rows that append no block, a block a row, and as many as a step of long prompts does."""
    from kernels.fetch_plan import HostLines, fetch_plan, plan_words
    from kernels.step_layout import PlanLayout

    device, _ = device_and_dtype()
    layout = PlanLayout(4, 40) if smoke else PlanLayout(256, 70_000)
    for appended in (0, layout.rows, 4 * layout.rows):
        lines = HostLines.allocate(layout, 6, torch.device(device))
        lines.plans[:, 3] = appended
        plan = torch.zeros(plan_words(layout), dtype=torch.int32, device=device)
        used = layout.appended_ids.start + appended

        def fetch(lines=lines, plan=plan) -> None:
            fetch_plan(lines, layout, plan)

        def copy(lines=lines, plan=plan, used=used) -> None:
            plan[:used].copy_(lines.plans[0, :used], non_blocking=True)

        yield Case(f"r{layout.rows}_a{appended}", 8 * used, [fetch], [copy])


if __name__ == "__main__":
    run(__doc__, "fetch_plan", cases)
