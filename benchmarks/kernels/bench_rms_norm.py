"""RMSNorm with and without the residual: bytes a second against the read limit of the same run.

python -m benchmarks.kernels.bench_rms_norm --output benchmarks/results/rms_norm.jsonl
"""

from collections.abc import Iterator

import torch

from benchmarks.kernels.harness import copies_to_exceed_l2
from benchmarks.kernels.runner import Case, device_and_dtype, run


def cases(smoke: bool) -> Iterator[Case]:
    """One row to thousands, with the residual, without, and in parts."""
    from kernels.rms_norm import bytes_moved, rms_norm

    device, dtype = device_and_dtype()
    for rows, hidden in [(2, 64)] if smoke else [(1, 1024), (64, 1024), (256, 1024), (8192, 1024), (8192, 4096)]:
        moved = bytes_moved(rows, hidden, dtype.itemsize, with_residual=True)
        weight = torch.randn(hidden, dtype=dtype, device=device)
        sets = [
            [torch.randn(rows, hidden, dtype=dtype, device=device) for _ in range(3)]
            for _ in range(copies_to_exceed_l2(moved, at_most=8))
        ]
        name = f"t{rows}_h{hidden}"
        calls = [lambda s=s, w=weight: rms_norm(s[0], w, 1e-6, s[2], s[1]) for s in sets]
        yield Case(f"{name}_residual", moved, calls)
        calls = [lambda s=s, w=weight: rms_norm(s[0], w, 1e-6, s[2]) for s in sets]
        library = [lambda s=s, w=weight: torch.nn.functional.rms_norm(s[0], w.shape, w) for s in sets]
        yield Case(name, bytes_moved(rows, hidden, dtype.itemsize, with_residual=False), calls, library)


if __name__ == "__main__":
    run(__doc__, "rms_norm", cases)
