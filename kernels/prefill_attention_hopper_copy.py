"""The moving side of kernels/prefill_attention_hopper.py: the mailbox, and the warps that copy what it computes on.

A letter holds, as int32: 1 (0 in the last letter), the row's first query token, its number of query tokens, the tile's
first token within them, the row's context length, the K/V head, the end of the keys that the tile sees, and the row's
line in the block tables. The warp that copies keys draws the tiles and writes the letters; the warp that copies values,
both computing groups and, over an 8-bit cache, the converting warps read them. A letter's slot, and the queries that
lie beside it, are free again when all of them have said so.

Over an 8-bit cache with FRESH, tiles that begin in the step's own tokens go straight to the stages that the computing
groups read, and those before them to the converting warps, which fill the stages that follow. A wait sees only whether
a stage's turn is odd or even. Neither side can be two turns off: a tile is brought for conversion when all before it
have been placed or taken, and the groups empty the stages in order.

Blocks of the cache are copied to `pages`: over a plain cache these are the computing groups' stages, seen block by
block, and over an 8-bit one stages of their own, which the converting warps empty.

Called by kernels/prefill_attention_hopper.py alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

MAIL_SLOTS = gl.constexpr(2)
MAIL_FIELDS = gl.constexpr(8)


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def zero_unowned(
    output_ptr, output_stride, slots_ptr, lengths_ptr, starts_ptr, first_row, max_rows, token_count,
    TOKEN_SIZE: gl.constexpr, TOKEN_TILE: gl.constexpr,
):  # fmt: skip
    """Write zeros to the tokens of padding rows and to those past the last row, shared out between the programs."""
    line: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    places = gl.arange(0, TOKEN_TILE, layout=line)
    zeros = gl.zeros([TOKEN_TILE], output_ptr.dtype.element_ty, line)
    for row in range(first_row + program, max_rows, programs):
        if (gl.load(slots_ptr + row) < 0) | (gl.load(lengths_ptr + row) <= 0):
            for token in range(gl.load(starts_ptr + row), gl.load(starts_ptr + row + 1)):
                token_ptr = output_ptr + token.to(gl.int64) * output_stride
                gl.store(token_ptr + places, zeros, mask=places < TOKEN_SIZE)
    for token in range(gl.load(starts_ptr + max_rows) + program, token_count, programs):
        token_ptr = output_ptr + token.to(gl.int64) * output_stride
        gl.store(token_ptr + places, zeros, mask=places < TOKEN_SIZE)


@gluon.jit
def cached_tiles(tile_count, length, query_count, KEY_TILE: gl.constexpr, FRESH: gl.constexpr):
    """How many of a row's first tiles are read from the cache: with FRESH those that hold tokens of earlier steps."""
    if FRESH:
        tile_count = (length - query_count + (KEY_TILE - 1)) // KEY_TILE
    return tile_count


@gluon.jit
def _copy_fresh(
    desc, query_start, query_count, length, head, tile_count, filled, boxes, full, empty, STAGES: gl.constexpr
):
    """Copy those of the row's `tile_count` tiles that hold the step's own keys (or values) alone, the last one first.

    Tokens past the row's end come along; past the tensor's end there are zeros.
    """
    KEY_TILE: gl.constexpr = boxes.shape[1]
    BOX: gl.constexpr = boxes.shape[3]
    HALVES: gl.constexpr = boxes.shape[0] // STAGES
    first_tile = cached_tiles(tile_count, length, query_count, KEY_TILE, True)
    token = query_start + (tile_count - 1) * KEY_TILE - (length - query_count)
    for step in range(tile_count - first_tile):
        stage = (filled + step) % STAGES
        mbarrier.wait(empty.index(stage), (((filled + step) // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), HALVES * KEY_TILE * BOX * 2)
        for half in gl.static_range(HALVES):
            place = [token - step * KEY_TILE, head, half * BOX]
            tma.async_copy_global_to_shared(desc, place, full.index(stage), boxes.index(stage * HALVES + half))


@gluon.jit
def _copy_row(
    desc, table_ptr, head, length, tile_count, copied, pages, full, empty,
    KV_HEADS: gl.constexpr, KEY_TILE: gl.constexpr, HALVES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the first `tile_count` tiles of keys (or values) from the cache, the last one first; return the stages that
    are filled so far."""
    PAGES: gl.constexpr = KEY_TILE // BLOCK_SIZE
    BOX: gl.constexpr = pages.shape[2]
    TILE_BYTES: gl.constexpr = KEY_TILE * HALVES * BOX * pages.dtype.primitive_bitwidth // 8
    last_page = (length - 1) // BLOCK_SIZE
    for step in range(tile_count):
        first_page = (tile_count - 1 - step) * PAGES
        stage = copied % STAGES
        box_rows = ()
        for page in gl.static_range(PAGES):
            # edge: blocks past the row's last one are not in the table; the last is copied again in their place
            block = gl.load(table_ptr + gl.minimum(first_page + page, last_page))
            box_rows += ((block * KV_HEADS + head) * BLOCK_SIZE,)
        mbarrier.wait(empty.index(stage), ((copied // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), TILE_BYTES)
        for page in gl.static_range(PAGES):
            for half in gl.static_range(HALVES):
                box = pages.index((stage * HALVES + half) * PAGES + page)
                tma.async_copy_global_to_shared(desc, [box_rows[page], half * BOX], full.index(stage), box)
        copied += 1
    return copied


@gluon.jit
def produce_keys(
    query_desc, key_desc, tables_ptr, slots_ptr, lengths_ptr, starts_ptr, counters_ptr, first_row, max_rows,
    table_stride, query_boxes, key_pages, page_full, page_empty, fresh_desc, fresh_boxes, key_full, key_empty,
    mail, mail_full, mail_empty,
    KV_HEADS: gl.constexpr, QUERY_TILE: gl.constexpr, KEY_TILE: gl.constexpr, HALVES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE_STAGES: gl.constexpr, STAGES: gl.constexpr, ROWS_TILE: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, COPY_QUERY: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """Draw tiles, post them, and copy their queries and keys; ends with a letter that says there are no more."""
    BOX: gl.constexpr = 64
    QUERY_HALVES: gl.constexpr = HEAD_DIM // BOX
    line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    rows = gl.arange(0, ROWS_TILE, layout=line)
    is_row = (rows >= first_row) & (rows < max_rows)
    slots = gl.load(slots_ptr + rows, mask=is_row, other=-1)
    lengths = gl.load(lengths_ptr + rows, mask=is_row, other=0)
    query_counts = gl.load(starts_ptr + rows + 1, mask=is_row, other=0)
    query_counts -= gl.load(starts_ptr + rows, mask=is_row, other=0)
    query_counts = gl.where((slots >= 0) & (lengths > 0), query_counts, 0)
    ends = gl.associative_scan((query_counts + (QUERY_TILE - 1)) // QUERY_TILE, 0, _add)
    total = gl.max(ends, axis=0) * KV_HEADS
    fields = gl.arange(0, MAIL_FIELDS, layout=line)

    work = program
    letter = 0
    filled = 0
    copied = 0
    while work < total:
        before = ends * KV_HEADS <= work
        row = gl.sum(before.to(gl.int32), axis=0)
        row_start = gl.max(gl.where(before, ends, 0), axis=0) * KV_HEADS
        query_start = gl.load(starts_ptr + row)
        query_count = gl.load(starts_ptr + row + 1) - query_start
        length = gl.load(lengths_ptr + row)
        table_row = gl.load(slots_ptr + row)
        head = (work - row_start) % KV_HEADS
        tile = (query_count + (QUERY_TILE - 1)) // QUERY_TILE - 1 - (work - row_start) // KV_HEADS
        first_token = tile * QUERY_TILE
        key_end = length - query_count + gl.minimum(first_token + QUERY_TILE, query_count)

        content = gl.where(fields == 1, query_start, 1)
        content = gl.where(fields == 2, query_count, content)
        content = gl.where(fields == 3, first_token, content)
        content = gl.where(fields == 4, length, content)
        content = gl.where(fields == 5, head, content)
        content = gl.where(fields == 6, key_end, content)
        content = gl.where(fields == 7, table_row, content)
        slot = letter % MAIL_SLOTS
        mbarrier.wait(mail_empty.index(slot), ((letter // MAIL_SLOTS) & 1) ^ 1)
        if COPY_QUERY:
            # Tokens past the row's end are other rows' or zeros; what comes of them is not stored.
            mbarrier.expect(mail_full.index(slot), 2 * 64 * HEAD_DIM * 2)
            for part in gl.static_range(2):
                for half in gl.static_range(QUERY_HALVES):
                    tma.async_copy_global_to_shared(
                        query_desc,
                        [query_start + first_token + part * (64 // GROUP), head * GROUP, half * BOX],
                        mail_full.index(slot),
                        query_boxes.index((slot * 2 + part) * QUERY_HALVES + half),
                    )
        mail.index(slot).store(content)
        mbarrier.arrive(mail_full.index(slot), count=1)
        letter += 1

        tile_count = (key_end + (KEY_TILE - 1)) // KEY_TILE
        if FRESH:
            _copy_fresh(
                fresh_desc, query_start, query_count, length, head, tile_count, filled, fresh_boxes, key_full,
                key_empty, STAGES,
            )  # fmt: skip
            filled += tile_count
        copied = _copy_row(
            key_desc, tables_ptr + table_row.to(gl.int64) * table_stride, head, length,
            cached_tiles(tile_count, length, query_count, KEY_TILE, FRESH), copied,
            key_pages, page_full, page_empty, KV_HEADS, KEY_TILE, HALVES, BLOCK_SIZE, PAGE_STAGES,
        )  # fmt: skip
        work = total
        if total > programs:
            work = programs + gl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")

    slot = letter % MAIL_SLOTS
    mbarrier.wait(mail_empty.index(slot), ((letter // MAIL_SLOTS) & 1) ^ 1)
    if COPY_QUERY:
        mbarrier.arrive(mail_full.index(slot), count=1)
    mail.index(slot).store(gl.zeros([MAIL_FIELDS], gl.int32, line))
    mbarrier.arrive(mail_full.index(slot), count=1)
    if total > programs:
        finished = gl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu")
        if finished == programs - 1:
            gl.store(counters_ptr, 0)
            gl.store(counters_ptr + 1, 0)


@gluon.jit
def _field(letter, index: gl.constexpr):
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(letter.slice(index, 1).load(line), axis=0)


@gluon.jit
def read_mail(mail, mail_full, letter):
    """Wait for a letter; return its eight fields, the first of them 0 if it is the last."""
    slot = letter % MAIL_SLOTS
    mbarrier.wait(mail_full.index(slot), (letter // MAIL_SLOTS) & 1)
    content = mail.index(slot)
    return (
        _field(content, 0),
        _field(content, 1),
        _field(content, 2),
        _field(content, 3),
        _field(content, 4),
        _field(content, 5),
        _field(content, 6),
        _field(content, 7),
    )


@gluon.jit
def produce_values(
    value_desc, tables_ptr, table_stride, value_pages, page_full, page_empty, fresh_desc, fresh_boxes, value_full,
    value_empty, mail, mail_full, mail_empty,
    KV_HEADS: gl.constexpr, KEY_TILE: gl.constexpr, HALVES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    PAGE_STAGES: gl.constexpr, STAGES: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """Read the letters and copy their values, until the last letter."""
    letter = 0
    filled = 0
    copied = 0
    is_work, query_start, query_count, _, length, head, key_end, table_row = read_mail(mail, mail_full, letter)
    while is_work != 0:
        mbarrier.arrive(mail_empty.index(letter % MAIL_SLOTS), count=1)
        tile_count = (key_end + (KEY_TILE - 1)) // KEY_TILE
        if FRESH:
            _copy_fresh(
                fresh_desc, query_start, query_count, length, head, tile_count, filled, fresh_boxes, value_full,
                value_empty, STAGES,
            )  # fmt: skip
            filled += tile_count
        copied = _copy_row(
            value_desc, tables_ptr + table_row.to(gl.int64) * table_stride, head, length,
            cached_tiles(tile_count, length, query_count, KEY_TILE, FRESH), copied,
            value_pages, page_full, page_empty, KV_HEADS, KEY_TILE, HALVES, BLOCK_SIZE, PAGE_STAGES,
        )  # fmt: skip
        letter += 1
        is_work, query_start, query_count, _, length, head, key_end, table_row = read_mail(mail, mail_full, letter)
