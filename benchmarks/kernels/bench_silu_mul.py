"""SiLU(gate) * up: bytes a second against the read limit of the same run.

python -m benchmarks.kernels.bench_silu_mul --output benchmarks/results/silu_mul.jsonl
"""

from collections.abc import Iterator

import torch

from benchmarks.kernels.harness import copies_to_exceed_l2
from benchmarks.kernels.runner import Case, device_and_dtype, run


def cases(smoke: bool) -> Iterator[Case]:
    """One row to thousands, and torch's two launches."""
    from kernels.silu_mul import bytes_moved, silu_mul

    device, dtype = device_and_dtype()
    for rows, intermediate in [(2, 64)] if smoke else [(1, 3072), (256, 3072), (8192, 3072), (8192, 14336)]:
        moved = bytes_moved(rows, intermediate, dtype.itemsize)
        sets = [
            (
                torch.randn(rows, 2 * intermediate, dtype=dtype, device=device),
                torch.empty(rows, intermediate, dtype=dtype, device=device),
            )
            for _ in range(copies_to_exceed_l2(moved, at_most=8))
        ]
        library = [
            lambda s=s, n=intermediate: torch.mul(torch.nn.functional.silu(s[0][:, :n]), s[0][:, n:], out=s[1])
            for s in sets
        ]
        yield Case(f"t{rows}_i{intermediate}", moved, [lambda s=s: silu_mul(*s) for s in sets], library)


if __name__ == "__main__":
    run(__doc__, "silu_mul", cases)
