"""Products in one order, beside the library that chooses its order: bytes a second against the read limit.

python -m benchmarks.kernels.bench_fixed_order_linear --output benchmarks/results/fixed_order_linear.jsonl
"""

from collections.abc import Iterator

import torch

from benchmarks.kernels.harness import copies_to_exceed_l2
from benchmarks.kernels.runner import Case, device_and_dtype, run

QWEN3_06B = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
"""Outputs and inputs of a layer's four products."""


def cases(smoke: bool) -> Iterator[Case]:
    """Every product of a layer at several numbers of rows, and the library at the same."""
    from kernels.fixed_order_linear import bytes_moved, fixed_order_linear

    device, dtype = device_and_dtype()
    for rows in (3,) if smoke else (1, 64, 512, 8192):
        for outputs, inputs in ((40, 48),) if smoke else QWEN3_06B:
            moved = bytes_moved(rows, outputs, inputs, dtype.itemsize)
            sets = [
                (
                    torch.randn(rows, inputs, dtype=dtype, device=device),
                    torch.randn(outputs, inputs, dtype=dtype, device=device),
                    torch.empty(rows, outputs, dtype=dtype, device=device),
                )
                for _ in range(copies_to_exceed_l2(moved, at_most=16))
            ]
            library = [lambda s=s: torch.mm(s[0], s[1].T, out=s[2]) for s in sets]
            ours = [lambda s=s: fixed_order_linear(*s) for s in sets]
            yield Case(f"m{rows}_n{outputs}_k{inputs}", moved, ours, library)


if __name__ == "__main__":
    run(__doc__, "fixed_order_linear", cases)
