"""Rows of the embedding table: bytes a second against the read limit of the same run.

python -m benchmarks.kernels.bench_embedding --output benchmarks/results/embedding.jsonl
"""

from collections.abc import Iterator

import torch

from benchmarks.kernels.runner import Case, device_and_dtype, run


def cases(smoke: bool) -> Iterator[Case]:
    """Rows of a table of 151,936 for steps of one token to thousands."""
    from kernels.embedding import bytes_moved, embedding

    device, dtype = device_and_dtype()
    shapes = [(2, 100, 64)] if smoke else [(1, 151_936, 1024), (256, 151_936, 1024), (8192, 151_936, 1024)]
    for tokens, vocabulary, hidden in shapes:
        table = torch.randn(vocabulary, hidden, dtype=dtype, device=device)
        sets = [
            (
                torch.randint(vocabulary, (tokens,), dtype=torch.int32, device=device),
                torch.empty(tokens, hidden, dtype=dtype, device=device),
            )
            for _ in range(8)
        ]
        calls = [lambda s=s, table=table: embedding(s[0], table, s[1]) for s in sets]
        library = [lambda s=s, table=table: torch.index_select(table, 0, s[0], out=s[1]) for s in sets]
        yield Case(f"t{tokens}_h{hidden}", bytes_moved(tokens, hidden, dtype.itemsize), calls, library)


if __name__ == "__main__":
    run(__doc__, "embedding", cases)
