"""Plans of the prefill kernels: which of them computes a bucket, with how many programs, in which tiles.

A plan is a pure function of the bucket's size and the heads' shape, so that one captured graph serves every mix of rows
and contexts in the bucket. Knows no tensor; called by kernels/prefill_attention.py and by what launches it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from kernels.launch import HOPPER_SHARED_BYTES
from kernels.paged_kv import HeadShape, gluon_attends, wanted

MAX_ROWS = 1024
MAX_GROUP = 128
SPECIALISED_TOKENS = 1024
SPECIALISED_ROW_TOKENS = 64
SPECIALISED_HEADS = 32
"""Query tokens of a bucket from which on the Hopper kernel is faster, twice as many where a row has no more than these
and there are fewer heads: `is_specialised_size`."""

LONG_TOKENS, LONG_ROWS = 4096, 4
"""Query tokens of a bucket from which on, in no more rows than these, the Hopper kernel takes long tiles of keys: two
rows of 4,000 take 8 to 10 % less time with them, and eight of 1,024 take 7 % less with the short ones (docs/log.md)."""

SHORT_TOKENS, SHORT_ROWS = 128, 64
"""Query tokens and rows of a bucket up to which the plain kernel has more, smaller tiles of queries that see all keys
of such a prompt at once."""

LARGE_TOKENS = 4096
"""Query tokens of a bucket from which on the plain kernel takes its larger tiles: `measured_tiles`."""


@dataclass(frozen=True)
class Tiles:
    """Rows of queries and keys of a tile, and how the compiler is to take them.

    Attributes:
        max_registers: of a thread; None: as the compiler likes.
        one_loop: masks in all tiles of keys, and so one loop, not one for the full tiles and one for those at edges.
    """

    tile_rows: int
    key_tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    one_loop: bool = False

    def shared_bytes(self, dim_tile: int, element_bytes: int) -> int:
        """Shared memory of a program of the plain kernel: its queries, and keys and values once a stage."""
        return (self.tile_rows + 2 * self.num_stages * self.key_tile) * dim_tile * element_bytes


HOPPER_TILES = {
    64: Tiles(tile_rows=128, key_tile=64, num_warps=4, num_stages=4),
    128: Tiles(tile_rows=128, key_tile=128, num_warps=4, num_stages=2),
}


def is_specialised_size(token_count: int, row_count: int, query_heads: int) -> bool:
    """Whether the Hopper kernel is the faster one for a bucket of that many query tokens with room for so many rows.

    It costs more to start, so a step that is just large enough but made of many short rows is the plain kernel's,
    unless many heads make it larger.
    """
    has_long_rows = token_count > SPECIALISED_ROW_TOKENS * row_count
    is_just_enough = has_long_rows or query_heads >= SPECIALISED_HEADS
    return token_count >= (SPECIALISED_TOKENS if is_just_enough else 2 * SPECIALISED_TOKENS)


def hopper_key_tile(token_count: int, row_count: int, quantised: bool) -> int:
    """Keys of a tile of the Hopper kernel for a bucket of that many query tokens with room for so many rows."""
    return 128 if quantised or (token_count >= LONG_TOKENS and row_count <= LONG_ROWS) else 64


@dataclass(frozen=True)
class PrefillPlan:
    """Everything a launch fixes; a pure function of the bucket and the head shape (`launch_plan`).

    Attributes:
        program_count: programs; no more than are on the card at once.
        wave: programs from which on they come second to a multiprocessor.
        specialised, overlap, fresh: as `launch_plan` takes them.
        tile_rows, query_tile: rows of a tile of queries, and tokens, each with the query heads of one K/V head.
        key_tile: keys of a tile.
        dim_tile, rows_tile: powers of two that hold head_dim and the bucket's rows.
        num_warps, num_stages, max_registers, one_loop: as `Tiles`.
    """

    program_count: int
    wave: int
    specialised: bool
    tile_rows: int
    query_tile: int
    key_tile: int
    dim_tile: int
    rows_tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    one_loop: bool
    overlap: bool
    fresh: bool


def can_specialise(
    shape: HeadShape,
    dtype: torch.dtype,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    *,
    quantised: bool = False,
    capability_major: int = 9,
    triton_version: str = triton.__version__,
) -> bool:
    """Whether kernels/prefill_attention_hopper.py computes such calls on a card of that compute capability.

    `dtype` is the query's; `quantised`: the cache holds 8-bit elements. Over these, heads of 64 are compiled but have
    not been confirmed on a card: they take the plain kernel.
    """
    card = {"capability_major": capability_major, "triton_version": triton_version}
    is_plain = sliding_window == 0 and soft_cap == 0
    head_dims = (128,) if quantised else (64, 128)
    return is_plain and gluon_attends(shape, dtype, MAX_GROUP, head_dims, quantised=quantised, **card)


def launch_plan(
    token_count: int,
    max_rows: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    multiprocessor_count: int,
    *,
    specialised: bool = False,
    quantised: bool = False,
    chunk_rows: int | None = None,
    element_bytes: int = 2,
    shared_bytes: int = HOPPER_SHARED_BYTES,
    tile_rows: int | None = None,
    key_tile: int | None = None,
    one_loop: bool | None = None,
    overlap: bool | None = None,
    fresh: bool | None = None,
) -> PrefillPlan:
    """The launch for a bucket of `token_count` query tokens in `max_rows` rows.

    The grid holds what the card runs at once, or fewer when the bucket cannot have that many tiles: at most
    token_count // query_tile full tiles and one partial tile a row, for each K/V head. `specialised` takes the Hopper
    kernel, which has its own tiles: pass `is_specialised_size(...) and can_specialise(...)`. `chunk_rows`: the rows
    that share the tokens, by which its tiles are chosen, where `max_rows` counts others too or is rounded up.
    `element_bytes` of a query's element, `shared_bytes` that the card has for a program: where the measured tiles do
    not fit, those of few tokens are taken. The other keyword arguments override the measured choice. `overlap`: whether
    the Hopper kernel's softmax runs beside the products of its own group too (its `_held`); so it does over 8-bit
    caches, which take 8 to 18 % longer without; over a plain one it makes less than 2 % either way
    (attention_plans.jsonl, commit a82871e). `fresh`: whether the Hopper kernel is given the step's own keys and values
    one after another, which is less to copy and, over an 8-bit cache, nothing to convert; by default it is.
    """
    group = query_heads // kv_heads
    wanted(1 <= max_rows <= MAX_ROWS, "max_rows", f"1..{MAX_ROWS}", max_rows)
    wanted(group <= MAX_GROUP, "query heads a K/V head", f"<= {MAX_GROUP}", group)
    dim_tile = triton.next_power_of_2(head_dim)
    if specialised:
        keys = key_tile or hopper_key_tile(token_count, chunk_rows or max_rows, quantised)
        wanted(keys in HOPPER_TILES, "key_tile", f"one of {list(HOPPER_TILES)} for the Hopper kernel", keys)
        chosen = HOPPER_TILES[keys]
    else:
        chosen = measured_tiles(token_count, max_rows, dim_tile)
        if chosen.shared_bytes(dim_tile, element_bytes) > shared_bytes:
            chosen = measured_tiles(SHORT_TOKENS + 1, max_rows, dim_tile)
    if quantised:  # not yet measured; a limit that costs bf16 little makes these spill 700 bytes a thread
        chosen = replace(chosen, max_registers=None)
    tile_rows = max(tile_rows or chosen.tile_rows, triton.next_power_of_2(group))
    query_tile = tile_rows // group
    tile_bound = (token_count // query_tile + min(max_rows, token_count)) * kv_heads
    resident = multiprocessor_count * (1 if specialised else 2)
    return PrefillPlan(
        program_count=max(1, min(resident, tile_bound)),
        wave=multiprocessor_count,
        specialised=specialised,
        tile_rows=tile_rows,
        query_tile=query_tile,
        key_tile=key_tile or chosen.key_tile,
        dim_tile=dim_tile,
        rows_tile=triton.next_power_of_2(max_rows),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        max_registers=chosen.max_registers,
        one_loop=chosen.one_loop if one_loop is None else one_loop,
        overlap=quantised if overlap is None else overlap,
        fresh=specialised if fresh is None else fresh,
    )


def measured_tiles(token_count: int, max_rows: int, dim_tile: int) -> Tiles:
    """The plain kernel's tiles: the best of a sweep on an NVIDIA H200 at 1x128 to 1x16384 tokens, group 2, bf16."""
    if token_count <= SHORT_TOKENS and max_rows <= SHORT_ROWS and dim_tile == 128:
        return Tiles(tile_rows=32, key_tile=128, num_warps=4, num_stages=2, one_loop=True)
    if token_count < LARGE_TOKENS:
        return Tiles(tile_rows=64, key_tile=64 if dim_tile <= 128 else 32, num_warps=4, num_stages=2, one_loop=True)
    if dim_tile == 64:
        return Tiles(tile_rows=128, key_tile=64, num_warps=4, num_stages=2)
    if dim_tile == 128:
        return Tiles(tile_rows=128, key_tile=64, num_warps=8, num_stages=2, max_registers=128)
    return Tiles(tile_rows=128, key_tile=64, num_warps=8, num_stages=2)
