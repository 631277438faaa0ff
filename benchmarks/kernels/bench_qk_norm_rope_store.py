"""q/k norm, RoPE and the K/V store in one launch: bytes a second against the read limit of the same run.

python -m benchmarks.kernels.bench_qk_norm_rope_store --output benchmarks/results/qk_norm_rope_store.jsonl
"""

import itertools
from collections.abc import Iterator

import torch

from benchmarks.kernels.harness import copies_to_exceed_l2
from benchmarks.kernels.runner import Case, device_and_dtype, run

BLOCK_SIZE = 16
MAX_POSITION = 40_960
LARGEST_PARTS = 256
"""Up to so many tokens the product comes in parts, into which nothing is written back."""


def cases(smoke: bool) -> Iterator[Case]:
    """Steps of one token to thousands, over plain and 8-bit caches; of large ones also what writing back adds."""
    from kernels.qk_norm_rope_store import bytes_moved, qk_norm_rope_store

    device, dtype = device_and_dtype()
    shapes = [(2, 4, 2, 64)] if smoke else [(t, 16, 8, 128) for t in (1, 8, 64, 256, 8192)] + [(8192, 32, 8, 128)]
    caches = {"": dtype, "_int8": torch.int8, "_fp8": torch.float8_e4m3fn}
    caches |= {"_int8_back": torch.int8, "_fp8_back": torch.float8_e4m3fn}
    for (tokens, query_heads, kv_heads, head_dim), suffix in itertools.product(shapes, caches):
        cache_dtype, write_back = caches[suffix], suffix.endswith("_back")
        if write_back and not (smoke or tokens > LARGEST_PARTS):
            continue
        moved = bytes_moved(tokens, query_heads, kv_heads, head_dim, dtype.itemsize, cache_dtype, write_back)
        copies = copies_to_exceed_l2(moved, at_most=8)
        blocks = tokens // BLOCK_SIZE + 1
        table = torch.randn(MAX_POSITION, head_dim, device=device)
        weights = [torch.randn(head_dim, dtype=dtype, device=device) for _ in range(2)]
        slots = torch.randperm(blocks * BLOCK_SIZE, device=device)[:tokens]
        positions = torch.randint(MAX_POSITION, (tokens,), dtype=torch.int32, device=device)
        calls = []
        for _ in range(copies):
            qkv = torch.randn(tokens, (query_heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
            q_out = torch.empty(tokens, query_heads, head_dim, dtype=dtype, device=device)
            size = (blocks, kv_heads, BLOCK_SIZE, head_dim)
            keys, values = (torch.empty(size, dtype=cache_dtype, device=device) for _ in range(2))
            arguments = (qkv, q_out, keys, values, slots, positions, table, *weights)
            options = {}
            if suffix:
                options = {name: torch.empty(size[:3], dtype=torch.float16, device=device)
                          for name in ("key_scales", "value_scales")}  # fmt: skip
                options["write_back"] = write_back
            calls.append(lambda a=arguments, o=options: qk_norm_rope_store(*a, **o))
        yield Case(f"t{tokens}_h{query_heads}_kv{kv_heads}_d{head_dim}{suffix}", moved, calls)


if __name__ == "__main__":
    run(__doc__, "qk_norm_rope_store", cases)
