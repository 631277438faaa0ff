"""Attention of one decode row that is left in parts, and merged by the product that reads it.

A row's cached tokens are shared out between programs (kernels/fused_decode_parts.py), and each leaves, for each query
head, the attention a to its tokens alone and the logarithm s of its normaliser, as a power of two:

    x[h, d] = sum over parts 2^(s_p - S) a_p[h, d] / sum over parts 2^(s_p - S),        S = max over parts of s_p

Merged by the last program to finish, that is a meeting by a counter, one reading and one writing between two kernels.
Here every program of the product merges what it needs, which is all of x: some kilobytes from the level-2 cache.

| tensor     | axes                    | dtype   | notes                                                       |
|------------|-------------------------|---------|-------------------------------------------------------------|
| parts      | [hkv, splits, rows, d]  | as x    | at the beginning of the workspace                           |
| statistics | [hkv, splits, 2, rows]  | float32 | behind hkv splits rows d floats of it; the first of two     |

`rows` of a group's heads; those from the group on hold anything. Called by kernels/skinny_linear_warps.py.

Sources: Flash-Decoding, PyTorch blog, 2023-10.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.decode_warp import with_parts

PARTS_AT_A_TIME = gl.constexpr(8)


@gluon.jit
def part_count_of(slots_ptr, lengths_ptr, SPLITS: gl.constexpr, TILE: gl.constexpr):
    """How many parts the row has, as kernels/fused_decode_parts.py leaves them; 0 of a padding row."""
    length = gl.load(lengths_ptr)
    tiles = (length + (TILE - 2)) // TILE  # of the cached tokens, one fewer than the context
    share = gl.maximum((tiles + (SPLITS - 2)) // (SPLITS - 1), 1)
    return gl.where((gl.load(slots_ptr) >= 0) & (length > 0), (tiles + share - 1) // share + 1, 0)


@gluon.jit
def _loaded(parts_ptr, statistics_ptr, pairs, columns, first, part_count, layout: gl.constexpr,
            STATISTICS: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """Logarithms [PARTS, HEADS], and attention [PARTS, HEADS, HEAD_DIM], of parts from `first` on.

    `pairs`: for each head, where its K/V head's parts begin, and its row in each of them.
    """
    parts = first + gl.arange(0, PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    is_part = parts < part_count
    places = pairs[0] + parts
    statistic_ptr = statistics_ptr + STATISTICS + places * (2 * ROWS) + pairs[1]
    logarithms = gl.load(statistic_ptr, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    attended_ptr = parts_ptr + gl.expand_dims((places * ROWS + pairs[1]) * HEAD_DIM, 2) + columns
    attended = gl.load(attended_ptr, mask=gl.expand_dims(is_part, 2), other=0.0, cache_modifier=".cg")
    return logarithms, attended


@gluon.jit
def merged_row(
    parts_ptr, statistics_ptr, part_count, dtype: gl.constexpr, SPLITS: gl.constexpr, ROWS: gl.constexpr,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """The row [HEADS, HEAD_DIM], in `dtype`; zeros without parts."""
    DIMS: gl.constexpr = HEADS * HEAD_DIM // (32 * gl.num_warps())
    LANES: gl.constexpr = HEAD_DIM // DIMS
    layout: gl.constexpr = gl.BlockedLayout([1, 1, DIMS], [1, 32 // LANES, LANES], [1, gl.num_warps(), 1], [2, 1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    head_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    STATISTICS: gl.constexpr = KV_HEADS * SPLITS * ROWS * HEAD_DIM
    GROUP: gl.constexpr = HEADS // KV_HEADS
    heads = gl.arange(0, HEADS, layout=head_layout)[None, :]
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, row_layout))
    columns = gl.expand_dims(gl.expand_dims(dims, 0), 0)
    pairs = ((heads // GROUP) * SPLITS, heads % GROUP)
    maximum = gl.full([HEADS], float("-inf"), gl.float32, head_layout)
    normaliser = gl.zeros([HEADS], gl.float32, head_layout)
    row = gl.zeros([HEADS, HEAD_DIM], gl.float32, row_layout)
    for first in range(0, part_count, PARTS):
        logarithms, attended = _loaded(
            parts_ptr, statistics_ptr, pairs, columns, first, part_count, layout, STATISTICS, ROWS, HEAD_DIM, PARTS
        )
        maximum, normaliser, row = with_parts(
            (maximum, normaliser, row), logarithms, 1.0, attended.to(gl.float32), row_layout, MAY_BE_EMPTY=False
        )
    share = 1.0 / gl.where(part_count > 0, normaliser, 1.0)
    row = row * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, row_layout)), 1)
    return row.to(dtype)
