"""The moving side of kernels/prefill_attention_hopper.py: the mailbox, and the warps that copy what it computes on.

A letter holds, as int32: 1 (0 in the last letter), the row's first query token, its number of query tokens, the tile's
first token within them, the row's context length, the K/V head, the end of the keys that the tile sees, and the row's
line in the block tables. The warp that copies keys draws the tiles and writes the letters; the warp that copies values,
both computing groups and, over an 8-bit cache, the converting warps read them. A letter's slot, and the queries that
lie beside it, are free again when all of them have said so.

Tiles of queries are drawn heaviest first, those of all rows together up to BAND_TOKENS of new tokens; rows that begin
beyond are a band of their own, which comes after: the keys and values of all at once would not stay in the level-2
cache. A tile's level is the place of its tokens in their context, in whole tiles, so a row with a prefix begins above
level 0; levels are taken from the highest, and within one the rows in order, heads next to one another. A run of levels
with the same rows is passed in one step. Where no program gets more than two tiles, they are dealt out to and fro; more
are drawn from a counter.

All that is read before the wait for the kernel ahead is the step's inputs (kernels/launch.py): rows and block ids.

With FRESH, tiles that begin in the step's own tokens are copied from where these lie one after another, in a box for
each 64 columns of a head, where the cache takes as many for each block. Those before them come from the cache: over a
plain one to the stages that follow; over an 8-bit one to the converting warps, which fill them. A wait sees only
whether a stage's turn is odd or even. Neither side can be two turns off: a tile is brought for conversion when all
before it have been placed or taken, and the groups empty the stages in order.

Blocks of the cache are copied to `pages`: over a plain cache these are the computing groups' stages, seen block by
block, and over an 8-bit one stages of their own, which the converting warps empty.

Called by kernels/prefill_attention_hopper.py alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.launch_gluon import wait_for_inputs

MAIL_SLOTS = gl.constexpr(2)
MAIL_FIELDS = gl.constexpr(8)
BAND_TOKENS = gl.constexpr(8192)
BAND_COUNT = gl.constexpr(64)
BAND_LEVELS = gl.constexpr(1 << 20)  # more than a context has tiles


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def _zero_unowned(
    output_ptr, output_stride, slots_ptr, lengths_ptr, starts_ptr, first_row, max_rows, token_count,
    TOKEN_SIZE: gl.constexpr,
):  # fmt: skip
    """Write zeros to the tokens of padding rows and to those past the last row, shared out between the programs."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    for row in range(first_row + program, max_rows, programs):
        if (gl.load(slots_ptr + row) < 0) | (gl.load(lengths_ptr + row) <= 0):
            for token in range(gl.load(starts_ptr + row), gl.load(starts_ptr + row + 1)):
                _zero(output_ptr + token.to(gl.int64) * output_stride, TOKEN_SIZE)
    for token in range(gl.load(starts_ptr + max_rows) + program, token_count, programs):
        _zero(output_ptr + token.to(gl.int64) * output_stride, TOKEN_SIZE)


@gluon.jit
def _zero(token_ptr, TOKEN_SIZE: gl.constexpr):
    """One warp's zeros, in pieces: it has few registers."""
    PIECE: gl.constexpr = 256
    line: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    zeros = gl.zeros([PIECE], token_ptr.dtype.element_ty, line)
    for begin in range(0, TOKEN_SIZE, PIECE):
        places = begin + gl.arange(0, PIECE, layout=line)
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
def _box_rows(
    table_ptr, head, length, tile, KV_HEADS: gl.constexpr, KEY_TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Where the boxes of a tile of keys, which are PAGE long, begin in the cache."""
    PAGES: gl.constexpr = KEY_TILE // PAGE
    PARTS: gl.constexpr = BLOCK_SIZE // PAGE
    box_rows = ()
    for place in gl.static_range(PAGES):
        # edge: blocks past the row's last one are not in the table; the last is copied again in their place
        page = gl.maximum(gl.minimum(tile * PAGES + place, (length - 1) // PAGE), 0)
        block = gl.load(table_ptr + page // PARTS)
        box_rows += ((block * KV_HEADS + head) * BLOCK_SIZE + page % PARTS * PAGE,)
    return box_rows


@gluon.jit
def _copy_row(
    desc, table_ptr, head, length, tile_count, copied, first_boxes, pages, full, empty,
    KV_HEADS: gl.constexpr, KEY_TILE: gl.constexpr, HALVES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Copy the first `tile_count` tiles of keys (or values) from the cache, the last one first; return the stages that
    are filled so far. AHEAD: block ids are read a tile ahead, those of the last tile are `first_boxes`."""
    PAGE: gl.constexpr = pages.shape[1]
    PAGES: gl.constexpr = KEY_TILE // PAGE
    BOX: gl.constexpr = pages.shape[2]
    TILE_BYTES: gl.constexpr = KEY_TILE * HALVES * BOX * pages.dtype.primitive_bitwidth // 8
    for step in range(tile_count):
        stage = copied % STAGES
        tile = tile_count - 1 - step
        boxes = first_boxes if AHEAD else _box_rows(table_ptr, head, length, tile, KV_HEADS, KEY_TILE, BLOCK_SIZE, PAGE)
        mbarrier.wait(empty.index(stage), ((copied // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), TILE_BYTES)
        for page in gl.static_range(PAGES):
            for half in gl.static_range(HALVES):
                box = pages.index((stage * HALVES + half) * PAGES + page)
                tma.async_copy_global_to_shared(desc, [boxes[page], half * BOX], full.index(stage), box)
        copied += 1
        if AHEAD:
            first_boxes = _box_rows(table_ptr, head, length, tile - 1, KV_HEADS, KEY_TILE, BLOCK_SIZE, PAGE)
    return copied


@gluon.jit
def _first_levels(starts, prefixes, QUERY_TILE: gl.constexpr):
    """The level of a row's first tile, by its first query token among all and the length of its prefix."""
    band = gl.minimum(starts // BAND_TOKENS, BAND_COUNT - 1)
    return (BAND_COUNT - 1 - band) * BAND_LEVELS + prefixes // QUERY_TILE


@gluon.jit
def _run_of_levels(begins, ends, level, KV_HEADS: gl.constexpr):
    """How many tiles of queries `level` has, all heads counted, and the lowest level down to which that stays so."""
    on_level = (begins <= level) & (ends > level)
    works = gl.sum(on_level.to(gl.int32), axis=0) * KV_HEADS
    lowest = gl.max(gl.where(ends <= level, ends, gl.where(begins <= level, begins, 0)), axis=0)
    return works, lowest


@gluon.jit
def produce_keys(
    query_desc, key_desc, tables_ptr, slots_ptr, lengths_ptr, starts_ptr, counters_ptr, first_row, max_rows,
    table_stride, query_boxes, query_full, key_pages, page_full, page_empty, fresh_desc, fresh_boxes, key_full,
    key_empty, mail, mail_full, mail_empty,
    KV_HEADS: gl.constexpr, QUERY_TILE: gl.constexpr, KEY_TILE: gl.constexpr, HALVES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE_STAGES: gl.constexpr, STAGES: gl.constexpr, ROWS_TILE: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, COPY_QUERY: gl.constexpr, FRESH: gl.constexpr, AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Draw tiles, post them, and copy their queries and keys; ends with a letter that says there are no more."""
    BOX: gl.constexpr = 64
    QUERY_HALVES: gl.constexpr = HEAD_DIM // BOX
    IS_PLAIN: gl.constexpr = key_pages.dtype.primitive_bitwidth == 16
    line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    program = gl.program_id(0)
    programs = gl.num_programs(0)

    # 1. Count the tiles of every row.
    rows = gl.arange(0, ROWS_TILE, layout=line)
    is_row = (rows >= first_row) & (rows < max_rows)
    slots = gl.load(slots_ptr + rows, mask=is_row, other=-1)
    lengths = gl.load(lengths_ptr + rows, mask=is_row, other=0)
    starts = gl.load(starts_ptr + rows, mask=is_row, other=0)
    query_counts = gl.load(starts_ptr + rows + 1, mask=is_row, other=0) - starts
    query_counts = gl.where((slots >= 0) & (lengths > 0), query_counts, 0)
    tiles = (query_counts + (QUERY_TILE - 1)) // QUERY_TILE
    total = gl.sum(tiles, axis=0) * KV_HEADS
    begins = _first_levels(starts, lengths - query_counts, QUERY_TILE)
    ends = begins + tiles  # a row's tiles are on the levels from `begins` on
    is_drawn = total > 2 * programs
    level = gl.max(ends, axis=0) - 1
    run_start = 0
    works, lowest = _run_of_levels(begins, ends, level, KV_HEADS)
    fields = gl.arange(0, MAIL_FIELDS, layout=line)

    work = program
    letter = 0
    filled = 0
    copied = 0
    while work < total:
        # 2. Locate: down the levels to the work's own, then its row and K/V head.
        while work >= run_start + works * (level + 1 - lowest):
            run_start += works * (level + 1 - lowest)
            level = lowest - 1
            works, lowest = _run_of_levels(begins, ends, level, KV_HEADS)
        place = (work - run_start) % works
        counts = gl.associative_scan(((begins <= level) & (ends > level)).to(gl.int32), 0, _add)
        row = gl.sum((counts <= place // KV_HEADS).to(gl.int32), axis=0)
        head = place % KV_HEADS
        query_start = gl.load(starts_ptr + row)
        query_count = gl.load(starts_ptr + row + 1) - query_start
        length = gl.load(lengths_ptr + row)
        table_row = gl.load(slots_ptr + row)
        tile = level - (work - run_start) // works - _first_levels(query_start, length - query_count, QUERY_TILE)
        first_token = tile * QUERY_TILE
        key_end = length - query_count + gl.minimum(first_token + QUERY_TILE, query_count)
        tile_count = (key_end + (KEY_TILE - 1)) // KEY_TILE
        old_tiles = cached_tiles(tile_count, length, query_count, KEY_TILE, FRESH)
        table_ptr = tables_ptr + table_row.to(gl.int64) * table_stride
        first_boxes = ()
        if AHEAD:
            PAGE: gl.constexpr = key_pages.shape[1]
            first_boxes = _box_rows(table_ptr, head, length, old_tiles - 1, KV_HEADS, KEY_TILE, BLOCK_SIZE, PAGE)

        # 3. Post it.
        content = gl.where(fields == 1, query_start, 1)
        content = gl.where(fields == 2, query_count, content)
        content = gl.where(fields == 3, first_token, content)
        content = gl.where(fields == 4, length, content)
        content = gl.where(fields == 5, head, content)
        content = gl.where(fields == 6, key_end, content)
        content = gl.where(fields == 7, table_row, content)
        slot = letter % MAIL_SLOTS
        mbarrier.wait(mail_empty.index(slot), ((letter // MAIL_SLOTS) & 1) ^ 1)
        mail.index(slot).store(content)
        mbarrier.arrive(mail_full.index(slot), count=1)
        letter += 1

        # 4. Copy its queries and keys. Of queries, tokens past the row's end are other rows' or zeros; what comes of
        # them is not stored.
        wait_for_inputs(PDL)
        if COPY_QUERY:
            mbarrier.expect(query_full.index(slot), 2 * 64 * HEAD_DIM * 2)
            for part in gl.static_range(2):
                for half in gl.static_range(QUERY_HALVES):
                    tma.async_copy_global_to_shared(
                        query_desc,
                        [query_start + first_token + part * (64 // GROUP), head * GROUP, half * BOX],
                        query_full.index(slot),
                        query_boxes.index((slot * 2 + part) * QUERY_HALVES + half),
                    )
        if FRESH:
            _copy_fresh(
                fresh_desc, query_start, query_count, length, head, tile_count, filled, fresh_boxes, key_full,
                key_empty, STAGES,
            )  # fmt: skip
            filled += tile_count
            if IS_PLAIN:
                copied = filled - old_tiles
        copied = _copy_row(
            key_desc, table_ptr, head, length, old_tiles, copied, first_boxes, key_pages, page_full, page_empty,
            KV_HEADS, KEY_TILE, HALVES, BLOCK_SIZE, PAGE_STAGES, AHEAD,
        )  # fmt: skip

        # 5. The next: of levels up to two a program are dealt to and fro, so that a light tile follows a heavy one.
        if is_drawn:
            work = programs + gl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
        else:
            work = (work // programs + 2) * programs - 1 - work % programs

    slot = letter % MAIL_SLOTS
    mbarrier.wait(mail_empty.index(slot), ((letter // MAIL_SLOTS) & 1) ^ 1)
    mail.index(slot).store(gl.zeros([MAIL_FIELDS], gl.int32, line))
    mbarrier.arrive(mail_full.index(slot), count=1)
    if is_drawn:
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
    output_ptr, output_stride, slots_ptr, lengths_ptr, starts_ptr, first_row, max_rows, token_count,
    value_desc, tables_ptr, table_stride, value_pages, page_full, page_empty, fresh_desc, fresh_boxes, value_full,
    value_empty, mail, mail_full, mail_empty,
    KV_HEADS: gl.constexpr, KEY_TILE: gl.constexpr, HALVES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    PAGE_STAGES: gl.constexpr, STAGES: gl.constexpr, TOKEN_SIZE: gl.constexpr, FRESH: gl.constexpr,
    AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Read the letters and copy their values, until the last letter; then write the zeros of tokens of no row, while
    the last tiles are computed."""
    IS_PLAIN: gl.constexpr = value_pages.dtype.primitive_bitwidth == 16
    letter = 0
    filled = 0
    copied = 0
    is_work, query_start, query_count, _, length, head, key_end, table_row = read_mail(mail, mail_full, letter)
    wait_for_inputs(PDL)  # also in a program without a tile: who waits for this kernel waits for those before it
    while is_work != 0:
        mbarrier.arrive(mail_empty.index(letter % MAIL_SLOTS), count=1)
        tile_count = (key_end + (KEY_TILE - 1)) // KEY_TILE
        old_tiles = cached_tiles(tile_count, length, query_count, KEY_TILE, FRESH)
        table_ptr = tables_ptr + table_row.to(gl.int64) * table_stride
        first_boxes = ()
        if AHEAD:
            PAGE: gl.constexpr = value_pages.shape[1]
            first_boxes = _box_rows(table_ptr, head, length, old_tiles - 1, KV_HEADS, KEY_TILE, BLOCK_SIZE, PAGE)
        if FRESH:
            _copy_fresh(
                fresh_desc, query_start, query_count, length, head, tile_count, filled, fresh_boxes, value_full,
                value_empty, STAGES,
            )  # fmt: skip
            filled += tile_count
            if IS_PLAIN:
                copied = filled - old_tiles
        copied = _copy_row(
            value_desc, table_ptr, head, length, old_tiles, copied, first_boxes, value_pages, page_full, page_empty,
            KV_HEADS, KEY_TILE, HALVES, BLOCK_SIZE, PAGE_STAGES, AHEAD,
        )  # fmt: skip
        letter += 1
        is_work, query_start, query_count, _, length, head, key_end, table_row = read_mail(mail, mail_full, letter)
    _zero_unowned(
        output_ptr, output_stride, slots_ptr, lengths_ptr, starts_ptr, first_row, max_rows, token_count, TOKEN_SIZE
    )  # fmt: skip
