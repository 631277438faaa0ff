"""Swapping on a GPU: blocks to the host and back on streams of their own, beside the steps.

A block is packed into one piece (`kernels.pack_blocks`), a run of host blocks is one copy. Out and in have a stream
each, since the link carries both ways at once. Nobody on the host waits: events order the streams.

    | who                                        | waits for                                                         |
    |--------------------------------------------|-------------------------------------------------------------------|
    | swap-out of plan N                         | the steps issued before N: they write what it reads               |
    | a plan that writes a block being read      | that swap-out                                                     |
    | the step of plan N                         | the swap-ins of plan N                                            |
    | a transfer that shares a host block        | the transfer before it in the other direction                     |

A swap-in does not wait for the steps before it, so that it runs beside them: the blocks that a plan brings in are used
by no plan whose result has not come back. That is the scheduler's rule for giving out blocks (`scheduler_proc.state`).

Without a GPU the same code runs in Triton's interpreter, in order. Called by the GPU runner.
"""

import logging
import mmap
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from common.messages import StepPlan
from kernels.pack_blocks import MAX_BLOCKS, BlockLayout, pack_blocks, unpack_blocks
from worker_proc.kv_cache import KVCache, block_pairs
from worker_proc.transfer import to_device

logger = logging.getLogger(__name__)

STAGING_BYTES = 32 << 20
"""Device memory for packed blocks, for each direction; what does not fit goes in turns."""

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Transfer:
    """A swap under way: the blocks that it reads and writes, and the event that ends it."""

    done: torch.cuda.Event
    device_blocks: frozenset[int]
    host_blocks: frozenset[int]


class Direction:
    """One way, `out` or `in`: its stream, its staging memory, its transfers that may not have ended."""

    def __init__(self, name: str, rows: int, block_bytes: int, device: torch.device) -> None:
        self.name = name
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.staging = torch.empty(rows, block_bytes, dtype=torch.uint8, device=device)
        self.transfers: deque[Transfer] = deque()

    def issuing(self) -> AbstractContextManager[object]:
        """What is issued inside runs on this stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def end(self, device_blocks: Iterable[int], host_blocks: Iterable[int]) -> None:
        """The transfer of these blocks has been issued; inside `issuing`."""
        if self.stream is not None:
            done = torch.cuda.Event()
            done.record()
            self.transfers.append(Transfer(done, frozenset(device_blocks), frozenset(host_blocks)))

    def under_way(self) -> Iterator[Transfer]:
        """The transfers that have not ended, as far as can be told without waiting."""
        while self.transfers and self.transfers[0].done.query():
            self.transfers.popleft()
        return iter(self.transfers)


class BlockSwap:
    """Moves the blocks of one cache, which has `host_block_count` blocks on the host."""

    def __init__(self, cache: KVCache) -> None:
        device = cache.key_caches[0].device
        self._cache, self._device = cache, device
        self._layout = BlockLayout.of(cache.tensors())
        size = self._layout.block_bytes
        self._host = pinned_bytes(cache.host_block_count, size, pin=device.type == "cuda")
        rows = min(max(1, STAGING_BYTES // size), max(1, cache.host_block_count), MAX_BLOCKS)
        self._out, self._in = Direction("out", rows, size, device), Direction("in", rows, size, device)

    def move(self, plan: StepPlan) -> None:
        """Issue the plan's swap-outs, copies and swap-ins; what follows on the current stream is the plan's step."""
        if plan.swap_out_block_ids:
            self.swap_out(block_pairs(plan.swap_out_block_ids))
        if self._out.transfers:
            self._wait_before_writing(written_blocks(plan))
        if plan.copy_block_ids:
            self._cache.copy_blocks(block_pairs(plan.copy_block_ids))
        if plan.swap_in_block_ids:
            self.swap_in(block_pairs(plan.swap_in_block_ids))

    def swap_out(self, pairs: Pairs) -> None:
        """Copy device blocks to host blocks once the current stream has come this far; pairs are (device, host)."""
        blocks, host_blocks = zip(*pairs, strict=True)
        way = self._out
        if way.stream is not None:
            way.stream.wait_stream(torch.cuda.current_stream())
            self._wait(way.stream, self._in, host_blocks=set(host_blocks))
        with way.issuing():
            for first, ids in self._turns(blocks, way):
                pack_blocks(self._layout, ids, way.staging)
                for start, place, count in block_runs(host_blocks[first : first + len(ids)]):
                    self._host[place : place + count].copy_(way.staging[start : start + count], non_blocking=True)
            way.end(blocks, host_blocks)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy host blocks to device blocks, at once; the current stream waits. Pairs are (host, device)."""
        host_blocks, blocks = zip(*pairs, strict=True)
        way = self._in
        if way.stream is not None:
            self._wait(way.stream, self._out, set(blocks), set(host_blocks))
        with way.issuing():
            for first, ids in self._turns(blocks, way):
                for start, place, count in block_runs(host_blocks[first : first + len(ids)]):
                    way.staging[start : start + count].copy_(self._host[place : place + count], non_blocking=True)
                unpack_blocks(self._layout, ids, way.staging)
            way.end(blocks, host_blocks)
        if way.stream is not None:
            torch.cuda.current_stream().wait_stream(way.stream)

    def _turns(self, blocks: Sequence[int], way: Direction) -> Iterator[tuple[int, torch.Tensor]]:
        """As many blocks at a time as the staging memory holds: index of the first, and the numbers on the device."""
        numbers = to_device(np.array(blocks, dtype=np.int32), self._device)
        rows = way.staging.shape[0]
        for first in range(0, len(blocks), rows):
            yield first, numbers[first : first + rows]

    def _wait_before_writing(self, blocks: set[int]) -> None:
        if blocks:
            self._wait(torch.cuda.current_stream(), self._out, blocks)

    def _wait(
        self, stream: torch.cuda.Stream, way: Direction, blocks: Iterable[int] = (), host_blocks: Iterable[int] = ()
    ) -> None:
        """Let the stream wait for those transfers of the other way that use one of the blocks."""
        for transfer in way.under_way():
            if not (transfer.device_blocks.isdisjoint(blocks) and transfer.host_blocks.isdisjoint(host_blocks)):
                stream.wait_event(transfer.done)


def written_blocks(plan: StepPlan) -> set[int]:
    """The device blocks that a plan gives out: what its step writes for the first time is among them."""
    return {*plan.block_ids, *plan.copy_block_ids[1::2], *plan.new_slots.block_ids}


def block_runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of consecutive numbers: index of the first, its number, how many."""
    runs: list[tuple[int, int, int]] = []
    for index, block in enumerate(blocks):
        if runs and block == runs[-1][1] + runs[-1][2]:
            first, start, count = runs[-1]
            runs[-1] = (first, start, count + 1)
        else:
            runs.append((index, block, 1))
    return runs


def pinned_bytes(rows: int, row_bytes: int, *, pin: bool) -> torch.Tensor:
    """Host memory, uint8 [rows, row_bytes], page-locked with `pin`: exactly this much, where torch rounds up to a power
    of two.

    Raises:
        RuntimeError: the system does not lock that much.
    """
    start = time.monotonic()
    size = rows * row_bytes
    pages = np.zeros(size + mmap.PAGESIZE, dtype=np.uint8)
    first = -pages.ctypes.data % mmap.PAGESIZE
    memory = torch.from_numpy(pages[first : first + size])
    if pin and size:
        runtime = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(memory.data_ptr(), size, 0))
        if error:
            raise RuntimeError(f"cannot lock {size} bytes of host memory for swapped blocks: CUDA error {error}")
        weakref.finalize(pages, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
        logger.info("locked %.2f GiB of host memory in %.2f s", size / 2**30, time.monotonic() - start)
    return memory.view(rows, row_bytes)
