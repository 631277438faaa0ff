"""Measures how fast blocks move between device and host at the start, for the scheduler's choice of preemption.

Called by the engine; works with whatever moves the device's blocks.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

MEASURED_BYTES = 64 << 20
"""Moved each way: about a millisecond over a GPU's link."""


class Swap(Protocol):
    """Moves blocks: the CPU's `KVCache` or a GPU's `BlockSwap`."""

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks to host blocks; pairs are (device block, host block)."""

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host blocks to device blocks; pairs are (host block, device block)."""


def measured_link_bytes_per_s(
    swap: Swap, block_count: int, host_block_count: int, block_bytes: int, wait: Callable[[], None] = lambda: None
) -> int:
    """Bytes a second, the mean of both ways; 0 if the host has no blocks. Device blocks keep what they hold.

    `wait` returns when everything that was issued is done. The second of two rounds counts.
    """
    count = min(block_count, host_block_count, max(1, MEASURED_BYTES // block_bytes))
    if not count:
        return 0
    pairs = [(block, block) for block in range(count)]
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        swap.swap_out(pairs)
        swap.swap_in(pairs)
        wait()
        seconds = time.perf_counter() - start
    return int(2 * count * block_bytes / seconds)
